"""The machine's ceilings, measured in turn with what is compared with them, since a machine's clock drifts.

The floor of an operation is its floating-point operations at the peak, or its bytes at the bandwidth, whichever takes
longer. On a CPU the peak is that of multiply-adds in registers, and the bandwidth that of reading (peaks.c). They are
those of torch's matrix product and copy on accelerators and without a C compiler; so is the peak of float16, and of
bfloat16 with AMX.
"""

from __future__ import annotations

import ctypes
import datetime
import math
import os
import platform
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

Work = Callable[[], object]

PEAKS: Final = Path(__file__).with_name("peaks.c")
#: Rounds of a loop in registers: a millisecond or two.
ROUNDS: Final = 200_000
#: Edge of the product. On a CPU a larger one is no faster (measured 768 … 3,072), on an
#: accelerator a smaller one does not fill it.
CPU_EDGE: Final = 1024
ACCELERATOR_EDGE: Final = 8192
#: Buffers that are read or copied: from here on the rate does not fall any more (measured 16 … 512 MiB), and K/V that
#: a ranking finds in memory is not in a cache either.
COPY_BYTES: Final = 128 << 20
#: Shortest time that one work runs before the next has its turn: hundreds of switches, not millions.
TURN_S: Final = 0.03


@dataclass(frozen=True)
class Floors:
    """What the machine did at best: FLOP/s, bytes/s."""

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
        self._source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
        self._target = torch.zeros_like(self._source)
        self._loops = _compiled() if device.type == "cpu" else None
        self._pool = ThreadPoolExecutor(torch.get_num_threads())

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
        multiply, flops = self._multiply_adds(dtype) or self._product(dtype)
        move, nbytes = self._reading() or self._copying()
        took, multiplied, moved = self.race((work, multiply, move), seconds)
        return took, Floors(flops / multiplied, nbytes / moved)

    def product_share(self, dtype: torch.dtype, seconds: float) -> float:
        """The rate of torch's matrix product, a peer, as a share of the peak."""
        product, flops = self._product(dtype)
        took, floors = self.beside(product, dtype, seconds)
        return flops / took / floors.peak

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

    def _multiply_adds(self, dtype: torch.dtype) -> tuple[Work, float] | None:
        """Multiply-adds in registers on every thread, and their number; None where there is no loop for them."""
        if self._loops is None or dtype not in (torch.float32, torch.bfloat16):
            return None
        loop: Callable[[int], int] = getattr(self._loops, f"{str(dtype).removeprefix('torch.')}_operations")
        threads = [ROUNDS] * torch.get_num_threads()
        operations = loop(ROUNDS) * len(threads)
        return (lambda: list(self._pool.map(loop, threads)), operations) if operations else None

    def _reading(self) -> tuple[Work, float] | None:
        if self._loops is None:
            return None
        read, part = self._loops.read_all, COPY_BYTES // torch.get_num_threads() // 256 * 256
        starts = [self._source.data_ptr() + part * thread for thread in range(torch.get_num_threads())]
        return lambda: list(self._pool.map(read, starts, [part] * len(starts))), part * len(starts)

    def _copying(self) -> tuple[Work, float]:
        return lambda: self._target.copy_(self._source), 2 * COPY_BYTES

    def _product(self, dtype: torch.dtype) -> tuple[Work, float]:
        if dtype not in self._products:
            edge = CPU_EDGE if self.device.type == "cpu" else ACCELERATOR_EDGE
            a, b = (torch.randn(edge, edge, device=self.device).to(dtype) for _ in range(2))
            out = torch.empty_like(a)
            self._products[dtype] = (lambda: torch.mm(a, b, out=out)), 2.0 * edge**3
        return self._products[dtype]


def _compiled() -> ctypes.CDLL | None:
    """peaks.c for this processor; None without a compiler."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "peaks.so"
        try:
            subprocess.run(
                [*compiler, "-O3", "-march=native", "-fPIC", "-shared", str(PEAKS), "-o", str(target)],
                check=True, capture_output=True,
            )  # fmt: skip
        except OSError:
            return None
        loops = ctypes.CDLL(str(target))
    for name in ("float32_operations", "bfloat16_operations"):
        function = getattr(loops, name)
        function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
    loops.read_all.argtypes, loops.read_all.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    return loops


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
