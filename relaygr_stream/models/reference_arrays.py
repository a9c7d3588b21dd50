"""The reference file of `relaygr model conformance`, read array by array.

The reference file is an npz with any number of variants V, found by their keys `V/meta`. Each variant has weights,
embedded inputs, and the outputs of each user. A variant with a bias on relative positions or times (relative.py) has
`V/layerI/relative_position` or `relative_time`, and then `V/in/timesU`, each user's times in milliseconds.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.errors import InputError
from relaygr_stream.settings.inputs import open_regular

#: Names in `V/meta`, in its order.
META: Final = (
    "D", "H", "dv", "dqk", "layers", "contextual_seq_len", "max_attn_len", "group_norm", "N", "candidates"
)  # fmt: skip


class ReferenceArrays:
    """The file's arrays by key. A missing or misshapen array raises an InputError that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                loaded = np.load(file, allow_pickle=False)
                if not isinstance(loaded, np.lib.npyio.NpzFile):
                    raise InputError(f"{path}: a single array; expected an npz with several named arrays")
                self._arrays: dict[str, npt.NDArray[Any]] = {key: loaded[key] for key in loaded}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
            raise InputError(f"{path}: not a readable npz file: {error}") from error

    def names(self) -> list[str]:
        """The names of all arrays."""
        return list(self._arrays)

    def text(self, key: str) -> str:
        """The text in an array without dimensions. Raises ValueError for anything else."""
        array = self._arrays[key]
        if array.shape or array.dtype.kind != "U":
            raise ValueError(f"an array of {array.dtype}, not a text")
        return str(array)

    def any(self, key: str) -> npt.NDArray[Any]:
        """The array at `key`, of any shape."""
        return self.get(key, (None,) * self._arrays[key].ndim) if key in self._arrays else self.get(key, ())

    def variants(self) -> list[str]:
        """The names of all variants, at least one."""
        names = [key.removesuffix("/meta") for key in self._arrays if key.endswith("/meta")]
        if not names:
            raise InputError(f"{self.path}: no variant; expected keys `VARIANT/meta`, found {len(self._arrays)} others")
        return names

    def users(self, variant: str) -> list[int]:
        """The numbers of a variant's users, at least one."""
        pattern = re.compile(re.escape(variant) + r"/in/hist(\d+)")
        users = sorted(int(match[1]) for match in map(pattern.fullmatch, self._arrays) if match)
        if not users:
            raise InputError(f"{self.path}: key `{variant}/in/hist0` is missing; expected one user at least")
        return users

    def meta(self, key: str) -> list[int]:
        """The variant's shape, in the order of META."""
        values = self.get(key, (len(META),))
        meta = [int(value) for value in values]
        for name, value in zip(META, meta, strict=True):
            least = 0 if name in ("contextual_seq_len", "max_attn_len", "group_norm", "candidates") else 1
            if value < least:
                raise InputError(f"{self.path}: `{key}` has {name} = {value}, expected at least {least}")
        return meta

    def inputs(self, key: str, dim: int) -> torch.Tensor:
        """Embedded tokens (n, dim) in float32, for any n."""
        return torch.from_numpy(self.get(key, (None, dim)).astype(np.float32))

    def times(self, key: str, count: int) -> torch.Tensor:
        """Times of `count` tokens, int64."""
        return torch.from_numpy(self.get(key, (count,)).astype(np.int64))

    def length(self, key: str) -> int:
        """The length of an array that need not be there; 0 if it is not."""
        return len(self.get(key, (None,))) if key in self._arrays else 0

    def get(self, key: str, shape: tuple[int | None, ...]) -> npt.NDArray[Any]:
        """The array at `key`, whose shape must be `shape` (None: any extent)."""
        if key not in self._arrays:
            raise InputError(f"{self.path}: key `{key}` is missing")
        array = self._arrays[key]
        matches = len(array.shape) == len(shape) and all(
            wanted in (None, found) for found, wanted in zip(array.shape, shape, strict=True)
        )
        if not matches or not np.issubdtype(array.dtype, np.number):
            found_shape, wanted_shape = (
                " × ".join("any" if extent is None else str(extent) for extent in extents) or "one value"
                for extents in (array.shape, shape)
            )
            raise InputError(
                f"{self.path}: `{key}` is {found_shape} of {array.dtype}, expected {wanted_shape} of numbers"
            )
        return array
