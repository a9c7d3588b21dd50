"""How much memory this host still has."""

from __future__ import annotations

import os
from pathlib import Path

from relaygr_stream.errors import CapacityError

#: The share of the host's available memory that a tier must leave free.
HOST_RESERVE = 0.05


def available_host_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still allocate: the least of the host's and its control group's; None if unknown.

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


def check_host(nbytes: int, taken: int, setting: str) -> None:
    """Raise CapacityError if the host lacks `taken` bytes: Linux would overcommit them, and kill the process later."""
    available = available_host_bytes()
    if available is not None and taken > (1 - HOST_RESERVE) * available:
        pinned = f", and torch pins {taken}, the next power of two" if taken > nbytes else ""
        raise CapacityError(
            f"{setting} = {nbytes} bytes{pinned}, but the host has {available} available, of which "
            f"{HOST_RESERVE:.0%} stay free; lower {setting}"
        )


def is_memory(device: int, root: Path = Path("/")) -> bool:
    """Whether files on this device (st_dev) take the host's memory."""
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.partition(" - ") for line in _read(root / "proc/self/mountinfo").splitlines())
    return any(mount.split()[2] == number and kind.split()[0] in ("tmpfs", "ramfs") for mount, _, kind in mounts)


def _inactive_file(stat: str) -> int:
    """Bytes of page cache that a control group counts as used but frees on demand."""
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
