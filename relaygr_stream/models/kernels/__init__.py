"""Fused SiLU attention for CUDA: tables of tiles, Triton kernels that walk them, graphs that replay them.

tiles.py           who computes what: one row of a table per block of rows and range of columns
silu_attention.py  the Triton kernels; the only module that imports triton
fused.py           the HSTU stack over them: extend and score, one launch per layer whatever the batch
graphs.py          launches recorded per bucket of sizes and replayed, against launch gaps
choice.py          whether to use all this: what the settings ask for, and a check on the device itself
"""
