"""The topics on a cluster: describes, creates and alters them, and checks them against their files (topic_files.py)."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import structlog
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.consumer.fetcher import OffsetResetStrategy
from aiokafka.errors import (
    KafkaError,
    NoError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    for_code,
)
from aiokafka.protocol.offset import OffsetRequest

from relaygr_stream.bus.aiokafka_compat import NOT_GRANTED, client_options, not_granted, typed_errors
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
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.topic_files import Topic, TopicSet, load_topics

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

T = TypeVar("T")
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
#: How long a command waits for what it makes. Apache Kafka shows partitions and their leaders before these have made
#: the logs; a busy machine takes tens of seconds for those of a group.
SERVED_S: Final = 120.0
#: The pause between looks at what was just made, at first, and how often it is told that it is waited for.
LOOK_S: Final = 0.05
TELL_S: Final = 10.0


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
    return await _tried(kafka, lambda admin: _describe(admin, topics.all), FENCING_S)


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
        except tuple(NOT_GRANTED) as error:
            raise not_granted(kafka, f"delete records of {topic}", "DELETE", "topic", [topic]) from error
        except (KafkaError, OSError) as error:
            raise BrokerError(
                f"the broker does not delete records of {topic} ({error}); the embedded one cannot"
            ) from error


async def add_partitions(kafka: Kafka, counts: Mapping[str, int]) -> None:
    """Have so many partitions of these topics, by name. Raises BrokerError, also for a broker that adds none."""
    topics = [topic for topic in load_topics(kafka).all if topic.name in counts]

    async def add(admin: Any) -> None:
        rows = [(row.topic.name, row.found) for row in await _describe(admin, topics)]
        few = {name: counts[name] for name, found in rows if found is None or found.partitions < counts[name]}
        if few:  # unless a request that took too long has added them
            await _add_partitions(kafka, admin, few)

    await _tried(kafka, add, SERVED_S)


async def _add_partitions(kafka: Kafka, admin: Any, counts: Mapping[str, int]) -> None:
    try:
        await admin.create_partitions({name: NewPartitions(count) for name, count in counts.items()})
    except tuple(NOT_GRANTED) as error:
        raise not_granted(kafka, "add partitions", "ALTER", "topic", counts) from error
    except (KafkaError, OSError) as error:
        raise BrokerError(
            f"the broker adds no partitions to {', '.join(counts)} ({error}); the embedded one cannot"
        ) from error


async def apply_topics(kafka: Kafka, *, alter: bool = False) -> TopicReport:
    """Create the missing topics, wait until they are served, let brokers set the times of existing ones, then verify
    strictly. Raises as `verify_topics`, and BrokerError where it waits for more than SERVED_S.

    Existing topics keep their number of lanes, and a missing one gets as many.
    alter: change existing topics to all that their files say, and add missing partitions. With kafka.partitions that is
    more lanes, which moves users to others, so nothing may run meanwhile (docs/how-to/kafka.md).
    """
    topics, missing = load_topics(kafka), dict[str, Topic]()
    await check_connection(kafka)

    async def apply(admin: Any) -> tuple[tuple[Difference, ...], tuple[TopicRow, ...]]:
        before = as_found(kafka, await _describe(admin, topics.all))
        _refuse_hidden(kafka, before)
        missing.update({row.topic.name: row.topic for row in before if row.found is None})
        if not alter:  # check the existing topics before changing them, or creating others
            check_rows([row for row in before if row.found is not None])
        altered = await _alter(kafka, admin, before, None if alter else ALWAYS_ALTERED)
        return altered, await _served(admin, kafka, [row.topic for row in before], missing, altered)

    altered, rows = await _tried(kafka, apply, SERVED_S)
    rows = as_found(kafka, rows)  # another process may have made some meanwhile
    check_rows(rows)
    check_all(rows)
    existing = tuple(row.topic.name for row in rows if row.topic.name not in missing)
    return TopicReport(tuple(missing), existing, rows, altered, _kept(topics_with(kafka, rows).lanes, topics.lanes))


def _kept(lanes: int, new: int) -> str:
    """That there are fewer lanes than new topics get, and how to have more; "": there are not."""
    more = -(-new // lanes) * lanes  # they grow to a multiple
    hint = f"{lanes} lanes, new topics get {new}: `relaygr lanes grow {more}` adds some while everything serves"
    return hint if lanes < new else ""


async def topic_exists(kafka: Kafka, topic: Topic, *, create: bool = False) -> bool:
    """Whether the cluster has the topic; create: make it if not, as described. Raises BrokerError, TopicError."""

    async def look(admin: Any) -> bool:
        (row,) = await _describe(admin, [topic])
        if row.found is None and create:
            (row,) = await _served(admin, kafka, [topic], {topic.name})
        return row.found is not None

    return await _tried(kafka, look, SERVED_S if create else 0.0)


async def _tried(kafka: Kafka, attempt: Callable[[Any], Awaitable[T]], within_s: float) -> T:
    """What the attempt returns with an admin client, repeated for within_s while brokers leave or are slow."""
    gives_up = time.monotonic() + within_s
    while True:
        try:
            async with _admin(kafka) as admin:
                return await attempt(admin)
        except BrokerError as error:
            passing = isinstance(error.__cause__, OSError) or getattr(error.__cause__, "retriable", False)
            if not passing or time.monotonic() >= gives_up:
                raise
            limited(log.warning, "tried")("the topics are looked at again", error=str(error))
        await asyncio.sleep(RETRY_S)


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
        if error in NOT_GRANTED:
            raise not_granted(kafka, f"create topic {name}", "CREATE", "cluster, or on topic", [name])
        # It may be there by now: by another process, or by a request that took too long for its broker.
        if error not in (NoError, TopicAlreadyExistsError) and not error.retriable:
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


async def _served(
    admin: Any, kafka: Kafka, topics: Sequence[Topic], new: Collection[str], altered: Sequence[Difference] = ()
) -> tuple[TopicRow, ...]:
    """Create those that are new, by name, and describe the topics when the leaders of the new ones serve them.

    Also when the cluster shows what was altered, or after a request timeout, since a broker may alter nothing.
    Raises BrokerError after SERVED_S.
    """
    pending = {(each.topic, each.setting) for each in altered}
    began, tells_s = time.monotonic(), TELL_S
    while True:
        rows = await _describe(admin, topics)
        _refuse_hidden(kafka, rows)
        waited_s = time.monotonic() - began
        if missing := [row.topic for row in rows if row.found is None and row.topic.name in new]:
            await _create(kafka, admin, missing)
        unserved = await _unserved(admin, [row for row in rows if row.topic.name in new])
        shown = pending.isdisjoint((each.topic, each.setting) for each in differences(rows))
        if not unserved and (shown or waited_s > kafka.request_timeout_ms / 1e3):
            return rows
        if waited_s > SERVED_S:
            raise BrokerError(
                f"{', '.join(unserved)}: made {SERVED_S:g} s ago, and no broker serves all partitions yet; look at the "
                f"brokers' logs, then run this again"
            )
        if waited_s > tells_s:
            tells_s = waited_s + TELL_S
            log.warning("waits for brokers to serve what was just made", topics=unserved)
        await asyncio.sleep(min(RETRY_S, max(LOOK_S, waited_s / 4)))


async def _unserved(admin: Any, rows: Sequence[TopicRow]) -> list[str]:
    """The topics that the cluster does not show, or with a partition whose leader does not answer for it yet."""
    unserved = {row.topic.name for row in rows if row.found is None or NO_LEADER in row.found.leaders.values()}
    asked: defaultdict[int, dict[str, list[tuple[int, int]]]] = defaultdict(dict)
    for row in rows:
        for partition, leader in row.found.leaders.items() if row.found is not None else ():
            asked[leader].setdefault(row.topic.name, []).append((partition, OffsetResetStrategy.LATEST))
    for leader in asked.keys() - {NO_LEADER}:
        answer = await admin._client.send(leader, OffsetRequest(-1, 0, list(asked[leader].items())))
        unserved |= {name for name, found in answer.topics if any(code != NoError.errno for _, code, *_ in found)}
    return sorted(unserved)
