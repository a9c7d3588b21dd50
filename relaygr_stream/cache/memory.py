"""The memory of one tier: one buffer, reserved whole at start, and the arena that divides it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import torch

from relaygr_stream.cache.arena import Arena, Extent
from relaygr_stream.cache.host import check_host
from relaygr_stream.cache.tier_file import TierFile
from relaygr_stream.errors import CapacityError

#: One page in bytes: extents share no page, and every dtype, cache line and kernel tile is aligned.
ALIGNMENT = 4096


class TierMemory:
    """`nbytes` (≥ 0, rounded down to the alignment) on `device`.

    Ordinary host memory is taken page by page as it is first written; a device's and pinned memory whole, at once.
    pinned: page-locked host memory, which an accelerator reads and writes directly; needs an accelerator. torch pins
    the next power of two.
    setting: the name of the setting that defines nbytes, for error messages.
    file: has the bytes, as many as nbytes; CUDA pins those of a file in memory (seen on an H200: 55 GB/s against 9; it
    refuses a disk's), others are copied through the driver's buffer.
    Raises CapacityError if the device or the host does not have that much memory.
    """

    def __init__(
        self,
        nbytes: int,
        device: torch.device,
        *,
        alignment: int = ALIGNMENT,
        pinned: bool = False,
        setting: str = "the tier's size",
        file: TierFile | None = None,
    ) -> None:
        self.device = device
        self.file = file
        self.pinned = pinned
        self.arena = Arena(nbytes, alignment)
        if file is not None:
            assert len(file.data) == self.arena.size
            self.buffer = torch.from_numpy(file.data)
            self.pinned = pinned and file.in_memory and _register(self.buffer)
            self._views = {torch.uint8: self.buffer}
            return
        if device.type == "cpu":
            check_host(nbytes, _pinned_bytes(self.arena.size) if pinned else self.arena.size, setting)
        # Pinned memory is page-aligned and needs no slack: for a power of two it would double what is pinned.
        slack = 0 if pinned or not self.arena.size else alignment
        try:
            if device.type == "cpu" and not pinned:
                whole = torch.from_numpy(np.zeros(self.arena.size + slack, np.uint8))  # calloc: no page is there yet
            else:
                whole = torch.zeros(self.arena.size + slack, dtype=torch.uint8, device=device, pin_memory=pinned)
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"{setting} = {nbytes} bytes: {device}{' (pinned)' if pinned else ''} refused them "
                f"({str(error).splitlines()[0]}); lower {setting}"
            ) from error
        start = -whole.data_ptr() % alignment
        if start > slack:
            raise CapacityError(f"{device} memory starts at {whole.data_ptr():#x}, not aligned to {alignment} bytes")
        self.buffer = whole[start : start + self.arena.size]
        self._views = {torch.uint8: self.buffer}

    def close(self) -> None:
        """Give its file back, for another process, or this one, to open again; the memory goes with its last view."""
        if self.file is None:
            return
        if self.pinned:
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(self.buffer.data_ptr())
        self.file.close()

    def view(self, extent: Extent, dtype: torch.dtype) -> torch.Tensor:
        """The extent as a 1-D tensor of size / itemsize elements that shares its memory."""
        whole = self._views.get(dtype)
        if whole is None:
            whole = self._views[dtype] = self.buffer.view(dtype)
        return whole[extent.offset // dtype.itemsize : extent.end // dtype.itemsize]


def _register(buffer: torch.Tensor) -> bool:
    """Whether a CUDA driver has pinned this memory in place; without, torch copies by a buffer of its own."""
    if not torch.cuda.is_available():
        return False
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):  # the refusal is reported once more, by the next kernel
        torch.zeros(1, device="cuda")
    return False


def _pinned_bytes(nbytes: int) -> int:
    """What torch's host allocator pins for so many bytes: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0
