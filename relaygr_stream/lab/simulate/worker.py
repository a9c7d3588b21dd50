"""One simulated worker: the real core, on a device thread made of turns on the timeline.

A turn is what worker/device.py does: take what came in, one step of the core, hand the answers over. It lasts as long
as the simulated device and the worker itself take; what comes meanwhile waits for the next turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import numpy as np
import torch

from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.lab.simulate.costs import DeviceCosts
from relaygr_stream.lab.simulate.device import META, SimulatedCopies, SimulatedModel
from relaygr_stream.lab.simulate.timeline import Clock, Timeline
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.worker.build import assemble
from relaygr_stream.worker.executor import Engine
from relaygr_stream.worker.scheduler import RelayCore
from relaygr_stream.worker.statement import Identity, Statements, snapshot
from relaygr_stream.worker.tasks import Answer

Call = Callable[[RelayCore, float], None]

#: Where the core's arrays and small tensors are.
HOST: Final = torch.device("cpu")


class SimulatedWorker:
    """on_answers(answers, time): called at the end of each turn that answered something."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        costs: DeviceCosts,
        timeline: Timeline,
        seed: int,
        on_answers: Callable[[list[Answer], float], None],
    ) -> None:
        self.name = name
        self.alive = True
        self._timeline = timeline
        self._clock = Clock(timeline.clock.now)
        self._step_s, self._answer_s = costs.step_ms / 1e3, costs.answer_ms / 1e3
        self._on_answers = on_answers
        self._inbox: list[Call] = []
        self._answers: list[Answer] = []
        self._free_at = 0.0
        self._next = math.inf
        self.model = SimulatedModel(costs, self._clock, np.random.default_rng(seed))
        engine = Engine(self.model, HOST, self._clock)
        worker = settings.worker
        self._inside = assemble(
            settings,
            engine,
            TierMemory(worker.hbm_bytes, META),
            TierMemory(worker.dram_bytes, META) if worker.dram_bytes else None,
            SimulatedCopies(costs, self._clock, self._wake),
            self._answers.append,
            _ignore_audit,
            audit_seed=seed,
        )
        self.core = self._inside.core
        scratch = self._inside.cache.scratch.borrow()
        engine.warm_up(scratch)
        self._inside.cache.scratch.give_back(scratch)
        self._clock.now, self.model.busy_s = timeline.clock.now, 0.0
        self._statements = Statements(settings, self._inside, timeline.clock.now)
        self._identity = Identity(name, 1, "simulated", 1)
        self.most_pinned = 0

    def submit(self, call: Call) -> None:
        """Have `call(core, now)` run in the next turn, after those submitted before."""
        self._inbox.append(call)
        self._wake(self._timeline.clock.now)

    def state(self, positions: Mapping[int, int], tell: Callable[[WorkerStatus, float], None]) -> None:
        """Have `tell(status, time)` called with what the worker says of itself; positions: of its lanes, now."""
        self.submit(partial(self._state, positions, tell))

    def die(self) -> None:
        """Nothing happens here any more."""
        self.alive = False

    def _state(
        self, positions: Mapping[int, int], tell: Callable[[WorkerStatus, float], None], core: RelayCore, now: float
    ) -> None:
        taken = snapshot(core, positions, now)
        self.most_pinned = max(self.most_pinned, taken.pinned_bytes)
        tell(self._statements.status(self._identity, "serving", taken, positions, now, int(now * 1e3)), now)

    def _wake(self, at: float) -> None:
        at = max(at, self._free_at)
        if at < self._next:
            self._next = at
            self._timeline.at(at, self._turn)

    def _turn(self, now: float) -> None:
        if now != self._next or not self.alive:
            return  # a turn before this one has done it all
        self._next = math.inf
        clock, core = self._clock, self.core
        clock.now = now
        calls, self._inbox = self._inbox, []
        for call in calls:
            call(core, now)
        worked = core.step(now)
        if worked or self._answers:
            clock.now += self._step_s + len(self._answers) * self._answer_s
        self._free_at = end = clock.now
        if self._answers:
            self._on_answers(self._answers, end)
            self._answers.clear()
        if worked:
            self._wake(end)
        elif (timer := core.next_timer()) is not None:
            self._wake(timer)


def _ignore_audit(*_: object) -> bool:
    """Audits take device time; that their scores agree is not what is simulated."""
    return False
