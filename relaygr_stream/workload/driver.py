"""The open-loop driver: sends a workload at its scheduled times, however slow the answers are.

A ranking's latency counts from its *scheduled* send time, so that a driver or a relay that falls behind cannot hide the
delay (no coordinated omission).
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from relaygr_stream.errors import DeadlineExceeded, RelayError
from relaygr_stream.wire.messages import Outcome, RankingRequest, RequestEvent
from relaygr_stream.workload.items import WorkItem
from relaygr_stream.workload.quantiles import nearest_rank

#: Most requests between announcement and answer. At the limit, the driver waits for one to complete; latencies include
#: that wait.
MAX_IN_FLIGHT: Final = 4096


class DrivenRanking(Protocol):
    """The parts of a client's answer that the driver reads."""

    @property
    def scores(self) -> npt.NDArray[np.float32]:
        """(m, tasks)."""
        ...

    @property
    def outcome(self) -> Outcome:
        """Where the prefix KV was found."""
        ...

    @property
    def model_version(self) -> str:
        """The version of the model that scored."""
        ...

    @property
    def admission(self) -> str:
        """The trigger's decision; empty: unknown."""
        ...


class RankingClient(Protocol):
    """The client that the driver needs, such as RelayClient."""

    async def announce(self, event: RequestEvent, /) -> Any:
        """Publish the request event."""
        ...

    async def rank(self, request: RankingRequest, /, *, timeout: float) -> DrivenRanking:
        """Scores within `timeout` seconds, or a RelayError."""
        ...


@dataclass(frozen=True)
class Result:
    """The result of one request: an outcome with scores, or the name of its error."""

    item: WorkItem
    outcome: Outcome | None
    error: str | None  # the class of the RelayError
    detail: str  # its message
    latency_ms: float  # from the scheduled send time of the ranking request to the answer or the error
    scores: npt.NDArray[np.float32] | None  # (m, tasks)
    ranking: DrivenRanking | None  # the client's whole answer


@dataclass
class DriveSummary:
    """Counts and latencies of a drive. Memory: 16 bytes a request."""

    sent: int = 0  # ranking requests whose time has come
    outcomes: Counter[str] = field(default_factory=Counter)  # answers by outcome
    admissions: Counter[str] = field(default_factory=Counter)  # answers to announced requests by the trigger's reason
    errors: Counter[str] = field(default_factory=Counter)  # requests without scores by error class
    announce_errors: Counter[str] = field(default_factory=Counter)  # unpublished events by error class; ranked anyway
    latencies_ms: array[float] = field(default_factory=lambda: array("d"))  # of answers with scores
    late_ms: array[float] = field(default_factory=lambda: array("d"))  # how late ranking requests were sent
    seconds: float = 0.0  # from the start to the last answer

    @property
    def answered(self) -> int:
        """Requests that got scores."""
        return self.outcomes.total()

    def latency_ms(self, quantile: float) -> float | None:
        """A quantile (0…1), by nearest rank, of the latencies of answers with scores; None without any."""
        return nearest_rank(self.latencies_ms, quantile) if self.latencies_ms else None

    def sent_late_ms(self, quantile: float) -> float | None:
        """The same of the driver's own delay."""
        return nearest_rank(self.late_ms, quantile) if self.late_ms else None


#: Called once for each request, in the order of completion.
OnResult = Callable[[Result], None]


async def drive(
    client: RankingClient,
    items: Iterable[WorkItem],
    *,
    mode: Literal["auto", "full"] = "auto",
    announce: bool = True,
    timeout: float,
    on_result: OnResult | None = None,
    stop: asyncio.Event | None = None,
    summary: DriveSummary | None = None,
    max_in_flight: int = MAX_IN_FLIGHT,
) -> DriveSummary:
    """Send every item at its time and return when all have an answer or an error.

    mode: "full" requests full inference. announce: whether request events are published. timeout: seconds from the
    scheduled send time of a ranking request. on_result: called once for each request, in the order of completion.
    stop: once set, no further item starts; started ones complete. summary: updated continuously, for live views.
    Errors that are not RelayErrors end the drive and are raised.
    """
    run = _Drive(client, mode, announce, timeout, on_result, DriveSummary() if summary is None else summary)
    stop = stop or asyncio.Event()
    slots = asyncio.Semaphore(max_in_flight)
    stopping = asyncio.create_task(stop.wait())
    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                await _sleep_until(run.start + item.at, stopping)
                if not stop.is_set():
                    await slots.acquire()
                if stop.is_set():
                    break
                group.create_task(run.request(item)).add_done_callback(lambda _: slots.release())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    finally:
        stopping.cancel()
    return run.summary


class _Drive:
    """The state that the requests of one drive share."""

    def __init__(
        self,
        client: RankingClient,
        mode: Literal["auto", "full"],
        announce: bool,
        limit: float,
        on_result: OnResult | None,
        summary: DriveSummary,
    ) -> None:
        self.client, self.mode, self.announce, self.limit = client, mode, announce, limit
        self.on_result = on_result
        self.summary = summary
        self.clock = asyncio.get_running_loop().time
        self.start = self.clock()

    async def request(self, item: WorkItem) -> None:
        """Announce, wait for the stage delay, rank, report."""
        if self.announce:
            try:
                await self.client.announce(item.event)
            except RelayError as error:
                self.summary.announce_errors[type(error).__name__] += 1
        scheduled = self.start + item.rank_at
        await asyncio.sleep(scheduled - self.clock())
        sent = self.clock()
        scheduled = min(scheduled, sent)  # uvloop counts in whole ms and may wake up early
        late = sent - scheduled
        self.summary.sent += 1
        self.summary.late_ms.append(late * 1000)
        ranking, failure = None, None
        try:
            if late >= self.limit:
                raise DeadlineExceeded(f"sent {late * 1000:.0f} ms late, after its timeout")
            request = item.request if self.mode == "auto" else replace(item.request, mode=self.mode)
            ranking = await self.client.rank(request, timeout=self.limit - late)
        except RelayError as error:
            failure = error
        latency_ms = (self.clock() - scheduled) * 1000
        if ranking is not None:
            self.summary.outcomes[ranking.outcome] += 1
            if self.announce:
                self.summary.admissions[ranking.admission] += 1
            self.summary.latencies_ms.append(latency_ms)
        else:
            self.summary.errors[type(failure).__name__] += 1
        self.summary.seconds = self.clock() - self.start
        if self.on_result is not None:
            self.on_result(
                Result(
                    item=item,
                    outcome=ranking.outcome if ranking else None,
                    error=type(failure).__name__ if failure else None,
                    detail=str(failure) if failure else "",
                    latency_ms=latency_ms,
                    scores=ranking.scores if ranking else None,
                    ranking=ranking,
                )
            )


async def _sleep_until(when: float, stopping: asyncio.Task[Any]) -> None:
    """Sleep until the loop's time is `when` or `stopping` is done."""
    delay = when - asyncio.get_running_loop().time()
    if delay > 0:
        await asyncio.wait([stopping], timeout=delay)
    else:
        await asyncio.sleep(0)  # behind schedule: let the requests in flight run
