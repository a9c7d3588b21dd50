"""An item table that stays in its files: larger than the device, or than memory.

A checkpoint's folder may have its item table in shards beside model.safetensors, which then lacks `embedding.item`:

    item-00001-of-00004.safetensors …   the rows follow each other in the order of the names
    rows    (n, D)   float32, float16 or bfloat16; or int8, and then
    scales  (n,)     float32: a row is its scale times its integers

The files are mapped into memory, read only: a start reads none of the rows but a sample, workers of one host share
what the system keeps of them, and a row is read when it is asked for. A file must not change while it is mapped: write
another folder instead. Where one does, by its size or time, no more rows are given, and the worker ends: behind the end
of a file that became shorter is a bus error, and rows of another table are no row of this version. On an accelerator
the host gathers rows, and the device keeps those in frequent use (HotRows).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from relaygr_stream.errors import ModelError
from relaygr_stream.models.features import oov_hash
from relaygr_stream.settings.inputs import LFS_POINTER, is_pointer, open_regular, pointer_error

Ids = npt.NDArray[np.int64]

SHARDS: Final = "item-*-of-*.safetensors"
#: Types of rows in files, and numpy's that has the same bytes.
TYPES: Final = {
    "F32": (torch.float32, "<f4"), "F16": (torch.float16, "<f2"), "BF16": (torch.bfloat16, "<i2"),
    "I8": (torch.int8, "i1"),
}  # fmt: skip
#: A header names two tensors; the format allows 100 MB.
MAX_HEADER_BYTES: Final = 1 << 20
#: Rows of each shard, evenly spaced, that the version depends on besides what the file's metadata state.
SAMPLE: Final = 256
#: Of worker.hbm_bytes, a device keeps hot rows in one part of so many, besides.
HOT_PART: Final = 16
#: A hot row stays for so many misses of its slot.
MOST_USES: Final = 3


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Header(msgspec.Struct):
    rows: _Tensor
    scales: _Tensor | None = None
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


class _Shard:
    """One mapped file: rows (n, D), scales (n,) or None, the metadata's largest value (0: unknown)."""

    def __init__(self, file: Path) -> None:
        self._file, self._fd = file, -1
        try:
            with open_regular(file) as raw:
                self._fd = os.dup(raw.fileno())
                self._found = self._now()
                start = raw.read(8)
                size = int.from_bytes(start, "little")
                if is_pointer(start + raw.read(len(LFS_POINTER) - 8)):
                    raise pointer_error(file)
                if len(start) < 8 or size > MAX_HEADER_BYTES:
                    raise ValueError("it has no header of safetensors")
                raw.seek(8)
                self.header = raw.read(size)
                found = msgspec.json.decode(self.header, type=_Header)
                # Shared and read only: memory is the system's to keep or drop, and counts for no process.
                self._mapped = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
            self.rows = self._tensor(found.rows, 2, tuple(TYPES), 8 + size)
            self.scales = None if found.scales is None else self._tensor(found.scales, 1, ("F32",), 8 + size)
            if (self.rows.dtype == torch.int8) != (self.scales is not None):
                raise ValueError("`scales` belong to rows of I8, and to no others")
            if self.scales is not None and len(self.scales) != len(self.rows):
                raise ValueError(f"{len(self.scales)} scales for {len(self.rows)} rows")
            self.largest = float(found.metadata.get("largest", 0))
        except OSError as error:
            raise ModelError(f"{file}: cannot be read: {error.strerror or error}") from error
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            raise ModelError(f"{file}: no shard of an item table: {error}") from error
        if hasattr(self._mapped, "madvise"):  # a row is a page or two: what stands around it is not wanted
            self._mapped.madvise(mmap.MADV_RANDOM)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def check(self) -> None:
        """Raise ModelError where the file has another size, or was written to, since it was mapped."""
        if (now := self._now()) != self._found:
            raise ModelError(
                f"{self._file} was changed while it is mapped: {now[0]} bytes, {self._found[0]} when it was loaded; "
                f"write another folder instead, and have workers load that"
            )

    def _now(self) -> tuple[int, int]:
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime_ns

    def _tensor(self, stated: _Tensor, dimensions: int, types: tuple[str, ...], base: int) -> torch.Tensor:
        if stated.dtype not in types or len(stated.shape) != dimensions or min(stated.shape) < 1:
            raise ValueError(f"a tensor of {stated.dtype} {stated.shape}; expected {dimensions} dimensions of {types}")
        dtype, plain = TYPES[stated.dtype]
        count, (start, stop) = int(np.prod(stated.shape, dtype=object)), stated.data_offsets
        if stop - start != count * dtype.itemsize or start < 0 or base + stop > len(self._mapped):
            raise ValueError(f"a tensor at bytes {start} to {stop} of {len(self._mapped)} is not {stated.shape}")
        if (base + start) % dtype.itemsize:
            raise ValueError(f"a tensor of {stated.dtype} begins at byte {base + start}, not at a multiple of its size")
        with warnings.catch_warnings():  # torch has no tensors that are read only; these are only read
            warnings.simplefilter("ignore", UserWarning)
            found = torch.from_numpy(np.frombuffer(self._mapped, plain, count, base + start))
        return found.view(dtype).view(stated.shape)


class MappedTable:
    """A table of `count` rows of width `dim` in its shards. digest: of their headers and a sample of rows.

    hot_bytes: of the cache of rows on a device other than the CPU. Rows come in the dtype that `place` was given.
    """

    digest: Final[str]

    def __init__(self, files: list[Path], hot_bytes: int = 0) -> None:
        self._shards = [_Shard(file) for file in files]
        first = self._shards[0].rows
        for file, shard in zip(files, self._shards, strict=True):
            if (shard.rows.dtype, shard.rows.shape[1]) != (first.dtype, first.shape[1]):
                raise ModelError(f"{file}: rows of {shard.rows.dtype}, width {shard.rows.shape[1]}, unlike {files[0]}")
        self.dim = first.shape[1]
        self._starts = np.cumsum([0, *(len(shard.rows) for shard in self._shards)])
        self.count = int(self._starts[-1])
        self.digest = self._digest()
        self._hot_bytes = hot_bytes
        self.place(torch.device("cpu"), torch.float32)

    @classmethod
    def found(cls, folder: Path, count: int, dim: int, hot_bytes: int = 0) -> MappedTable | None:
        """The table in `folder`; None: it has no shards. Raises ModelError for another shape, or a lost shard."""
        files = sorted(folder.glob(SHARDS))
        if not files:
            return None
        wanted = [folder / shard_name(number, len(files)) for number in range(len(files))]
        if files != wanted:
            raise ModelError(f"{folder}: the item table's shards are {files[0].name} …, expected {wanted[0].name} …")
        table = cls(files, hot_bytes)
        if (table.count, table.dim) != (count, dim):
            raise ModelError(
                f"{folder}: the item table has {table.count} rows of {table.dim}, expected {count} of {dim}"
            )
        return table

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Give rows on this device and of this type from now on. Raises ModelError if `dtype` does not hold a row."""
        largest = max(shard.largest for shard in self._shards)
        if largest > torch.finfo(dtype).max:
            raise ModelError(
                f"the item table has values up to {largest:.4g}, beyond {dtype}: use another `worker.dtype`"
            )
        self.device, self.dtype = device, dtype
        slots = self._hot_bytes // (self.dim * dtype.itemsize) if device.type != "cpu" else 0
        self._hot = HotRows(slots, self.dim, device, dtype) if slots else None

    def rows(self, ids: Ids) -> torch.Tensor:
        """Rows (n, D) of these ids within 0 … count − 1. Raises ModelError where a file has changed."""
        for shard in self._shards:
            shard.check()
        if self._hot is not None:
            return self._hot.rows(ids, self._read)
        return self._read(ids).to(self.device)

    def _read(self, ids: Ids) -> torch.Tensor:
        """As `rows`, on the host."""
        if len(self._shards) == 1:
            return self._of_shard(self._shards[0], torch.from_numpy(ids))
        out, shard_of = torch.empty((len(ids), self.dim), dtype=self.dtype), np.searchsorted(self._starts, ids, "right")
        for number in np.unique(shard_of).tolist():
            places = np.flatnonzero(shard_of == number)
            local = torch.from_numpy(ids[places] - self._starts[number - 1])
            out[torch.from_numpy(places)] = self._of_shard(self._shards[number - 1], local)
        return out

    def _of_shard(self, shard: _Shard, ids: torch.Tensor) -> torch.Tensor:
        found = shard.rows.index_select(0, ids)
        if shard.scales is not None:
            found = found.float().mul_(shard.scales.index_select(0, ids)[:, None])
        return found.to(self.dtype)

    def _digest(self) -> str:
        state = hashlib.blake2b(digest_size=8)
        for shard in self._shards:
            state.update(shard.header)
            sample = torch.linspace(0, len(shard.rows) - 1, min(SAMPLE, len(shard.rows)), dtype=torch.float64).long()
            for part in filter(lambda each: each is not None, (shard.rows, shard.scales)):
                state.update(part.index_select(0, sample).view(torch.uint8).numpy().tobytes())  # type: ignore[union-attr]
        return state.hexdigest()


class HotRows:
    """Rows of a table on a device, each in the slot that its hash names.

    A row that is asked for while another one has its slot takes it over once that one was not asked for lately: rows
    that are asked for once do not displace those in frequent use. found, missed: rows so far, repeated ones of a call
    counted once.
    """

    def __init__(self, slots: int, dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._rows = torch.empty((slots, dim), device=device, dtype=dtype)
        self._held = np.full(slots, -1, np.int64)
        self._uses = np.zeros(slots, np.int8)
        self.found = self.missed = 0

    def rows(self, ids: Ids, read: Callable[[Ids], torch.Tensor]) -> torch.Tensor:
        """Rows (n, D) of ids. read: gathers on the host those that are not here; they are copied once."""
        unique, places = np.unique(ids, return_inverse=True)
        slots = (oov_hash(unique) % np.uint64(len(self._held))).astype(np.int64)
        here = self._held[slots] == unique
        self._uses[slots[here]] = MOST_USES
        out = self._rows.index_select(0, self._to_device(slots))
        missing = np.flatnonzero(~here)
        self.found, self.missed = self.found + int(here.sum()), self.missed + len(missing)
        if len(missing):
            fresh = read(unique[missing])
            fresh = (fresh.pin_memory() if self._rows.is_cuda else fresh).to(self._rows.device, non_blocking=True)
            out[self._to_device(missing)] = fresh
            self._keep(unique[missing], slots[missing], fresh)
        return out.index_select(0, self._to_device(places))

    def _keep(self, ids: Ids, slots: Ids, fresh: torch.Tensor) -> None:
        slots, first = np.unique(slots, return_index=True)  # of rows that meet in a slot, one
        free = self._uses[slots] == 0
        self._uses[slots[~free]] -= 1
        slots, first = slots[free], first[free]
        self._rows[self._to_device(slots)] = fresh.index_select(0, self._to_device(first))
        self._held[slots] = ids[first]

    def _to_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._rows.device, non_blocking=True)


def shard_name(number: int, count: int) -> str:
    """The file name of a shard, counted from 0."""
    return f"item-{number + 1:05}-of-{count:05}.safetensors"


class ItemEmbedding(nn.Module):
    """Embedding tables. unknown_items: ids outside the item table that were embedded so far, in behaviours and
    candidates. table: of items, where it stays in its files."""

    def __init__(self, table: MappedTable | None = None) -> None:
        super().__init__()
        self.unknown_items = 0
        self.table = table
