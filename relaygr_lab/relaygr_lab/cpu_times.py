"""Processor time of this process and its descendants, and of others.

Reads Linux's /proc; on other systems nothing is known. Time taken by a hypervisor (steal) counts as other processes'.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

#: Columns of /proc/stat's first line that are work: user, nice, system, irq, softirq, steal (idle and iowait are not).
WORK_COLUMNS: Final = (1, 2, 3, 6, 7, 8)
PROC: Final = Path("/proc")
#: Cores that others may use without disturbing a measurement: of two cores, the relay's own processes need one and a
#: half.
OTHERS_CORES: Final = 0.2


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of all cores since the system started: all work, and that of this process and its descendants."""

    at_s: float
    work_s: float
    ours_s: float

    @classmethod
    def now(cls) -> Self | None:
        """The current values; None where they are unknown."""
        if sys.platform != "linux":
            return None
        tick = os.sysconf("SC_CLK_TCK")
        columns = (PROC / "stat").read_text(encoding="ascii").splitlines()[0].split()
        work = sum(int(columns[column]) for column in WORK_COLUMNS)
        return cls(time.monotonic(), work / tick, _ours() / tick)

    def busy_since(self, before: CpuTimes) -> float:
        """Share of all cores' time that was work between the two."""
        seconds = max(1e-3, self.at_s - before.at_s)
        return (self.work_s - before.work_s) / seconds / (os.cpu_count() or 1)

    def others_since(self, before: CpuTimes) -> float:
        """Cores that others kept busy between the two, on average."""
        seconds = max(1e-3, self.at_s - before.at_s)
        return max(0.0, (self.work_s - before.work_s) - (self.ours_s - before.ours_s)) / seconds


def disturbance(before: CpuTimes | None, after: CpuTimes | None) -> str:
    """That processes which are not ours took processor time between the two, in words; "": too little to count."""
    others = after.others_since(before) if before and after else 0.0
    return f"other processes used {others:.1f} of {os.cpu_count()} cores meanwhile" if others > OTHERS_CORES else ""


def _ours() -> int:
    """Clock ticks of this process and every descendant, of those that ended once their parents know."""
    parents, ticks = {}, {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)], own, ended = _stat(entry)
                ticks[int(entry.name)] = own + ended
            except OSError:
                continue  # it ended meanwhile
    family = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        family |= more
        grown = bool(more)
    return sum(ticks.get(pid, 0) for pid in family)


def process_s(pid: int) -> float:
    """Processor time in seconds of a running process, all its threads; 0 where it is unknown."""
    try:
        return _stat(PROC / str(pid))[1] / os.sysconf("SC_CLK_TCK")
    except OSError:
        return 0.0


def _stat(process: Path) -> tuple[int, int, int]:
    """The parent's id, and clock ticks: its own, and those of its children that ended."""
    fields = (process / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    utime, stime, cutime, cstime = map(int, fields[11:15])  # behind the name: state, ppid, …
    return int(fields[1]), utime + stime, cutime + cstime
