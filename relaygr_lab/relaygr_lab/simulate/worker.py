"""One simulated worker: the real core of its rules, and the real scheduler, whose turns (take_turn) are events on the
timeline.

A turn lasts as long as the simulated device and the worker's own steps take; messages that arrive during it wait for
the next turn.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch

from relaygr_lab.policies import Policy, eviction
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_lab.simulate.device import META, SimulatedCopies, SimulatedModel
from relaygr_lab.simulate.timeline import Clock, Timeline
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.engine.build import assemble
from relaygr_stream.engine.commands import Answer, Command, Query
from relaygr_stream.engine.executor import Executor
from relaygr_stream.engine.scheduler import Snapshot
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.worker.core import WorkerCore
from relaygr_stream.worker.device import Submitted, take_turn
from relaygr_stream.worker.statement import Identity, Statements

Tell = Callable[[WorkerStatus, float], None]

#: The device of the core's arrays and small tensors.
HOST: Final = torch.device("cpu")


class SimulatedWorker:
    """core: its rules. on_answers(answers, time): called after each half of a turn with answers."""

    def __init__(
        self,
        core: WorkerCore,
        settings: Settings,
        costs: DeviceCosts,
        timeline: Timeline,
        seed: int,
        on_answers: Callable[[list[Answer], float], None],
        policy: Policy = "relay",
    ) -> None:
        self.name = core.name
        self.core: Final = core
        self.alive = True
        self._timeline = timeline
        self._clock = Clock(timeline.clock.now)
        self._step_s, self._answer_s = costs.step_ms / 1e3, costs.answer_ms / 1e3
        self._on_answers = on_answers
        self._inbox: deque[Submitted] = deque()
        self._free_at = 0.0
        self._next = math.inf
        self.model = SimulatedModel(costs, self._clock, np.random.default_rng(seed))
        executor = Executor(self.model, HOST, self._clock)
        worker = settings.worker
        self._runtime = assemble(
            settings,
            executor,
            TierMemory(worker.hbm_bytes, META),
            TierMemory(worker.dram_bytes, META) if worker.dram_bytes else None,
            # An event of its own: a turn before a copy's end must not be the last that knows of it.
            SimulatedCopies(costs, self._clock, lambda at: timeline.at(at, self._wake)),
            _ignore_audit,
            audit_seed=seed,
            policy=eviction(policy),
        )
        self.scheduler = self._runtime.scheduler
        scratch = self._runtime.cache.scratch.borrow()
        executor.warm_up(scratch)
        self._runtime.cache.scratch.give_back(scratch)
        self._clock.now, self.model.busy_s = timeline.clock.now, 0.0
        self._statements = Statements(settings, self._runtime, timeline.clock.now)
        self._identity = Identity(self.name, 1, "simulated", 1)
        self.most_pinned = self.most_held = 0  # bytes in any status: by the lanes' admitted requests; by all

    def submit(self, command: Command) -> None:
        """Enqueue a command for the next turn."""
        self._submit(Submitted(command))

    def state(self, positions: Mapping[int, int], tell: Tell) -> None:
        """Call `tell(status, time)` with the worker's status in the next turn. positions: its lanes' read offsets."""
        self._submit(Submitted(Query(tuple(positions)), (positions, tell)))

    def _submit(self, submitted: Submitted) -> None:
        self._inbox.append(submitted)
        self._wake(self._timeline.clock.now)

    def die(self) -> None:
        """Stop: no further turn runs."""
        self.alive = False

    def _state(self, taken: Snapshot, positions: Mapping[int, int], tell: Tell, now: float) -> None:
        self.most_pinned = max(self.most_pinned, sum(taken.lane_bytes.values()))
        self.most_held = max(self.most_held, taken.pinned_bytes)
        tell(self._statements.status(self._identity, "serving", taken, positions, now, int(now * 1e3)), now)

    def _wake(self, at: float) -> None:
        at = max(at, self._free_at)  # during a turn: never; what its answers bring is taken after it
        if at < self._next:
            self._next = at
            self._timeline.at(at, self._turn)

    def _turn(self, now: float) -> None:
        if now != self._next or not self.alive:
            return  # an earlier turn has replaced this one
        self._next = math.inf
        clock, self._free_at = self._clock, math.inf
        clock.now = now
        for turn in take_turn(self.scheduler, self._inbox, clock):
            if turn.error is not None:
                raise turn.error
            for (positions, tell), taken in turn.replies:
                self._state(taken, positions, tell, now)
            clock.now += turn.worked * self._step_s + len(turn.answers) * self._answer_s
            if turn.answers:
                self._on_answers(turn.answers, clock.now)
        self._free_at = clock.now
        if turn.worked or self._inbox:
            self._wake(clock.now)
        elif (timer := self.scheduler.next_timer()) is not None:
            self._wake(timer)


def _ignore_audit(*_: object) -> bool:
    """Ignores an audit's result: audits take device time, but simulated scores mean nothing."""
    return False
