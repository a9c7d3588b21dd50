"""Compares a cluster's topics with their files: refuses what breaks the relay, names other differences, and goes on
asking for partition counts, because an operator may add partitions while a process runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import structlog
from msgspec.structs import replace

from relaygr_stream.bus.producer import Producer
from relaygr_stream.errors import BrokerError, CoPartitionError, LanesChanged, TopicError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.telemetry.background import periodically
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.topic_files import Topic, TopicSet, lanes_in, load_topics

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

#: Bytes that the headers of a dead letter add to the original; reason, detail and origin are below 2 KiB.
DEAD_LETTER_HEADERS_BYTES: Final = 4096
#: The interval of polling in seconds, for up to ASK_S · LANES_PER_S = 500 lanes.
ASK_S: Final = 5.0
#: Above 500 lanes the interval is lanes / LANES_PER_S. A partition takes about 40 bytes of the answer, and there are
#: four topics, so a process reads at most 16 kB a second.
LANES_PER_S: Final = 100
REMEDY: Final = "`relaygr topics apply --alter` changes the cluster to what the files say"


@dataclass(frozen=True)
class FoundTopic:
    """A topic as the cluster describes it.

    configs: by Kafka's names; the embedded broker reports few. own: names of the configs set for this topic, which are
    not the cluster's defaults. secret: the cluster does not tell this process the configs.
    """

    partitions: int
    replication: int
    configs: Mapping[str, str]
    own: frozenset[str]
    leaders: Mapping[int, int]  # partition → broker; -1: no leader
    secret: bool = False

    def takes_bytes(self, topic: Topic) -> int:
        """The longest message; what the file says if the broker does not report it."""
        return int(self.configs.get("max.message.bytes", topic.max_message_bytes))


@dataclass(frozen=True)
class TopicRow:
    """A topic's description, and the topic on the cluster; `found` is None if it does not exist, or if it is hidden:
    then the cluster does not say whether it exists."""

    topic: Topic
    found: FoundTopic | None
    hidden: bool = False


class Difference(NamedTuple):
    """One setting with its value in the file and on the cluster."""

    topic: str
    setting: str
    file: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.topic}: {self.setting} = {self.cluster} on the cluster, {self.file} in its file"


def _missing(names: Sequence[str]) -> str:
    return f"missing on the cluster: {', '.join(names)}; `relaygr topics apply` with the same settings creates them"


def check_rows(rows: Sequence[TopicRow]) -> None:
    """Check what every process needs at its start. Raises TopicError, CoPartitionError (both topics, both counts)."""
    missing = [row.topic.name for row in rows if row.found is None]
    if missing:
        raise TopicError(_missing(missing))
    found = [(row.topic, row.found) for row in rows if row.found is not None]
    sharing = {topic: has.partitions for topic, has in found if topic.lanes}
    if sharing:
        lanes_in({topic.name: count for topic, count in sharing.items()}, next(iter(sharing)).partitions)
    for topic, has in found:
        _check_count(topic, has.partitions)
        takes = has.takes_bytes(topic)
        if takes < topic.max_message_bytes:
            raise TopicError(
                f"topic {topic.name} takes messages up to {takes} bytes (max.message.bytes), "
                f"its file says {topic.max_message_bytes}; raise the cluster's ({REMEDY}) or lower the file's"
            )
        policy = has.configs.get("cleanup.policy", topic.cleanup_policy)
        if topic.cleanup_policy not in policy.split(","):
            raise TopicError(
                f"topic {topic.name} has cleanup.policy={policy}, its file says {topic.cleanup_policy}; {REMEDY}"
            )


def topics_with(kafka: Kafka, rows: Iterable[TopicRow]) -> TopicSet:
    """The topics as described, with the lanes that a cluster has by these checked rows."""
    topics = load_topics(kafka)
    topics.follow(lanes_in(_lane_counts(rows), topics.stated))
    return topics


def as_found(kafka: Kafka, rows: Sequence[TopicRow]) -> tuple[TopicRow, ...]:
    """The rows, described with the lanes that there are, unless a setting states how many there must be.

    So a cluster keeps its number, and a topic that is missing gets as many. Counts that differ stay for check_rows.
    """
    counts, lanes = _lane_counts(rows), 0
    if counts and not kafka.partitions:
        with suppress(CoPartitionError):
            lanes = lanes_in(counts, 0)
    if not lanes:
        return tuple(rows)
    kept = (replace(row.topic, partitions=lanes if row.topic.lanes else row.topic.partitions) for row in rows)
    return tuple(TopicRow(topic, row.found, row.hidden) for topic, row in zip(kept, rows, strict=True))


def _lane_counts(rows: Iterable[TopicRow]) -> dict[str, int]:
    return {row.topic.name: row.found.partitions for row in rows if row.found is not None and row.topic.lanes}


def _check_count(topic: Topic, count: int) -> None:
    if topic.may_have(count):
        return
    mend = f"set {'kafka.partitions' if topic.lanes else 'its file'} to {count}"
    if topic.lanes and topic.partitions % count == 0:
        mend += f", with which `relaygr lanes grow {topic.partitions}` adds the others (docs/how-to/kafka.md)"
    elif count < topic.partitions:
        mend += ", or add partitions with `relaygr topics apply --alter` while nothing runs (docs/how-to/kafka.md)"
    raise TopicError(
        f"topic {topic.name} has {count} partitions, its description says {topic.partitions}; {mend}, "
        f"or delete and apply it"
    )


def differences(rows: Sequence[TopicRow]) -> list[Difference]:
    """Every setting of the files that has another reported value on the cluster.

    More partitions than stated are no difference: check_rows refuses them where the count matters.
    """
    return [
        Difference(row.topic.name, setting, file, cluster)
        for row in rows
        if row.found is not None
        for setting, file, cluster in [
            ("partitions", str(row.topic.partitions), str(min(row.found.partitions, row.topic.partitions))),
            ("replication", str(row.topic.replication), str(row.found.replication)),
            *((name, value, row.found.configs.get(name, value)) for name, value in row.topic.configs.items()),
        ]
        if cluster != file
    ]


def check_all(rows: Sequence[TopicRow], *, but: str = "") -> None:
    """Check that there are no differences, and that dead letters of every topic fit into `dead-letter`.

    but: a setting to ignore. Raises TopicError that names all differences.
    """
    takes = [(row.topic, row.found.takes_bytes(row.topic)) for row in rows if row.found is not None]
    problems = [str(each) for each in differences(rows) if each.setting != but] + too_large_for_dead_letters(takes)
    if problems:
        raise TopicError(
            f"{'; '.join(problems)}. {REMEDY} (not replication: set kafka.replication); or change the files "
            f"(kafka.topics_dir)"
        )


def too_large_for_dead_letters(takes: Sequence[tuple[Topic, int]]) -> list[str]:
    """The topics whose dead letters may not fit into `dead-letter`. takes: topics, each with its longest message."""
    return [
        f"{lane.name} takes messages of {most} bytes, {letters.name} of {room}: a dead letter has up to "
        f"{DEAD_LETTER_HEADERS_BYTES} bytes more than its original"
        for letters, room in takes
        if letters.name.endswith("dead-letter")
        for lane, most in takes
        if lane.lanes and room < most + DEAD_LETTER_HEADERS_BYTES
    ]


# ---- while a process runs ----


class ReplyPartitions(Protocol):
    """Goes by the number of partitions of `scores`."""

    def counted(self, count: int) -> None:
        """The topic has so many now."""


class PartitionCounts:
    """Polls and checks the counts, and names topics that are missing.

    More partitions of `scores` are harmless: clients choose among all of them. So are more lanes, a multiple of those
    known: workers and triggers serve all that there are. Another number is an error: messages are sent to lanes that
    nobody serves.

    topics: grows with the cluster's lanes where `serves`; a client sends to as many as were announced (wire/routes.py).
    producer: its metadata is used, so it learns of new partitions too.
    replies: chooses among the partitions of `scores`. also: other topics that must not be missing.
    """

    def __init__(
        self,
        topics: TopicSet,
        producer: Producer,
        replies: ReplyPartitions | None = None,
        also: Sequence[Topic] = (),
        *,
        serves: bool = True,
    ) -> None:
        self._topics = topics
        self._serves = serves
        self._producer = producer
        self._replies = replies
        self._also = [topic.name for topic in also]
        self.error: LanesChanged | None = None
        self._missing: set[str] = set()  # in the last answer
        self._gone: set[str] = set()  # in the last two: a broker's metadata may be behind for a moment

    def why_not_ready(self) -> str | None:
        """The reason for readiness if lanes were added or topics are missing; None if not."""
        if self.error is not None:
            return str(self.error)
        if self._gone:
            return _missing(sorted(self._gone))
        return None

    async def run(self) -> None:
        """Poll for ever. A BrokerError is logged."""
        await periodically(max(ASK_S, self._topics.lanes / LANES_PER_S), self.ask, "ask for partition counts")

    async def ask_now(self) -> None:
        """Poll once now; where no broker answers, the next poll tells the same."""
        with suppress(BrokerError):
            await self.ask()

    async def ask(self) -> None:
        """Poll once and set `error`. Raises BrokerError."""
        lanes = [topic.name for topic in self._topics.all if topic.lanes]
        counts = await self._producer.partitions([*lanes, self._topics.scores.name, *self._also])
        missing = {name for name, count in counts.items() if not count}
        self._gone, self._missing = missing & self._missing, missing
        if self._replies is not None and (count := counts[self._topics.scores.name]):
            self._replies.counted(count)
        self._check_lanes({name: counts[name] for name in lanes if counts[name]})

    def _check_lanes(self, counts: dict[str, int]) -> None:
        topics, found = self._topics, 0
        if not counts:
            return
        with suppress(CoPartitionError):
            found = lanes_in(counts, topics.lanes)
        other = {name: count for name, count in counts.items() if count != topics.lanes}
        wrong = not found or found % topics.lanes > 0
        if wrong != bool(self.error):
            log.error("lanes changed on the cluster", counts=counts, served=topics.lanes)
        self.error = LanesChanged(other, topics.lanes) if wrong else None
        if not wrong and self._serves and topics.grow(found):
            log.info("lanes were added", lanes=found)
