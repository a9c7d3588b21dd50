"""The topics: what their files say, which lane a user has, and whether the cluster agrees.

`topics/*.toml` holds one file per topic. Topics that share lanes (`lanes = true`) must have equal partition counts, in
the files and on the cluster: a user's lane is a partition number of each of them. Knows nothing of what the messages
contain.
"""

from __future__ import annotations

import asyncio
import time
import tomllib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import NoError, TopicAlreadyExistsError, for_code
from aiokafka.partitioner import murmur2
from msgspec import Meta

from relaygr_stream.bus.connection import client_options, typed_errors
from relaygr_stream.bus.probe import check_connection
from relaygr_stream.errors import ConfigError, CoPartitionError, TopicError
from relaygr_stream.files import packaged_dir
from relaygr_stream.settings import Kafka

CleanupPolicy = Literal["delete", "compact"]


@dataclass(frozen=True)
class Topic:
    """One topic, as its file and the settings describe it; `name` is the full one, prefix included."""

    name: str
    key: str
    message: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    lanes: bool
    partitions: int
    replication: int
    retention_ms: int
    max_message_bytes: int
    cleanup_policy: CleanupPolicy

    @property
    def exact(self) -> bool:
        """Whether more partitions than stated would break readers: they look a key up, or read every partition."""
        return self.lanes or self.cleanup_policy == "compact"


@dataclass(frozen=True)
class TopicSet:
    """All topics of the relay."""

    retrieval: Topic
    pre_infer: Topic
    ranking: Topic
    scores: Topic
    worker_status: Topic
    dead_letter: Topic

    @property
    def all(self) -> tuple[Topic, ...]:
        """Every topic."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def lanes(self) -> int:
        """The number of lanes: partitions of each topic that shares them."""
        return self.ranking.partitions


#: Those whose partition p must reach one worker, or one trigger, together (DESIGN §4).
LANE_TOPICS: Final = ("retrieval", "pre-infer", "ranking")
_NAMES: Final = tuple(field.name.replace("_", "-") for field in fields(TopicSet))


class _TopicFile(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    key: str
    message: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    lanes: bool
    partitions: Annotated[int, Meta(ge=1, le=10_000)]
    replication: Annotated[int, Meta(ge=1, le=9)]
    retention_ms: Annotated[int, Meta(ge=1)]
    max_message_bytes: Annotated[int, Meta(ge=1024, le=64 * 1024 * 1024)]
    cleanup_policy: CleanupPolicy = "delete"


def lane_of(user_id: str, lanes: int) -> int:
    """The lane of a user among `lanes`: the partition that Kafka's Java client gives the key (murmur2 of UTF-8)."""
    return int((murmur2(user_id.encode()) & 0x7FFFFFFF) % lanes)


def load_topics(kafka: Kafka) -> TopicSet:
    """The topics as the files and the settings describe them; needs no broker.

    kafka.partitions, if set, is the lane count in place of the files'; kafka.replication likewise for every topic.
    Raises ConfigError, naming file and key, and CoPartitionError if the files disagree about the lane count.
    """
    folder = Path(kafka.topics_dir) if kafka.topics_dir else packaged_dir("topics")
    found: dict[str, Topic] = {}
    for path in sorted(folder.glob("*.toml")):
        spec = _read_topic_file(path)
        if spec.name in found:
            raise ConfigError(f"{path}: `name` = {spec.name!r}: another file in {folder} describes this topic already")
        values = msgspec.structs.asdict(spec)
        values["name"] = kafka.prefix + spec.name
        if spec.lanes and kafka.partitions:
            values["partitions"] = kafka.partitions
        if kafka.replication:
            values["replication"] = kafka.replication
        found[spec.name] = Topic(**values)
    missing = [name for name in _NAMES if name not in found]
    if missing:
        raise ConfigError(f"{folder}: no file describes {', '.join(missing)}; copy it from the packaged topics")
    topics = TopicSet(**{name.replace("-", "_"): found[name] for name in _NAMES})
    _check_equal_counts((topic.name, topic.partitions) for topic in topics.all if topic.lanes)
    return topics


def _read_topic_file(path: Path) -> _TopicFile:
    try:
        spec = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _TopicFile)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if spec.name not in _NAMES:
        raise ConfigError(f"{path}: `name` = {spec.name!r}: not a topic of the relay ({', '.join(_NAMES)})")
    if spec.lanes != (spec.name in LANE_TOPICS):
        raise ConfigError(f"{path}: `lanes` = {spec.lanes}: {', '.join(LANE_TOPICS)} share lanes, and no others")
    return spec


def _check_equal_counts(counts: Iterable[tuple[str, int]]) -> None:
    (first, expected), *others = counts
    for name, count in others:
        if count != expected:
            raise CoPartitionError(
                f"topics {first} and {name} share lanes but have {expected} and {count} partitions; a user's lane must "
                f"be the same partition of both, so give them equal counts (a topic can be deleted and applied again)"
            )


@dataclass(frozen=True)
class FoundTopic:
    """What the cluster says of a topic; None: it does not say (the embedded broker keeps few configs)."""

    partitions: int
    replication: int
    retention_ms: int | None
    max_message_bytes: int | None
    cleanup_policy: str | None


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
    async with _admin(kafka) as admin:
        return await _describe(admin, topics.all)


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
        _check_equal_counts(sharing)
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
