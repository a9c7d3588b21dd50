"""A simulated device, which several kinds of rankings share: a queue with the scheduler's order (engine/queue.py).

Each request is announced, brings a prefix, which is computed until its ranking comes, and then that ranking. Rankings
come first, each with what its prefix still lacks; else prefixes. Among kinds the one that was given less device time
has its turn, of those within a slice the earliest due one. A ranking that cannot be in time is refused. Prefixes are
computed in slices, which no ranking interrupts. It knows neither batches nor other devices.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class DeviceLoad(NamedTuple):
    """Requests by number, in the order of their announcements. All times in one unit.

    announced, ranked: when each is, and its ranking comes. prefixes, scores: work. due: later, the answer is too late;
    inf: never. kinds: of each, from 0 on.
    """

    announced: Sequence[float]
    ranked: Sequence[float]
    prefixes: Sequence[float]
    scores: Sequence[float]
    due: Sequence[float]
    kinds: Sequence[int]


def answered(load: DeviceLoad, piece: float) -> Iterator[tuple[int, float]]:
    """The number of each request, and the time from its ranking to its answer; inf: refused.

    piece: above 0, the longest slice. Takes some 4 µs of a processor a request.
    """
    announced, ranked, prefixes, scores, due, kinds = load
    left, order = list(prefixes), sorted(range(len(ranked)), key=ranked.__getitem__)
    rankings, ahead = _Turns(max(kinds, default=0) + 1, piece), _Turns(max(kinds, default=0) + 1, piece)
    announcing, ranking = (
        ((at, number) for number, at in enumerate(announced)),
        ((ranked[each], each) for each in order),
    )
    end = (math.inf, -1)
    (next_announced, told), (next_ranked, came) = next(announcing, end), next(ranking, end)
    now = 0.0
    while True:
        while next_announced <= now:
            ahead.add(kinds[told], ranked[told], told)
            next_announced, told = next(announcing, end)
        while next_ranked <= now:
            rankings.add(kinds[came], due[came], came)
            next_ranked, came = next(ranking, end)
        if rankings.size:
            number = rankings.first()
            rest, score = left[number], scores[number]
            if now + rest + score > due[number]:
                left[number] = 0.0
                rankings.pop(0.0)
                yield number, math.inf
            elif rest > 0:
                took = min(rest, piece)
                left[number] = rest - took
                now += took
                rankings.serve(took)
            else:
                now += score
                rankings.pop(score)
                yield number, now - ranked[number]
        elif ahead.size:
            number = ahead.first()
            rest = left[number]
            if rest <= next_ranked - now:
                left[number] = 0.0
                now += rest
                ahead.pop(rest)
            else:
                took = min(rest, math.ceil((next_ranked - now) / piece) * piece)
                left[number] = rest - took
                now += took
                ahead.serve(took)
        elif (now := min(next_announced, next_ranked)) == math.inf:
            return


class _Turns:
    """What waits, by kind, as engine/queue.py: Turns. slack: how much more device time than the least served kind one
    may have been given that has its turn."""

    __slots__ = ("_floor", "_queues", "_served", "_slack", "_turn", "size")

    def __init__(self, kinds: int, slack: float) -> None:
        self._queues: list[list[tuple[float, int]]] = [[] for _ in range(kinds)]
        self._served = [0.0] * kinds
        self._slack, self._floor, self._turn, self.size = slack, 0.0, 0, 0

    def add(self, kind: int, due: float, number: int) -> None:
        """It waits from now on; its kind cannot claim the time that others were given while it had nothing waiting."""
        if not self._queues[kind]:
            self._served[kind] = max(self._served[kind], self._floor)
        heapq.heappush(self._queues[kind], (due, number))
        self.size += 1

    def first(self) -> int:
        """The number of what is next, left in place. Something waits."""
        least, turn, served = math.inf, 0, self._served
        for kind, queue in enumerate(self._queues):
            if queue and served[kind] < least:
                least, turn = served[kind], kind
        self._floor = least = max(self._floor, least)
        if len(self._queues[turn]) < self.size:
            first = self._queues[turn][0]
            for kind, queue in enumerate(self._queues):
                if queue and served[kind] <= least + self._slack and queue[0] < first:
                    first, turn = queue[0], kind
        self._turn = turn
        return self._queues[turn][0][1]

    def serve(self, took: float) -> None:
        """The device worked for what `first` found."""
        self._served[self._turn] += took

    def pop(self, took: float) -> None:
        """The same, and it is over."""
        self._served[self._turn] += took
        heapq.heappop(self._queues[self._turn])
        self.size -= 1
