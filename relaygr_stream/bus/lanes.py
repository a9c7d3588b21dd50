"""The two-plane consumer: a lane keeps reading while other lanes move.

The membership plane (membership.py) decides which lanes this member owns. The data plane in this module reads them from
manually assigned partitions. When the group rebalances, only lanes that changed their owner stop or start; a kept lane
continues at its position.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from relaygr_stream.bus.aiokafka_compat import broker_error, client_options
from relaygr_stream.bus.crashes import Crashes, OffsetLedger, Suspects
from relaygr_stream.bus.membership import Membership
from relaygr_stream.bus.renewed import Renewed
from relaygr_stream.bus.unreadable import pass_unreadable
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record, as_record

log = structlog.get_logger(__name__)

#: The time limit of one wait for records: the period of an idle loop.
WAIT_MS: Final = 1000
#: Largest answer to a fetch (or one message). asyncio copies its bytes several times, which is fastest if they fit the
#: processor's cache: 28,000 events of 26 KB a second with 4 MiB, 21,000 with aiokafka's 50 MiB, 16,000–21,000 with
#: 1 MiB (docs/explanation/performance.md).
FETCH_BYTES: Final = 4 * 1024 * 1024
#: Lanes gained together start together, but no lane waits longer than this for the offsets of another.
TOGETHER_S: Final = 0.1
#: A broker answers each fetch within the fetch wait. It counts as unavailable if it is silent for this much longer.
SILENT_S: Final = 3.0


class LaneConsumer:
    """Reads the lanes that a group assigns to this member, and commits the offsets of records that are done.

    topics: full names; partition p of each is lane p.
    on_records(records): gets new records, in order per topic and lane, all at once, since unread partitions block the
        others.
    on_lanes(gained, lost): called just before the first record of a gained lane, and when a lane is lost. A lane that
        another member owned for a moment is first lost, then gained.
    capacity: this member's weight in the assignment.
    check_crcs: whether to verify the producer's checksum of each batch.
    progressing(): False while the process is stuck; after kafka.max_poll_interval_ms the lanes go to other members, and
        they return when the process makes progress.
    crashes: whether to count crashes of owners, and what to do with a record that caused too many.

    The callbacks run on the loop and must be quick. An exception in one ends the consumer (`failed`).
    """

    def __init__(
        self,
        kafka: Kafka,
        *,
        topics: Sequence[str],
        group: str,
        member: str,
        on_records: Callable[[list[Record]], None],
        on_lanes: Callable[[frozenset[int], frozenset[int]], None],
        capacity: float = 1.0,
        check_crcs: bool = True,
        progressing: Callable[[], bool] = lambda: True,
        crashes: Crashes | None = None,
    ) -> None:
        self._kafka = kafka
        self._check_crcs = check_crcs
        self._topics = tuple(topics)
        self._member = member
        self._on_records = on_records
        self._on_lanes = on_lanes
        self._membership = Membership(
            kafka,
            topics=self._topics,
            group=group,
            member=member,
            capacity=capacity,
            on_assigned=self._assigned,
            on_left=lambda: self._assigned(frozenset(), False),
            committable=self._committable,
            progressing=progressing,
        )
        self._renewed = Renewed(kafka, "the lanes' reader", self._make, self._point, given_up=self._fail)
        self._lanes: frozenset[int] = frozenset()
        self._ledgers: dict[tuple[str, int], OffsetLedger] = {}
        self._suspects = (
            None
            if crashes is None
            else Suspects(crashes, self._membership, self._ledgers, lambda: self._data, on_records)
        )
        self._answered_ms = 0  # time of a broker's last answer, by aiokafka's clock, which is not monotonic
        self._heard_s = 0.0  # monotonic time at which _answered_ms changed, or the lanes did
        self._reading = asyncio.Event()  # set while there are lanes to read
        self._draining = False
        self._drained: asyncio.Event | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._starting: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None] | None = None

    @property
    def lanes(self) -> frozenset[int]:
        """The lanes that this member reads now."""
        return self._lanes

    @property
    def failed(self) -> asyncio.Future[None]:
        """A future that completes, with the error, only if the consumer fails. Wait on it beside other conditions."""
        assert self._failed is not None, "start() comes first"
        return self._failed

    @property
    def trouble(self) -> str | None:
        """The part that has ended and is being replaced; no lane is read meanwhile. None if all is well."""
        return self._renewed.trouble

    @property
    def healthy(self) -> bool:
        """Whether the consumer runs and a broker answers it, for readiness. False while it drains."""
        if self._failed is None or self._failed.done() or self._draining or self.trouble:
            return False
        if not self._lanes and (self._starting is None or self._starting.done()):
            return True  # no lanes are assigned, so there is no signal either way
        answers = (self._data.last_poll_timestamp(TopicPartition(*each)) or 0 for each in self._ledgers)
        if (answered_ms := max(answers, default=0)) != self._answered_ms:
            self._answered_ms, self._heard_s = answered_ms, time.monotonic()
        return time.monotonic() - self._heard_s < SILENT_S + self._kafka.fetch_max_wait_ms / 1000

    @property
    def rebalances(self) -> int:
        """The number of assignments of this member."""
        return self._membership.rebalances

    @property
    def commits_refused(self) -> int:
        """The number of commits refused because this member was out of the group; their records are read again."""
        return self._membership.commits_refused

    @property
    def undone(self) -> int:
        """The number of records handed out and not done, over all lanes."""
        return sum(ledger.undone for ledger in self._ledgers.values())

    @property
    def uncommitted(self) -> int:
        """The number of offsets read and not committable, over all lanes: one record that is not done holds back all
        behind it."""
        return sum(ledger.position - ledger.committable for ledger in self._ledgers.values())

    def done(self, record: Record) -> None:
        """Mark the record as done. No effect if its lane is lost, or if it is done already."""
        ledger = self._ledgers.get((record.topic, record.lane))
        if ledger is not None:
            ledger.done(record.offset)
        if self._suspects is not None:
            self._suspects.changed()
        self._note_drained()

    def position(self, topic: str, lane: int) -> int:
        """The next offset to read of an owned lane. Raises KeyError for another lane."""
        return self._ledgers[topic, lane].position

    async def start(self) -> None:
        """Join the group; returns with the first assignment. Raises BrokerUnavailable, BrokerError, ConfigError."""
        self._failed = asyncio.get_running_loop().create_future()
        self._failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())  # no warning if unused
        try:
            await self._renewed.start()
            await self._membership.start()
        except BaseException:
            await self.stop()
            raise
        works = [self._fetch, self._membership.poll, self._membership.commit]
        if self._suspects is not None:
            works.append(self._suspects.hand_out)
        for work in works:
            self._tasks.append(asyncio.create_task(self._watched(work)))

    @property
    def _data(self) -> Any:
        return self._renewed.client

    def _make(self) -> Any:
        return AIOKafkaConsumer(
            **client_options(self._kafka, self._member),
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",  # see _restart_lane
            fetch_max_wait_ms=self._kafka.fetch_max_wait_ms,
            fetch_max_bytes=FETCH_BYTES,
            check_crcs=self._check_crcs,
        )

    async def drain(self, timeout_s: float) -> bool:
        """Stop reading, stay a member without new lanes, and wait until every record handed out is done.

        Returns False if some are not done within timeout_s.
        """
        self._draining = True
        self._membership.draining()
        self._reading.clear()
        self._cancel_start()
        self._data.assign([])
        if self.undone:
            self._drained = asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._drained.wait()
        return self.undone == 0

    async def stop(self) -> None:
        """Stop reading, commit, and leave the group at once. Call `drain` first to finish the records handed out."""
        self._draining = True
        self._cancel_start()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        await self._membership.stop()
        await self._renewed.stop()
        self._drop(self._lanes)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _assigned(self, lanes: frozenset[int], continuous: bool) -> None:
        """Handle a new assignment: drop lost lanes now, start gained lanes as soon as their offsets are known."""
        self._cancel_start()
        kept = self._lanes & lanes if continuous else frozenset()
        try:
            self._drop(self._lanes - kept)
        except Exception as error:  # aiokafka would only log it
            self._fail(error)
        if lanes != kept and not self._draining:
            self._heard_s = time.monotonic()
            self._starting = asyncio.create_task(self._watched(partial(self._begin, lanes - kept)))

    def _cancel_start(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None

    async def _begin(self, lanes: frozenset[int]) -> None:
        """Start reading lanes, each as soon as the offsets of all its topics are known."""

        async def start_offsets(lane: int) -> tuple[int, list[int | None]]:
            return lane, [await self._membership.start_offset(topic, lane) for topic in self._topics]

        async with asyncio.TaskGroup() as group:
            # A partition without a leader delays its own lane only.
            pending = {group.create_task(start_offsets(lane)) for lane in lanes}
            while pending:
                done, pending = await asyncio.wait(pending, timeout=TOGETHER_S)
                known = {lane: found for lane, found in (task.result() for task in done) if None not in found}
                if self._suspects is not None and known:
                    which = self._topics.index(self._suspects.topic)
                    await self._suspects.take_over({lane: offsets[which] or 0 for lane, offsets in known.items()})
                for lane, offsets in known.items():
                    for topic, offset in zip(self._topics, offsets, strict=True):
                        self._ledgers[topic, lane] = OffsetLedger(offset or 0)
                gained = frozenset(known)
                if gained:
                    self._lanes |= gained
                    self._on_lanes(gained, frozenset())
                    self._reassign()

    def _committable(self, leaving: bool) -> dict[tuple[str, int], tuple[int, str]]:
        suspects = self._suspects
        return {
            each: (ledger.committable, "" if suspects is None else suspects.note(*each, leaving=leaving))
            for each, ledger in self._ledgers.items()
        }

    def _drop(self, lanes: frozenset[int]) -> None:
        if not self._draining:
            # Pause only: a new assignment of the rest would abort the fetch in which the kept lanes wait.
            self._data.pause(*(TopicPartition(topic, lane) for lane in lanes for topic in self._topics))
        for topic in self._topics:
            for lane in lanes:
                del self._ledgers[topic, lane]
        if self._suspects is not None:
            self._suspects.changed()
        self._lanes -= lanes
        if not self._lanes:
            self._reading.clear()
        self._note_drained()
        if lanes:
            self._on_lanes(frozenset(), lanes)

    def _note_drained(self) -> None:
        if self._drained is not None and not self.undone:
            self._drained.set()

    def _reassign(self) -> None:
        """Assign the owned lanes to the data plane, each at its position. It does not await, so no record is lost."""
        self._assign(self._data)
        self._reading.set()

    async def _point(self, data: Any) -> None:
        """Assign the owned lanes to a new consumer. It does not await, since the consumer takes over right after."""
        pass_unreadable(data)
        if self._lanes and not self._draining:
            self._assign(data)

    def _assign(self, data: Any) -> None:
        partitions = [TopicPartition(topic, lane) for lane in sorted(self._lanes) for topic in self._topics]
        data.assign(partitions)
        for partition in partitions:
            data.seek(partition, self._ledgers[partition].position)
        self._heard_s = time.monotonic()

    async def _fetch(self) -> None:
        while True:
            await self._reading.wait()
            try:
                batches = await self._data.getmany(timeout_ms=WAIT_MS)
            except OffsetOutOfRangeError as error:
                await self._restart_lane(error.args[0])
                continue
            self._hand_out([as_record(message) for messages in batches.values() for message in messages])

    def _hand_out(self, records: list[Record]) -> None:
        """Hand out the new records of owned lanes in order. After a seek, some records arrive a second time."""
        new = []
        for record in records:
            ledger = self._ledgers.get((record.topic, record.lane))
            if ledger is None or not ledger.read(record.offset):
                continue
            if self._suspects is None or not self._suspects.set_apart(record):
                new.append(record)
        if new:
            self._on_records(new)

    async def _restart_lane(self, out_of_range: dict[TopicPartition, int]) -> None:
        """Restart at the earliest offset: the log was truncated, expired or recreated, so the offset is not in it."""
        earliest = await self._data.beginning_offsets(list(out_of_range))
        for partition, offset in earliest.items():
            if partition in self._ledgers and not self._draining:
                log.warning(
                    "offset_out_of_range",
                    topic=partition.topic,
                    lane=partition.partition,
                    position=out_of_range[partition],
                    restarted_at=offset,
                )
                self._ledgers[partition] = OffsetLedger(offset)
                self._data.seek(partition, offset)

    async def _watched(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run background work; an exception ends the consumer (`failed`)."""
        try:
            await work()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, (KafkaError, OSError)):
            error = broker_error(self._kafka, "read lanes", error)
        log.error("consumer_failed", member=self._member, error=repr(error))
        if not self.failed.done():
            self.failed.set_exception(error)
