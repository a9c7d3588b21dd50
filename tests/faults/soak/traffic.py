"""Several clients' steady requests, what each got, and when: small notes, so that an hour of them fits in memory.

Knows nothing of faults.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

from relaygr_stream.client import Ranking, RelayClient
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.messages import RankingRequest, RequestEvent
from relaygr_stream.wire.topic_files import lane_of
from relaygr_stream.workload.driver import DriveSummary, Result, drive
from relaygr_stream.workload.generator import Generator, GeneratorOptions
from relaygr_stream.workload.items import WorkItem
from tests.faults.witness import Witness

#: A request without scores by then ends with a typed error.
TIMEOUT_S: Final = 3.0
#: So many instances of the service.
CLIENTS: Final = 3
#: A second in which fewer of the requests sent get scores is disturbed (the issue's figure).
GOOD_SHARE: Final = 0.99


@dataclass(frozen=True, slots=True)
class Note:
    """One request of the steady load; seconds of the loop's clock."""

    sent: float
    ended: float
    user: str
    lane: int
    error: str | None


class Clients:
    """Several clients as one: a user's requests are always made by the same."""

    def __init__(self, settings: Settings) -> None:
        self._each = [RelayClient(settings=settings, client_id=f"soak-{i}") for i in range(CLIENTS)]
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Clients:
        async with AsyncExitStack() as stack:
            for client in self._each:
                await stack.enter_async_context(client)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def announce(self, event: RequestEvent) -> None:
        await self._of(event.user_id).announce(event)

    async def rank(self, request: RankingRequest, *, timeout: float) -> Ranking:
        return await self._of(request.user_id).rank(request, timeout=timeout)

    def dropped(self) -> Counter[str]:
        """Answers nobody waited for, by reason. Another client's on the same partition are none."""
        return self._sum("relaygr_client_answers_dropped")

    def hedges(self) -> Counter[str]:
        """Copies sent elsewhere, by reason."""
        return self._sum("relaygr_client_hedges")

    def _of(self, user: str) -> RelayClient:
        return self._each[lane_of(user, 1 << 16) % CLIENTS]

    def _sum(self, metric: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        for client in self._each:
            for family in client.registry.collect():
                if family.name == metric:
                    for sample in family.samples:
                        if sample.name.endswith("_total") and sample.labels["reason"] != "foreign":
                            counts[sample.labels["reason"]] += int(sample.value)
        return counts


class Traffic:
    """Steady requests from a seed until stopped, and bursts beside them; every one goes through the witness."""

    def __init__(self, clients: Clients, witness: Witness, lanes: int, rate: float, seed: int) -> None:
        self.notes: list[Note] = []  # in the order in which they ended
        self.summary: Final = DriveSummary()
        self.rate: Final = rate
        self._clients, self._witness, self._lanes, self._seed = clients, witness, lanes, seed
        self._loop = asyncio.get_running_loop()
        self._under_way: list[float] = []  # when requests under way were sent, ascending
        self._stop = asyncio.Event()
        self._bursts = itertools.count(1)
        self._steady: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin the steady load."""
        self._steady = asyncio.create_task(self._drive(self._items(self.rate, self._seed, "s"), self.summary))

    async def burst(self, seconds: float, rate: float) -> None:
        """So many more requests; returns when all have ended."""
        number = next(self._bursts)
        items = self._items(rate, self._seed + number, f"b{number}-")
        await self._drive(itertools.takewhile(lambda item: item.at < seconds, items), DriveSummary(), steady=False)

    async def stop(self) -> None:
        """Send no more; returns when all have ended. Raises what ended the load before."""
        self._stop.set()
        if self._steady is not None:
            await self._steady

    def abandon(self) -> None:
        """Send no more, and wait for nothing."""
        self._stop.set()
        if self._steady is not None:
            self._steady.cancel()

    def disturbed(self, start: float, stop: float) -> float:
        """See `disturbed` below."""
        return disturbed(self.notes, start, stop)

    def calm(self, since: float, seconds: int) -> bool:
        """Whether the last so many whole seconds, all after `since`, are known to be good."""
        known = min(self._oldest(), self._loop.time())
        start = known - seconds
        return start >= since and not self.disturbed(start, known)

    def latencies_ms(self, start: float, stop: float, lanes: Iterable[int] | None = None) -> list[float]:
        """Of requests with scores sent from `start` to `stop`, on these lanes."""
        wanted = None if lanes is None else set(lanes)
        return [
            (note.ended - note.sent) * 1e3
            for note in since(self.notes, start)
            if note.sent < stop and note.error is None and (wanted is None or note.lane in wanted)
        ]

    def silence(self, key: str) -> float:
        """See `silence` below."""
        return silence(self.notes, key)

    def _oldest(self) -> float:
        return self._under_way[0] if self._under_way else math.inf

    async def _drive(self, items: Iterable[WorkItem], summary: DriveSummary, *, steady: bool = True) -> None:
        started = self._loop.time()

        def sending() -> Iterator[WorkItem]:
            for item in self._witness.ledger.sending(items):
                if steady:
                    insort(self._under_way, started + item.rank_at)
                yield item

        def ended(result: Result) -> None:
            self._witness.result(result)
            if steady:
                now, user = self._loop.time(), result.item.request.user_id
                due = started + result.item.rank_at
                self._under_way.pop(bisect_left(self._under_way, due))
                sent = now - result.latency_ms / 1e3
                self.notes.append(Note(sent, now, user, lane_of(user, self._lanes), result.error))

        await drive(self._clients, sending(), timeout=TIMEOUT_S, on_result=ended, summary=summary)

    def _items(self, rate: float, seed: int, run: str) -> Iterator[WorkItem]:
        options = GeneratorOptions(
            seed=seed, rate=rate, users=200, items=5000, length=150.0, revisit=0.6, candidates=20, suffix=4,
            max_prefix=400, run=run,
        )  # fmt: skip
        for item in Generator(options):
            if self._stop.is_set():
                return
            yield item


def since(notes: Sequence[Note], start: float) -> Iterator[Note]:
    """Notes of requests sent since, the last to end first. notes: in the order in which they ended."""
    for note in reversed(notes):
        if note.ended < start:
            return
        if note.sent >= start:
            yield note


def disturbed(notes: Sequence[Note], start: float, stop: float) -> float:
    """Seconds from `start` to the end of the last disturbed second of those up to `stop`; 0 without any."""
    sent, good = Counter[int](), Counter[int]()
    for note in since(notes, start):
        if note.sent < stop:
            sent[int(note.sent - start)] += 1
            good[int(note.sent - start)] += note.error is None
    return max((second + 1.0 for second in sent if good[second] < GOOD_SHARE * sent[second]), default=0.0)


def silence(notes: Sequence[Note], key: str) -> float:
    """Longest time in which a user, or a lane, asked and got no scores: from a request to the next scores or, if those
    were asked for only later, to the end of the last request without scores before them. key: the note's field."""
    scored: defaultdict[Any, list[tuple[float, float]]] = defaultdict(list)  # ends, and when they were asked for
    failed: defaultdict[Any, list[float]] = defaultdict(list)  # ends
    for note in notes:
        name = getattr(note, key)
        if note.error is None:
            insort(scored[name], (note.ended, note.sent))
        else:
            insort(failed[name], note.ended)
    longest = 0.0
    for note in notes:
        name = getattr(note, key)
        at = bisect_left(scored[name], (note.sent,))
        until, asked = scored[name][at] if at < len(scored[name]) else (math.inf, math.inf)
        before = bisect_left(failed[name], until)
        last = max(note.ended, failed[name][before - 1]) if before else note.ended
        longest = max(longest, (until if asked <= last else last) - note.sent)
    return longest
