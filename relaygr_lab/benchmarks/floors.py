"""The machine's ceilings, measured in turn with what is compared with them, since a machine's clock drifts.

The floor of an operation is its multiply-adds, its SiLU and its conversions, each at its own peak, or its bytes at the
bandwidth, whichever takes longer. On a CPU the peaks are those of loops in registers, and the bandwidth that of reading
(peaks.c). They are those of torch's matrix product and copy on accelerators and without a C compiler, and the rest
comes for nothing there; so it is with float16, and the product with bfloat16 and AMX.
"""

from __future__ import annotations

import ctypes
import datetime
import itertools
import math
import os
import platform
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from relaygr_stream.models.native.objects import CPUINFO, FOLDER, instructions

Work = Callable[[], object]

PEAKS: Final = Path(__file__).with_name("peaks.c")
#: Instructions and dtype → the folders of the kernels, and the loops of peaks.c that run what stands in them.
KERNELS: Final[dict[str, dict[torch.dtype, tuple[str, ...]]]] = {
    "avx512f": {torch.float32: ("avx512", "float32"), torch.bfloat16: ("avx512", "bfloat16", "avx512_bf16")},
    "avx2": {torch.float32: ("avx2", "float32"), torch.bfloat16: ("avx2", "avx2_bf16")},
}
SILU: Final = ("scores", "activations", "conversions")
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
class Cost:
    """What an operation must do at least: floating-point operations of products, bytes of weights and K/V to read, SiLU
    of scores, SiLU of elements, and elements rounded to the dtype.
    """

    flops: float
    nbytes: float
    scores: float = 0
    activations: float = 0
    conversions: float = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(mine + others for mine, others in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Floors:
    """What the machine did at best, of each part of a Cost in a second."""

    peak: float
    bandwidth: float
    scores: float = math.inf
    activations: float = math.inf
    conversions: float = math.inf

    def seconds(self, cost: Cost) -> float:
        """The shortest time that `cost` may take."""
        in_registers = cost.scores / self.scores + cost.activations / self.activations
        in_registers += cost.flops / self.peak + cost.conversions / self.conversions
        return max(in_registers, cost.nbytes / self.bandwidth)

    def best(self, other: Floors) -> Floors:
        """The better of each."""
        return Floors(*map(max, astuple(self), astuple(other)))


class Machine:
    """One device and its ceilings. Threads are as torch.set_num_threads left them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._products: dict[torch.dtype, tuple[Work, float]] = {}
        self._source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
        self._target = torch.zeros_like(self._source)
        self._loops: dict[torch.dtype, ctypes.CDLL | None] = {}
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
        loops = self._registers(dtype)
        multiply, flops = loops.pop("operations") if "operations" in loops else self._product(dtype)
        move, nbytes = self._reading(dtype) or self._copying()
        took, multiplied, moved, *rest = self.race(
            (work, multiply, move, *(loop for loop, _ in loops.values())), seconds
        )
        rates = {name: count / time for (name, (_, count)), time in zip(loops.items(), rest, strict=True)}
        return took, Floors(flops / multiplied, nbytes / moved, **rates)

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

    def bare(self, kv: Sequence[torch.Tensor], cost: Cost) -> Work | None:
        """The bytes of `kv` in turn and of weights, with the multiply-adds of `cost`; None without a compiler."""
        loops = self.loops(kv[0].dtype)
        if loops is None:
            return None
        half, held = int(kv[0].dtype == torch.bfloat16), kv[0].nbytes // 64 * 64
        of_weights = int(max(cost.nbytes - held, 0)) // 64 * 64
        weights = torch.zeros(of_weights, dtype=torch.uint8)
        flops_of_vector = 2 * 64 // kv[0].itemsize
        each = max(8, round(cost.flops / flops_of_vector / ((held + of_weights) / 64) / 8) * 8)
        turns = itertools.cycle([one.data_ptr() for one in kv])

        def run() -> None:
            loops.product_over(next(turns), held, each, half)
            loops.product_over(weights.data_ptr(), of_weights, each, half)

        return run

    def loops(self, dtype: torch.dtype) -> ctypes.CDLL | None:
        """peaks.c with the SiLU and the conversions of a dtype; None where there is none."""
        if dtype not in self._loops:
            self._loops[dtype] = _compiled(dtype) if self.device.type == "cpu" else None
        return self._loops[dtype]

    def _registers(self, dtype: torch.dtype) -> dict[str, tuple[Work, float]]:
        """Loops in registers on every thread, and what they count; "operations" is missing where there is none."""
        loops = self.loops(dtype)
        if loops is None or dtype not in KERNELS["avx2"]:
            return {}
        found: dict[str, tuple[Work, float]] = {}
        threads = torch.get_num_threads()
        names = {"operations": f"{dtype_name(dtype)}_operations"}
        names |= {name: name for name in SILU if hasattr(loops, name)}
        for name, symbol in names.items():
            loop: Callable[[int], int] = getattr(loops, symbol)
            loop.argtypes, loop.restype = [ctypes.c_int64], ctypes.c_int64  # type: ignore[attr-defined]
            rounds = ROUNDS if name == "operations" else ROUNDS // 4
            if count := loop(rounds) * threads:
                found[name] = partial(self._on_all, loop, [rounds] * threads), float(count)
        return found

    def _on_all(self, loop: Callable[[int], int], arguments: list[int]) -> None:
        list(self._pool.map(loop, arguments))

    def _reading(self, dtype: torch.dtype) -> tuple[Work, float] | None:
        loops = self.loops(dtype)
        if loops is None:
            return None
        read, part = loops.read_all, COPY_BYTES // torch.get_num_threads() // 256 * 256
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


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compiled(dtype: torch.dtype) -> ctypes.CDLL | None:
    """peaks.c for this processor, with its kernels for the dtype if there are any; None without a compiler."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    has = instructions(CPUINFO)
    kernels = next((folders.get(dtype, ()) for name, folders in KERNELS.items() if name in has), ())
    include = ["-DKERNELS", *(f"-I{FOLDER / name}" for name in (".", *kernels))] if kernels else []
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "peaks.so"
        command = [
            *compiler,
            "-O3",
            "-march=native",
            "-fPIC",
            "-shared",
            *include,
            str(PEAKS),
            "-o",
            str(target),
            "-lm",
        ]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except OSError:
            return None
        loops = ctypes.CDLL(str(target))
    loops.read_all.argtypes, loops.read_all.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    loops.product_over.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    loops.product_over.restype = ctypes.c_float
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
