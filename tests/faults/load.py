"""Steady requests through a fault, and what the fault cost those who made them.

Knows nothing of faults nor of how they are injected.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from relaygr_stream.client import Ranking, RelayClient
from relaygr_stream.wire.messages import RankingRequest
from relaygr_stream.workload.driver import Result, drive
from relaygr_stream.workload.generator import Generator, GeneratorOptions
from relaygr_stream.workload.items import WorkItem
from tests.faults.witness import Witness

#: A request without scores by then ends with a typed error; several times what a hedge takes on a crowded machine.
TIMEOUT_S: Final = 3.0
#: The driver's own bound, which counts from when a request was due: far beyond what a busy machine holds the load up.
HELD_UP_S: Final = 60.0
#: Of the requests sent while some lanes have no owner or no leader, at most so many get no scores; they end typed.
UNSERVED_SHARE: Final = 0.01
#: A busy machine takes so many times longer to recover than the quiet one on which the table was measured.
TIMES_MEASURED: Final = 3.0
#: A second counts as disturbed while more than this share of its requests got no scores in time: a machine with two
#: cores and a dozen processes is late now and then without any fault.
DISTURBED_SHARE: Final = 0.1
#: So many seconds in a row without disturbance, and the fault is over.
CALM_SECONDS: Final = 3


@dataclass(frozen=True)
class Note:
    """One request; times in seconds of the event loop's clock. took_s: without the load's own delay."""

    result: Result
    sent: float  # when it was due
    ended: float
    took_s: float = 0.0

    @property
    def user(self) -> str:
        return self.result.item.request.user_id

    @property
    def scored(self) -> bool:
        return self.result.error is None


class Load:
    """Requests at a steady rate until stopped; each ends in one note and in the witness's ledger."""

    def __init__(
        self, client: RelayClient, witness: Witness, rate: float, *, seed: int = 1, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.notes: list[Note] = []
        self._made_by = client, witness, rate
        self._seed, self._timeout_s = seed, timeout_s
        self._client = _FromSending(client, timeout_s)
        self._witness = witness
        self._stopped = False
        self._generator = Generator(
            GeneratorOptions(
                seed=seed,
                rate=rate,
                users=60,
                items=5000,
                length=150.0,
                revisit=0.7,
                candidates=20,
                suffix=4,
                max_prefix=400,
                run=f"load{seed}",
            )
        )
        self._task = asyncio.create_task(self._run())

    async def answered(self, count: int) -> None:
        """Until so many more have got scores."""
        goal = sum(note.scored for note in self.notes) + count
        while sum(note.scored for note in self.notes) < goal:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Send no more and wait until every request has ended."""
        self._stopped = True
        await self._task

    def next(self) -> Load:
        """Other requests at the same rate, from now on: for the next fault, once this load has been stopped."""
        return Load(*self._made_by, seed=self._seed + 1, timeout_s=self._timeout_s)

    async def _run(self) -> None:
        items = self._witness.ledger.sending(self._items())
        await drive(self._client, items, timeout=HELD_UP_S, on_result=self._on_result)

    def _items(self) -> Iterator[WorkItem]:
        for item in self._generator:
            if self._stopped:
                return
            yield item

    def _on_result(self, result: Result) -> None:
        ended = asyncio.get_running_loop().time()
        took_s = self._client.took_s.pop(result.item.request.request_id, 0.0)
        self.notes.append(Note(result, ended - result.latency_ms / 1000, ended, took_s))
        self._witness.result(result)


class _FromSending:
    """A client whose requests have their whole timeout from when they are sent. By the driver's clock, a load that its
    own machine held up would ask for answers in less time than the relay is promised; in latencies its delay counts.
    """

    def __init__(self, client: RelayClient, timeout_s: float) -> None:
        self.announce = client.announce
        self.took_s: dict[str, float] = {}  # request id → from when it was sent to its end
        self._client, self._timeout_s = client, timeout_s

    async def rank(self, request: RankingRequest, /, *, timeout: float) -> Ranking:
        clock = asyncio.get_running_loop().time
        sent = clock()
        try:
            return await self._client.rank(request, timeout=self._timeout_s)
        finally:
            self.took_s[request.request_id] = clock() - sent


@dataclass(frozen=True)
class Impact:
    """What a fault cost. A request is in time if it got scores within `patience_s` of when it was due."""

    patience_s: float  # one hedge delay past the P99 before the fault
    recovery_s: float  # from the fault to the last request that was not in time, before the first CALM_SECONDS
    unscored_s: float  # the same to the last request without scores
    sent: int  # in the window: from the fault to when it was over
    scored: int  # of them, with scores within their deadline
    in_time: int
    silence_s: float  # longest time from a user's request to that user's next scores, of requests in the window
    errors: dict[str, int]  # the most frequent, of requests in the window without scores

    @property
    def served(self) -> bool:
        """Whether at most 1 % of the requests in the window got no scores (issue 6); of fewer than 100, at most one."""
        return self.sent - self.scored <= max(1.0, UNSERVED_SHARE * self.sent)

    def recovered(self, measured_s: float) -> bool:
        """Of a fault that requests cannot survive: whether scores came back within TIMES_MEASURED times the worst
        recovery measured (docs/explanation/reliability.md)."""
        return self.unscored_s <= TIMES_MEASURED * measured_s


def impact(notes: Sequence[Note], fault: float, over: float, hedge_s: float) -> Impact:
    """fault, over: when it was injected, and when its cause had gone (lanes owned again, a broker back)."""
    healthy = [note.ended - note.sent for note in notes if note.scored and note.ended < fault]
    assert len(healthy) >= 20, "too few requests before the fault to know what is healthy"
    patience = hedge_s + float(np.quantile(healthy, 0.99))
    seconds: defaultdict[int, list[Note]] = defaultdict(list)
    for note in notes:
        if note.sent >= fault:
            seconds[int(note.sent - fault)].append(note)
    window = [note for note in notes if fault <= note.sent <= over]
    errors = Counter(f"{n.result.error}: {n.result.detail}" for n in window if n.result.error is not None)
    return Impact(
        patience_s=patience,
        recovery_s=_recovery(seconds, lambda note: _in_time(note, patience), fault),
        unscored_s=_recovery(seconds, lambda note: note.scored, fault),
        sent=len(window),
        scored=sum(note.scored for note in window),
        in_time=sum(_in_time(note, patience) for note in window),
        silence_s=_silence(notes, window),
        errors=dict(errors.most_common(5)),
    )


def _recovery(seconds: Mapping[int, Sequence[Note]], good: Callable[[Note], bool], fault: float) -> float:
    last, calm = 0.0, 0
    for second in range(max(seconds, default=-1) + 1):
        made = seconds.get(second, ())
        late = [note.sent - fault for note in made if not good(note)]
        if made and len(late) <= DISTURBED_SHARE * len(made):
            calm += 1
            if calm == CALM_SECONDS:
                break
        else:
            last, calm = max(late, default=second + 1.0), 0
    return last


def _in_time(note: Note, patience_s: float) -> bool:
    return note.scored and note.ended - note.sent <= patience_s


def _silence(notes: Sequence[Note], window: Sequence[Note]) -> float:
    answers: defaultdict[str, list[float]] = defaultdict(list)
    for note in notes:
        if note.scored:
            answers[note.user].append(note.ended)
    last = max((note.ended for note in notes), default=0.0)
    return max(
        (min((a for a in answers[note.user] if a >= note.sent), default=last) - note.sent for note in window),
        default=0.0,
    )
