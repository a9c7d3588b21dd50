"""Hand-over: when lanes move, prefix KV move from the old owner's DRAM tier to the new owner's."""
