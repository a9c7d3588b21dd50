"""A request traced by its id: what the topics hold of it, and of no other tenant's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from relaygr_stream.bus.contents import read_since
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.ops.dashboard import trace as traces
from relaygr_stream.ops.dashboard.board import Board
from relaygr_stream.ops.dashboard.trace import RequestTrace, trace
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import Cancel, PreInferSignal
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_KIND, HEADER_REPLY_PARTITION, KIND_CANCEL
from relaygr_stream.wire.refusals import KIND, Refusal, encode_refusals
from relaygr_stream.wire.topic_files import TopicSet, load_topics
from relaygr_stream.wire.worker_status import StatusReader
from tests.unit.client_peers import PREFIX, event, request, scored


class Log:
    """Writes what services, triggers and workers write."""

    def __init__(self, kafka: Kafka, topics: TopicSet, producer: Producer) -> None:
        self.kafka, self.topics, self._producer = kafka, topics, producer

    async def write(self, topic: str, value: bytes, *headers: tuple[str, bytes], **where: int) -> None:
        key = None if where else b"u"
        await self._producer.send_and_wait(
            f"{self.kafka.prefix}{topic}", value, key=key, headers=list(headers), **where
        )

    async def announced(self, number: int, tenant: str = "") -> None:
        await self.write("retrieval", encode(msgspec.structs.replace(event(number), tenant=tenant)))

    async def admitted(self, number: int, tenant: str = "") -> None:
        signal = PreInferSignal(
            request_id=f"r-{number}", user_id="u", prefix=PREFIX, admitted_ms=0, life_ms=1.0, tenant=tenant
        )
        await self.write("pre-infer", encode(signal))

    async def ranked(self, number: int, tenant: str = "", trace_parent: bytes = b"") -> None:
        asked = msgspec.structs.replace(request(number), tenant=tenant)
        route = [(HEADER_CORRELATION, f"c-{number}".encode()), (HEADER_REPLY_PARTITION, b"1")]
        await self.write("ranking", encode(asked), *route, ("traceparent", trace_parent))
        await self.write("scores", encode(scored(asked)), route[0], partition=1)

    async def trace(self, number: int, tenant: str | None = None, lanes: tuple[int, ...] = ()) -> RequestTrace:
        return await trace(self.kafka, self.topics, f"r-{number}", lanes, tenant)


def steps(found: RequestTrace) -> list[str]:
    assert found.missing == []
    return [step.what for step in found.steps]


@pytest.fixture
async def log(kafka_settings: Kafka) -> AsyncIterator[Log]:
    await apply_topics(kafka_settings)
    async with Producer(kafka_settings, client_id="test") as producer:
        yield Log(kafka_settings, load_topics(kafka_settings), producer)


async def test_the_steps_of_a_request_in_order_and_no_other_request(log: Log) -> None:
    for number in (1, 12, 2):
        await log.announced(number)
        await log.admitted(number)
        await log.ranked(number, trace_parent=b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    found = await log.trace(1)
    assert steps(found) == ["announced", "admitted", "ranking asked", "answered ok"]
    assert found.steps[2].facts["trace id"] == "0af7651916cd43dd8448eb211c80319c"
    answer = found.steps[-1].facts
    assert answer == {"outcome": "hbm", "worker": "peer", "until the device": "1.5 ms", "on the device": "2.5 ms"}
    assert found.steps[0].facts["behaviours"] == "2"
    assert not any(text == "u" for step in found.steps for text in step.facts.values())  # no user
    assert steps(await log.trace(3)) == []


async def test_a_refusal_and_a_cancel_are_steps(log: Log) -> None:
    await log.announced(1)
    await log.write("pre-infer", encode_refusals([Refusal("r-1", "over_load")]), (HEADER_KIND, KIND.encode()))
    await log.write("ranking", encode(Cancel(request_id="r-1")), (HEADER_KIND, KIND_CANCEL.encode()))
    found = await log.trace(1)
    assert steps(found) == ["announced", "not admitted", "cancelled"]
    assert found.steps[1].facts == {"reason": "over_load"}


async def test_a_tenant_sees_its_own_requests_alone(log: Log) -> None:
    await log.announced(1, "shop")
    await log.admitted(1, "shop")
    await log.ranked(1, "shop")
    refused = encode_refusals([Refusal("r-2", "stale", "shop")])
    await log.write("pre-infer", refused, (HEADER_KIND, KIND.encode()))
    for tenant in ("shop", None):
        assert steps(await log.trace(1, tenant)) == ["announced", "admitted", "ranking asked", "answered ok"]
        assert steps(await log.trace(2, tenant)) == ["not admitted"]
    for tenant in ("library", ""):
        assert steps(await log.trace(1, tenant)) == []
        assert steps(await log.trace(2, tenant)) == []


async def test_what_is_read_is_bounded_and_said(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    await log.announced(1)
    await log.ranked(1)
    monkeypatch.setattr(traces, "MOST_BYTES", 1)
    found = await log.trace(1)
    assert any("only" in why and "name the user" in why for why in found.missing)
    monkeypatch.setattr(traces, "WITHIN_S", 0.0)
    assert (await log.trace(1)).missing == ["the search took longer than 0 s"]


async def test_lanes_and_times_narrow_the_search(log: Log) -> None:
    await log.announced(1)
    lane = next(iter((await log.trace(1)).steps)).facts["lane"]
    assert steps(await log.trace(1, lanes=(int(lane),))) == ["announced"]
    assert steps(await log.trace(1, lanes=(1 - min(1, int(lane)),))) == []
    name, lanes = log.topics.retrieval.name, range(log.topics.lanes)
    for since_ms, count in ((0, 1), (int(time.time() * 1e3) + 60_000, 0)):
        found = [record async for batch in read_since(log.kafka, name, lanes, since_ms) for record in batch]
        assert len(found) == count


async def test_one_search_at_a_time(log: Log) -> None:
    await log.announced(1)
    board = Board(Settings(kafka=log.kafka), log.topics, StatusReader(log.topics.lanes))
    pages = await asyncio.gather(*(board.trace("id=r-1&user=u") for _ in range(3)))
    assert sum(b"announced" in page for page in pages) == 1
    assert sum(b"Another search is under way" in page for page in pages) == 2
    assert b"announced" in await board.trace("id=r-1")
