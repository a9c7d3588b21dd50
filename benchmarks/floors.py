"""The machine's ceilings, measured in turn with what is compared with them, since a machine's clock drifts.

The floor of an operation is its floating-point operations at the peak of a matrix product, or its bytes at the
bandwidth of a copy, whichever takes longer. Knows nothing of models.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

Work = Callable[[], object]

#: Edge of the product whose rate counts as the peak. On a CPU a larger one is no faster (measured 768 … 3,072), on an
#: accelerator a smaller one does not fill it.
CPU_EDGE: Final = 1024
ACCELERATOR_EDGE: Final = 8192
#: Buffers of the copy: from here on the rate does not fall any more (measured 16 … 512 MiB), and K/V that a ranking
#: finds in memory is not in a cache either.
COPY_BYTES: Final = 128 << 20
#: Shortest time that one work runs before the next has its turn: hundreds of switches, not millions.
TURN_S: Final = 0.03


@dataclass(frozen=True)
class Floors:
    """What the machine did at best: FLOP/s of a product, bytes/s (read and written) of a copy."""

    peak: float
    bandwidth: float

    def seconds(self, flops: float, nbytes: float) -> float:
        """The shortest time that `flops` operations on `nbytes` of memory may take."""
        return max(flops / self.peak, nbytes / self.bandwidth)


class Machine:
    """One device and its ceilings. Threads are as torch.set_num_threads left them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._products: dict[torch.dtype, tuple[Work, float]] = {}
        source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        self._copy: Work = lambda: target.copy_(source)

    def race(self, works: Sequence[Work], seconds: float) -> list[float]:
        """Shortest seconds of each of `works`, which take turns for about `seconds`: other processes only ever add.

        The first round warms up and does not count, unless it took longer than that already.
        """
        start = time.perf_counter()
        shortest = [self._turn(work) for work in works]
        if time.perf_counter() - start > seconds:
            return shortest
        shortest = [math.inf] * len(works)
        while time.perf_counter() - start < seconds or math.inf in shortest:
            shortest = [min(so_far, self._turn(work)) for so_far, work in zip(shortest, works, strict=True)]
        return shortest

    def beside(self, work: Work, dtype: torch.dtype, seconds: float) -> tuple[float, Floors]:
        """Shortest seconds of `work`, and the machine's floors while it ran."""
        product, flops = self._product(dtype)
        took, multiplied, copied = self.race((work, product, self._copy), seconds)
        return took, Floors(flops / multiplied, 2 * COPY_BYTES / copied)

    def floors(self, dtype: torch.dtype, seconds: float) -> Floors:
        """The floors alone."""
        return self.beside(lambda: None, dtype, seconds)[1]

    def transfers(self, seconds: float) -> tuple[float, float] | None:
        """Bytes/s from pinned host memory to the device and back; None where the device is the host."""
        if self.device.type == "cpu":
            return None
        host = torch.zeros(COPY_BYTES, dtype=torch.uint8).pin_memory()
        device = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=self.device)
        up, down = self.race((lambda: device.copy_(host), lambda: host.copy_(device)), seconds)
        return COPY_BYTES / up, COPY_BYTES / down

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def describe(self) -> list[str]:
        """The facts that a reader of a table needs, as lines."""
        lines = [
            f"date      {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
            f"CPU       {_cpu_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s) used",
            f"torch     {torch.__version__}, Python {platform.python_version()}",
        ]
        if self.device.type == "cuda":
            lines.append(f"device    {torch.cuda.get_device_name(self.device)}")
        elif self.device.type != "cpu":
            lines.append(f"device    {self.device}")
        return lines

    def _turn(self, work: Work) -> float:
        shortest, until = math.inf, time.perf_counter() + TURN_S
        while True:
            start = time.perf_counter()
            work()
            self.synchronize()
            stop = time.perf_counter()
            shortest = min(shortest, stop - start)
            if stop > until:
                return shortest

    def _product(self, dtype: torch.dtype) -> tuple[Work, float]:
        if dtype not in self._products:
            edge = CPU_EDGE if self.device.type == "cpu" else ACCELERATOR_EDGE
            a, b = (torch.randn(edge, edge, device=self.device).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            self._products[dtype] = (lambda: torch.mm(a, b, out=out)), 2.0 * edge**3
        return self._products[dtype]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
