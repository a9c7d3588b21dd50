"""Where a ranking request may go when its lane does not answer: to a lane of another worker that lives and has time.

A hedge is answered in full there, so it costs device time that nobody planned: slow answers are hedged within a budget,
and nobody is sent what would only wait. Knows nothing of how requests are sent.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Final

from relaygr_stream.messages import WorkerStatus
from relaygr_stream.owners import OwnerDirectory

#: Of requests whose owner lives, this share may be hedged, and so many at once after a quiet time. Hedging the slowest
#: twentieth is what bounds a tail (Dean & Barroso, The Tail at Scale) at a few percent more load.
SLOW_SHARE: Final = 0.05
SLOW_BURST: Final = 20.0


class Hedges:
    """What the statuses of the workers say about other ways. busy_ms: a worker whose queue is longer gets no hedges."""

    def __init__(self, owners: OwnerDirectory, busy_ms: float, seed: int | None = None) -> None:
        self._owners = owners
        self._busy_ms = busy_ms
        self._random = random.Random(seed)
        self._slow = SLOW_BURST

    def request(self) -> None:
        """A request was made: it adds its share to the budget."""
        self._slow = min(SLOW_BURST, self._slow + SLOW_SHARE)

    def silent(self, lane: int) -> bool:
        """Nobody speaks for the lane, though other workers do."""
        return self._owners.owner(lane) is None and bool(self._serving())

    def elsewhere(self, tried: Collection[int]) -> int | None:
        """A lane of a worker that lives, has time and owns none of the lanes tried; None where there is none."""
        owners = (self._owners.owner(lane) for lane in tried)
        but = {claim.worker.name for claim in owners if claim is not None}
        free = [s for s in self._serving() if s.name not in but and s.queue_ms <= self._busy_ms]
        if not free:
            return None
        # The better of two at random: the best of all would get everybody's hedges until its next status.
        two = self._random.sample(free, min(2, len(free)))
        chosen = min(two, key=lambda status: status.queue_ms)
        return self._random.choice(chosen.lanes).lane

    def spend(self) -> bool:
        """Take a slow hedge from the budget; False where it is used up."""
        if self._slow < 1:
            return False
        self._slow -= 1
        return True

    def _serving(self) -> list[WorkerStatus]:
        return [s for s in self._owners.workers().values() if s.state == "serving" and s.lanes]
