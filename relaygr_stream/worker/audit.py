"""Scoring a share of the answered rankings a second time, in full, to show that the relay changes nothing.

Where prefix KV were rounded in DRAM (worker.dram_storage = "int8"), scores do change: those audits are told apart.

Audits use idle device time and the scratch region; a full inference that needs the scratch takes it from them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import structlog

from relaygr_stream.cache.scratch import Scratch
from relaygr_stream.exactness import relative_deviation
from relaygr_stream.models.protocol import ScoreInput
from relaygr_stream.telemetry.logs import request_log_fields
from relaygr_stream.worker.engine import Engine, describe
from relaygr_stream.worker.extension import Extension
from relaygr_stream.worker.tasks import Audit, RankTask

log = structlog.get_logger(__name__)

#: Audits waiting at most: each keeps a request's tokens, and an old one says nothing more than a new one.
MAX_WAITING: Final = 8


#: Told of each finished audit: the ranking, its deviation, milliseconds of device time. Returns whether it deviates by
#: too much.
Report = Callable[[RankTask, float, float], bool]


class Auditor:
    """Compares relayed with full scores. evict(user_key): what is cached of this user deviates by too much."""

    def __init__(self, share: float, report: Report, seed: int | None = None) -> None:
        self._share = share
        self._report = report
        self.evict: Callable[[str], None] = lambda user_key: None
        self._random = random.Random(seed)
        self._waiting: deque[Audit] = deque()
        self.done = 0
        self.worst = 0.0  # largest relative deviation found where nothing was rounded
        self.worst_rounded = 0.0  # and where it was

    def consider(self, task: RankTask, relayed: npt.NDArray[np.float32]) -> None:
        """Choose this answered ranking for an audit, or not."""
        if task.outcome == "full" or not self._share or self._random.random() >= self._share:
            return
        if len(self._waiting) >= MAX_WAITING:
            if self._waiting[0].work is not None:
                return  # the oldest is under way and holds the scratch; it must not fall out
            self._waiting.popleft()
        self._waiting.append(Audit(task, relayed))

    def step(self, engine: Engine, scratch: Scratch, budget_ms: float) -> bool:
        """A slice of an audit; False if there is none or the scratch is lent. An audit that fails is dropped."""
        if not self._waiting:
            return False
        audit = self._waiting[0]
        task = audit.task
        if audit.work is None:
            if not scratch.free:
                return False
            audit.work, audit.ms, audit.scores = Extension(engine, scratch.borrow(), task.tokens), 0.0, []
        try:
            if not audit.work.done:
                audit.ms += audit.work.advance(budget_ms)
                return True
            done = sum(len(scores) for scores in audit.scores)
            # Candidates never see each other: a few at a time are scored alike, and keep no ranking waiting.
            few = task.candidates[done : done + engine.candidates_within(audit.work.region, task.suffix, budget_ms)]
            scores, ms = engine.score([ScoreInput(audit.work.region, task.suffix, few)])
            audit.scores.append(scores[0])
            audit.ms += ms
            if done + len(few) < len(task.candidates):
                return True
        except Exception as error:  # a user's model or the device may raise anything; the request has its answer
            self._end(audit, scratch)
            log.warning(
                "audit failed",
                **request_log_fields(task.request_id, task.user_id, task.lane, task.outcome),
                error=describe(error),
            )
            return True
        self._end(audit, scratch)
        deviation = relative_deviation(audit.relayed, np.concatenate(audit.scores))
        self.done += 1
        if task.approximate:
            self.worst_rounded = max(self.worst_rounded, deviation)
        else:
            self.worst = max(self.worst, deviation)
        if self._report(task, deviation, audit.ms):
            self.evict(task.user_key)
        return True

    def give_up_scratch(self, scratch: Scratch) -> bool:
        """A request needs the scratch region: stop the audit under way; it starts again later."""
        if not self._waiting or (work := self._waiting[0].work) is None:
            return False
        scratch.give_back(work.region)
        self._waiting[0].work = None
        return True

    def _end(self, audit: Audit, scratch: Scratch) -> None:
        assert audit.work is not None
        scratch.give_back(audit.work.region)
        self._waiting.popleft()
