"""A tiny worker for the client's tests: reads `ranking`, answers on `scores` as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
import numpy as np

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.settings.schema import Client, Kafka, Settings
from relaygr_stream.wire.behaviours import ITEM_DTYPE, Behaviours, pack_items
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import Cancel, RankingRequest, RequestEvent, ScoreReply, Timings
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION, KIND_CANCEL, Record, kind_of
from relaygr_stream.wire.topic_files import load_topics

TASKS = ("click", "like")
#: For calls whose time is no matter.
PATIENCE_S = 20.0
PREFIX = Behaviours.from_arrays([1, 2], [0, 0], [10, 20])

Answers = Callable[[RankingRequest], Sequence[ScoreReply | bytes]]


def request(number: int = 0, candidates: Sequence[int] = (7, 8, 9), user_id: str = "u") -> RankingRequest:
    return RankingRequest(
        request_id=f"r-{number}", user_id=user_id, prefix=PREFIX, candidates=pack_items(list(candidates))
    )


def event(number: int = 0, user_id: str = "u") -> RequestEvent:
    return RequestEvent(request_id=f"r-{number}", user_id=user_id, prefix=PREFIX, candidates=3)


def scores_for(request: RankingRequest) -> np.ndarray:
    """(m, 2): the candidate's id, and minus that."""
    items = np.frombuffer(request.candidates, ITEM_DTYPE).astype("<f4")
    return np.stack([items, -items], axis=1)


def scored(request: RankingRequest) -> ScoreReply:
    return ScoreReply(
        request_id=request.request_id,
        status="ok",
        outcome="hbm",
        scores=scores_for(request).tobytes(),
        tasks=TASKS,
        model_version="m-1",
        worker="peer",
        timings=Timings(queued_ms=1.5, device_ms=2.5, computed_tokens=3),
    )


class Responder:
    """Answers each ranking request with what `answers` gives, at once or, with hold=True, when released."""

    def __init__(self, producer: Producer, scores: str, answers: Answers) -> None:
        self.producer = producer
        self.scores = scores
        self.answers = answers
        self.hold = False
        self.requests: list[tuple[Record, RankingRequest]] = []
        self.held: list[tuple[Record, RankingRequest]] = []
        self.events: list[Record] = []
        self.cancels: list[Cancel] = []
        self.tasks: set[asyncio.Task[None]] = set()

    def on_records(self, records: list[Record]) -> None:
        cancels = [record for record in records if kind_of(record.headers) == KIND_CANCEL]
        self.cancels += [decode(Cancel, record.value) for record in cancels]
        taken = [(record, decode(RankingRequest, record.value)) for record in records if record not in cancels]
        self.requests += taken
        if self.hold:
            self.held += taken
        else:
            self.reply(taken)

    def release(self) -> None:
        held, self.held = self.held, []
        self.reply(held)

    def reply(self, taken: list[tuple[Record, RankingRequest]]) -> None:
        task = asyncio.create_task(self._reply(taken))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _reply(self, taken: list[tuple[Record, RankingRequest]]) -> None:
        for record, request in taken:
            headers = dict(record.headers)
            for answer in self.answers(request):
                await self.producer.send(
                    self.scores,
                    answer if isinstance(answer, bytes) else encode(answer),
                    partition=int(headers[HEADER_REPLY_PARTITION]),
                    headers=[(HEADER_CORRELATION, headers[HEADER_CORRELATION])],
                )


@asynccontextmanager
async def responder_on(kafka: Kafka, answers: Answers = lambda request: [scored(request)]) -> AsyncIterator[Responder]:
    """Topics, and a responder that reads every lane."""
    await apply_topics(kafka)
    topics = load_topics(kafka)
    async with Producer(kafka, client_id="responder", acks=1) as producer:
        responder = Responder(producer, topics.scores.name, answers)
        lanes = range(topics.lanes)
        async with (
            TopicTail(kafka, topics.ranking.name, lanes, "latest", responder.on_records),
            TopicTail(kafka, topics.retrieval.name, lanes, "latest", responder.events.extend),
        ):
            yield responder
            await asyncio.gather(*responder.tasks)


def client_on(kafka: Kafka, name: str | None = None, **client: object) -> RelayClient:
    """A client of this name with these `client.…` settings."""
    settings = Settings(kafka=kafka, client=msgspec.structs.replace(Client(), **client))
    return RelayClient(settings=settings, client_id=name)


def count(client: RelayClient, name: str, **labels: str) -> float:
    """A counter of the client."""
    return client.registry.get_sample_value(f"relaygr_client_{name}_total", labels) or 0.0
