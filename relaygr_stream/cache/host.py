"""How much memory this host still has."""

from __future__ import annotations

from pathlib import Path


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
