"""The topics on a cluster: created, and checked against what their files say (topic_files.py), at every start.

What the files say is imported from here as well. Knows nothing of what the messages contain.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import KafkaError, NoError, TopicAlreadyExistsError, for_code

from relaygr_stream.bus.connection import client_options, typed_errors
from relaygr_stream.bus.probe import check_connection
from relaygr_stream.errors import BrokerError, BrokerUnavailable, TopicError
from relaygr_stream.settings import Kafka
from relaygr_stream.topic_files import LANE_TOPICS, Topic, TopicSet, check_equal_counts, lane_of, load_topics

__all__ = [
    "LANE_TOPICS",
    "FoundTopic",
    "Topic",
    "TopicReport",
    "TopicRow",
    "TopicSet",
    "apply_topics",
    "describe_topics",
    "lane_of",
    "load_topics",
    "verify_topics",
]

#: The cluster names a dead broker until it is fenced (`broker.session.timeout.ms`, 9 s by default): whoever starts just
#: then, and is sent there, asks again until that is over.
FENCING_S: Final = 10.0
RETRY_S: Final = 0.5


@dataclass(frozen=True)
class FoundTopic:
    """What the cluster says of a topic; None: it does not say (the embedded broker keeps few configs)."""

    partitions: int
    replication: int
    retention_ms: int | None
    max_message_bytes: int | None
    cleanup_policy: str | None
    leaders: Mapping[int, int]  # partition → broker; -1: nobody


@dataclass(frozen=True)
class TopicRow:
    """A topic's description beside what the cluster has; `found` is None where the topic does not exist."""

    topic: Topic
    found: FoundTopic | None


@dataclass(frozen=True)
class TopicReport:
    """What `apply_topics` did."""

    created: tuple[str, ...]
    existing: tuple[str, ...]
    rows: tuple[TopicRow, ...]

    def __str__(self) -> str:
        lines = [f"created   {name}" for name in self.created] + [f"existing  {name}" for name in self.existing]
        return "\n".join(lines)


async def describe_topics(kafka: Kafka) -> tuple[TopicRow, ...]:
    """Each topic's description beside what the cluster has. Raises BrokerUnavailable, ConfigError."""
    topics = load_topics(kafka)
    gives_up = time.monotonic() + FENCING_S
    while True:
        try:
            async with _admin(kafka) as admin:
                return await _describe(admin, topics.all)
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            passing = isinstance(error.__cause__, KafkaError) and error.__cause__.retriable
            if not passing or time.monotonic() > gives_up:
                raise
        await asyncio.sleep(RETRY_S)


async def verify_topics(kafka: Kafka) -> tuple[TopicRow, ...]:
    """Check the cluster against the description; every process does so at its start.

    Raises TopicError, CoPartitionError (naming both topics and both counts), BrokerUnavailable, ConfigError.
    """
    rows = await describe_topics(kafka)
    _check(rows)
    return rows


async def apply_topics(kafka: Kafka) -> TopicReport:
    """Create the topics that are missing, leave those that exist, then verify. Raises as `verify_topics` does."""
    topics = load_topics(kafka)
    async with _admin(kafka) as admin:
        before = await _describe(admin, topics.all)
        missing = [row.topic for row in before if row.found is None]
        # What exists must fit before anything is added to it.
        _check([row for row in before if row.found is not None])
        if missing:
            await _create(admin, missing)
        rows = await _describe_when_visible(admin, topics.all, kafka.request_timeout_ms / 1000)
    _check(rows)
    created = tuple(topic.name for topic in missing)
    return TopicReport(created, tuple(row.topic.name for row in rows if row.topic.name not in created), rows)


def _check(rows: Sequence[TopicRow]) -> None:
    missing = [row.topic.name for row in rows if row.found is None]
    if missing:
        raise TopicError(f"missing on the cluster: {', '.join(missing)}; `relaygr topics apply` creates them")
    found = [(row.topic, row.found) for row in rows if row.found is not None]
    sharing = [(topic.name, has.partitions) for topic, has in found if topic.lanes]
    if sharing:
        check_equal_counts(sharing)
    for topic, has in found:
        if has.partitions < topic.partitions or (topic.exact and has.partitions != topic.partitions):
            raise TopicError(
                f"topic {topic.name} has {has.partitions} partitions, its description says {topic.partitions}; "
                f"set {'kafka.partitions' if topic.lanes else 'its file'} to {has.partitions}, or delete and apply it"
            )
        if has.max_message_bytes is not None and has.max_message_bytes < topic.max_message_bytes:
            raise TopicError(
                f"topic {topic.name} takes messages up to {has.max_message_bytes} bytes (max.message.bytes), "
                f"its file says {topic.max_message_bytes}; raise the one or lower the other"
            )
        if has.cleanup_policy is not None and topic.cleanup_policy not in has.cleanup_policy.split(","):
            raise TopicError(
                f"topic {topic.name} has cleanup.policy={has.cleanup_policy}, its file says {topic.cleanup_policy}"
            )


@asynccontextmanager
async def _admin(kafka: Kafka) -> AsyncIterator[Any]:
    await check_connection(kafka)
    admin = AIOKafkaAdminClient(**client_options(kafka, "relaygr-topics"))
    try:
        with typed_errors(kafka, "look at the topics"):
            await admin.start()
            yield admin
    finally:
        await admin.close()


async def _describe(admin: Any, topics: Sequence[Topic]) -> tuple[TopicRow, ...]:
    # All topics are asked for, not ours by name: naming a missing one may make the broker create it.
    listed = {
        entry["topic"]: entry["partitions"]
        for entry in await admin.describe_topics()
        if entry["error_code"] == NoError.errno and entry["partitions"]
    }
    present = [topic.name for topic in topics if topic.name in listed]
    configs = await _configs(admin, present) if present else {}
    return tuple(
        TopicRow(topic, _found(listed[topic.name], configs.get(topic.name, {})) if topic.name in listed else None)
        for topic in topics
    )


def _found(partitions: list[dict[str, Any]], config: dict[str, str]) -> FoundTopic:
    return FoundTopic(
        partitions=len(partitions),
        replication=min(len(partition["replicas"]) for partition in partitions),
        retention_ms=int(config["retention.ms"]) if "retention.ms" in config else None,
        max_message_bytes=int(config["max.message.bytes"]) if "max.message.bytes" in config else None,
        cleanup_policy=config.get("cleanup.policy"),
        leaders={partition["partition"]: partition["leader"] for partition in partitions},
    )


async def _configs(admin: Any, names: Sequence[str]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    responses = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names])
    for response in responses:
        for error_code, _, _, name, entries in response.resources:
            if error_code == NoError.errno:
                found[name] = {entry[0]: entry[1] for entry in entries if entry[1]}
    return found


async def _create(admin: Any, topics: Sequence[Topic]) -> None:
    new = [
        NewTopic(
            name=topic.name,
            num_partitions=topic.partitions,
            replication_factor=topic.replication,
            topic_configs={
                "cleanup.policy": topic.cleanup_policy,
                "retention.ms": str(topic.retention_ms),
                "max.message.bytes": str(topic.max_message_bytes),
                # The broker then unpacks what came compressed and holds the limit against that. Else a reader would
                # have to: 300 MB of zeros pass a limit of 1 MiB as 0.3 MB of gzip.
                "compression.type": "uncompressed",
            },
        )
        for topic in topics
    ]
    response = await admin.create_topics(new)
    for name, error_code, *detail in response.topic_errors:
        error = for_code(error_code)
        # Another process may have created it since we looked; the check afterwards tells whether it fits.
        if error not in (NoError, TopicAlreadyExistsError):
            raise TopicError(f"topic {name} could not be created: {error.__name__}: {detail[0] if detail else ''}")


async def _describe_when_visible(admin: Any, topics: Sequence[Topic], timeout_s: float) -> tuple[TopicRow, ...]:
    """A new topic takes a moment to show in every broker's metadata."""
    deadline = time.monotonic() + timeout_s
    while True:
        rows = await _describe(admin, topics)
        if all(row.found is not None for row in rows) or time.monotonic() > deadline:
            return rows
        await asyncio.sleep(0.05)
