"""The two-plane consumer: a lane keeps reading while other lanes move.

The membership plane (membership.py) decides which lanes this member owns, the data plane (lane_reader.py) reads them.
This module tells each what the other has to know, and counts crashes between the two (crashes.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol, Self

import structlog
from aiokafka.errors import KafkaError

from relaygr_stream.bus.aiokafka_compat import broker_error
from relaygr_stream.bus.crashes import Crashes, Suspects
from relaygr_stream.bus.lane_reader import LaneReader
from relaygr_stream.bus.loads import LaneLoads
from relaygr_stream.bus.membership import Membership
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.telemetry.background import Background
from relaygr_stream.wire.records import Record

log = structlog.get_logger(__name__)

#: Lanes gained together start together, but no lane waits longer than this for the offsets of another.
TOGETHER_S: Final = 0.1
#: The interval of measurements of the lanes' loads.
MEASURE_S: Final = 5.0


class LaneUser(Protocol):
    """Who takes the records of its lanes. It is called on the loop and must be quick; an exception ends the consumer
    (`failed`)."""

    @property
    def progressing(self) -> bool:
        """False while the process is stuck; after kafka.max_poll_interval_ms the lanes go to other members, and they
        return when the process makes progress."""

    def on_records(self, records: list[Record]) -> None:
        """Take new records, in order per topic and lane, all at once, since unread partitions block the others."""

    def on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> None:
        """Handle a change of lanes: just before the first record of a gained one, and when one is lost.

        A lane that another member owned for a moment is first lost, then gained.
        """


class LaneConsumer:
    """Reads the lanes that a group assigns to this member, and commits the offsets of records that are done.

    topics: full names; partition p of each is lane p. user: takes the records.
    capacity: this member's weight in the assignment. check_crcs: whether to verify the producer's checksum of each
    batch. crashes: whether to count crashes of owners, and who takes a record that caused too many.
    """

    def __init__(
        self,
        kafka: Kafka,
        *,
        topics: Sequence[str],
        group: str,
        member: str,
        user: LaneUser,
        capacity: float = 1.0,
        check_crcs: bool = True,
        crashes: Crashes | None = None,
    ) -> None:
        self._kafka = kafka
        self._topics = tuple(topics)
        self._member = member
        self._user = user
        self._membership = Membership(
            kafka, topics=self._topics, group=group, member=member, capacity=capacity, owner=self
        )
        self._reader = LaneReader(kafka, self._topics, member, self, check_crcs=check_crcs)
        self._suspects = None if crashes is None else Suspects(crashes, self._membership, self._reader)
        self._loads = LaneLoads()
        self.speed = 0.0  # stated to the group once lanes are busy (MemberClaim)
        self._taking = False  # lanes and their records: from `start` until `drain` or `stop`
        self._in_order = True
        self._drained: asyncio.Event | None = None
        self._background: Final = _Work(kafka, member)
        self._starting: asyncio.Task[None] | None = None

    @property
    def lanes(self) -> frozenset[int]:
        """The lanes that this member reads now."""
        return self._reader.lanes

    @property
    def failed(self) -> asyncio.Future[None]:
        """A future that completes, with the error, only if the consumer fails. Wait on it beside other conditions."""
        return self._background.failed

    @property
    def trouble(self) -> str | None:
        """Why lanes are not read as they should be: the reader is being replaced, or the group has members that are not
        of this program. None if all is well."""
        return self._reader.trouble or self._membership.strangers or None

    @property
    def healthy(self) -> bool:
        """Whether the consumer runs and a broker answers it, for readiness. False while it drains."""
        if not self._taking or self.failed.done() or self.trouble:
            return False
        if not self._reader.lanes and (self._starting is None or self._starting.done()):
            return True  # no lanes are assigned, so there is no signal either way
        return self._reader.answered

    @property
    def undone(self) -> int:
        """The number of records handed out and not done, over all lanes."""
        return self._reader.undone

    @property
    def uncommitted(self) -> int:
        """The number of offsets read and not committable, over all lanes: one record that is not done holds back all
        behind it."""
        return self._reader.uncommitted

    def done(self, record: Record) -> None:
        """Mark the record as done. No effect if its lane is lost, or if it is done already."""
        ledger = self._reader.ledgers.get((record.topic, record.lane))
        if ledger is not None:
            ledger.done(record.offset)
        if self._suspects is not None:
            self._suspects.changed()
        self._note_drained()

    def position(self, topic: str, lane: int) -> int:
        """The next offset to read of an owned lane. Raises KeyError for another lane."""
        return self._reader.ledger(topic, lane).position

    async def start(self, warm: Sequence[int] = ()) -> None:
        """Join the group; returns with the first assignment. warm: lanes to ask for first, as far as lanes move.

        Raises BrokerUnavailable, BrokerError, ConfigError.
        """
        self._taking = True
        try:
            await self._reader.start()
            await self._membership.start(warm)
        except BaseException:
            await self.stop()
            raise
        plane = self._membership
        works = [self._reader.run, plane.poll, plane.commit, plane.look, self._measure]
        if self._suspects is not None:
            works.append(self._suspects.hand_out)
        for work in works:
            self._background.start(work())

    def rebalance(self) -> None:
        """Ask the group for another assignment, by the loads of now, if the last one is older than a session timeout. A
        lane that stays is read on."""
        self._membership.rebalance()

    async def drain(self, timeout_s: float) -> bool:
        """Stop reading, stay a member without new lanes, and wait until every record handed out is done.

        Returns False if some are not done within timeout_s.
        """
        self._taking = False
        self._membership.draining()
        self._cancel_start()
        self._reader.halt()
        if self.undone:
            self._drained = asyncio.Event()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._drained.wait()
        return self.undone == 0

    async def stop(self, *, in_order: bool = True) -> None:
        """Stop reading, commit, and leave the group at once. Call `drain` first to finish the records handed out.

        in_order: False if a record may have caused the end, which then counts as a crash.
        """
        self._taking = False
        self._in_order = in_order
        self._cancel_start()
        await self._background.end()
        await self._membership.stop()
        await self._reader.stop()
        self._drop(self._reader.lanes)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _measure(self) -> None:
        """Measure the lanes' loads, for ever, and state them."""
        while True:
            positions = {lane: sum(self.position(topic, lane) for topic in self._topics) for lane in self.lanes}
            self._loads.note(positions, time.monotonic())
            self._membership.measured(self._loads.levels, self.speed if self._loads.telling else 0.0)
            await asyncio.sleep(MEASURE_S)

    def _cancel_start(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            self._starting = None

    async def _begin(self, lanes: frozenset[int]) -> None:
        """Start reading lanes, each as soon as the offsets of all its topics are known."""

        async def start_offsets(lane: int) -> tuple[int, list[int] | None]:
            found = [await self._membership.start_offset(topic, lane) for topic in self._topics]
            offsets = [offset for offset in found if offset is not None]
            return lane, offsets if len(offsets) == len(found) else None  # None: the lane is lost

        async with asyncio.TaskGroup() as group:
            # A partition without a leader delays its own lane only.
            pending = {group.create_task(start_offsets(lane)) for lane in lanes}
            while pending:
                done, pending = await asyncio.wait(pending, timeout=TOGETHER_S)
                known = {lane: found for lane, found in (task.result() for task in done) if found is not None}
                if not known:
                    continue
                if self._suspects is not None:
                    await self._suspects.take_over(
                        {
                            (topic, lane): offset
                            for lane, offsets in known.items()
                            for topic, offset in zip(self._topics, offsets, strict=True)
                        }
                    )
                self._reader.add(known)
                self._user.on_lanes(frozenset(known), frozenset())
                self._reader.resume()

    def _drop(self, lanes: frozenset[int]) -> None:
        self._reader.drop(lanes)
        if self._suspects is not None:
            self._suspects.changed()
        self._note_drained()
        if lanes:
            self._user.on_lanes(frozenset(), lanes)

    def _note_drained(self) -> None:
        if self._drained is not None and not self.undone:
            self._drained.set()

    # ---- called by the two planes ----

    @property
    def progressing(self) -> bool:
        """Whether the process makes progress."""
        return self._user.progressing

    def on_assigned(self, lanes: frozenset[int], *, continuous: bool) -> None:
        """Handle a new assignment: drop lost lanes now, start gained lanes as soon as their offsets are known."""
        self._cancel_start()
        kept = self._reader.lanes & lanes if continuous else frozenset()
        try:
            self._drop(self._reader.lanes - kept)
        except Exception as error:  # aiokafka would only log it
            self.fail(error)
        if lanes != kept and self._taking:
            self._reader.expect()
            self._starting = self._background.start(self._begin(lanes - kept))

    def on_read(self, records: list[Record]) -> None:
        """Hand out what was read; suspects alone, later."""
        if self._suspects is not None:
            records = [record for record in records if not self._suspects.set_apart(record)]
        if records:
            self._user.on_records(records)

    def restarted(self, topic: str, lane: int, offset: int) -> None:
        """The lane's log begins anew at this offset."""
        if self._suspects is not None:
            self._suspects.restarted(topic, lane, offset)

    def committable(self, *, leaving: bool) -> dict[tuple[str, int], tuple[int, str]]:
        """The offset and metadata to commit for each owned partition. leaving: the lanes may be lost behind that."""
        suspects, leaving = self._suspects, leaving and self._in_order
        return {
            each: (
                self._reader.ledger(*each).committable,
                "" if suspects is None else suspects.note(*each, leaving=leaving),
            )
            for each in self._reader.ledgers
        }

    def fail(self, error: BaseException) -> None:
        """End the consumer by this error (`failed`)."""
        self._background.fail(error)


class _Work(Background):
    """The consumer's background work. A failure is logged, and is a BrokerError where a broker causes it."""

    def __init__(self, kafka: Kafka, member: str) -> None:
        super().__init__()
        self._kafka = kafka
        self._member = member

    def fail(self, error: BaseException) -> None:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, (KafkaError, OSError)):
            error = broker_error(self._kafka, "read lanes", error)
        log.error("the lanes' reader failed", member=self._member, error=repr(error))
        super().fail(error)
