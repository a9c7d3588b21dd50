"""Scoring a share of the answered rankings a second time, in full, to show that the relay changes nothing.

Audits use idle device time and the scratch region; a full inference that needs the scratch takes it from them.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.exactness import relative_deviation
from relaygr_stream.models.protocol import ScoreInput
from relaygr_stream.worker.engine import Engine
from relaygr_stream.worker.tasks import Audit, Flight, RankTask

#: Audits waiting at most: each keeps a request's tokens, and an old one says nothing more than a new one.
MAX_WAITING: Final = 8


class Auditor:
    """Compares relayed with full scores; `report(task, deviation, ms)` is called for each finished audit."""

    def __init__(self, share: float, report: Callable[[RankTask, float, float], None], seed: int | None = None) -> None:
        self._share = share
        self._report = report
        self._random = random.Random(seed)
        self._waiting: deque[Audit] = deque(maxlen=MAX_WAITING)
        self._ms = 0.0
        self.done = 0
        self.worst = 0.0  # largest relative deviation found

    def consider(self, task: RankTask, relayed: npt.NDArray[np.float32]) -> None:
        """Choose this answered ranking for an audit, or not."""
        if task.outcome != "full" and self._share > 0 and self._random.random() < self._share:
            if len(self._waiting) == MAX_WAITING and self._waiting[0].flight is not None:
                return  # the oldest is under way and holds the scratch; it must not fall out
            self._waiting.append(Audit(task, relayed))

    def step(self, engine: Engine, cache: PrefixCache, budget_ms: float) -> bool:
        """One chunk of an audit; False if there is none or the scratch is lent."""
        if not self._waiting:
            return False
        audit = self._waiting[0]
        task = audit.task
        if audit.flight is None:
            if not cache.scratch_free:
                return False
            audit.flight = Flight(cache.borrow(), task.tokens, task.deadline)
            self._ms = 0.0
        region = audit.flight.region
        position = region.length
        if position < len(task.tokens):
            left = len(task.tokens) - position
            if engine.model.incremental:
                left = min(left, engine.costs.chunk(position, budget_ms))
            self._ms += engine.extend(region, task.tokens.slice(position, position + left))
            return True
        scores, ms = engine.score([ScoreInput(region, task.suffix, task.candidates)])
        self._waiting.popleft()
        cache.give_back(region)
        deviation = relative_deviation(audit.relayed, scores[0])
        self.done += 1
        self.worst = max(self.worst, deviation)
        self._report(task, deviation, self._ms + ms)
        return True

    def give_up_scratch(self, cache: PrefixCache) -> bool:
        """A request needs the scratch region: stop the audit under way; it starts again later."""
        if not self._waiting or self._waiting[0].flight is None:
            return False
        cache.give_back(self._waiting[0].flight.region)
        self._waiting[0].flight = None
        return True
