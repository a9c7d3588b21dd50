"""Run by test_compiles.py without the interpreter: compile the kernels for GPUs that need not be there.

Prints one JSON object per kernel: shared memory in bytes, registers spilled, and the instructions that tell how it
computes and loads.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from relaygr_stream.models.kernels import silu_attention as kernels

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}


#: Bytes of shared memory that one program may have, by compute capability.
SHARED = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}


def compile_for(capability: int, shape: kernels.Shape, split: bool) -> list[dict[str, Any]]:
    """The kernels as `silu_attention` and `store_kv` would launch them."""
    element = POINTERS[shape.dtype]
    pointers = {"tiles": "*i64", "uvqk": element, "gates": element, "sums": "*fp32" if split else element}
    target, found = GPUTarget("cuda", capability, 32), []
    for kernel, constants in (
        (kernels.attention_kernel, kernels.constants(shape, split)),
        *([(kernels.sum_kernel, kernels.sum_constants(shape))] if split else []),
        (kernels.store_kernel, kernels.store_constants(shape)),
    ):
        names = kernel.arg_names
        signature = {name: pointers.get(name, "i32" if name == "layer" else "constexpr") for name in names}
        source = ASTSource(
            kernel,
            signature,
            {(names.index(name),): value for name, value in constants.items()},
            {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name in pointers},
        )
        compiled = triton.compile(source, target=target, options=kernels.launch_options(shape, SHARED[capability]))
        ptx = compiled.asm["ptx"]
        found.append(
            {
                "kernel": kernel.__name__,
                "shared": compiled.metadata.shared,
                "allowed": SHARED[capability],
                "matrix": len(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async)\S*(?:bf16|f16)", ptx)),
                "tf32": len(re.findall(r"\bmma\S*tf32", ptx)),
                "wide_loads": len(re.findall(r"cp\.async\.cg\.shared\.global", ptx)),
                "narrow_loads": len(re.findall(r"ld\.global\.b(?:16|32)\b|cp\.async\.ca", ptx)),
                "local": len(re.findall(r"\b(?:ld|st)\.local", ptx)),
            }
        )
    return found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        dtype, width, capability, split = name.split(":")
        shape = kernels.Shape(4, int(width), int(width), 0.125, 1 / 1024, 0, getattr(torch, dtype))
        print(json.dumps(compile_for(int(capability), shape, split == "split")))
