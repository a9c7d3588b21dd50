"""Where the kernels of these tests run: on the GPU where there is one, in Triton's interpreter on the CPU elsewhere."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import numpy as np
import torch

HINT = "the package triton is not installed: pip install triton (a CUDA build of torch brings it)"


def prepare() -> None:
    """Have Triton interpret what it decorates from here on, unless a GPU is there to run it. Before triton's import."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    if "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        raise RuntimeError("triton was imported before these tests could ask for its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
    _let_numpy_read_scalars()
    _let_dot_read_bfloat16()


def _let_numpy_read_scalars() -> None:
    """It holds scalars as arrays of one element, which numpy 2.4 refuses to read as a loop's bound."""
    from triton.runtime import interpreter

    module: Any = interpreter
    patch = module._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    module._patch_lang_tensor = patched


def _let_dot_read_bfloat16() -> None:
    """It holds bfloat16 as the 16 bits that it is, and multiplies those as integers: turned to float32 before."""
    from triton import language
    from triton.runtime import interpreter

    module: Any = interpreter
    plain = module.InterpreterBuilder.create_dot

    def as_float(side: Any) -> Any:
        if side.dtype.scalar != language.bfloat16:
            return side
        bits = side.data.astype(np.uint32) << 16
        return module.TensorHandle(bits.view(np.float32), language.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, as_float(a), as_float(b), *rest)

    module.InterpreterBuilder.create_dot = create_dot
