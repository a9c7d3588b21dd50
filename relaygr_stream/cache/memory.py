"""The memory of one tier: one buffer taken whole at start, and the arena that says who has which part of it.

Knows nothing of entries, nor of what the bytes mean.
"""

from __future__ import annotations

from pathlib import Path

import torch

from relaygr_stream.cache.arena import Arena, Extent
from relaygr_stream.errors import CapacityError

#: One page: extents never share one, and every dtype, cache line and kernel tile is aligned by it.
ALIGNMENT = 4096
#: What taking a tier must leave of the host's memory to everything else, as a share of what is available now.
HOST_RESERVE = 0.05


class TierMemory:
    """`nbytes` (rounded down to the alignment; 0 is allowed and holds nothing) on `device`, every page touched.

    pinned: host memory that an accelerator copies from and to by itself; needs an accelerator.
    setting: the name of the setting that asked for it, for the message of the CapacityError raised when the device or
        the host has not that much.
    """

    def __init__(
        self,
        nbytes: int,
        device: torch.device,
        *,
        alignment: int = ALIGNMENT,
        pinned: bool = False,
        setting: str = "the tier's size",
    ) -> None:
        self.device = device
        self.arena = Arena(nbytes, alignment)
        if device.type == "cpu":
            _check_host(self.arena.size, setting)
        # Pinned memory is page-aligned, and its allocator rounds up to powers of two: no slack there.
        slack = 0 if pinned or not self.arena.size else alignment
        try:
            whole = torch.empty(self.arena.size + slack, dtype=torch.uint8, device=device, pin_memory=pinned)
        except RuntimeError as error:
            raise CapacityError(
                f"{setting} = {nbytes} bytes: {device}{' (pinned)' if pinned else ''} refused them "
                f"({str(error).splitlines()[0]}); lower {setting}"
            ) from error
        start = -whole.data_ptr() % alignment
        if start > slack:
            raise CapacityError(f"{device} memory starts at {whole.data_ptr():#x}, not aligned to {alignment} bytes")
        self.buffer = whole[start : start + self.arena.size]
        self.buffer.zero_()  # so that no page is first touched while a request waits
        self._views = {torch.uint8: self.buffer}

    def view(self, extent: Extent, dtype: torch.dtype) -> torch.Tensor:
        """The extent as a 1-D tensor of size / itemsize elements, sharing its memory."""
        whole = self._views.get(dtype)
        if whole is None:
            whole = self._views[dtype] = self.buffer.view(dtype)
        return whole[extent.offset // dtype.itemsize : extent.end // dtype.itemsize]


def _check_host(nbytes: int, setting: str) -> None:
    """Refuse what the host cannot back: it would lend the addresses, and kill the process at the first touch."""
    available = available_host_bytes()
    if available is not None and nbytes > (1 - HOST_RESERVE) * available:
        raise CapacityError(
            f"{setting} = {nbytes} bytes, but the host has {available} available, of which "
            f"{HOST_RESERVE:.0%} stay free; lower {setting}"
        )


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Memory this process can still take: the least of the host's and its control group's; None where unknown.

    Reads Linux's /proc/meminfo and control groups v2 and v1 below `root`.
    """
    found: list[int] = []
    meminfo = _read(root / "proc/meminfo")
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for limit, usage, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        most, used = _read(root / "sys/fs/cgroup" / limit).strip(), _read(root / "sys/fs/cgroup" / usage).strip()
        if most.isdigit() and used.isdigit():
            found.append(int(most) - int(used) + _inactive_file(_read(root / "sys/fs/cgroup" / stat)))
    return min(found, default=None)


def _inactive_file(stat: str) -> int:
    """Page cache that a control group counts as used but gives up on demand."""
    for line in stat.splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
