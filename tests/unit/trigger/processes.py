"""A trigger in this process on real topics, and a peer that publishes events and reads signals as a worker does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

from prometheus_client import CollectorRegistry

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import BrokerError
from relaygr_stream.settings.schema import Kafka, Settings, Trigger
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.trigger.decision import REASONS
from relaygr_stream.trigger.service import run_trigger
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import LaneStatus, PreInferSignal, RequestEvent, WorkerStatus
from relaygr_stream.wire.records import Record, kind_of
from relaygr_stream.wire.topic_files import TopicSet, lane_of, load_topics
from tests.unit.trigger.parts import worker_status
from tests.waiting import WITHIN_S, until

PATIENCE_S = 20.0
#: On a crowded machine seconds may pass between an event and its decision.
WIDE_BOUNDS = Trigger(max_event_age_ms=30_000, max_status_age_ms=10_000)


def user_on(lane: int, lanes: int) -> str:
    return next(user for user in map(str, range(1000)) if lane_of(user, lanes) == lane)


class Peer:
    """A service and a worker in one: publishes events, reads signals and dead letters, states its lanes 10 times/s."""

    def __init__(self, kafka: Kafka, producer: Producer) -> None:
        self.kafka = kafka
        self.topics: TopicSet = load_topics(kafka)
        self.producer = producer
        self.signals: list[Record] = []
        self.others: list[Record] = []  # on `pre-infer`, and no signals
        self.letters: list[Record] = []
        self.read_to = dict.fromkeys(range(self.topics.lanes), 0)
        self.reading = True
        self.stating = True
        self.lane = {"budget_bytes": 10**9, "pinned_bytes": 0}

    def on_signals(self, records: list[Record]) -> None:
        for record in records:
            (self.others if kind_of(record.headers) else self.signals).append(record)
            if self.reading:
                self.read_to[record.lane] = record.offset + 1

    def status(self) -> WorkerStatus:
        return worker_status(
            *(LaneStatus(lane=lane, pre_infer_offset=offset, **self.lane) for lane, offset in self.read_to.items())
        )

    async def state(self) -> None:
        while self.stating:
            with suppress(BrokerError):
                await self.producer.send_and_wait(self.topics.worker_status.name, encode(self.status()), key=b"w")
            await asyncio.sleep(0.1)

    async def publish(self, event: RequestEvent) -> int:
        key = event.user_id.encode()
        return await self.producer.send_and_wait(self.topics.retrieval.name, encode(event), key=key)

    async def publish_raw(self, value: bytes, lane: int = 0, key: bytes = b"k") -> int:
        return await self.producer.send_and_wait(self.topics.retrieval.name, value, key=key, partition=lane)

    @property
    def signalled(self) -> list[str]:
        return [decode(PreInferSignal, record.value).request_id for record in self.signals]


@asynccontextmanager
async def peer_on(kafka: Kafka, *, letters: bool = True) -> AsyncIterator[Peer]:
    await apply_topics(kafka)
    async with Producer(kafka, client_id="peer") as producer:
        peer = Peer(kafka, producer)
        topics = peer.topics
        async with AsyncExitStack() as tails:
            signals = TopicTail(kafka, topics.pre_infer.name, range(topics.lanes), "earliest", peer.on_signals)
            await tails.enter_async_context(signals)
            if letters:
                tail = TopicTail(kafka, topics.dead_letter.name, [0], "earliest", peer.letters.extend)
                await tails.enter_async_context(tail)
            stating = asyncio.create_task(peer.state())
            yield peer
            stating.cancel()
            await asyncio.gather(stating, return_exceptions=True)


class RunningTrigger:
    """A trigger running in this process; `stop` as SIGTERM does it."""

    def __init__(self, settings: Settings) -> None:
        self.context = ProcessContext(settings, asyncio.Event(), CollectorRegistry())
        self.task = asyncio.create_task(run_trigger(self.context))

    @property
    def ready(self) -> bool:
        assert not self.task.done(), self.task
        return self.context.why_not_ready() is None

    def count(self, name: str, **labels: str) -> float:
        return self.context.registry.get_sample_value(f"relaygr_trigger_{name}", labels) or 0.0

    def decisions(self, reason: str) -> float:
        return self.count("decisions_total", reason=reason)

    @property
    def decided(self) -> float:
        return sum(self.decisions(reason) for reason in REASONS)

    async def stop(self) -> None:
        self.context.stop.set()
        await asyncio.wait_for(self.task, WITHIN_S)


@asynccontextmanager
async def trigger_on(kafka: Kafka, **sections: Any) -> AsyncIterator[RunningTrigger]:
    """A trigger that is ready and has heard of an owner."""
    sections.setdefault("trigger", WIDE_BOUNDS)
    trigger = RunningTrigger(Settings(kafka=kafka, **sections))
    try:
        await until(lambda: trigger.ready and trigger.count("lanes_with_owner"))
        yield trigger
    finally:
        await trigger.stop()
