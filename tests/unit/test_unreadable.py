"""Reading around unreadable records ends when they are passed: neither before, nor only when all is quiet.

On brokers: tests/bus/test_unreadable.py.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition

from relaygr_stream.bus import unreadable
from relaygr_stream.bus.records import Record
from relaygr_stream.bus.unreadable import read_around

HERE = TopicPartition("t", 0)


class Consumer:
    """One partition. What a seek asks for comes after fetch_s; endless: there is always one more record."""

    def __init__(self, bad: set[int], fetch_s: float, *, end: int, endless: bool = False) -> None:
        self._bad = bad
        self._fetch_s = fetch_s
        self._end = end
        self._endless = endless
        self._position = 0
        self._here_at = 0.0

    def seek(self, partition: TopicPartition, offset: int) -> None:
        assert partition == HERE
        self._position = offset
        self._here_at = asyncio.get_running_loop().time() + self._fetch_s

    async def getmany(
        self, *_: TopicPartition, timeout_ms: int, max_records: int | None
    ) -> dict[TopicPartition, list[Any]]:
        assert timeout_ms == 0
        if asyncio.get_running_loop().time() < self._here_at:
            return {}
        end = self._position + 1 if self._endless or max_records else self._end
        found: list[Any] = []
        while self._position < min(end, self._end):
            if self._position in self._bad:
                raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
            found.append(message(self._position))
            self._position += 1
        return {HERE: found} if found else {}


def message(offset: int) -> Any:
    return SimpleNamespace(
        topic=HERE.topic, partition=HERE.partition, offset=offset, timestamp=0, key=None, value=b"v", headers=()
    )


class Reader:
    """Hands out from offset 0 on."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    async def around(self, consumer: Consumer, fetch_wait_s: float) -> None:
        async with asyncio.timeout(10.0):
            await read_around(consumer, lambda: [HERE], lambda _: len(self.records), self.records.extend, fetch_wait_s)


async def test_it_ends_under_steady_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn asks each partition, and records wait for a turn: no state to stay in for as long as users come."""
    monkeypatch.setattr(unreadable, "PASSED_S", 0.05)
    reader = Reader()
    await reader.around(Consumer({3}, 0.0, end=1 << 62, endless=True), 0.0)
    assert [record.offset for record in reader.records if record.value is None] == [3]
    assert [record.offset for record in reader.records] == list(range(len(reader.records)))


async def test_it_waits_for_a_fetch_that_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ordinary reading would meet the same record again, and no lane would ever get on."""
    monkeypatch.setattr(unreadable, "PASSED_S", 0.1)
    reader = Reader()
    await reader.around(Consumer({0, 2}, 0.3, end=4), 0.3)
    assert [(record.offset, record.value) for record in reader.records] == [(0, None), (1, b"v"), (2, None), (3, b"v")]
