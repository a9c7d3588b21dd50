"""Numbers of rows that come often: what has to be compiled per shape is compiled seldom. Knows nothing of layers."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

#: At most 31 rows are computed in vain up to 512, 127 above; 44 sizes up to 4,096.
FEW_ROWS: Final = 512
FEW_STEP: Final = 32
MANY_STEP: Final = 128


def with_usual_rows(x: torch.Tensor) -> torch.Tensor:
    """x, with rows of zeros behind it up to a number of rows that comes often.

    oneDNN compiles a product for each number of rows it meets: measured 2–9 ms in bfloat16, a hundred times what the
    product takes. Requests have any number of rows, so they are rounded up: to 32, from 512 on to 128.
    """
    if not compiles_per_shape(x):
        return x
    step = FEW_STEP if len(x) <= FEW_ROWS else MANY_STEP
    return functional.pad(x, (0, 0, 0, -len(x) % step))


def compiles_per_shape(x: torch.Tensor) -> bool:
    """Whether products with x are compiled for each number of rows: oneDNN's in half precision."""
    return x.device.type == "cpu" and x.dtype != torch.float32
