"""Finds records that crash their owner: counts crashes per partition, tries suspects alone, then refuses.

The count is in the metadata of a partition's committed offset, so it survives the process and its host. Each crash of
an owner adds the log end that the successor finds. A record that is not done and lies below n of these log ends was in
the log at n crashes.

    owner crashes ─► log end added ─► … ─► limit - 1 log ends: records are handed out one at a time, each noted
                                           before ─► owner crashes again: the noted record is refused

A broker without commit metadata (the embedded one) counts nothing: every owner looks like the first one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import structlog
from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from relaygr_stream.bus.lane_reader import LaneReader, OffsetLedger
from relaygr_stream.bus.membership import Membership
from relaygr_stream.wire.records import Record

log = structlog.get_logger(__name__)

#: The time limit of counting. It takes milliseconds, and a lane must not wait longer for it.
NOTE_S: Final = 1.0
#: The pause before a note that was not committed is tried again.
RETRY_S: Final = 0.1
#: The first word of a mark. A mark must fit into 4096 B (offset.metadata.max.bytes): 100 offsets of 19 digits do.
_WORD: Final = "relaygr-owner"


@dataclass(frozen=True, slots=True)
class Mark:
    """The metadata that an owner commits with the offset of a lane.

    open: the owner has not left in order (yet). hand: 1 + the offset of the record that is handed out alone; 0: none.
    log_ends: the log end after each crash of a former owner, ascending, if records below it are not done.
    """

    open: bool = True
    hand: int = 0
    log_ends: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The mark as metadata of an offset."""
        numbers = ",".join(map(str, self.log_ends))
        return f"{_WORD} {'open' if self.open else 'left'} {self.hand} {numbers}".rstrip()


def parse(text: str | None) -> Mark | None:
    """The mark in a text of `Mark.text`; None for any other text, for example of another program."""
    words = (text or "").split(" ")
    if len(words) not in (3, 4) or words[0] != _WORD or words[1] not in ("open", "left"):
        return None
    numbers = ",".join(words[2:]).split(",")
    if not all(number.isascii() and number.isdecimal() and len(number) < 20 for number in numbers):
        return None
    hand, *log_ends = map(int, numbers)
    return Mark(words[1] == "open", hand, tuple(sorted(log_ends)))


def succeed(before: Mark | None, committed: int, log_end: int, limit: int) -> tuple[Mark, int]:
    """The mark of a lane's next owner, and the offset below which it must refuse records.

    A record is refused only if `limit` owners crashed while it was in the log and not done, and it was handed out alone
    at the last crash. So a record that crashes each of its owners is refused after `limit` crashes, unless another
    record crashes them too. An owner that leaves in order adds no log end; its undone records stay as suspect.
    """
    if before is None:
        return Mark(), committed
    log_ends = tuple(end for end in before.log_ends if end > committed)
    if before.open and log_end > committed:
        log_ends = (*log_ends, max(log_end, *log_ends, 0))[-limit:]
    alone = before.open and committed < before.hand
    refused = alone and sum(before.hand <= end for end in log_ends) >= limit
    return Mark(log_ends=log_ends), before.hand if refused else committed


class CrashingUser(Protocol):
    """Takes the records that crash, or may crash, their owner."""

    def on_suspect(self, record: Record) -> None:
        """Take a record that is handed out alone. It is done only when nothing is left to do at it, since the next one
        is blamed for a crash after that."""

    def on_crashed(self, record: Record) -> None:
        """Get a record done that crashed so many owners in a row; it must not be run."""


@dataclass(frozen=True)
class Crashes:
    """The counting of crashes on `topics`, whose records `user` takes: of `limit` owners in a row."""

    topics: Sequence[str]
    limit: int
    user: CrashingUser


class Suspects:
    """Counts the crashes of the owners of this member's lanes, and hands out suspect records alone.

    Partitions are (topic, lane).
    """

    def __init__(self, crashes: Crashes, membership: Membership, reader: LaneReader) -> None:
        self._crashes = crashes
        self._membership = membership
        self._reader = reader
        self._ledgers = reader.ledgers
        self._marks: dict[tuple[str, int], Mark] = {}
        self._refused_below: dict[tuple[str, int], int] = {}
        self._waiting: asyncio.Queue[Record] = asyncio.Queue()
        self._changed = asyncio.Event()

    async def take_over(self, started: Mapping[tuple[str, int], int]) -> None:
        """Read the marks of these partitions' former owners, and commit new ones. Call it before handing out records.

        started: the start offset of each partition; those of other topics are ignored. It takes at most NOTE_S;
        partitions not read and committed by then are not counted.
        """
        committed = {each: offset for each, offset in started.items() if each[0] in self._crashes.topics}
        for each, offset in committed.items():
            self._marks[each], self._refused_below[each] = Mark(), offset
        try:
            async with asyncio.timeout(NOTE_S):
                texts = await self._membership.metadata(committed)
                before = {each: parse(texts.get(each)) for each in committed}
                killed = [each for each, mark in before.items() if mark is not None and mark.open]
                ends = await self._log_ends(killed)
                for each, offset in committed.items():
                    self._marks[each], self._refused_below[each] = succeed(
                        before[each], offset, ends.get(each, offset), self._crashes.limit
                    )
                if killed:
                    counts = {f"{topic} {lane}": len(self._marks[topic, lane].log_ends) for topic, lane in killed}
                    log.warning("former owners were killed", lanes=counts)
                await self._membership.commit_now(
                    {each: (offset, self._marks[each].text) for each, offset in committed.items()}
                )
        except (TimeoutError, KafkaError) as error:
            lanes = sorted({lane for _, lane in committed})
            log.warning("crashes of former owners are not counted", lanes=lanes, error=repr(error))

    def note(self, topic: str, lane: int, *, leaving: bool) -> str:
        """The metadata to commit with a partition's offset. leaving: this member may lose the lane after the commit."""
        mark = self._marks.get((topic, lane))
        if mark is None:
            return ""
        return replace(mark, open=False, hand=0).text if leaving else mark.text

    def set_apart(self, record: Record) -> bool:
        """Refuse the record, or queue it for `hand_out` if it is suspect. Returns False if it is neither."""
        partition = (record.topic, record.lane)
        if record.topic not in self._crashes.topics:
            return False
        log_ends = self._marks[partition].log_ends
        if record.offset < self._refused_below[partition]:
            self._crashes.user.on_crashed(record)
        elif len(log_ends) >= self._crashes.limit - 1 and record.offset < log_ends[-1]:
            self._waiting.put_nowait(record)
            self._reader.client.pause(TopicPartition(*partition))  # the rest of the log may not fit in memory
        else:
            return False
        return True

    def restarted(self, topic: str, lane: int, offset: int) -> None:
        """The lane's log begins anew: what was known of its offsets says nothing of the records that have them now."""
        if topic in self._crashes.topics:
            self._marks[topic, lane], self._refused_below[topic, lane] = Mark(), offset
            self.changed()  # the ledger of a record that is handed out alone is gone

    def changed(self) -> None:
        """Wake `hand_out` after a record is done or a lane is lost."""
        self._changed.set()

    async def hand_out(self) -> None:
        """Hand out the queued records for ever, one at a time over all partitions: two would be blamed for a crash."""
        while True:
            record = await self._waiting.get()
            partition = (record.topic, record.lane)
            ledger = self._ledgers.get(partition)
            if ledger is not None and ledger.has(record.offset):
                try:
                    if await self._noted(record, ledger, record.offset + 1):
                        self._crashes.user.on_suspect(record)
                except asyncio.CancelledError:  # the process ends, whyever: this record has not run
                    self._marks[partition] = replace(self._marks[partition], hand=0)
                    raise
                while self._ledgers.get(partition) is ledger and ledger.has(record.offset):
                    self._changed.clear()
                    await self._changed.wait()
                await self._noted(record, ledger, 0)  # else a later crash would be blamed on the record
            if self._waiting.empty():
                client = self._reader.client
                client.resume(*(each for each in client.assignment() if each in self._marks and each in self._ledgers))

    async def _noted(self, record: Record, ledger: OffsetLedger, hand: int) -> bool:
        """Commit the mark with `hand`, and retry until it succeeds. Returns False if the lane is lost."""
        partition = (record.topic, record.lane)
        while self._ledgers.get(partition) is ledger:
            self._marks[partition] = mark = replace(self._marks[partition], hand=hand)
            try:
                async with asyncio.timeout(NOTE_S):
                    if await self._membership.commit_now({partition: (ledger.committable, mark.text)}):
                        return self._ledgers.get(partition) is ledger
            except TimeoutError:
                log.warning(
                    "a suspect record waits",
                    topic=record.topic,
                    lane=record.lane,
                    offset=record.offset,
                    why="no coordinator answers",
                )
            await asyncio.sleep(RETRY_S)
        return False

    async def _log_ends(self, which: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        partitions = [TopicPartition(*each) for each in which]
        ends = await self._reader.client.end_offsets(partitions) if partitions else {}
        return {(each.topic, each.partition): int(end) for each, end in ends.items()}
