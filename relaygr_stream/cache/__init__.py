"""The prefix cache: entries of prefix KV in an HBM and a DRAM tier, and the memory behind the tiers."""
