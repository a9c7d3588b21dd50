"""Bad messages by the thousand on a running trigger and worker, and what must have become of each.

What a message deserves is told by the readers' own parts, outside of any process: then everything bad is in the
dead-letter topic with its reason and origin, everything with a usable reply partition is answered once, and every lane
is committed to its end.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from prometheus_client import CollectorRegistry

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.telemetry.process import process
from relaygr_stream.trigger.service import run_trigger
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import PreInferSignal, RankingRequest, RequestEvent, ScoreReply
from relaygr_stream.wire.records import (
    HEADER_CORRELATION,
    HEADER_ORIGIN_OFFSET,
    HEADER_ORIGIN_PARTITION,
    HEADER_ORIGIN_TOPIC,
    HEADER_REASON,
    Record,
)
from relaygr_stream.wire.topic_files import Topic, lane_of, load_topics
from relaygr_stream.worker.intake import Intake, IntakeLimits, TooMuch
from tests.fuzz.corpus import plain, route
from tests.fuzz.mutate import Mutator
from tests.unit.worker.services import committed, worker_on, worker_settings
from tests.waiting import until

#: Sent before the acknowledgements are waited for.
AT_ONCE: Final = 200
#: For everything to be settled: a bound against hanging, not a claim of speed.
PATIENCE_S: Final = 120.0
#: How often the commits are looked at.
COMMIT_S: Final = 0.2
Origin = tuple[str, int, int]


class Bus:
    """Sends bad messages, and remembers what each deserves and gets."""

    def __init__(self, settings: Settings, producer: Producer) -> None:
        self.topics = load_topics(settings.kafka)
        self.deserved: dict[Origin, str] = {}  # reason, of those that belong to the dead letters
        # A set: after a pause longer than a session lanes move, and records are read and dead-lettered again.
        self.dead_lettered: set[tuple[Origin, str]] = set()
        self.expected: set[bytes] = set()  # correlation ids of those that can be answered
        self.answers: Counter[bytes] = Counter()
        self._producer = producer
        self.sent: Counter[str] = Counter()
        self._replies = self.topics.scores.partitions
        self._intake = Intake(
            IntakeLimits(settings.relay, 1000.0, self._replies, self.topics.ranking.max_message_bytes)
        )

    def on_dead(self, records: list[Record]) -> None:
        for record in records:
            headers = dict(reversed(record.headers))
            where = headers[HEADER_ORIGIN_TOPIC].decode()
            origin = where, int(headers[HEADER_ORIGIN_PARTITION]), int(headers[HEADER_ORIGIN_OFFSET])
            self.dead_lettered.add((origin, headers[HEADER_REASON].decode()))

    def on_scores(self, records: list[Record]) -> None:
        for record in records:
            decode(ScoreReply, record.value)
            self.answers[dict(record.headers)[HEADER_CORRELATION]] += 1

    async def send(self, rng: random.Random) -> None:
        """One message, and what the parts that read it say to it."""
        mutator = Mutator(rng)
        kind: Any = rng.choice([RequestEvent, PreInferSignal, RankingRequest, RankingRequest])
        topics: dict[Any, Topic] = {RequestEvent: self.topics.retrieval, PreInferSignal: self.topics.pre_infer}
        topic = topics.get(kind, self.topics.ranking)
        value, lane, key = mutator.value(plain(kind, rng)), rng.randrange(self.topics.lanes), mutator.key()
        headers: Any = mutator.headers(route(rng, self._replies)) if kind is RankingRequest else []
        headers = [(name, value) for name, value in headers if len(name) < 300]
        offset = await self._producer.send_and_wait(topic.name, value, key=key, partition=lane, headers=headers)
        self.sent[topic.name] += 1
        record = Record(topic.name, lane, offset, 0, key, value, tuple(headers))
        try:
            if kind is RequestEvent:
                event = decode(RequestEvent, value)
                if lane_of(event.user_id, self.topics.lanes) != lane:
                    raise DecodeError("invalid", "another's lane")
            elif kind is PreInferSignal:
                self._intake.signal(record, time.monotonic())
            else:
                self._ranking(record)
        except DecodeError as error:
            self.deserved[topic.name, lane, offset] = error.reason

    def _ranking(self, record: Record) -> None:
        origin = self._intake.route(record)
        self.expected.add(origin.correlation)
        try:
            self._intake.ranking(record, origin, time.monotonic())
        except TooMuch:
            return  # answered, and no dead letter

    async def settle(self, kafka: Kafka) -> None:
        """Wait until everything was dealt with. Raises AssertionError naming what was not."""
        due = set(self.deserved.items())
        await until(
            lambda: {origin for origin, _ in self.dead_lettered} >= self.deserved.keys(),
            "dead letters are missing",
            PATIENCE_S,
        )
        await until(lambda: self.expected <= self.answers.keys(), "answers are missing", PATIENCE_S)
        assert self.dead_lettered == due, f"{self.dead_lettered - due} dead-lettered, {due - self.dead_lettered} not"
        assert self.answers.keys() == self.expected, "answered what could not be"
        for topic in (self.topics.ranking, self.topics.pre_infer):
            for _ in range(int(PATIENCE_S / COMMIT_S)):
                if (done := await committed(kafka, topic.name)) >= self.sent[topic.name]:  # the trigger's own on top
                    break
                await asyncio.sleep(COMMIT_S)
            assert done >= self.sent[topic.name], f"{topic.name}: {done} of {self.sent[topic.name]} done"


@asynccontextmanager
async def bus(kafka: Kafka) -> AsyncIterator[Bus]:
    """A trigger and a worker with the toy model in this process; what has been sent is settled at the end."""
    await apply_topics(kafka)
    settings = worker_settings(kafka)
    topics = load_topics(kafka)
    async with AsyncExitStack() as stack:
        producer = await stack.enter_async_context(Producer(kafka, client_id="hostile", max_bytes=1 << 21))
        running = Bus(settings, producer)
        for topic, take in ((topics.dead_letter, running.on_dead), (topics.scores, running.on_scores)):
            tail = TopicTail(kafka, topic.name, range(topic.partitions), "latest", take)
            await stack.enter_async_context(tail)
        worker = await stack.enter_async_context(worker_on(settings))
        context = await stack.enter_async_context(process(settings, "trigger", registry=CollectorRegistry()))
        trigger = asyncio.create_task(run_trigger(context))
        try:
            await until(lambda: trigger.done() or context.why_not_ready() is None, "no trigger")
            yield running
            await running.settle(kafka)
            assert not trigger.done(), "the trigger ended"
            assert not worker.task.done(), "the worker ended"
        finally:
            context.stop.set()
            await asyncio.gather(trigger, return_exceptions=True)


async def flood(running: Bus, inputs: int, seed: int) -> None:
    """So many messages, AT_ONCE at a time."""
    for first in range(0, inputs, AT_ONCE):
        numbers = range(first, min(inputs, first + AT_ONCE))
        await asyncio.gather(*(running.send(random.Random(f"{seed} bus {number}")) for number in numbers))
