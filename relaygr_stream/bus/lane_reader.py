"""The data plane: reads the lanes that this member owns from manually assigned partitions.

When the group rebalances, only lanes that changed their owner stop or start; a kept lane continues at its position.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from relaygr_stream.bus.aiokafka_compat import broker_error, client_options, read
from relaygr_stream.bus.fetch_sessions import fetched_s
from relaygr_stream.bus.renewed import ClientUser, Renewed
from relaygr_stream.bus.unreadable import pass_unreadable
from relaygr_stream.errors import BrokerError, BrokerUnavailable
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record

log = structlog.get_logger(__name__)

#: Largest answer to a fetch (or one message). asyncio copies its bytes several times, which is fastest if they fit the
#: processor's cache: 28,000 events of 26 KB a second with 4 MiB, 21,000 with aiokafka's 50 MiB, 16,000–21,000 with
#: 1 MiB.
FETCH_BYTES: Final = 4 * 1024 * 1024
#: How often to look whether to read on.
STANDSTILL_S: Final = 0.05
#: The broker of a log that begins anew answers within milliseconds; until it does, no lane is read.
RESTART_S: Final = 1.0
#: A broker answers each fetch within the fetch wait. It counts as unavailable if it is silent for this much longer.
SILENT_S: Final = 3.0


class OffsetLedger:
    """Read and done offsets of one partition, from the offset at which this owner started.

    `committable` never passes a record that was read and is not done, in any order of calls. A ledger lives while the
    lane is owned without a break. The next ownership gets a new ledger, so a record of the former ownership that is
    done late has no effect, unless it was read again.
    """

    __slots__ = ("_position", "_undone")

    def __init__(self, start: int) -> None:
        self._position = start
        self._undone: OrderedDict[int, None] = OrderedDict()  # ascending; a plain dict's first key is O(deletions)

    @property
    def position(self) -> int:
        """The next offset to read."""
        return self._position

    @property
    def undone(self) -> int:
        """The number of records read and not done."""
        return len(self._undone)

    @property
    def committable(self) -> int:
        """The offset at which the next owner may start: every record read below it is done."""
        return next(iter(self._undone), self._position)

    def has(self, offset: int) -> bool:
        """Whether the record was read and is not done."""
        return offset in self._undone

    def read(self, offset: int) -> bool:
        """Mark a record as read. Returns False if it was read before, and must not be handed out again.

        Offsets ascend, with gaps where the topic is compacted.
        """
        if offset < self._position:
            return False
        self._position = offset + 1
        self._undone[offset] = None
        return True

    def passed(self, position: int) -> None:
        """No record to hand out is below this position: a transaction's marker, or a gap, may be."""
        self._position = max(self._position, position)

    def done(self, offset: int) -> bool:
        """Mark a record as done. Returns False if it was not read by this owner, or is done already."""
        if offset not in self._undone:
            return False
        del self._undone[offset]
        return True


class ReadingPlane(Protocol):
    """Whose lanes a LaneReader reads."""

    @property
    def progressing(self) -> bool:
        """Whether to read more now."""

    def on_read(self, records: list[Record]) -> None:
        """Take new records, all at once, since unread partitions block the others."""

    def restarted(self, topic: str, lane: int, offset: int) -> None:
        """The lane's log begins anew, and is read from this offset."""

    def fail(self, error: BaseException) -> None:
        """Reading cannot be resumed."""


class LaneReader(ClientUser):
    """Hands out the records of some lanes to `plane`, in order per topic and lane."""

    gives_up = True

    def __init__(
        self, kafka: Kafka, topics: Sequence[str], member: str, plane: ReadingPlane, *, check_crcs: bool
    ) -> None:
        self._kafka = kafka
        self._topics = topics
        self._member = member
        self._plane = plane
        self._check_crcs = check_crcs
        self._renewed = Renewed(kafka, "the lanes' reader", self)
        self.lanes: frozenset[int] = frozenset()
        self.ledgers: Final[dict[tuple[str, int], OffsetLedger]] = {}
        self._since_s = 0.0  # monotonic time since when brokers are to answer: the lanes changed
        self._reading = asyncio.Event()  # set while there are lanes to read
        self._halted = False

    @property
    def client(self) -> Any:
        """The aiokafka consumer of this moment."""
        return self._renewed.client

    @property
    def trouble(self) -> str | None:
        """The part that has ended and is being replaced; no lane is read meanwhile. None if all is well."""
        return self._renewed.trouble

    @property
    def answered(self) -> bool:
        """Whether a broker has answered lately."""
        heard_s = max(self._since_s, fetched_s(self.client))
        return time.monotonic() - heard_s < SILENT_S + self._kafka.fetch_max_wait_ms / 1000

    @property
    def undone(self) -> int:
        """The number of records handed out and not done, over all lanes."""
        return sum(ledger.undone for ledger in self.ledgers.values())

    @property
    def uncommitted(self) -> int:
        """The number of offsets read and not committable, over all lanes: one record that is not done holds back all
        behind it."""
        return sum(ledger.position - ledger.committable for ledger in self.ledgers.values())

    def ledger(self, topic: str, lane: int) -> OffsetLedger:
        """The ledger of an owned partition, as far as its log was read. Raises KeyError for another lane.

        A log that ends with the marker of a transaction has no record there: without the consumer's own position, the
        lane would lag behind such an end for ever.
        """
        ledger, partition = self.ledgers[topic, lane], TopicPartition(topic, lane)
        client = self._renewed.client
        if client is not None and self.trouble is None and not self._halted:
            # aiokafka's public method awaits. What `read` returned was handed out at once, so nothing is in between.
            read = client._subscription.subscription
            if read is not None and read.assignment is not None and partition in read.assignment.tps:
                state = read.assignment.state_value(partition)
                if state.has_valid_position and not state.paused:
                    ledger.passed(state.position)
        return ledger

    async def start(self) -> None:
        """Connect, without lanes. Raises BrokerUnavailable, BrokerError."""
        await self._renewed.start()

    async def stop(self) -> None:
        """Disconnect; the lanes and their ledgers stay."""
        self._halted = True
        await self._renewed.stop()

    def expect(self) -> None:
        """Lanes are about to be gained: a silent broker is noticed from now on."""
        self._since_s = time.monotonic()

    def add(self, offsets: Mapping[int, Sequence[int]]) -> None:
        """Read these lanes too. offsets: lane → the start offset of each topic."""
        for lane, starts in offsets.items():
            for topic, offset in zip(self._topics, starts, strict=True):
                self.ledgers[topic, lane] = OffsetLedger(offset)
        self.lanes |= frozenset(offsets)

    def resume(self) -> None:
        """Assign the owned lanes, each at its position. It does not await, so no record is lost."""
        self._assign(self.client)
        self._reading.set()

    def drop(self, lanes: frozenset[int]) -> None:
        """Read these lanes no more; their records are not handed out after this."""
        if not self._halted:
            # Pause only: a new assignment of the rest would abort the fetch in which the kept lanes wait.
            self.client.pause(*(TopicPartition(topic, lane) for lane in lanes for topic in self._topics))
        for topic in self._topics:
            for lane in lanes:
                del self.ledgers[topic, lane]
        self.lanes -= lanes
        if not self.lanes:
            self._reading.clear()

    def halt(self) -> None:
        """Read nothing more; the lanes and their ledgers stay."""
        self._halted = True
        self._reading.clear()
        self.client.assign([])

    async def run(self) -> None:
        """Read for ever; after a refusal, with a new client. Raises what ends reading."""
        while True:
            await self._reading.wait()
            if not self._plane.progressing:  # what is read waits in memory, and the member keeps its lanes for seconds
                await asyncio.sleep(STANDSTILL_S)
                continue
            client = self.client
            try:
                records = await read(client)
            except OffsetOutOfRangeError as error:
                await self._restart_lane(error.args[0])
                continue
            except (KafkaError, OSError) as error:
                await self._refused(client, error)
                continue
            self._hand_out(records)

    async def _refused(self, client: Any, error: KafkaError | OSError) -> None:
        """Replace a client that was refused: a grant may be back in a moment. Refusals in a row end reading."""
        if client is self.client:
            typed = broker_error(self._kafka, "read lanes", error)
            self._renewed.renew(str(typed), type(typed))
        with suppress(BrokerUnavailable):  # `trouble` reports it
            await self._renewed.present()

    def _hand_out(self, records: list[Record]) -> None:
        """Hand out the new records of owned lanes in order. After a seek, some records arrive a second time."""
        new = []
        for record in records:
            ledger = self.ledgers.get((record.topic, record.lane))
            if ledger is not None and ledger.read(record.offset):
                new.append(record)
        if new:
            self._plane.on_read(new)

    async def _restart_lane(self, out_of_range: dict[TopicPartition, int]) -> None:
        """Restart at the earliest offset: the log was truncated, expired or recreated, so the offset is not in it.

        If its broker is away again, the next fetch of the lane says the same. No lane is read meanwhile, for RESTART_S.
        """
        try:
            async with asyncio.timeout(RESTART_S):
                earliest = await self.client.beginning_offsets(list(out_of_range))
        except (TimeoutError, KafkaError) as error:
            log.warning(
                "the beginning of a lane's log is not known yet",
                lanes=[each.partition for each in out_of_range],
                error=repr(error),
            )
            return
        for partition, offset in earliest.items():
            if partition in self.ledgers and not self._halted:
                log.warning(
                    "the offset is not in the log",
                    topic=partition.topic,
                    lane=partition.partition,
                    position=out_of_range[partition],
                    restarted_at=offset,
                )
                self.ledgers[partition] = OffsetLedger(offset)
                self._plane.restarted(partition.topic, partition.partition, offset)
                self.client.seek(partition, offset)

    def make_client(self) -> Any:
        """A new aiokafka consumer, not started."""
        return AIOKafkaConsumer(
            **client_options(self._kafka, self._member),
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",  # see _restart_lane
            fetch_max_wait_ms=self._kafka.fetch_max_wait_ms,
            fetch_max_bytes=FETCH_BYTES,
            check_crcs=self._check_crcs,
        )

    async def begin_client(self, client: Any) -> None:
        """Assign the owned lanes to a new consumer. It does not await, since the consumer takes over right after."""
        pass_unreadable(client)
        if self.lanes and not self._halted:
            self._assign(client)

    def give_up_client(self, error: BrokerError) -> None:
        """Reading cannot be resumed."""
        self._plane.fail(error)

    def _assign(self, data: Any) -> None:
        partitions = [TopicPartition(topic, lane) for lane in sorted(self.lanes) for topic in self._topics]
        data.assign(partitions)
        for partition in partitions:
            data.seek(partition, self.ledgers[partition].position)
        self._since_s = time.monotonic()
