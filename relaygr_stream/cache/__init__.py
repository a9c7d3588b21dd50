"""Memory of prefix KV: arenas, the HBM and DRAM tiers, entries and who may hold them."""
