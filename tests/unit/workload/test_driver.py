"""The open-loop driver: sends on schedule, counts latency from the schedule, types what goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest

from relaygr_stream.errors import BrokerUnavailable, DeadlineExceeded, Overloaded, RelayError
from relaygr_stream.wire.messages import RankingRequest, RequestEvent
from relaygr_stream.workload.driver import Result, drive
from relaygr_stream.workload.generator import Generator, GeneratorOptions
from relaygr_stream.workload.items import WorkItem
from tests.unit.workload.recording_client import RecordingClient
from tests.waiting import WITHIN_S

OPTIONS = GeneratorOptions(users=10, items=200, length=20, max_prefix=60, candidates=10, rate=400)


def workload(count: int) -> list[WorkItem]:
    return list(islice(Generator(OPTIONS), count))


async def test_every_request_is_announced_ranked_and_reported_once() -> None:
    client, results = RecordingClient(), list[Result]()
    items = workload(40)
    summary = await drive(client, items, timeout=5, on_result=results.append)
    assert sorted(client.announced) == sorted(client.ranked) == sorted(item.event.request_id for item in items)
    assert sorted(result.item.event.request_id for result in results) == sorted(client.ranked)
    assert summary.sent == summary.answered == 40
    assert summary.outcomes == {"hbm": 40}
    assert not summary.errors
    for result in results:
        assert result.error is None
        assert result.scores is not None
        assert result.scores.shape == (10, 2)


async def test_the_event_comes_at_its_time_and_the_ranking_a_stage_delay_later() -> None:
    client = RecordingClient()
    items = workload(20)
    start = asyncio.get_running_loop().time()
    await drive(client, items, timeout=5)
    for item in items:
        name = item.event.request_id
        assert client.announced[name] - start >= item.at
        assert client.ranked[name] - start >= item.rank_at
        assert client.ranked[name] > client.announced[name]


async def test_latency_counts_from_the_schedule_when_the_driver_falls_behind() -> None:
    """One request at a time, 20 ms each, all due at once: the last waited for all others, and must say so."""
    client = RecordingClient(seconds=0.02)
    items = [WorkItem(0.0, 0.0, item.event, item.request, item.target) for item in workload(10)]
    results: list[Result] = []
    summary = await drive(client, items, timeout=60, on_result=results.append, max_in_flight=1)
    latencies = [result.latency_ms for result in results]
    assert latencies == sorted(latencies)
    assert latencies[-1] >= 10 * 20 * 0.9
    assert summary.latency_ms(1.0) == latencies[-1]
    assert (summary.sent_late_ms(1.0) or 0) >= 9 * 20 * 0.9


async def test_a_slow_answer_does_not_delay_the_next_request() -> None:
    client = RecordingClient(seconds=0.5)
    items = workload(40)  # due within some 0.4 s
    await drive(client, items, timeout=5)
    assert client.most_in_flight > 20


async def test_in_flight_requests_are_bounded() -> None:
    client = RecordingClient(seconds=0.01)
    await drive(client, workload(60), timeout=60, max_in_flight=3)
    assert client.most_in_flight <= 3
    assert len(client.ranked) == 60


async def test_what_is_due_after_its_timeout_is_not_sent_but_counted() -> None:
    client = RecordingClient(seconds=0.05)
    items = [WorkItem(0.0, 0.0, item.event, item.request, item.target) for item in workload(10)]
    summary = await drive(client, items, timeout=0.12, max_in_flight=1)
    assert summary.sent == 10
    assert summary.errors["DeadlineExceeded"] >= 6
    assert len(client.ranked) == summary.answered < 4


async def test_errors_are_counted_by_type_and_the_rest_goes_on() -> None:
    def fail(request: RankingRequest) -> RelayError | None:
        return {0: DeadlineExceeded("late"), 1: Overloaded("full")}.get(int(request.request_id[1:]) % 4)

    results: list[Result] = []
    summary = await drive(RecordingClient(fail=fail), workload(40), timeout=5, on_result=results.append)
    assert summary.errors == {"DeadlineExceeded": 10, "Overloaded": 10}
    assert summary.answered == len(summary.latencies_ms) == 20
    assert {(result.error, result.detail) for result in results if result.outcome is None} == {
        ("DeadlineExceeded", "late"),
        ("Overloaded", "full"),
    }


async def test_an_event_that_cannot_be_published_still_leads_to_a_ranking() -> None:
    class NoRetrieval(RecordingClient):
        async def announce(self, event: RequestEvent, /) -> None:
            raise BrokerUnavailable("nobody there")

    summary = await drive(NoRetrieval(), workload(5), timeout=5)
    assert summary.announce_errors == {"BrokerUnavailable": 5}
    assert summary.answered == 5


async def test_full_mode_without_announcements() -> None:
    client = RecordingClient()
    await drive(client, workload(5), timeout=5, mode="full", announce=False)
    assert not client.announced
    assert set(client.modes) == {"full"}


async def test_stop_begins_nothing_new_and_finishes_what_began() -> None:
    client, stop = RecordingClient(), asyncio.Event()
    options = GeneratorOptions(users=10, items=200, length=20, candidates=10, rate=200)

    def on_result(result: Result) -> None:
        stop.set()

    summary = await drive(client, Generator(options), timeout=5, on_result=on_result, stop=stop)  # endless
    assert summary.sent == summary.answered == len(client.announced) == len(client.ranked) >= 1


async def test_stop_is_heard_while_waiting_for_the_next_item() -> None:
    stop = asyncio.Event()
    item = workload(1)[0]
    later = WorkItem(3600.0, 0.0, item.event, item.request, 0)
    asyncio.get_running_loop().call_later(0.05, stop.set)
    async with asyncio.timeout(WITHIN_S):
        summary = await drive(RecordingClient(), [later], timeout=5, stop=stop)
    assert summary.sent == 0


@pytest.mark.parametrize("where", ["client", "on_result"])
async def test_a_defect_ends_the_drive_and_shows(where: str) -> None:
    def defect(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    client = RecordingClient(fail=defect if where == "client" else None)
    on_result: Callable[[Result], None] | None = defect if where == "on_result" else None
    with pytest.raises(ZeroDivisionError):
        await drive(client, workload(50), timeout=5, on_result=on_result)


async def test_quantiles() -> None:
    summary = await drive(RecordingClient(), [], timeout=1)
    assert summary.latency_ms(0.5) is None
    assert summary.sent_late_ms(0.99) is None
    summary.latencies_ms.extend([1.0, 2.0, 3.0])
    assert summary.latency_ms(0.5) == np.median([1, 2, 3])
