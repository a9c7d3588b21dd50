"""Collects the partitions that a command leaves out because no broker serves them: named once, at its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from aiokafka import TopicPartition

from relaygr_stream.bus.producer import NO_LEADER
from relaygr_stream.bus.topic_check import TopicRow
from relaygr_stream.errors import PartitionsAway


class Away:
    """Partitions that no broker serves, each with the reason. False while there are none."""

    def __init__(self) -> None:
        self._why: dict[tuple[str, int], str] = {}

    @classmethod
    def from_rows(cls, rows: Iterable[TopicRow]) -> Away:
        """The partitions without a leader among described topics."""
        away = cls()
        for row in rows:
            for partition, leader in row.found.leaders.items() if row.found is not None else ():
                if leader == NO_LEADER:
                    away.add(row.topic.name, partition, leader)
        return away

    def add(self, topic: str, partition: int, leader: int | None) -> None:
        """Add a partition that did not answer. leader: the id of its broker, NO_LEADER, or None: not known."""
        why = {NO_LEADER: "no leader", None: "no answer"}.get(leader, f"broker {leader} does not answer")
        self._why[topic, partition] = why

    def update(self, other: Away) -> None:
        """Add the other's partitions."""
        self._why.update(other._why)

    def __bool__(self) -> bool:
        return bool(self._why)

    def __contains__(self, partition: tuple[str, int]) -> bool:
        return partition in self._why

    def __str__(self) -> str:
        alike: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for (topic, partition), why in sorted(self._why.items()):
            alike[topic, why].append(partition)
        return "; ".join(f"{topic} {ranges(partitions)} ({why})" for (topic, why), partitions in alike.items())

    def check(self) -> None:
        """Raise PartitionsAway if there are any."""
        if self._why:
            raise self.error()

    def error(self) -> PartitionsAway:
        """The error that names them."""
        return PartitionsAway(
            f"no broker serves {self}; what needs the others only was done. Start the brokers, then run this again"
        )


def leader_of(consumer: Any, partition: TopicPartition) -> int | None:
    """The broker of a partition as a started AIOKafkaConsumer knows it; NO_LEADER; None: not known."""
    leader: int | None = consumer._client.cluster.leader_for_partition(partition)
    return leader


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: 0–3, 7; "" if there are none."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{first}" if first == last else f"{first}–{last}" for first, last in parts)
