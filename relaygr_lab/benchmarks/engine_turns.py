"""What takes turns in the engine's bench: both dtypes, one thread and several, behind a pause and without, with
recorded graphs and without."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Final

import torch
from engine_load import EngineLoad
from engine_report import Report
from floors import Machine, Work

from relaygr_stream.models.hstu_model import HSTUModel

CANDIDATES: Final = 64
#: bfloat16 over float32, of the quotient of their peaks.
OF_PEAKS: Final = 0.8
#: Two threads over one.
THREADS: Final = 2
FASTER: Final = {"prefill": 1.7, "hit": 1.4}
#: A worker that is idle for so long has lost its caches, its clock and its place on the core.
PAUSE_S: Final = 0.02
#: What the pause costs a hit, of what it costs the bare products on the same bytes.
OF_BARE: Final = 1.5


class Turns:
    """A prefill and a hit, as works that take turns. A hit goes round copies of its prefix KV."""

    def __init__(self, load: EngineLoad, prefix: int) -> None:
        self.load = load
        self.kv, self.history = load.region(prefix), load.tokens(prefix)
        self.prefill()
        self.one = load.ranking(self.kv, CANDIDATES)
        self._alike = load.alike(self.one)

    def prefill(self) -> None:
        self.kv.length = 0
        self.load.model.prefill(self.kv, self.history)

    def hit(self) -> None:
        self.load.model.score([next(self._alike)])

    def works(self) -> dict[str, Work]:
        return {"prefill": self.prefill, "hit": self.hit}


def both_dtypes(loads: list[EngineLoad], machine: Machine, report: Report, prefix: int, seconds: float) -> None:
    """Print and judge how many times as fast as float32 bfloat16 is."""
    turns = {load.dtype: Turns(load, prefix) for load in loads}
    if not {torch.bfloat16, torch.float32} <= turns.keys():
        return
    half, single = turns[torch.bfloat16], turns[torch.float32]
    peaks = machine.floors(torch.bfloat16, seconds).peak / machine.floors(torch.float32, seconds).peak
    for name, in_half in half.works().items():
        slow, fast = machine.race((single.works()[name], in_half), 2 * seconds)
        times, text = slow / fast, f"{name} of {prefix}: bfloat16 / float32"
        report.note(torch.bfloat16, text, f"{times:.2f} × as fast, the peaks {peaks:.2f}", ratio=times, of_peaks=peaks)
        report.check(times >= OF_PEAKS * peaks, f"{text} is {times:.2f}; bound: at least {OF_PEAKS} × {peaks:.2f}")


def threads(load: EngineLoad, machine: Machine, report: Report, prefix: int, seconds: float) -> None:
    """Print and judge how many times as fast several threads are as one."""
    if load.device.type != "cpu" or torch.get_num_threads() > 1:
        return
    if (os.cpu_count() or 1) < THREADS:
        report.note(load.dtype, f"{THREADS} threads", "not run: the machine has one core")
        return
    turns = Turns(load, prefix)
    for name, work in turns.works().items():
        alone, together = machine.race((work, _with_threads(work)), 2 * seconds)
        ratio, text = alone / together, f"{name} of {prefix} with {THREADS} threads"
        report.note(load.dtype, text, f"{ratio:.2f} × as fast as with one", ratio=ratio)
        report.check(
            ratio >= FASTER[name], f"{text} is {ratio:.2f} × as fast as with one; bound: at least {FASTER[name]}"
        )


def _with_threads(work: Work) -> Work:
    def run() -> None:
        torch.set_num_threads(THREADS)
        work()
        torch.set_num_threads(1)

    return run


def recorded(load: EngineLoad, machine: Machine, report: Report, prefix: int, seconds: float) -> None:
    """Print how many times as fast recorded graphs are as launching layer by layer, for a CUDA device."""
    with_graphs = Turns(load, prefix)
    launched = Turns(EngineLoad(load.shape, load.device, load.dtype), prefix)
    model = launched.load.model
    if not isinstance(model, HSTUModel) or model.stack.fused is None:
        return
    model.use(model.stack.fused, None)
    for name, work in with_graphs.works().items():
        slow, fast = machine.race((launched.works()[name], work), 2 * seconds)
        text = f"{name} of {prefix} through recorded graphs"
        shown = f"{fast * 1e3:.2f} ms instead of {slow * 1e3:.2f}: {slow / fast:.2f} × as fast"
        report.note(load.dtype, text, shown, ratio=slow / fast)


def behind_a_pause(load: EngineLoad, machine: Machine, report: Report, prefix: int, seconds: float) -> None:
    """Print and judge what a pause costs a hit, beside what it costs bare products on the same bytes."""
    turns = Turns(load, prefix)
    copies = [next(turns._alike).kv.storage for _ in range(8)]
    bare = machine.bare(copies, load.score_cost(turns.one))
    if bare is None:
        return
    found: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in ("hit", "bare")}
    until = time.perf_counter() + 4 * seconds
    while time.perf_counter() < until:
        for name, work in (("hit", turns.hit), ("bare", bare)):
            for paused in (True, False):  # the second comes directly behind the first
                if paused:
                    time.sleep(PAUSE_S)
                found[name][paused].append(_timed(work))
    middle = {name: {paused: statistics.median(times) for paused, times in of.items()} for name, of in found.items()}
    costs = {name: of[True] / of[False] for name, of in middle.items()}
    text = f"hit of {prefix} behind {PAUSE_S * 1e3:.0f} ms of idleness"
    for name, of in middle.items():
        shown = f"{of[True] * 1e3:.2f} ms instead of {of[False] * 1e3:.2f}: {costs[name]:.2f} ×"
        report.note(load.dtype, f"{text}, {name}", shown, ratio=costs[name])
    times = costs["hit"] / costs["bare"]
    report.check(times <= OF_BARE, f"{text} costs {times:.2f} × what it costs bare products; bound: at most {OF_BARE}")


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
