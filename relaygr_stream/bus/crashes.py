"""Records that end the process which works at them: counted per lane, tried alone, and at last handed out no more.

The count is the metadata of the lane's committed offset, so that it survives the process and its host. Each end of an
owner that did not leave in order adds the end of the log as its successor finds it. A record below `limit` of these
log ends, and not done, was there at as many ends.

    owner killed ─► log end added ─► … ─► limit - 1 of them: what the log holds is handed out one at a time, each
                                          noted before ─► killed again: the record noted is handed out no more

A broker that keeps no metadata (the embedded one) makes every owner the first one: nothing is counted there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from relaygr_stream.bus.membership import Membership
from relaygr_stream.wire.records import Record

# What of one topic's lane was read, what is done, and therefore what may be committed. Knows nothing of Kafka.


class OffsetLedger:
    """Read and done offsets of one partition, from the offset at which this owner started.

    `committable` never passes a record that was read and is not done, at any interleaving. A ledger lives as long as
    the lane is owned without a break; the next ownership gets a new one, so that a record of the former ownership
    that is done late counts for nothing, unless it was read anew.
    """

    __slots__ = ("_order", "_position", "_undone")

    def __init__(self, start: int) -> None:
        self._position = start
        self._order: deque[int] = deque()  # offsets read, ascending, from the first undone one on
        self._undone: set[int] = set()

    @property
    def position(self) -> int:
        """The next offset to be read."""
        return self._position

    @property
    def undone(self) -> int:
        """Records read and not done."""
        return len(self._undone)

    @property
    def committable(self) -> int:
        """Every record below this offset that was read is done: what a next owner may start from."""
        return self._order[0] if self._order else self._position

    def has(self, offset: int) -> bool:
        """The record was read and is not done."""
        return offset in self._undone

    def read(self, offset: int) -> bool:
        """Note that a record was read; False if it was read before, and must not be handed out again.

        Offsets ascend, with gaps where the topic is compacted.
        """
        if offset < self._position:
            return False
        self._position = offset + 1
        self._order.append(offset)
        self._undone.add(offset)
        return True

    def done(self, offset: int) -> bool:
        """Note that a record needs no more work; False if it is not one of ours, or was done already."""
        if offset not in self._undone:
            return False
        self._undone.remove(offset)
        while self._order and self._order[0] not in self._undone:
            self._order.popleft()
        return True


log = structlog.get_logger(__name__)

#: A lane is not kept waiting longer than this for what is only counted; reading and noting takes milliseconds.
NOTE_S: Final = 1.0
#: How long before a note that was not committed is tried again.
RETRY_S: Final = 0.1
#: Before the rest of a mark. All of it has to fit 4096 B (offset.metadata.max.bytes): 100 offsets of 19 digits do.
_WORD: Final = "relaygr-owner"


@dataclass(frozen=True, slots=True)
class Mark:
    """What an owner leaves with the committed offset of a lane.

    open: it has not left in order (yet). hand: one more than the offset of the record in hand alone; 0: none is.
    log_ends: of each owner before that ended in disorder, ascending, where records below it are not done.
    """

    open: bool = True
    hand: int = 0
    log_ends: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """As metadata of an offset."""
        numbers = ",".join(map(str, self.log_ends))
        return f"{_WORD} {'open' if self.open else 'left'} {self.hand} {numbers}".rstrip()


def parse(text: str | None) -> Mark | None:
    """What `Mark.text` wrote; None for anything else, such as what another program left there."""
    words = (text or "").split(" ")
    if len(words) not in (3, 4) or words[0] != _WORD or words[1] not in ("open", "left"):
        return None
    numbers = ",".join(words[2:]).split(",")
    if not all(number.isascii() and number.isdecimal() and len(number) < 20 for number in numbers):
        return None
    hand, *log_ends = map(int, numbers)
    return Mark(words[1] == "open", hand, tuple(sorted(log_ends)))


def succeed(before: Mark | None, committed: int, log_end: int, limit: int) -> tuple[Mark, int]:
    """The mark of a lane's next owner, and the offset below which records are not to be handed out.

    A record is refused only if `limit` owners ended in disorder while it was in the log and not done, and it was in
    hand alone at the last of these ends. A record that ends each of its owners is refused after `limit` of them,
    unless another one ends them too. To leave in order adds nothing; what it leaves undone is as suspect as before.
    """
    if before is None:
        return Mark(), committed
    log_ends = tuple(end for end in before.log_ends if end > committed)
    if before.open and log_end > committed:
        log_ends = (*log_ends, max(log_end, *log_ends, 0))[-limit:]
    alone = before.open and committed < before.hand
    refused = alone and sum(before.hand <= end for end in log_ends) >= limit
    return Mark(log_ends=log_ends), before.hand if refused else committed


@dataclass(frozen=True)
class Crashes:
    """Of `topic`, a record at which `limit` owners in a row ended goes to on_crashed; that must see to it that the
    record is done."""

    topic: str
    limit: int
    on_crashed: Callable[[Record], None]


class Suspects:
    """Counts the ends of the owners of our lanes, and hands out alone what may have been their cause.

    ledgers, client(): of the consumer that owns this. on_records: as for the consumer. topic: the one that is counted.
    """

    def __init__(
        self,
        crashes: Crashes,
        membership: Membership,
        ledgers: Mapping[tuple[str, int], OffsetLedger],
        client: Callable[[], Any],
        on_records: Callable[[list[Record]], None],
    ) -> None:
        self.topic = crashes.topic
        self._crashes = crashes
        self._membership = membership
        self._ledgers = ledgers
        self._client = client
        self._on_records = on_records
        self._marks: dict[int, Mark] = {}
        self._refused_below: dict[int, int] = {}
        self._waiting: asyncio.Queue[Record] = asyncio.Queue()
        self._changed = asyncio.Event()

    async def take_over(self, committed: Mapping[int, int]) -> None:
        """Learn how the owners of these lanes ended, and note that each has one now: before any record is handed out.

        committed: where each lane starts. Takes NOTE_S at most; what is not known or noted by then is not counted.
        """
        topic, limit = self._crashes.topic, self._crashes.limit
        for lane, offset in committed.items():
            self._marks[lane], self._refused_below[lane] = Mark(), offset
        try:
            async with asyncio.timeout(NOTE_S):
                texts = await self._membership.metadata(topic, committed)
                before = {lane: parse(texts.get(lane)) for lane in committed}
                killed = [lane for lane, mark in before.items() if mark is not None and mark.open]
                ends = await self._log_ends(killed)
                for lane, offset in committed.items():
                    end = ends.get(lane, offset)
                    self._marks[lane], self._refused_below[lane] = succeed(before[lane], offset, end, limit)
                if killed:
                    log.warning("owners_killed", lanes={lane: len(self._marks[lane].log_ends) for lane in killed})
                await self._membership.commit_now(
                    {(topic, lane): (offset, self._marks[lane].text) for lane, offset in committed.items()}
                )
        except (TimeoutError, KafkaError) as error:
            log.warning("owners_not_counted", topic=topic, lanes=sorted(committed), error=repr(error))

    def note(self, topic: str, lane: int, *, leaving: bool) -> str:
        """What to commit beside the offset of a partition. leaving: the lane may be another's right after."""
        mark = self._marks.get(lane)
        if topic != self._crashes.topic or mark is None:
            return ""
        return replace(mark, open=False, hand=0).text if leaving else mark.text

    def set_apart(self, record: Record) -> bool:
        """True: not to be handed out with others; the record is refused, or waits until `hand_out` comes to it."""
        if record.topic != self._crashes.topic:
            return False
        log_ends = self._marks[record.lane].log_ends
        if record.offset < self._refused_below[record.lane]:
            self._crashes.on_crashed(record)
        elif len(log_ends) >= self._crashes.limit - 1 and record.offset < log_ends[-1]:
            self._waiting.put_nowait(record)
            self._client().pause(TopicPartition(record.topic, record.lane))  # the log may hold more than memory does
        else:
            return False
        return True

    def changed(self) -> None:
        """Tell that a record is done, or a lane lost."""
        self._changed.set()

    async def hand_out(self) -> None:
        """Hand out, for ever, what waits: one record of all our lanes at a time, or two would be blamed for one end."""
        while True:
            record = await self._waiting.get()
            partition = (record.topic, record.lane)
            ledger = self._ledgers.get(partition)
            if ledger is not None and ledger.has(record.offset):
                if await self._noted(record, ledger, record.offset + 1):
                    self._on_records([record])
                while self._ledgers.get(partition) is ledger and ledger.has(record.offset):
                    self._changed.clear()
                    await self._changed.wait()
                await self._noted(record, ledger, 0)  # or an end from now on is still blamed on the record
            if self._waiting.empty():
                client = self._client()
                ours = {each for each in client.assignment() if each.topic == record.topic and each in self._ledgers}
                client.resume(*ours)

    async def _noted(self, record: Record, ledger: OffsetLedger, hand: int) -> bool:
        """Note what is in hand of a lane, however long that takes; False: the lane was lost."""
        partition = (record.topic, record.lane)
        while self._ledgers.get(partition) is ledger:
            self._marks[record.lane] = mark = replace(self._marks[record.lane], hand=hand)
            try:
                async with asyncio.timeout(NOTE_S):
                    if await self._membership.commit_now({partition: (ledger.committable, mark.text)}):
                        return self._ledgers.get(partition) is ledger
            except TimeoutError:
                log.warning("suspect_waits", lane=record.lane, offset=record.offset, why="no coordinator answers")
            await asyncio.sleep(RETRY_S)
        return False

    async def _log_ends(self, lanes: Iterable[int]) -> dict[int, int]:
        partitions = [TopicPartition(self._crashes.topic, lane) for lane in lanes]
        ends = await self._client().end_offsets(partitions) if partitions else {}
        return {partition.partition: int(end) for partition, end in ends.items()}
