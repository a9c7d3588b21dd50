"""A whole worker in this process, on real topics, and the service and trigger that talk to it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from aiokafka import AIOKafkaConsumer, TopicPartition
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.engine.build import WorkerRuntime
from relaygr_stream.engine.commands import Query
from relaygr_stream.engine.scheduler import Snapshot
from relaygr_stream.handover.build import handover_for
from relaygr_stream.settings.schema import Kafka, Relay, Settings, Telemetry
from relaygr_stream.settings.worker import Model, Worker
from relaygr_stream.telemetry.process import ProcessContext, process
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import PreInferSignal, RankingRequest, ScoreReply, WorkerStatus
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION, Record
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.wire.worker_status import worker_statuses
from relaygr_stream.worker import process as worker_process
from tests.unit.engine.worlds import TOY, Wrapped, toy_model
from tests.waiting import until

MIB = 1 << 20
REPLY_PARTITION = 1

#: The models that `faulty` made, newest last, for tests to break.
made: list[Wrapped] = []


class Hangable(Wrapped):
    """A model that hangs in prefill while `hang` is set; `hung`: it has."""

    hang = hung = False

    def prefill(self, kv: Any, tokens: Any) -> None:
        while self.hang:
            self.hung = True
            time.sleep(0.01)
        super().prefill(kv, tokens)


def faulty(model: Model, device: torch.device, dtype: torch.dtype) -> Hangable:
    """model.factory = "tests.unit.worker.services:faulty": the toy model, to be broken from outside."""
    made.append(Hangable(toy_model(device)))
    return made[-1]  # type: ignore[return-value]


def worker_settings(kafka: Kafka, **changes: Any) -> Settings:
    """A worker of toy size, whose model a test can break."""
    worker = Worker(name="w1", hbm_bytes=4 * MIB, dram_bytes=4 * MIB, status_interval_ms=50, drain_ms=2000)
    return Settings(
        kafka=kafka,
        relay=Relay(max_prefix_tokens=256, max_suffix_tokens=16, max_candidates=64, life_window_ms=60_000),
        worker=msgspec.structs.replace(worker, **changes),
        model=msgspec.structs.replace(TOY, factory="tests.unit.worker.services:faulty"),
        telemetry=Telemetry(log_level="warning"),
    )


class RunningWorker:
    """What process.run_worker does, as a task."""

    def __init__(self, context: ProcessContext) -> None:
        self.context = context
        self.made: worker_process.WorkerProcess | None = None
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with worker_process.made_worker(self.context, handover_for) as self.made:
            await self.made.run()

    @property
    def worker(self) -> worker_process.WorkerProcess:
        assert self.made is not None, "its model is being loaded"
        return self.made

    @property
    def runtime(self) -> WorkerRuntime:
        """Its parts on the device thread, for tests that break one."""
        return self.worker.runtime

    async def ask(self, query: Query) -> Snapshot:
        """What the scheduler answers to it."""
        snapshot: Snapshot = await self.worker.device.ask(query)
        return snapshot

    def total(self, name: str) -> float:
        """A counter of its /metrics, over all labels."""
        samples = (sample for family in self.context.registry.collect() for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == f"relaygr_{name}_total")

    @property
    def model(self) -> Hangable:
        found = self.runtime.model
        assert isinstance(found, Hangable)
        return found

    @property
    def ready(self) -> bool:
        return self.context.why_not_ready() is None

    async def end(self) -> None:
        """Stop as SIGTERM does."""
        self.context.stop.set()
        await self.task


@asynccontextmanager
async def worker_on(settings: Settings, *, lanes: int = 8) -> AsyncIterator[RunningWorker]:
    """A worker that owns all lanes; stopped in order at the end unless it ended by itself."""
    registry = CollectorRegistry()
    async with process(settings, "worker", registry=registry) as context:
        running = RunningWorker(context)
        try:
            await until(lambda: running.task.done() or (running.ready and owned(running) == lanes))
            if running.task.done():
                running.task.result()
            yield running
        finally:
            context.stop.set()
            if made:
                made[-1].hang = False  # type: ignore[attr-defined]
            await asyncio.gather(running.task, return_exceptions=True)


def owned(running: RunningWorker) -> int:
    return 0 if running.made is None else len(running.made.consumer.lanes)


class Peer:
    """What the recommendation service and the trigger do, and all that workers say."""

    def __init__(self, kafka: Kafka) -> None:
        self.topics = load_topics(kafka)
        self.replies: dict[bytes, list[ScoreReply]] = {}
        self.statuses: list[WorkerStatus] = []
        self.dead: list[Record] = []
        self._kafka = kafka
        self._stack = AsyncExitStack()
        self._numbers = itertools.count()

    async def __aenter__(self) -> Peer:
        await apply_topics(self._kafka)
        self.producer = await self._stack.enter_async_context(
            Producer(self._kafka, client_id="peer", max_bytes=2 * MIB)
        )
        for topic, partition, take in (
            (self.topics.scores, REPLY_PARTITION, self._on_scores),
            (self.topics.worker_status, 0, self._on_statuses),
            (self.topics.dead_letter, 0, self.dead.extend),
        ):
            await self._stack.enter_async_context(TopicTail(self._kafka, topic.name, [partition], "latest", take))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def signal(self, request: str, user: str, length: int, **extra: Any) -> int:
        """Admit a request; returns the signal's offset in its lane."""
        message = PreInferSignal(
            request_id=request,
            user_id=user,
            prefix=history(user, length),
            admitted_ms=now_ms(),
            life_ms=60_000.0,
            rank_in_ms=80.0,
            **extra,
        )
        return await self.producer.send_and_wait(self.topics.pre_infer.name, encode(message), key=user.encode())

    async def rank(self, request: str, user: str, length: int, *, timeout_ms: float = 30_000.0, **extra: Any) -> bytes:
        """Ask for scores; returns the correlation id."""
        message = RankingRequest(
            request_id=request,
            user_id=user,
            prefix=history(user, length),
            candidates=pack_items(range(5)),
            sent_ms=now_ms(),
            timeout_ms=timeout_ms,
            **extra,
        )
        return await self.send_ranking(encode(message), key=user.encode())

    async def send_ranking(self, value: bytes, *, key: bytes = b"u", headers: list[Any] | None = None) -> bytes:
        correlation = f"c-{next(self._numbers)}".encode()
        route = [(HEADER_CORRELATION, correlation), (HEADER_REPLY_PARTITION, str(REPLY_PARTITION).encode())]
        await self.producer.send_and_wait(
            self.topics.ranking.name, value, key=key, headers=route if headers is None else headers
        )
        return correlation

    async def reply(self, correlation: bytes) -> ScoreReply:
        await until(lambda: correlation in self.replies, f"no reply to {correlation!r}")
        return self.replies[correlation][0]

    def lane(self, user: str) -> int:
        return lane_of(user, self.topics.lanes)

    def _on_scores(self, records: list[Record]) -> None:
        for record in records:
            correlation = dict(record.headers)[HEADER_CORRELATION]
            self.replies.setdefault(correlation, []).append(decode(ScoreReply, record.value))

    def _on_statuses(self, records: list[Record]) -> None:
        self.statuses += worker_statuses(records)


async def committed(kafka: Kafka, topic: str) -> int:
    """How many records of a topic the workers' group is done with, over all lanes."""
    lanes = [TopicPartition(topic, lane) for lane in range(load_topics(kafka).lanes)]
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, group_id=f"{kafka.prefix}workers")
    await consumer.start()
    try:
        return sum([await consumer.committed(lane) or 0 for lane in lanes])
    finally:
        await consumer.stop()


def history(user: str, length: int) -> Behaviours:
    """The same for the same user, longer ones continuing shorter ones."""
    rng = np.random.default_rng(sum(user.encode()))
    items = rng.integers(0, 1000, 512)[:length]
    return Behaviours.from_arrays(items, np.zeros(length, int), np.arange(length) * 1000)
