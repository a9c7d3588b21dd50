"""The topics on a cluster: describes, creates and alters them, and checks them against their files (topic_files.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    ClusterAuthorizationFailedError,
    KafkaError,
    NoError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    for_code,
)

from relaygr_stream.bus.aiokafka_compat import client_options, not_granted, typed_errors
from relaygr_stream.bus.probe import check_connection
from relaygr_stream.bus.producer import NO_LEADER
from relaygr_stream.bus.topic_check import (
    Difference,
    FoundTopic,
    TopicRow,
    as_found,
    check_all,
    check_rows,
    differences,
    topics_with,
)
from relaygr_stream.errors import BrokerError, TopicError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import Topic, TopicSet, load_topics

log = structlog.get_logger(__name__)

#: Config name → its value, and whether it is set for the topic.
_Configs = dict[str, tuple[str, bool]]
#: Kafka's code of DYNAMIC_TOPIC_CONFIG among the sources of a config.
TOPICS_OWN: Final = 1
#: What `apply_topics` changes on existing topics in any case: no traffic notices, and a wrong clock does harm without.
ALWAYS_ALTERED: Final = frozenset({"message.timestamp.type"})
#: How long a process retries at its start. A cluster refers clients to a dead broker until it is fenced
#: (`broker.session.timeout.ms`, 9 s by default).
FENCING_S: Final = 10.0
RETRY_S: Final = 0.5
#: An authorizer's refusals of a change.
NOT_GRANTED: Final = (TopicAuthorizationFailedError, ClusterAuthorizationFailedError)


@dataclass(frozen=True)
class TopicReport:
    """The result of `apply_topics`. kept: says that there are fewer lanes than new topics get."""

    created: tuple[str, ...]
    existing: tuple[str, ...]
    rows: tuple[TopicRow, ...]
    altered: tuple[Difference, ...] = ()
    kept: str = ""

    def __str__(self) -> str:
        lines = [f"created   {name}" for name in self.created] + [f"existing  {name}" for name in self.existing]
        lines += [f"altered   {each.topic}: {each.setting} {each.cluster} → {each.file}" for each in self.altered]
        lines += [f"kept      {self.kept}"] if self.kept else []
        lines += [hidden] if (hidden := uncompared(self.rows)) else []
        return "\n".join(lines)


async def describe_topics(kafka: Kafka) -> tuple[TopicRow, ...]:
    """Each topic's description, and the topic on the cluster. Raises BrokerUnavailable, BrokerError, ConfigError.

    It raises at once if no broker answers. After a first answer it retries for FENCING_S, since brokers may leave.
    """
    topics = load_topics(kafka)
    await check_connection(kafka)
    gives_up = time.monotonic() + FENCING_S
    while True:
        try:
            async with _admin(kafka) as admin:
                return await _describe(admin, topics.all)
        except BrokerError as error:
            passing = isinstance(error.__cause__, OSError) or getattr(error.__cause__, "retriable", False)
            if not passing or time.monotonic() > gives_up:
                raise
        await asyncio.sleep(RETRY_S)


async def verify_topics(kafka: Kafka, *, strict: bool = False, optional: Collection[str] = ()) -> tuple[TopicRow, ...]:
    """Check the cluster against the topics' files, as every process does at its start.

    strict: refuse every difference; otherwise a difference that does not break the relay is a warning in the log.
    optional: names of topics that may be missing.
    Raises TopicError, CoPartitionError (naming both topics and both counts), BrokerUnavailable, ConfigError.
    """
    described = await describe_topics(kafka)
    rows = tuple(row for row in described if row.found is not None or row.topic.name not in optional)
    rows = as_found(kafka, rows)
    _refuse_hidden(kafka, rows)
    check_rows(rows)
    try:
        # The operator chooses the replication; a process that uses the topics need not know it.
        check_all(rows, but="" if strict else "replication")
    except TopicError as error:
        if strict:
            raise
        log.warning("topics differ from their files", detail=str(error))
    return rows


async def verified_topics(kafka: Kafka) -> TopicSet:
    """The topics, with the lanes that the cluster has. Raises as `verify_topics`."""
    return topics_with(kafka, await verify_topics(kafka))


async def delete_before(kafka: Kafka, topic: str, offsets: Mapping[int, int]) -> None:
    """Delete the records of a topic's partitions below these offsets; partition → offset.

    Raises BrokerError, also for a broker that deletes no records.
    """
    wanted = {TopicPartition(topic, partition): RecordsToDelete(offset) for partition, offset in offsets.items()}
    async with _admin(kafka) as admin:
        # aiokafka looks for the leaders in the metadata of all topics, for which our clients do not ask.
        admin._get_cluster_metadata = partial(admin._get_cluster_metadata, [topic])
        try:
            await admin.delete_records(wanted)
        except NOT_GRANTED as error:
            raise not_granted(kafka, f"delete records of {topic}", "DELETE", "topic", [topic]) from error
        except (KafkaError, OSError) as error:
            raise BrokerError(
                f"the broker does not delete records of {topic} ({error}); the embedded one cannot"
            ) from error


async def add_partitions(kafka: Kafka, counts: Mapping[str, int]) -> None:
    """Have so many partitions of these topics, by name. Raises BrokerError, also for a broker that adds none."""
    async with _admin(kafka) as admin:
        await _add_partitions(kafka, admin, counts)


async def _add_partitions(kafka: Kafka, admin: Any, counts: Mapping[str, int]) -> None:
    try:
        await admin.create_partitions({name: NewPartitions(count) for name, count in counts.items()})
    except NOT_GRANTED as error:
        raise not_granted(kafka, "add partitions", "ALTER", "topic", counts) from error
    except (KafkaError, OSError) as error:
        raise BrokerError(
            f"the broker adds no partitions to {', '.join(counts)} ({error}); the embedded one cannot"
        ) from error


async def apply_topics(kafka: Kafka, *, alter: bool = False) -> TopicReport:
    """Create the missing topics, let brokers set the times of existing ones, then verify strictly. Raises as
    `verify_topics`.

    Existing topics keep their number of lanes, and a missing one gets as many.
    alter: change existing topics to all that their files say, and add missing partitions. With kafka.partitions that is
    more lanes, which moves users to others, so nothing may run meanwhile (docs/how-to/kafka.md).
    """
    topics = load_topics(kafka)
    await check_connection(kafka)
    async with _admin(kafka) as admin:
        before = as_found(kafka, await _describe(admin, topics.all))
        _refuse_hidden(kafka, before)
        missing = [row.topic for row in before if row.found is None]
        if not alter:  # check the existing topics before changing them, or creating others
            check_rows([row for row in before if row.found is not None])
        altered = await _alter(kafka, admin, before, None if alter else ALWAYS_ALTERED)
        if missing:
            await _create(kafka, admin, missing)
        timeout_s = kafka.request_timeout_ms / 1000
        rows = await _describe_when_visible(
            admin, [row.topic for row in before], timeout_s, {(each.topic, each.setting) for each in altered}
        )
    rows = as_found(kafka, rows)  # another process may have made some meanwhile
    check_rows(rows)
    check_all(rows)
    created = tuple(topic.name for topic in missing)
    existing = tuple(row.topic.name for row in rows if row.topic.name not in created)
    return TopicReport(created, existing, rows, altered, _kept(topics_with(kafka, rows).lanes, topics.lanes))


def _kept(lanes: int, new: int) -> str:
    """That there are fewer lanes than new topics get, and how to have more; "": there are not."""
    more = -(-new // lanes) * lanes  # they grow to a multiple
    hint = f"{lanes} lanes, new topics get {new}: `relaygr lanes grow {more}` adds some while everything serves"
    return hint if lanes < new else ""


async def topic_exists(kafka: Kafka, topic: Topic, *, create: bool = False) -> bool:
    """Whether the cluster has the topic; create: make it if not, as described. Raises BrokerError, TopicError."""
    async with _admin(kafka) as admin:
        (row,) = await _describe(admin, [topic])
        if row.found is None and create:
            await _create(kafka, admin, [topic])
            (row,) = await _describe_when_visible(admin, [topic], kafka.request_timeout_ms / 1000, set())
    return row.found is not None


@asynccontextmanager
async def _admin(kafka: Kafka) -> AsyncIterator[Any]:
    admin = AIOKafkaAdminClient(**client_options(kafka, "relaygr-topics"))
    try:
        with typed_errors(kafka, "look at the topics", "DESCRIBE"):
            await admin.start()
            yield admin
    finally:
        await admin.close()


def _refuse_hidden(kafka: Kafka, rows: Sequence[TopicRow]) -> None:
    if hidden := [row.topic.name for row in rows if row.hidden]:
        raise not_granted(kafka, "look at the topics", "DESCRIBE", "topic", hidden)


def uncompared(rows: Sequence[TopicRow]) -> str:
    """Which topics' settings the cluster does not tell; "": it tells all."""
    names = [row.topic.name for row in rows if row.found is not None and row.found.secret]
    return f"not compared, for lack of the ACL DESCRIBE_CONFIGS: the settings of {', '.join(names)}" if names else ""


async def _describe(admin: Any, topics: Sequence[Topic]) -> tuple[TopicRow, ...]:
    described = await admin.describe_topics([topic.name for topic in topics])
    listed = {
        entry["topic"]: entry["partitions"]
        for entry in described
        if entry["error_code"] == NoError.errno and entry["partitions"]
    }
    hidden = {entry["topic"] for entry in described if entry["error_code"] == TopicAuthorizationFailedError.errno}
    present = [topic.name for topic in topics if topic.name in listed]
    configs = await _configs(admin, present) if present else {}
    found = {name: _found(listed[name], configs.get(name, {})) for name in present}
    return tuple(TopicRow(topic, found.get(topic.name), topic.name in hidden) for topic in topics)


def _found(partitions: list[dict[str, Any]], config: _Configs | None) -> FoundTopic:
    secret, config = config is None, config or {}
    return FoundTopic(
        partitions=len(partitions),
        replication=min(len(partition["replicas"]) for partition in partitions),
        configs={name: value for name, (value, _) in config.items()},
        own=frozenset(name for name, (_, own) in config.items() if own),
        leaders={partition["partition"]: partition["leader"] for partition in partitions},
        secret=secret,
    )


async def _configs(admin: Any, names: Sequence[str]) -> dict[str, _Configs | None]:
    """By topic; None: the cluster does not tell them."""
    found: dict[str, _Configs | None] = {}
    responses = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, name) for name in names])
    for response in responses:
        for error_code, _, _, name, entries in response.resources:
            if error_code == NoError.errno:
                # The fourth field is a value's source (1: the topic); before version 1, whether it is a default.
                own = (lambda source: not source) if response.API_VERSION == 0 else TOPICS_OWN.__eq__
                found[name] = {entry[0]: (entry[1], own(entry[3])) for entry in entries if entry[1]}
            elif error_code == TopicAuthorizationFailedError.errno:
                found[name] = None
    return found


async def _create(kafka: Kafka, admin: Any, topics: Sequence[Topic]) -> None:
    new = [
        NewTopic(
            name=topic.name,
            num_partitions=topic.partitions,
            replication_factor=topic.replication,
            topic_configs=topic.configs,
        )
        for topic in topics
    ]
    response = await admin.create_topics(new)
    for name, error_code, *detail in response.topic_errors:
        error = for_code(error_code)
        # Another process may have created it meanwhile; the check afterwards covers it.
        if error in NOT_GRANTED:
            raise not_granted(kafka, f"create topic {name}", "CREATE", "cluster, or on topic", [name])
        if error not in (NoError, TopicAlreadyExistsError):
            raise TopicError(f"topic {name} could not be created: {error.__name__}: {detail[0] if detail else ''}")


async def _alter(
    kafka: Kafka, admin: Any, rows: Sequence[TopicRow], only: Collection[str] | None
) -> tuple[Difference, ...]:
    """Change existing topics to what their files say, except for fewer partitions and another replication.

    only: the names of the settings to change; None: all.
    """
    found = [(row.topic, row.found) for row in rows if row.found is not None]
    check_rows([row for row in rows if row.found is not None and row.found.partitions > row.topic.partitions])
    changed = tuple(
        each for each in differences(rows) if each.setting != "replication" and (only is None or each.setting in only)
    )
    resources, few = [], {}
    for topic, has in found:
        settings = {each.setting for each in changed if each.topic == topic.name}
        if settings - {"partitions"}:
            # Kafka's request replaces all configs of the topic, so the present ones are sent too.
            stated = {name: value for name, value in topic.configs.items() if name in settings}
            configs = {name: has.configs[name] for name in has.own} | stated
            resources.append(ConfigResource(ConfigResourceType.TOPIC, topic.name, configs))
        if "partitions" in settings:
            few[topic.name] = topic.partitions
    if resources:
        for response in await admin.alter_configs(resources):
            for error_code, message, _, name in response.resources:
                if for_code(error_code) in NOT_GRANTED:
                    raise not_granted(kafka, f"alter topic {name}", "ALTER_CONFIGS", "topic", [name])
                if error_code != NoError.errno:
                    raise TopicError(f"topic {name} could not be altered: {for_code(error_code).__name__}: {message}")
    if few:
        await _add_partitions(kafka, admin, few)
    return changed


async def _describe_when_visible(
    admin: Any, topics: Sequence[Topic], timeout_s: float, altered: set[tuple[str, str]]
) -> tuple[TopicRow, ...]:
    """Describe the topics when all brokers show the new topics, their leaders and the changes, or after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while True:
        rows = await _describe(admin, topics)
        waiting = any(
            row.found is None or NO_LEADER in row.found.leaders.values() for row in rows
        ) or not altered.isdisjoint((each.topic, each.setting) for each in differences(rows))
        if not waiting or time.monotonic() > deadline:
            return rows
        await asyncio.sleep(0.05)
