"""Where a ranking request may go when its lane does not answer: to a lane of another worker that lives and has time.

A hedge is answered in full there, so it costs device time that nobody planned: slow answers are hedged within a budget,
and nobody is sent what would only wait. Knows nothing of how requests are sent.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection
from typing import Final, Literal

from relaygr_stream.messages import WorkerStatus
from relaygr_stream.owners import OwnerDirectory

#: Of requests whose owner lives, this share may be hedged, and so many at once after a quiet time. Hedging the slowest
#: twentieth is what bounds a tail (Dean & Barroso, The Tail at Scale) at a few percent more load.
SLOW_SHARE: Final = 0.05
SLOW_BURST: Final = 20.0
#: For so long what workers stated last is gone by when all are silent: a dead broker is fenced within 9 s by default
#: (`broker.session.timeout.ms`), and until then a topic of three copies takes nothing.
LAST_WORDS_MS: Final = 15_000.0


class Hedges:
    """What the statuses of the workers say about other ways. busy_ms: a worker whose queue is longer gets no hedges.
    stuck(lane): no broker takes what is sent there. silence_ms: an owner that was not heard in so long a time of
    listening is silent; one that was not heard yet may speak any moment.
    """

    def __init__(
        self,
        owners: OwnerDirectory,
        busy_ms: float,
        seed: int | None = None,
        stuck: Callable[[int], bool] = lambda lane: False,
        silence_ms: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._all_heard_s = clock() + silence_ms / 1000.0
        self._owners = owners
        self._busy_ms = busy_ms
        self._stuck = stuck
        self._random = random.Random(seed)
        self._slow = SLOW_BURST

    def request(self) -> None:
        """A request was made: it adds its share to the budget."""
        self._slow = min(SLOW_BURST, self._slow + SLOW_SHARE)

    def cut_off(self, lane: int) -> Literal["silent", "unsent"] | None:
        """Why nothing sent on the lane would be answered: nobody speaks for it, though other workers do, or no broker
        takes it. None: it is as good as any."""
        if self._owners.owner(lane, self._patience_ms) is None and self._known(lane) and self._serving():
            return "silent"
        return "unsent" if self._stuck(lane) else None

    def _known(self, lane: int) -> bool:
        return self._clock() >= self._all_heard_s or self._owners.owner(lane, math.inf) is not None

    def elsewhere(self, tried: Collection[int]) -> int | None:
        """A lane of a worker that lives, has time and owns none of the lanes tried; None where there is none."""
        owners = (self._owners.owner(lane, self._patience_ms) for lane in tried)
        but = {claim.worker.name for claim in owners if claim is not None}
        ways = [
            (status.queue_ms, lanes)
            for status in self._serving()
            if status.name not in but
            and status.queue_ms <= self._busy_ms
            and (lanes := [lane.lane for lane in status.lanes if not self._stuck(lane.lane)])
        ]
        if not ways:
            return None
        # The better of two at random: the best of all would get everybody's hedges until its next status. Of two that
        # are idle either: by their lanes, the one with the highest would never be asked.
        _, lanes = min(self._random.sample(ways, min(2, len(ways))), key=lambda way: way[0])
        return self._random.choice(lanes)

    def spend(self) -> bool:
        """Take a slow hedge from the budget; False where it is used up."""
        if self._slow < 1:
            return False
        self._slow -= 1
        return True

    @property
    def _patience_ms(self) -> float | None:
        """Where everybody falls silent at once, it is the topic that stands still, not the workers: what they stated
        last is worth more than nothing."""
        return None if self._owners.speaking else LAST_WORDS_MS

    def _serving(self) -> list[WorkerStatus]:
        return [s for s in self._owners.workers(self._patience_ms).values() if s.state == "serving" and s.lanes]
