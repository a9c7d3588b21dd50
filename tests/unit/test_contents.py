"""Which partitions no broker tells of, beside a client that waits for a broker that hangs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaTimeoutError

from relaygr_stream.bus.away import Away
from relaygr_stream.bus.contents import OffsetSpan, _spans
from relaygr_stream.bus.producer import NO_LEADER


class Brokers:
    """In place of a consumer. silent: how many requests for a partition's offsets get no answer. leaders: as known."""

    def __init__(self, silent: dict[int, int], leaders: dict[int, int]) -> None:
        self._silent, self.asked = dict(silent), 0
        cluster = SimpleNamespace(leader_for_partition=lambda one: leaders[one.partition])
        self._client = SimpleNamespace(cluster=cluster)

    async def beginning_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return await self._answer(partitions, 0)

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return await self._answer(partitions, 5)

    async def _answer(self, partitions: list[TopicPartition], offset: int) -> dict[TopicPartition, int]:
        (one,) = partitions
        self.asked += 1
        if self._silent.get(one.partition, 0):
            self._silent[one.partition] -= 1
            raise KafkaTimeoutError
        return {one: offset}


@pytest.mark.parametrize(
    ("silent", "leader", "away"),
    [({1: 1}, 7, ""), ({1: 99}, 7, "t 1 (broker 7 does not answer)"), ({1: 1}, NO_LEADER, "t 1 (no leader)")],
    ids=["once", "hangs", "no leader"],
)
async def test_a_broker_that_did_not_answer_is_asked_once_more(silent: dict[int, int], leader: int, away: str) -> None:
    brokers, missing = Brokers(silent, {0: 3, 1: leader}), Away()
    found = await _spans(brokers, "t", [0, 1], missing)
    assert str(missing) == away
    assert found == {partition: OffsetSpan(0, 5) for partition in ([0] if away else [0, 1])}
    assert brokers.asked == 2 + {"": 3}.get(away, 1 if leader == NO_LEADER else 2)
