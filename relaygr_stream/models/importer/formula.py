"""Weights that a reference file gives by a formula instead of storing them.

value(name, i) = center + scale · (k - 2^23) / 2^23,  k = splitmix64(seed(name), i) >> 40, i the index in C order
seed(name) = the first 8 bytes, little-endian, of SHA-256(name)
splitmix64(s, i): z = s + (i + 1)·0x9E3779B97F4A7C15, then the finalizer of SplitMix64 (`oov_hash`), modulo 2^64
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.errors import InputError
from relaygr_stream.models.features import oov_hash

#: Tables here → their names in the reference.
TABLES_OF: Final = {"item": "item_id", "category": "item_category_id", "user": "user_id"}
STEP: Final = np.uint64(0x9E3779B97F4A7C15)
HALF: Final = 1 << 23


class FormulaWeights:
    """The weights of a file whose config has `weights`: name → shape, center, scale, SHA-256 of the float32 bytes."""

    def __init__(self, config: dict[str, Any], path: Path) -> None:
        self._config = config
        self._path = path

    def dense(self) -> dict[str, torch.Tensor]:
        """All weights but the tables. Raises InputError if one has another digest than the file says."""
        if not isinstance(self._config.get("weights"), dict):
            raise InputError(f"{self._path}: neither weights `w/NAME` nor a formula of them in `meta/config`")
        found = {}
        for name, (shape, center, scale, digest) in self._config["weights"].items():
            values = _values(name, np.arange(int(np.prod(shape)), dtype=np.uint64), center, scale).reshape(shape)
            if hashlib.sha256(values.tobytes()).hexdigest() != digest:
                raise InputError(f"{self._path}: the formula gives other weights `{name}` than the file was made with")
            found[name] = torch.from_numpy(values)
        return found

    def rows(self, name: str, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        """The rows of a table (ids, table_dim)."""
        width = self._config.get("table_dim")
        if not isinstance(width, int):
            raise InputError(f"{self._path}: `meta/config` has no `table_dim`")
        index = ids[:, None] * width + np.arange(width)
        return torch.from_numpy(_values(name, index.astype(np.uint64), 0.0, 1.0))


def _values(name: str, index: npt.NDArray[np.uint64], center: float, scale: float) -> npt.NDArray[np.float32]:
    seed = np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    with np.errstate(over="ignore"):
        mixed = oov_hash((seed + (index + np.uint64(1)) * STEP).view(np.int64))
    k = (mixed >> np.uint64(40)).astype(np.float64)
    return (center + scale * (k - HALF) / HALF).astype(np.float32)
