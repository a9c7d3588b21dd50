"""Sees a run for the ledger: reads every topic along, compares scores, and looks at what is left when all is quiet.

async with Witness(settings) as witness:
    await drive(client, witness.ledger.sending(items), timeout=…, on_result=witness.result)
    witness.expect_exits(await stop_all(children))     # after `await witness.rest()`, while the workers still live
witness.ledger.check()
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Final, Self

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.producer.message_accumulator import MessageBatch

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.errors import DecodeError
from relaygr_stream.ops.dead_letters.letter import letters_of
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import RankingRequest, WorkerStatus
from relaygr_stream.wire.records import HEADER_CORRELATION, Record
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.wire.worker_status import worker_statuses
from relaygr_stream.workload.driver import Result
from tests.faults.ledger import Copy, Ledger
from tests.faults.truth import Truth

#: A lane's last commit comes within kafka.commit_interval_ms, a status within worker.status_interval_ms; a lane of a
#: worker that died meanwhile is read again by another. A bound against hanging, not a claim of speed.
REST_S: Final = 60.0


class Witness:
    """Sees everything from when it is entered, which must be before the first request, on topics that exist."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._topics = load_topics(settings.kafka)
        self._truth = Truth(settings)
        worker = settings.worker
        self.ledger: Final = Ledger(self._truth.version, int(worker.pinned_share * worker.hbm_bytes))
        self.statuses: Final[dict[str, WorkerStatus]] = {}  # the newest of each worker
        self._read: dict[TopicPartition, int] = {}  # of `scores`: where this witness has read to
        self._answered: dict[TopicPartition, int] = {}  # where it ends
        self._uncompared: deque[Result] = deque()
        self._thread = ThreadPoolExecutor(1, "truth")  # torch lets go of the GIL: the loop goes on meanwhile
        self._comparing: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        kafka, topics = self._settings.kafka, self._topics
        async with AsyncExitStack() as stack:
            stack.enter_context(_told_of_sends(self._on_sent))
            for topic, on_records in (
                (topics.ranking, self._on_rankings),
                (topics.scores, self._on_scores),
                (topics.worker_status, self._on_statuses),
                (topics.dead_letter, self._on_letters),
            ):
                tail = TopicTail(kafka, topic.name, range(topic.partitions), "latest", on_records)
                await stack.enter_async_context(tail)
            self._bad = await stack.enter_async_context(
                Producer(kafka, client_id="bad", max_bytes=topics.dead_letter.max_message_bytes)
            )
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._comparing is not None:
            await self._comparing
        self._thread.shutdown()
        await self._stack.aclose()

    def result(self, result: Result) -> None:
        """A request has ended; its scores, if any, will be compared with full inference."""
        self.ledger.result(result)
        if result.scores is not None:
            self._uncompared.append(result)
            if self._comparing is None or self._comparing.done():
                self._comparing = asyncio.create_task(self._compare())

    async def send_bad(
        self, topic: str, value: bytes, reason: str, *, key: bytes, headers: list[tuple[str, bytes]]
    ) -> None:
        """Send what nobody can read, and note where a dead letter of which reason must come from."""
        lane = lane_of(key.decode(), self._topics.lanes)
        offset = await self._bad.send_and_wait(topic, value, key=key, partition=lane, headers=headers)
        self.ledger.bad[topic, lane, offset] = reason

    async def follow(self, lanes: int) -> None:
        """There are so many lanes now: see the added ones, too, from their beginning."""
        ranking, before = self._topics.ranking.name, self._topics.lanes
        assert self._topics.grow(lanes)
        tail = TopicTail(self._settings.kafka, ranking, range(before, lanes), "earliest", self._on_rankings)
        await self._stack.enter_async_context(tail)

    def expect_exits(self, codes: Mapping[str, int], due: int = 0) -> None:
        """These processes have ended: a worker's code tells whether its books balanced."""
        self.ledger.exits += [(name, code, due) for name, code in codes.items()]

    async def rest(self) -> None:
        """Once no request is under way, and while the workers still live: wait until nothing is pinned, every lane is
        committed to its end, every answer is read here, every bad message has its dead letter, or REST_S is over; then
        the ledger has what is left. Behind a bad cable this process may read an answer seconds after the client."""
        if self._comparing is not None:
            await self._comparing
        deadline = time.monotonic() + REST_S
        while True:
            self._note_pins()
            await self.note_offsets()
            if self._quiet() or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.25)

    def _quiet(self) -> bool:
        ledger = self.ledger
        return (
            not any(ledger.pinned_at_rest.values())
            and all(ledger.committed.get(key, 0) >= end for key, end in ledger.log_ends.items())
            and all(self._read.get(partition, 0) >= end for partition, end in self._answered.items())
            and all(reason in ledger.letters.get(place, ()) for place, reason in ledger.bad.items())
        )

    def _note_pins(self) -> None:
        self.ledger.pinned_at_rest = {
            status.name: sum(lane.pinned_bytes for lane in status.lanes)
            for status in self.statuses.values()
            if status.state == "serving" and self._fresh(status)
        }

    def _fresh(self, status: WorkerStatus) -> bool:
        return time.time() * 1e3 - status.sent_ms < self._settings.trigger.max_status_age_ms

    async def note_offsets(self) -> None:
        """Where the workers' lanes are committed, and where they end."""
        async with self.noting_offsets() as note:
            await note()

    @asynccontextmanager
    async def noting_offsets(self) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """`note_offsets` again and again, in milliseconds each; where no broker goes away."""
        bootstrap = self._settings.kafka.bootstrap
        admin, reader = AIOKafkaAdminClient(bootstrap_servers=bootstrap), AIOKafkaConsumer(bootstrap_servers=bootstrap)
        try:
            await admin.start()
            await reader.start()
            yield lambda: self._note_offsets(admin, reader)
        finally:
            await admin.close()
            await reader.stop()

    async def _note_offsets(self, admin: Any, reader: Any) -> None:
        kafka, topics = self._settings.kafka, self._topics
        lanes = [
            TopicPartition(t.name, lane) for t in (topics.pre_infer, topics.ranking) for lane in range(t.partitions)
        ]
        group = kafka.prefix + self._settings.worker.group
        found = await admin.list_consumer_group_offsets(group, partitions=lanes)
        answers = [TopicPartition(topics.scores.name, number) for number in range(topics.scores.partitions)]
        ends = await reader.end_offsets([*lanes, *answers])
        ledger = self.ledger
        ledger.committed = {(p.topic, p.partition): max(0, at.offset) for p, at in found.items()}  # -1: never
        # The embedded broker's ends may miss what came in the last batch, all but its first record (measured).
        ledger.log_ends = {(p.topic, p.partition): ends[p] for p in lanes}
        self._answered = {p: ends[p] for p in answers}

    async def _compare(self) -> None:
        loop = asyncio.get_running_loop()
        while self._uncompared:
            result = self._uncompared.popleft()
            assert result.scores is not None
            request = result.item.request
            found = await loop.run_in_executor(self._thread, self._truth.deviation, request, result.scores)
            self.ledger.deviations[request.request_id] = found

    def _on_rankings(self, records: list[Record]) -> None:
        for record in records:
            try:
                request = decode(RankingRequest, record.value)
            except DecodeError:
                continue  # a bad message: its place is noted by whoever sent it
            correlation = dict(record.headers).get(HEADER_CORRELATION, b"")
            copy = Copy(correlation, request.request_id, record.timestamp_ms / 1e3, request.hops)
            self.ledger.rankings[record.topic, record.lane, record.offset] = copy

    def _on_sent(self, sent: asyncio.Future[Any]) -> None:
        if not sent.cancelled() and sent.exception() is None:
            place = sent.result()
            self.ledger.from_clients.add((place.topic, place.partition, place.offset))

    def _on_scores(self, records: list[Record]) -> None:
        self.ledger.replied.update(dict(record.headers).get(HEADER_CORRELATION, b"") for record in records)
        self._read |= {TopicPartition(record.topic, record.lane): record.offset + 1 for record in records}

    def _on_statuses(self, records: list[Record]) -> None:
        for status in worker_statuses(records):
            self.statuses[status.name] = status
            self.ledger.status(status)

    def _on_letters(self, records: list[Record]) -> None:
        for letter in letters_of(records):
            origin = (letter.origin_topic, letter.origin_partition, letter.origin_offset)
            self.ledger.letters[origin].append(letter.reason)


@contextmanager
def _told_of_sends(note: Callable[[asyncio.Future[Any]], None]) -> Iterator[None]:
    """Where the producers of this process, which are clients', put each message: a forward's is in a worker."""
    append = MessageBatch.append

    def noting(*arguments: Any, **options: Any) -> asyncio.Future[Any] | None:
        sent: asyncio.Future[Any] | None = append(*arguments, **options)
        if sent is not None:  # there was room
            sent.add_done_callback(note)
        return sent

    MessageBatch.append = noting
    try:
        yield
    finally:
        MessageBatch.append = append
