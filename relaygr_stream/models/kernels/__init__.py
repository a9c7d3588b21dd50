"""Fused SiLU attention for CUDA: tables of tiles, Triton kernels that walk them, graphs that replay them.

tiles.py           the table of tiles: one row per block of rows and range of columns
silu_attention.py  the Triton kernels; the only module that imports triton
fused.py           the HSTU stack on them: prefill and score, one launch per layer for any batch
graphs.py          launches recorded per bucket of sizes and replayed, against launch gaps
recorded.py        scoring and short prefills through them
choice.py          whether to use the kernels: the settings, and a check on the device itself
"""
