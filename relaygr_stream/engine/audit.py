"""Scoring a share of the answered rankings a second time, in full, to show that the relay changes nothing.

Audits use idle device time and the scratch region; a full inference that needs the scratch takes it from them.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import structlog

from relaygr_stream.cache.scratch import Scratch
from relaygr_stream.engine.commands import Measured, RankTask
from relaygr_stream.engine.executor import Executor, PrefillRun, describe
from relaygr_stream.models.api import ScoreInput, relative_deviation
from relaygr_stream.telemetry.logs import request_log_fields
from relaygr_stream.wire.messages import MISSES

log = structlog.get_logger(__name__)

#: Most audits that wait: each keeps a request's tokens, and an old audit tells no more than a new one.
MAX_WAITING: Final = 8
#: In half precision the root mean square is judged, and fewer scores than these count as these with the rest equal: one
#: score may be off by several times the root mean square of many.
LEAST_SCORES: Final = 32
#: Audits of whose largest scores the median counts: neither a ranking whose scores nearly cancel nor one with huge
#: scores decides.
SCALE_AUDITS: Final = 101


def audit_deviation(
    relayed: npt.NDArray[np.float32], full: npt.NDArray[np.float32], scale: float, *, half: bool
) -> float:
    """How far relayed scores are from full ones, relative to `scale` or to the largest full score, if that is more.

    half: in half precision the two are different roundings of one truth: the root mean square, else the largest
    difference. Infinite if a score is not finite or the shapes differ.
    """
    if math.isinf(relative_deviation(relayed, full)):
        return math.inf
    scale = max(scale, float(np.abs(full).max(initial=0.0)), float(np.finfo(np.float32).tiny))
    off = np.abs(relayed.astype(np.float64) - full) / scale
    if not half:
        return float(off.max(initial=0.0))
    return math.sqrt(float((off**2).sum()) / max(off.size, LEAST_SCORES))


#: Called with each finished audit: the request, what its answer told, deviation, milliseconds of device time. True: it
#: deviates by too much.
Report = Callable[[RankTask, Measured, float, float], bool]


@dataclass(slots=True, eq=False)
class Audit:
    """A ranking that was answered from prefix KV and is to be scored in full, to compare."""

    task: RankTask
    measured: Measured
    relayed: npt.NDArray[np.float32]
    run: PrefillRun | None = None  # into the scratch region, while it is under way
    ms: float = 0.0  # device time of this attempt
    scores: list[npt.NDArray[np.float32]] = field(default_factory=list)  # in full, of the first candidates


class Auditor:
    """Compares relayed with full scores, relative to their usual size: those of one ranking may nearly cancel.

    half: the model computes in half precision. deviating: users whose cached prefix KV deviate by too much.
    """

    def __init__(self, share: float, report: Report, seed: int | None = None, *, half: bool = False) -> None:
        self._share = share
        self._report = report
        self._half = half
        #: Largest full scores of the last audits in which relayed ones agreed: others may be anything.
        self._largest: deque[float] = deque(maxlen=SCALE_AUDITS)
        self.deviating: list[str] = []
        self._random = random.Random(seed)
        self._waiting: deque[Audit] = deque()
        self.done = 0
        self.worst = 0.0  # largest relative deviation found

    def consider(self, task: RankTask, measured: Measured, relayed: npt.NDArray[np.float32]) -> None:
        """Choose this answered ranking for an audit, or not."""
        if measured.outcome in MISSES or not self._share or self._random.random() >= self._share:
            return
        if len(self._waiting) >= MAX_WAITING:
            if self._waiting[0].run is not None:
                return  # the oldest is running and holds the scratch region: it must stay
            self._waiting.popleft()
        self._waiting.append(Audit(task, measured, relayed))

    @property
    def waiting(self) -> int:
        """Audits that are not over."""
        return len(self._waiting)

    def users(self) -> set[str]:
        """The users whose rankings wait for their audit."""
        return {audit.task.user_key for audit in self._waiting}

    def erase_users(self, users: Set[str], scratch: Scratch) -> None:
        """Drop the audits of these users, one under way too."""
        if self._waiting and self._waiting[0].task.user_key in users:
            self.give_up_scratch(scratch)
        self._waiting = deque(audit for audit in self._waiting if audit.task.user_key not in users)

    def step(self, executor: Executor, scratch: Scratch, budget_ms: float) -> bool:
        """A slice of an audit; False if there is none or the scratch is lent. An audit that fails is dropped."""
        if not self._waiting:
            return False
        audit = self._waiting[0]
        task = audit.task
        if audit.run is None:
            if not scratch.free:
                return False
            audit.run, audit.ms, audit.scores = executor.prefill(scratch.borrow(), task.tokens), 0.0, []
        try:
            if not audit.run.done:
                audit.ms += audit.run.advance(budget_ms)
                return True
            done = sum(len(scores) for scores in audit.scores)
            # Candidates never see each other: scored a few at a time they score the same, and no ranking waits long.
            some = slice(done, done + executor.candidates_within(audit.run.region, task.suffix, budget_ms))
            few, features = task.candidates[some], {name: rows[some] for name, rows in task.features.items()}
            scores, ms = executor.score([ScoreInput(audit.run.region, task.suffix, few, features)])
            audit.scores.append(scores[0])
            audit.ms += ms
            if done + len(few) < len(task.candidates):
                return True
        except Exception as error:  # a user's model or the device may raise anything; the request has its answer
            self._end(audit, scratch)
            log.warning(
                "audit failed",
                **request_log_fields(task.request_id, task.user_id, task.lane, audit.measured.outcome),
                error=describe(error),
            )
            return True
        self._end(audit, scratch)
        full = np.concatenate(audit.scores)
        scale = statistics.median(self._largest) if self._largest else 0.0
        deviation = audit_deviation(audit.relayed, full, scale, half=self._half)
        self.done += 1
        self.worst = max(self.worst, deviation)
        if self._report(task, audit.measured, deviation, audit.ms):
            self.deviating.append(task.user_key)
        else:
            self._largest.append(float(np.abs(full).max(initial=0.0)))
        return True

    def give_up_scratch(self, scratch: Scratch) -> bool:
        """A request needs the scratch region: stop the audit under way; it starts again later."""
        if not self._waiting or (run := self._waiting[0].run) is None:
            return False
        scratch.give_back(run.region)
        self._waiting[0].run = None
        return True

    def _end(self, audit: Audit, scratch: Scratch) -> None:
        assert audit.run is not None
        scratch.give_back(audit.run.region)
        self._waiting.popleft()
