"""What a lane's owners leave beside its offset, over any sequence of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaTimeoutError, OffsetOutOfRangeError
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.bus import lane_reader
from relaygr_stream.bus.crashes import Crashes, Mark, Suspects, parse, succeed
from relaygr_stream.bus.lane_reader import LaneReader, OffsetLedger
from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record
from tests.waiting import until

LIMITS = st.integers(2, 5)
OFFSETS = st.integers(0, 10**18)


@dataclass
class Lane:
    """A lane as its owners see it, one after the other; what each does is told by the test."""

    limit: int
    log_end: int = 0
    committed: int = 0
    mark: Mark | None = None
    refused_below: int = 0

    def take_over(self) -> None:
        self.mark, self.refused_below = succeed(
            parse(self.mark.text) if self.mark else None, self.committed, self.log_end, self.limit
        )

    @property
    def alone_below(self) -> int:
        """Records below this are handed out one at a time."""
        assert self.mark is not None
        return self.mark.log_ends[-1] if len(self.mark.log_ends) >= self.limit - 1 else 0


@given(st.booleans(), OFFSETS, st.lists(OFFSETS, max_size=100))
def test_a_mark_is_read_as_it_was_written(is_open: bool, hand: int, log_ends: list[int]) -> None:
    mark = Mark(is_open, hand, tuple(sorted(log_ends)))
    assert parse(mark.text) == mark
    assert len(mark.text) <= 4096


@given(st.none() | st.text() | st.text().map(lambda text: f"relaygr-owner open {text}"))
def test_anything_else_is_no_mark_or_one_that_is_written_back(text: str | None) -> None:
    mark = parse(text)
    assert mark is None or parse(mark.text) == mark


@given(LIMITS, st.integers(1, 50), st.data())
def test_a_record_that_ends_each_owner_is_refused_after_limit_of_them(
    limit: int, poison: int, data: st.DataObject
) -> None:
    lane = Lane(limit, log_end=poison)
    lane.take_over()
    ends = 0
    while True:
        lane.log_end = max(lane.log_end, poison + 1) + data.draw(st.integers(0, 20))
        assert lane.refused_below <= poison or ends == limit
        if lane.refused_below > poison:
            break
        assert ends < limit
        assert lane.mark is not None
        if poison < lane.alone_below:  # what is before it is done, and noted with it
            lane.committed, hand = poison, poison + 1
        else:
            lane.committed, hand = data.draw(st.integers(lane.committed, poison)), 0
        lane.mark = Mark(True, hand, lane.mark.log_ends)
        ends += 1
        lane.take_over()
        if data.draw(st.booleans()):  # the lane goes to another in order, with nothing of it done
            assert lane.mark is not None
            if lane.refused_below <= poison:
                lane.mark = Mark(False, 0, lane.mark.log_ends)
                lane.take_over()


@given(LIMITS, st.data())
def test_what_was_not_there_at_limit_ends_is_never_refused(limit: int, data: st.DataObject) -> None:
    lane = Lane(limit)
    lane.take_over()
    killed: list[tuple[int, int]] = []  # of each owner that was killed: what of the log was not done
    for _ in range(data.draw(st.integers(1, 12))):
        assert lane.mark is not None
        lane.log_end += data.draw(st.integers(0, 5))
        lane.committed = data.draw(
            st.integers(max(lane.committed, lane.refused_below), max(lane.log_end, lane.committed))
        )
        in_order = data.draw(st.booleans())
        hand = 0
        if not in_order:
            if lane.committed < lane.alone_below and data.draw(st.booleans()):
                hand = lane.committed + 1
            killed.append((lane.committed, lane.log_end))
        lane.mark = Mark(not in_order, hand, lane.mark.log_ends)
        lane.take_over()
        for offset in range(lane.committed, lane.refused_below):
            assert offset == hand - 1
            assert sum(first <= offset < end for first, end in killed) >= limit


@given(LIMITS, st.lists(st.integers(1, 100), min_size=1, max_size=10))
def test_killed_owners_that_got_past_what_they_found_are_not_counted(limit: int, sent: list[int]) -> None:
    lane = Lane(limit)
    lane.take_over()
    for number in sent:  # each owner finishes what the log held when it came, and is killed with more in hand
        lane.committed, lane.log_end = lane.log_end, lane.log_end + number
        assert lane.mark is not None
        lane.mark = Mark(True, 0, lane.mark.log_ends)
        lane.take_over()
        assert len(lane.mark.log_ends) == 1
        assert limit == 2 or not lane.alone_below


def test_owners_that_leave_in_order_are_never_counted() -> None:
    lane = Lane(3, log_end=10)
    for _ in range(10):
        lane.take_over()
        assert lane.mark == Mark()
        lane.mark = Mark(False)


@pytest.mark.parametrize("in_order", [True, False])
async def test_only_an_end_in_order_closes_the_marks(monkeypatch: pytest.MonkeyPatch, in_order: bool) -> None:
    user = User()
    consumer = LaneConsumer(
        Kafka(), topics=["ranking"], group="g", member="m", user=user, crashes=Crashes(["ranking"], 3, user)
    )
    suspects, membership, last = consumer._suspects, consumer._membership, dict[tuple[str, int], tuple[int, str]]()
    assert suspects is not None
    suspects._marks["ranking", 0] = Mark(hand=8, log_ends=(9,))
    consumer._reader.add({0: [7]})

    async def stop() -> None:
        last.update(consumer.committable(leaving=True))

    monkeypatch.setattr(membership, "stop", stop)
    await consumer.stop(in_order=in_order)
    assert last == {("ranking", 0): (7, "relaygr-owner left 0 9" if in_order else "relaygr-owner open 8 9")}


class User:
    """Takes the records of its lanes; `crashed`: those that must not be run."""

    progressing = True

    def __init__(self) -> None:
        self.handed: list[Record] = []
        self.crashed: list[Record] = []

    def on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> None:
        pass

    def on_records(self, records: list[Record]) -> None:
        self.handed += records

    def on_suspect(self, record: Record) -> None:
        self.handed.append(record)

    def on_crashed(self, record: Record) -> None:
        self.crashed.append(record)


class Plane:
    """Whose lanes are read."""

    @property
    def progressing(self) -> bool:
        return True

    def on_read(self, records: list[Record]) -> None:
        pass

    def restarted(self, topic: str, lane: int, offset: int) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        raise error


def reader_of(client: Client, ledgers: dict[tuple[str, int], OffsetLedger]) -> LaneReader:
    return cast(LaneReader, SimpleNamespace(client=client, ledgers=ledgers))


class Membership:
    """Keeps notes as a broker does; `away` while no coordinator answers."""

    def __init__(self, notes: dict[int, str]) -> None:
        self.notes = notes
        self.away = False
        self.tried = 0

    async def metadata(self, _partitions: object) -> dict[tuple[str, int], str]:
        return {("ranking", lane): note for lane, note in self.notes.items()}

    async def commit_now(self, offsets: dict[tuple[str, int], tuple[int, str]]) -> bool:
        self.tried += 1
        if not self.away:
            self.notes |= {lane: text for (_, lane), (_, text) in offsets.items()}
        return not self.away


class Client:
    """A reader whose lanes' logs end at 10."""

    def __init__(self) -> None:
        self.paused: set[TopicPartition] = set()

    def pause(self, *partitions: TopicPartition) -> None:
        self.paused |= set(partitions)

    def resume(self, *partitions: TopicPartition) -> None:
        self.paused -= set(partitions)

    def assignment(self) -> set[TopicPartition]:
        return {TopicPartition("ranking", lane) for lane in (0, 1)}

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 10)


def record(lane: int, offset: int) -> Record:
    return Record("ranking", lane, offset, 0, None, b"", ())


class Anew(Client):
    """A reader of a lane whose log began anew: the offset is not in it, and its broker is away once more."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.position = 5000

    def assign(self, partitions: list[TopicPartition]) -> None:
        pass

    def seek(self, _partition: TopicPartition, offset: int) -> None:
        self.position = offset

    async def beginning_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        self.asked += 1
        if self.asked == 1:
            raise KafkaTimeoutError
        return dict.fromkeys(partitions, 0)

    async def getmany(self, timeout_ms: int, max_records: int) -> dict[TopicPartition, list[Any]]:
        await asyncio.sleep(0)
        partition = TopicPartition("ranking", 0)
        if self.position >= 5000:
            raise OffsetOutOfRangeError({partition: self.position})
        fields = {"timestamp": 0, "key": None, "value": b"", "headers": ()}
        offset, self.position = self.position, self.position + 1
        return {partition: [SimpleNamespace(topic="ranking", partition=0, offset=offset, **fields)]}


async def test_nothing_is_read_while_the_process_makes_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member keeps its lanes for seconds then, and what is read waits in memory."""
    client, seen = Anew(), list[str]()
    client.position = 0

    class Slow(Plane):
        @property
        def progressing(self) -> bool:
            seen.append("asked")
            return len(seen) > 3

        def on_read(self, records: list[Record]) -> None:
            seen.append("read")

    monkeypatch.setattr(LaneReader, "client", client)
    monkeypatch.setattr(lane_reader, "STANDSTILL_S", 0.0)
    reader = LaneReader(Kafka(), ["ranking"], "m", Slow(), check_crcs=False)
    reader.add({0: [0]})
    reader.resume()
    reading = asyncio.create_task(reader.run())
    try:
        await until(lambda: "read" in seen or reading.done(), "read on")
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert seen[:5] == ["asked", "asked", "asked", "asked", "read"]


async def test_a_log_that_begins_anew_is_read_and_nobody_in_it_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its offsets are below the one at which the lane was taken over, and records of that number are others."""
    client, user = Anew(), User()
    monkeypatch.setattr(LaneReader, "client", client)
    membership = Membership({0: "relaygr-owner open 0 6000,7000"})
    consumer = LaneConsumer(
        Kafka(), topics=["ranking"], group="g", member="m", user=user, crashes=Crashes(["ranking"], 3, user)
    )
    reader, handed, refused = consumer._reader, user.handed, user.crashed
    consumer._suspects = suspects = Suspects(Crashes(["ranking"], 3, user), cast(Any, membership), reader)
    await suspects.take_over({("ranking", 0): 5000})
    reader.add({0: [5000]})
    reader.resume()
    reading = asyncio.create_task(reader.run())
    try:
        await until(lambda: len(handed) >= 3 or len(refused) >= 3 or reading.done(), "read anew")
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert [each.offset for each in handed[:3]] == [0, 1, 2]
    assert not refused
    assert client.asked == 2


async def test_a_record_that_was_noted_and_not_handed_out_is_not_blamed_for_the_end() -> None:
    membership, client = Membership({0: "relaygr-owner open 0 8"}), Client()
    ledger, user = OffsetLedger(2), User()
    handed = user.handed
    suspects = Suspects(
        Crashes(["ranking"], 3, user), cast(Any, membership), reader_of(client, {("ranking", 0): ledger})
    )
    await suspects.take_over({("ranking", 0): 2})
    ledger.read(2)
    assert suspects.set_apart(record(0, 2))
    membership.away = True
    task = asyncio.create_task(suspects.hand_out())
    await until(lambda: membership.tried >= 3, "notes tried")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not handed
    assert parse(suspects.note("ranking", 0, leaving=False)) == Mark(True, 0, (8, 10))


async def test_suspects_of_all_lanes_are_handed_out_one_at_a_time_each_noted_before() -> None:
    membership, client = Membership({0: "relaygr-owner open 0 8", 1: "relaygr-owner open 3 5,8"}), Client()
    ledgers = {("ranking", lane): OffsetLedger(2) for lane in (0, 1)}
    user = User()
    handed, refused = user.handed, user.crashed
    suspects = Suspects(Crashes(["ranking"], 3, user), cast(Any, membership), reader_of(client, ledgers))
    await suspects.take_over({("ranking", 0): 2, ("ranking", 1): 2})
    for each in [record(0, 2), record(0, 3), record(1, 2), record(1, 3), record(1, 10)]:
        ledgers["ranking", each.lane].read(each.offset)
        assert suspects.set_apart(each) == (each.offset < 10)
    assert refused == [record(1, 2)]
    assert len(client.paused) == 2
    membership.away = True
    task = asyncio.create_task(suspects.hand_out())
    try:
        await until(lambda: membership.tried >= 3, "notes tried")
        assert not handed
        membership.away = False
        for number, each in enumerate([record(0, 2), record(0, 3)], 1):
            await until(lambda: len(handed) == number, "handed out")  # noqa: B023
            assert handed[-1] == each
            assert parse(membership.notes[0]) == Mark(True, each.offset + 1, (8, 10))
            ledgers["ranking", 0].done(each.offset)
            suspects.changed()
        await until(lambda: handed[2:] == [record(1, 3)], "the other lane's")
        assert parse(membership.notes[0]) == Mark(True, 0, (8, 10))
        assert parse(suspects.note("ranking", 1, leaving=True)) == Mark(False, 0, (5, 8, 10))
        del ledgers["ranking", 1]  # the lane is lost: its record is another's
        suspects.changed()
        await until(lambda: client.paused == {TopicPartition("ranking", 1)}, "ours go on")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
