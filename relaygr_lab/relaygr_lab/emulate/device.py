"""An emulated device: the model's operations and copies take the times of a cost file, and no processor.

The worker runs unmodified. Its model is the simulator's, by a clock that sleeps; its tiers are the real arenas on
torch's `meta` device, so that prefix KV of stated bytes fill them and take no memory. `model.factory` is this module's
`make`, `model.checkpoint` the cost file.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch

from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_lab.simulate.device import META, DeviceClock, SimulatedCopies, SimulatedModel
from relaygr_stream.cache.fading import CostAwarePolicy
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.tiers import MakePolicy
from relaygr_stream.engine.audit import Report
from relaygr_stream.engine.build import WorkerRuntime, assemble, load_executor
from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Model

#: An operation that comes later than this after the last one's end was not held up by its lateness: a worker's turn
#: between two operations takes tenths of a millisecond, and a few where processes share cores.
FOLLOWS_S: Final = 2e-3


class WallClock:
    """A device's time on the wall clock: `spend` sleeps, on a schedule that lateness does not shift.

    An operation ends at max(start, free) + cost, where `free` is the scheduled end of the one before. The wake-up comes
    somewhat later than that end. An operation that follows at once begins as if the wake-up had been in time: the
    device had been free, and only its host had slept. busy_s: running total of costs; late_s: of lateness, as far as
    no following operation made up for it.
    """

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._now = now
        self._sleep = sleep
        self._free = now()
        self._overslept = 0.0  # by the last operation
        self._returned = self._free
        self.busy_s = 0.0
        self.late_s = 0.0

    @property
    def now(self) -> float:
        """Seconds."""
        return self._now()

    def spend(self, seconds: float) -> None:
        """Sleep until the operation is over."""
        now = self._now()
        start = now
        if now - self._returned <= FOLLOWS_S:
            start = max(self._free, now - self._overslept)
            self.late_s -= now - start
        self._free = end = start + seconds
        if (left := end - now) > 0:
            self._sleep(left)
        self._returned = self._now()
        self._overslept = max(0.0, self._returned - end)
        self.busy_s += seconds
        self.late_s += self._overslept


class EmulatedModel(SimulatedModel):
    """A RankingModel whose operations take the times in `costs` on the wall clock; all scores are zero."""

    version = "emulated"
    note = "emulated: computes nothing"

    def __init__(self, costs: DeviceCosts, tasks: tuple[str, ...], seed: int) -> None:
        self.costs = costs
        self.clock = WallClock()
        super().__init__(costs, self.clock, np.random.default_rng(seed))
        self.tasks = tasks


def make(model: Model, device: torch.device, dtype: torch.dtype) -> EmulatedModel:
    """The factory: `model.checkpoint` is the cost file, which also says the shape of K and V. Raises ConfigError."""
    del device, dtype
    if not model.checkpoint:
        raise ConfigError("an emulated device needs its costs: set model.checkpoint to a cost file")
    return EmulatedModel(DeviceCosts.read(Path(model.checkpoint)), model.tasks, model.seed)


class Alarm:
    """Calls `wake` at given times of time.perf_counter, from a thread of its own, which ends with the process."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._times: list[float] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="relaygr-alarm", daemon=True).start()

    def at(self, when: float) -> None:
        """Wake at this time."""
        with self._changed:
            heapq.heappush(self._times, when)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._times or (left := self._times[0] - time.perf_counter()) > 0:
                    self._changed.wait(left if self._times else None)
                heapq.heappop(self._times)
            self._wake()


class EmulatedCopies(SimulatedCopies):
    """Copies that take bytes / bandwidth on the wall clock, and move nothing."""

    def __init__(self, costs: DeviceCosts, clock: DeviceClock, wake: Callable[[], None]) -> None:
        super().__init__(costs, clock, Alarm(wake).at)


def build(
    settings: Settings,
    report_audit: Report,
    wake: Callable[[], None],
    policy: MakePolicy = CostAwarePolicy,
) -> WorkerRuntime:
    """As engine.build.build, with an emulated device. Raises ConfigError where the model is none."""
    worker = settings.worker
    executor = load_executor(settings)
    model = executor.model
    if not isinstance(model, EmulatedModel):
        raise ConfigError(f"model.factory = {settings.model.factory!r}: an emulated device needs {__name__}:make")
    runtime = assemble(
        settings,
        executor,
        TierMemory(worker.hbm_bytes, META, setting="worker.hbm_bytes"),
        TierMemory(worker.dram_bytes, META, setting="worker.dram_bytes") if worker.dram_bytes else None,
        EmulatedCopies(model.costs, model.clock, wake),
        report_audit,
        policy=policy,
    )
    scratch = runtime.cache.scratch.borrow()
    executor.warm_up(scratch)
    runtime.cache.scratch.give_back(scratch)
    return runtime
