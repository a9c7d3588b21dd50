"""Topics on each broker: created, verified, shown; and what differs from its description is refused."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import shutil
from pathlib import Path

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import NotLeaderForPartitionError
from aiokafka.protocol.offset import OffsetRequest
from structlog.testing import capture_logs

from relaygr_stream.bus import topics as bus_topics
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics, describe_topics, topic_exists, verified_topics, verify_topics
from relaygr_stream.errors import BrokerError, BrokerUnavailable, CoPartitionError, TopicError
from relaygr_stream.ops.brokers.distribution import DEFAULT_NODE
from relaygr_stream.ops.brokers.local import BrokerKind, local_broker
from relaygr_stream.settings.files import packaged_dir
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.routes import routes_topic
from relaygr_stream.wire.topic_files import LANE_TOPICS, lane_of, load_topics
from tests import needs
from tests.bus.members import Member
from tests.conftest import TEST_LANES, AnyBroker
from tests.waiting import WITHIN_S, until


async def _create(kafka: Kafka, name: str, partitions: int, **configs: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        config = {key.replace("_", "."): value for key, value in configs.items()}
        await admin.create_topics([NewTopic(kafka.prefix + name, partitions, 1, topic_configs=config)])

        async def there() -> bool:
            return kafka.prefix + name in await admin.list_topics()

        await until(there, "created")
    finally:
        await admin.close()


async def test_applied_topics_are_as_described(kafka_settings: Kafka) -> None:
    names = tuple(topic.name for topic in load_topics(kafka_settings).all)
    with pytest.raises(TopicError) as missing:
        await verify_topics(kafka_settings)
    assert all(name in str(missing.value) for name in names)
    assert all(row.found is None for row in await describe_topics(kafka_settings))

    report = await apply_topics(kafka_settings)
    assert (report.created, report.existing) == (names, ())
    assert f"created   {names[0]}" in str(report)

    for row in await verify_topics(kafka_settings):
        assert row.found is not None
        for what in ("partitions", "replication"):
            assert getattr(row.found, what) == getattr(row.topic, what), f"{row.topic.name} {what}"
        for name, value in row.topic.configs.items():
            assert row.found.configs.get(name) == value, f"{row.topic.name} {name}"
    await verify_topics(kafka_settings, strict=True)

    again = await apply_topics(kafka_settings)
    assert (again.created, again.existing) == ((), names)


def leaders_not_ready(monkeypatch: pytest.MonkeyPatch, answers: float) -> None:
    """So many answers of a leader say that it is none yet, as those of one that still makes the logs."""
    asked, send = 0, AIOKafkaClient.send

    async def answer(self: AIOKafkaClient, node: int, request: object, **options: object) -> object:
        nonlocal asked
        found = await send(self, node, request, **options)
        if isinstance(request, OffsetRequest) and (asked := asked + 1) <= answers:
            code = NotLeaderForPartitionError.errno
            found.topics = [(name, [(part, code, *rest) for part, _, *rest in parts]) for name, parts in found.topics]
        return found

    monkeypatch.setattr(AIOKafkaClient, "send", answer)


async def test_what_a_command_made_is_served_when_it_ends(
    kafka_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apache Kafka shows a leader before that has made the logs, for many seconds where the machine is busy: who then
    read gave up after a request timeout."""
    kafka = msgspec.structs.replace(kafka_settings, request_timeout_ms=1000)
    topics = load_topics(kafka)
    routes = routes_topic(topics)
    leaders_not_ready(monkeypatch, 12)  # a reader asks ten times within a request timeout
    await apply_topics(kafka)
    async with TopicTail(kafka, topics.ranking.name, range(topics.lanes), "latest", lambda _: None):
        pass
    leaders_not_ready(monkeypatch, 12)
    assert await topic_exists(kafka, routes, create=True)
    async with TopicTail(kafka, routes.name, [0], "earliest", lambda _: None):
        pass


async def test_what_is_not_served_for_long_is_named(kafka_settings: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_topics, "SERVED_S", 0.5)
    leaders_not_ready(monkeypatch, math.inf)
    with pytest.raises(BrokerError, match=r"ranking.*made 0.5 s ago, and no broker serves all partitions yet"):
        await apply_topics(kafka_settings)


async def test_unequal_lane_counts_are_refused_naming_both(kafka_settings: Kafka) -> None:
    await _create(kafka_settings, "pre-infer", 6)
    await _create(kafka_settings, "ranking", 8)
    with pytest.raises(CoPartitionError) as refused:
        await apply_topics(kafka_settings)
    for part in (f"{kafka_settings.prefix}pre-infer", f"{kafka_settings.prefix}ranking", "6 and 8"):
        assert part in str(refused.value)
    # Nothing was added to what does not fit.
    assert sum(row.found is not None for row in await describe_topics(kafka_settings)) == 2


async def test_verify_refuses_unequal_lane_counts(kafka_settings: Kafka) -> None:
    for name, partitions in {"retrieval": 8, "pre-infer": 8, "ranking": 12}.items():
        await _create(kafka_settings, name, partitions)
    for name in ("scores", "worker-status", "dead-letter"):
        await _create(kafka_settings, name, 16)
    with pytest.raises(CoPartitionError, match=r"retrieval and test-\w+\.ranking .* 8 and 12"):
        await verify_topics(kafka_settings)


@pytest.mark.parametrize(
    ("name", "partitions", "configs", "said"),
    [
        ("scores", 2, {}, "2 partitions"),
        ("worker-status", 3, {"cleanup_policy": "compact"}, "3 partitions"),
        ("worker-status", 1, {"cleanup_policy": "delete"}, r"cleanup\.policy=delete"),
        ("ranking", 8, {"max_message_bytes": "5000"}, "5000 bytes"),
    ],
)
async def test_what_differs_is_refused(
    kafka_settings: Kafka, name: str, partitions: int, configs: dict[str, str], said: str
) -> None:
    await _create(kafka_settings, name, partitions, **configs)
    with pytest.raises(TopicError, match=f"{name} .*{said}"):
        await apply_topics(kafka_settings)


async def test_every_difference_is_named_with_both_values_and_altered_when_told_so(
    kafka_settings: Kafka, broker: AnyBroker
) -> None:
    """A cluster of an earlier release: no segment.ms, producers' compression, larger messages than dead letters."""
    lanes = {"retention_ms": "60000", "compression_type": "producer", "max_message_bytes": "8388608"}
    await _create(kafka_settings, "ranking", 8, **lanes, segment_bytes="200000000")
    ranking, dead_letter = f"{kafka_settings.prefix}ranking", f"{kafka_settings.prefix}dead-letter"
    with pytest.raises(TopicError) as refused:
        await apply_topics(kafka_settings)
    for said in (
        f"{ranking}: compression.type = producer on the cluster, uncompressed in its file",
        f"{ranking}: max.message.bytes = 8388608 on the cluster, 1048576 in its file",
        f"{ranking} takes messages of 8388608 bytes, {dead_letter} of 2097152",
        "`relaygr topics apply --alter`",
    ):
        assert said in str(refused.value)
    with capture_logs() as logs:  # those who start go on, and say so
        await verify_topics(kafka_settings)
    assert [line["log_level"] for line in logs if "differ" in line["event"]] == ["warning"]
    with pytest.raises(TopicError, match=r"compression\.type = producer"):
        await verify_topics(kafka_settings, strict=True)
    if broker.kind == "embedded":
        return  # it alters nothing
    assert f"{ranking}: segment.ms = 604800000 on the cluster, 30000 in its file" in str(refused.value)
    report = await apply_topics(kafka_settings, alter=True)
    assert f"altered   {ranking}: segment.ms 604800000 → 30000" in str(report)
    rows = {row.topic.name: row.found for row in await verify_topics(kafka_settings, strict=True)}
    found = rows[ranking]
    assert found is not None
    assert found.configs["segment.bytes"] == "200000000", "what else was set for the topic stays"


async def test_partitions_are_added_when_told_so(kafka_settings: Kafka, broker: AnyBroker) -> None:
    if broker.kind == "embedded":
        pytest.skip("the embedded broker adds no partitions")
    await apply_topics(kafka_settings)
    more = msgspec.structs.replace(kafka_settings, partitions=12)
    with pytest.raises(TopicError, match=r"8 partitions, its description says 12.*--alter"):
        await apply_topics(more)
    await apply_topics(more, alter=True)
    assert {row.found.partitions for row in await verify_topics(more) if row.found and row.topic.lanes} == {12}
    with pytest.raises(TopicError, match="12 partitions, its description says 8"):
        await apply_topics(kafka_settings, alter=True)  # Kafka takes none away


@pytest.mark.kafka
async def test_retention_is_kept_under_traffic(tmp_path: Path) -> None:
    """Only whole segments expire: without segment.ms the one that is written to keeps everything for a week."""
    needs.kafka_home()
    often = {"log.retention.check.interval.ms": "200", "log.initial.task.delay.ms": "500"}
    node = dataclasses.replace(DEFAULT_NODE, properties=often)
    folder = tmp_path / "topics"
    shutil.copytree(packaged_dir("topics"), folder)
    file = folder / "ranking.toml"
    text = file.read_text(encoding="utf-8").replace("retention_ms = 60_000", "retention_ms = 3_000")
    file.write_text(text.replace("segment_ms = 30_000", "segment_ms = 500"), encoding="utf-8")
    async with local_broker("kafka", folder=tmp_path, node=node) as own:
        kafka = own.kafka_settings(Kafka(topics_dir=str(folder), partitions=1))
        await apply_topics(kafka)
        ranking = load_topics(kafka).ranking.name
        partition = TopicPartition(ranking, 0)
        async with (
            Producer(kafka, client_id="traffic") as producer,
            AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap) as reader,
        ):
            first = 0
            async with asyncio.timeout(WITHIN_S):
                while not first:  # traffic without a pause
                    await producer.send_and_wait(ranking, bytes(1000), partition=0)
                    first = (await reader.beginning_offsets([partition]))[partition]
            assert first < (await reader.end_offsets([partition]))[partition]


@pytest.mark.parametrize("kind", ["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
async def test_asking_for_a_topic_does_not_create_it(kind: BrokerKind, tmp_path: Path) -> None:
    """A broker with `auto.create.topics.enable` creates what a client names, with its own number of partitions: a topic
    deleted under a running relay came back with other lanes. An application's own clients are left as they are."""
    if kind == "kafka":
        needs.kafka_home()
    node = dataclasses.replace(DEFAULT_NODE, properties={"auto.create.topics.enable": "true"})
    async with local_broker(kind, folder=tmp_path, node=node) as own:
        kafka = own.kafka_settings(Kafka(request_timeout_ms=3000))
        async with Producer(kafka, client_id="test") as producer:
            assert await producer.partitions(["gone"]) == {"gone": 0}
            with pytest.raises(TopicError, match="no such topic"):
                await producer.send("gone", b"", partition=0)
            async with AIOKafkaProducer(bootstrap_servers=kafka.bootstrap) as other:
                await other.send_and_wait("wanted", b"")
            counts = await producer.partitions(["gone", "wanted"])
            assert counts["wanted"] > counts["gone"] == 0


async def test_another_lane_count_than_configured_is_refused(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    other = msgspec.structs.replace(kafka_settings, partitions=5)
    with pytest.raises(TopicError, match=r"has 8 partitions, its description says 5; set kafka\.partitions to 8"):
        await verify_topics(other)


@pytest.mark.parametrize("there", [{}, {"retrieval": 8, "pre-infer": 4}])
async def test_a_cluster_keeps_its_lanes(kafka_settings: Kafka, there: dict[str, int]) -> None:
    """A cluster of a release with fewer lanes, whole or half created: nothing is refused, and nothing grows unasked."""
    as_files_say = {topic.name.removeprefix(kafka_settings.prefix): topic for topic in load_topics(kafka_settings).all}
    for name, partitions in there.items():
        configs = {key.replace(".", "_"): value for key, value in as_files_say[name].configs.items()}
        await _create(kafka_settings, name, partitions, **configs)
    lanes = min(there.values(), default=TEST_LANES)
    stated = msgspec.structs.replace(kafka_settings, partitions=lanes)
    if not there:
        await apply_topics(stated)
    unstated = msgspec.structs.replace(kafka_settings, partitions=0)
    for alter in (False, True) if not there else (False,):
        report = await apply_topics(unstated, alter=alter)
        assert f"kept      {lanes} lanes, new topics get 64: `relaygr lanes grow 64`" in str(report)
    counts = {row.topic.name: row.found.partitions for row in report.rows if row.found and row.topic.lanes}
    assert counts == {f"{kafka_settings.prefix}{name}": there.get(name, lanes) for name in LANE_TOPICS}
    assert (await verified_topics(unstated)).lanes == (await verified_topics(stated)).lanes == lanes
    if not there:
        assert "kept" not in str(await apply_topics(stated))
        await verify_topics(unstated, strict=True)


async def test_impossible_replication_is_explained(broker: AnyBroker, kafka_settings: Kafka) -> None:
    if broker.kind == "embedded":
        pytest.skip("the embedded broker keeps one copy and accepts any replication")
    with pytest.raises(TopicError, match="InvalidReplicationFactor"):
        await apply_topics(msgspec.structs.replace(kafka_settings, replication=9))


async def test_no_broker_is_said(kafka_settings: Kafka) -> None:
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1.*RELAYGR_KAFKA_BOOTSTRAP"):
        await verify_topics(msgspec.structs.replace(kafka_settings, bootstrap="127.0.0.1:1"))


async def test_a_users_messages_go_to_the_users_lane(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topics = load_topics(kafka_settings)
    users = [f"user-{number}" for number in range(40)] + ["用户", "ü", "a b"]
    async with Member(kafka_settings, topics, "one") as one, Producer(kafka_settings, client_id="test") as producer:
        for user in users:
            for topic in (topics.pre_infer.name, topics.ranking.name):
                await producer.send_and_wait(topic, b"", key=user.encode())
        await until(lambda: len(one.records) == 2 * len(users), "all read")
        for record in one.records:
            assert record.key is not None
            assert record.lane == lane_of(record.key.decode(), topics.lanes)
