"""The topics' files, and the lane of a user.

`topics/*.toml` holds one file per topic. Topics that share lanes (`lanes = true`) must have equal partition counts: a
user's lane is a partition number of each of them.
"""

from __future__ import annotations

import struct
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from relaygr_stream.errors import ConfigError, CoPartitionError
from relaygr_stream.settings.files import packaged_dir
from relaygr_stream.settings.inputs import read_text
from relaygr_stream.settings.schema import MAX_LANES, Kafka
from relaygr_stream.wire.messages import split_tenant_key

CleanupPolicy = Literal["delete", "compact"]
TimestampType = Literal["CreateTime", "LogAppendTime"]
Compression = Literal["uncompressed", "producer", "gzip", "snappy", "lz4", "zstd"]


class Topic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One topic as its file describes it. `load_topics` applies the settings to it.

    name: as in the file; from `load_topics`: the full name, prefix included.
    """

    name: str
    key: str
    message: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    lanes: bool
    partitions: Annotated[int, Meta(ge=1, le=MAX_LANES)]
    replication: Annotated[int, Meta(ge=1, le=9)]
    retention_ms: Annotated[int, Meta(ge=1)]
    max_message_bytes: Annotated[int, Meta(ge=1024, le=64 * 1024 * 1024)]
    cleanup_policy: CleanupPolicy = "delete"
    #: Kafka deletes only whole, closed segments: a record is kept for the retention plus at most this.
    segment_ms: Annotated[int, Meta(ge=1)] | None = None
    #: A compacted topic keeps every record so long.
    min_compaction_lag_ms: Annotated[int, Meta(ge=0)] | None = None
    #: uncompressed: the broker unpacks compressed batches and checks max_message_bytes against the unpacked size.
    #: Otherwise 300 MB of zeros pass a limit of 1 MiB as 0.3 MB of gzip, and the reader unpacks them.
    compression_type: Compression = "uncompressed"
    min_insync_replicas: Annotated[int, Meta(ge=1, le=9)] | None = None
    #: LogAppendTime: brokers set the times of records. Otherwise one sender's clock that is ahead keeps a log for ever,
    #: and a sender whose clock is more than an hour ahead is refused (message.timestamp.after.max.ms).
    timestamp_type: TimestampType = "LogAppendTime"

    @property
    def configs(self) -> dict[str, str]:
        """The topic's configuration, by Kafka's names."""
        stated = {
            "cleanup.policy": self.cleanup_policy,
            "retention.ms": self.retention_ms,
            "segment.ms": self.segment_ms,
            "min.compaction.lag.ms": self.min_compaction_lag_ms,
            "max.message.bytes": self.max_message_bytes,
            "compression.type": self.compression_type,
            "min.insync.replicas": self.min_insync_replicas,
            "message.timestamp.type": self.timestamp_type,
        }
        return {name: str(value) for name, value in stated.items() if value is not None}

    def may_have(self, partitions: int) -> bool:
        """Whether the topic serves with so many: lanes grow to a multiple, and a compacted topic is read whole."""
        if self.lanes:
            return partitions > 0 and partitions % self.partitions == 0
        return partitions == self.partitions or (partitions > self.partitions and self.cleanup_policy != "compact")


@dataclass
class TopicSet:
    """All topics of the relay. Lanes are added while processes run; all else stays as it is.

    stated: kafka.partitions, of which the present number is a multiple; 0: any number will do, and the files' is that
    of topics that are made.
    """

    retrieval: Topic
    pre_infer: Topic
    ranking: Topic
    scores: Topic
    worker_status: Topic
    dead_letter: Topic

    def __post_init__(self) -> None:
        self.stated = 0

    @property
    def all(self) -> tuple[Topic, ...]:
        """Every topic."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def lanes(self) -> int:
        """The number of lanes: partitions of each topic that shares them."""
        return self.ranking.partitions

    def lane_of(self, user_id: str) -> int:
        """The lane of a user."""
        return lane_of(user_id, self.lanes)

    def follow(self, lanes: int) -> None:
        """Have so many lanes from now on."""
        for name in ("retrieval", "pre_infer", "ranking"):
            setattr(self, name, msgspec.structs.replace(getattr(self, name), partitions=lanes))

    def grow(self, lanes: int) -> bool:
        """As `follow`; returns False, and changes nothing, if they are not more."""
        if more := lanes > self.lanes:
            self.follow(lanes)
        return more

    def lanes_of(self, user_id: str) -> list[int]:
        """The lanes that a user's messages may be on, the present one first: clients learn of more lanes one by one.

        Of every number that may have grown to the present one, but not of one lane where that is not stated: a sender
        that does not hash users has them all there.
        """
        hashed = murmur2(user_id.encode()) & 0x7FFFFFFF
        return list(dict.fromkeys(hashed % count for count in _grown_from(self.lanes, self.stated)))

    def splits(self, lane: int, user_id: str) -> bool:
        """Whether this lane, beyond those that are known, was added and takes a part of the user's lane."""
        return lane >= self.lanes and lane % self.lanes == self.lane_of(user_id)


@cache
def _grown_from(lanes: int, stated: int) -> tuple[int, ...]:
    """The numbers that may have grown to `lanes`, the largest first."""
    least = stated or 2
    return (lanes, *(n for n in range(lanes // 2, least - 1, -1) if lanes % n == 0 and n % (stated or 1) == 0))


def lanes_in(counts: Mapping[str, int], stated: int) -> int:
    """The number of lanes of topics with these partition counts; `stated` and any multiple of it will do; 0: any.

    Where an operator's growth was stopped in the middle, it is the least count, of which the others are multiples.
    Raises CoPartitionError, which names two topics, for other counts that differ.
    """
    least = min(counts.values())
    if least % (stated or 1) or any(count % least for count in counts.values()):
        check_equal_counts(counts.items())
    return least


#: Topics that share lanes: partition p of each is read by the same worker or trigger.
LANE_TOPICS: Final = ("retrieval", "pre-infer", "ranking")
_NAMES: Final = tuple(field.name.replace("_", "-") for field in fields(TopicSet))


def lane_of(user_id: str, lanes: int) -> int:
    """The lane of a user, of `lanes`: the partition that Kafka's Java client gives the key (murmur2 of its UTF-8)."""
    return partition_of(user_id.encode(), lanes)


def lane_of_key(key: str, lanes: int) -> int:
    """The lane of a user whom a tenant_key names."""
    return lane_of(split_tenant_key(key)[1], lanes)


def load_topics(kafka: Kafka) -> TopicSet:
    """The topics as the files and the settings describe them; needs no broker.

    kafka.partitions, if not 0, replaces the files' lane count, that of new topics; kafka.replication, if not 0, every
    topic's replication.
    Raises ConfigError, which names file and key, and CoPartitionError if the files disagree about the lane count.
    """
    folder = Path(kafka.topics_dir) if kafka.topics_dir else packaged_dir("topics")
    if not folder.is_dir():
        raise ConfigError(
            f"`kafka.topics_dir` = {str(folder)!r}: no such folder here; the packaged files are in "
            f"{packaged_dir('topics')}"
        )
    found: dict[str, Topic] = {}
    for path in sorted(folder.glob("*.toml")):
        spec = _read_topic_file(path)
        if spec.name in found:
            raise ConfigError(
                f"{path}: `name` = {spec.name!r}: another file in {folder} describes this topic; remove one of them"
            )
        found[spec.name] = msgspec.structs.replace(
            spec,
            name=kafka.prefix + spec.name,
            partitions=(spec.lanes and kafka.partitions) or spec.partitions,
            replication=kafka.replication or spec.replication,
        )
    missing = [name for name in _NAMES if name not in found]
    if missing:
        raise ConfigError(f"{folder}: no file describes {', '.join(missing)}; copy it from {packaged_dir('topics')}")
    topics = TopicSet(**{name.replace("-", "_"): found[name] for name in _NAMES})
    topics.stated = kafka.partitions
    check_equal_counts((topic.name, topic.partitions) for topic in topics.all if topic.lanes)
    if topics.worker_status.partitions != 1:
        raise ConfigError(
            f"topic {topics.worker_status.name}: `partitions` = {topics.worker_status.partitions}: must be 1, because "
            f"readers need all statuses in their order"
        )
    for topic in topics.all:
        if (topic.min_insync_replicas or 1) > topic.replication:
            raise ConfigError(
                f"topic {topic.name}: `min_insync_replicas` = {topic.min_insync_replicas}, of {topic.replication} "
                f"replicas (`replication`, kafka.replication): no message would be acknowledged; lower the first or "
                f"raise the second"
            )
    return topics


def _read_topic_file(path: Path) -> Topic:
    try:
        spec = msgspec.convert(tomllib.loads(read_text(path)), Topic)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (UnicodeError, RecursionError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if spec.name not in _NAMES:
        raise ConfigError(f"{path}: `name` = {spec.name!r}: not a topic of the relay ({', '.join(_NAMES)})")
    if spec.lanes != (spec.name in LANE_TOPICS):
        raise ConfigError(f"{path}: `lanes` = {spec.lanes}: {', '.join(LANE_TOPICS)} share lanes, and no others")
    return spec


def check_equal_counts(counts: Iterable[tuple[str, int]]) -> None:
    """Raise CoPartitionError, which names two topics, if the partition counts differ. counts: (topic name, count)."""
    (first, expected), *others = counts
    for name, count in others:
        if count != expected:
            raise CoPartitionError(
                f"topics {first} and {name} share lanes but have {expected} and {count} partitions; a user's lane must "
                f"be the same partition of both: give them equal counts (a topic can be deleted and applied again)"
            )


# ---- the partition of a key: MurmurHash2 with the seed of Kafka's Java client ----

SEED: Final = 0x9747B28C
FACTOR: Final = 0x5BD1E995
MASK: Final = 0xFFFFFFFF
WORD: Final = struct.Struct("<I")


def murmur2(data: bytes) -> int:
    """The hash, as an unsigned 32-bit number.

    The same function as aiokafka's, which reads byte by byte. Reading word by word takes a third of the time, and the
    trigger checks the lane of every event.
    """
    length = len(data)
    words = length & ~3
    value = SEED ^ length
    for (word,) in WORD.iter_unpack(data[:words]):
        mixed = (word * FACTOR) & MASK
        value = (value * FACTOR ^ (mixed ^ mixed >> 24) * FACTOR) & MASK
    if words != length:
        value = ((value ^ int.from_bytes(data[words:], "little")) * FACTOR) & MASK
    value = ((value ^ value >> 13) * FACTOR) & MASK
    return value ^ value >> 15


def partition_of(key: bytes, partitions: int) -> int:
    """The partition, of `partitions`, that Kafka's Java client gives a key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
