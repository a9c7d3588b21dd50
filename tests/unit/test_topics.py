"""Topic files, and the lane of a user."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka.errors import KafkaConnectionError, NodeNotReadyError, TopicAuthorizationFailedError
from aiokafka.partitioner import murmur2 as aiokafka_murmur2
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.bus import topics
from relaygr_stream.bus.aiokafka_compat import typed_errors
from relaygr_stream.bus.topic_check import TopicRow
from relaygr_stream.errors import BrokerError, BrokerUnavailable, ConfigError, CoPartitionError
from relaygr_stream.settings.files import packaged_dir
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import LANE_TOPICS, lane_of, load_topics, murmur2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = tmp_path / "topics"
    shutil.copytree(packaged_dir("topics"), copy)
    return copy


def _edit(folder: Path, name: str, old: str, new: str) -> Path:
    path = folder / f"{name}.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


def test_the_packaged_topics_load() -> None:
    topics = load_topics(Kafka())
    files = [path.stem for path in packaged_dir("topics").glob("*.toml")]
    assert sorted(topic.name for topic in topics.all) == sorted(f"relaygr.{name}" for name in files)
    assert topics.worker_status.cleanup_policy == "compact"
    assert (topics.lanes, topics.stated, topics.scores.partitions) == (64, 0, 16)
    assert {topic.name for topic in topics.all if topic.lanes} == {f"relaygr.{name}" for name in LANE_TOPICS}


def test_the_packaged_topics_state_what_keeps_their_retention() -> None:
    for topic in load_topics(Kafka()).all:
        assert topic.segment_ms is not None
        assert topic.segment_ms <= topic.retention_ms / 2
        assert {"compression.type", "min.insync.replicas", "segment.ms"} <= topic.configs.keys()


def test_more_replicas_that_must_acknowledge_than_there_are_is_refused(folder: Path) -> None:
    _edit(folder, "retrieval", "min_insync_replicas = 1", "min_insync_replicas = 2")
    with pytest.raises(ConfigError, match=r"retrieval: `min_insync_replicas` = 2, of 1 replicas"):
        load_topics(Kafka(topics_dir=str(folder)))
    assert load_topics(Kafka(topics_dir=str(folder), replication=3)).retrieval.configs["min.insync.replicas"] == "2"


def test_settings_override_lanes_replicas_and_prefix() -> None:
    topics = load_topics(Kafka(prefix="x.", partitions=5, replication=3))
    assert topics.lanes == 5
    assert (topics.retrieval.partitions, topics.scores.partitions, topics.worker_status.partitions) == (5, 16, 1)
    assert {topic.replication for topic in topics.all} == {3}
    assert topics.scores.name == "x.scores"


def test_unequal_lane_counts_in_the_files_are_refused(folder: Path) -> None:
    _edit(folder, "ranking", "partitions = 64", "partitions = 12")
    with pytest.raises(CoPartitionError, match=r"relaygr\.retrieval and relaygr\.ranking .* 64 and 12"):
        load_topics(Kafka(topics_dir=str(folder)))
    assert load_topics(Kafka(topics_dir=str(folder), partitions=4)).lanes == 4


def test_statuses_on_more_than_one_partition_are_refused(folder: Path) -> None:
    """Workers whose name was on another one than the first were invisible to clients, peers and themselves."""
    _edit(folder, "worker-status", "partitions = 1", "partitions = 3")
    with pytest.raises(ConfigError, match=r"worker-status: `partitions` = 3: must be 1"):
        load_topics(Kafka(topics_dir=str(folder)))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("partitions = 64", "partitions = 0", r"partitions"),
        ("partitions = 64", 'partitions = "64"', r"partitions"),
        ("partitions = 64", "", r"partitions"),
        ("partitions = 64", "partitions = 64\nreplicas = 3", r"replicas"),
        ("partitions = 64", "partitions = 64\ncleanup_policy = 'keep'", r"cleanup_policy"),
        ("lanes = true", "lanes = false", r"`lanes` = False"),
        ('name = "ranking"', 'name = "rankings"', r"`name` = 'rankings'"),
        ('name = "ranking"', 'name = "scores"', r"`lanes` = True"),
        ('name = "ranking"', 'name = "pre-infer"', r"another file"),
        ('name = "ranking"', "name =", r"Invalid value"),
    ],
)
def test_a_bad_file_is_named_with_its_key(folder: Path, old: str, new: str, said: str) -> None:
    path = _edit(folder, "ranking", old, new)
    with pytest.raises(ConfigError, match=said) as refused:
        load_topics(Kafka(topics_dir=str(folder)))
    assert str(path) in str(refused.value)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "scores.toml").unlink()
    with pytest.raises(ConfigError, match="scores"):
        load_topics(Kafka(topics_dir=str(folder)))
    with pytest.raises(ConfigError, match=r"nowhere.*: no such folder"):
        load_topics(Kafka(topics_dir=str(folder / "nowhere")))


@pytest.mark.parametrize(
    ("key", "hashed"),
    # From Apache Kafka's own test of Utils.murmur2 (UtilsTest.testMurmur2).
    [
        ("21", -973932308),
        ("foobar", -790332482),
        ("a-little-bit-long-string", -985981536),
        ("a-little-bit-longer-string", -1486304829),
        ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
    ],
)
def test_lanes_are_those_of_kafkas_java_client(key: str, hashed: int) -> None:
    for lanes in (1, 7, 16, 10_000):
        assert lane_of(key, lanes) == (hashed & 0x7FFFFFFF) % lanes


def test_the_lanes_in_the_protocol_are_right() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert rows
    for key, hashed, *lanes in rows:
        assert murmur2(key.encode()) == int(hashed)
        assert [lane_of(key, count) for count in (8, 16, 100)] == [int(lane) for lane in lanes]


@given(st.binary(max_size=40))
def test_the_hash_is_aiokafkas(key: bytes) -> None:
    assert murmur2(key) == aiokafka_murmur2(key)


@given(st.text(min_size=1, max_size=30), st.integers(1, 10_000))
def test_a_lane_is_a_lane(user: str, lanes: int) -> None:
    assert 0 <= lane_of(user, lanes) < lanes


class Cluster:
    """An admin client that fails with each of these in turn, and then answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failures: Exception) -> None:
        self.asked, self._failures = 0, failures
        self.answers = True
        monkeypatch.setattr(topics, "check_connection", self._check)
        monkeypatch.setattr(topics, "_admin", self._admin)
        monkeypatch.setattr(topics, "_describe", self._describe)
        monkeypatch.setattr(topics, "RETRY_S", 0.0)

    @asynccontextmanager
    async def _admin(self, kafka: Kafka) -> AsyncIterator[None]:
        self.asked += 1
        if self.asked <= len(self._failures):
            with typed_errors(kafka, "look at the topics"):
                raise self._failures[self.asked - 1]
        yield

    async def _check(self, kafka: Kafka) -> None:
        if not self.answers:
            raise BrokerUnavailable("no Kafka broker answers")

    async def _describe(self, admin: None, described: object) -> tuple[TopicRow, ...]:
        return ()


async def test_a_start_while_a_dead_broker_is_still_named_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, NodeNotReadyError("node 3"), NodeNotReadyError("node 3"))
    assert await topics.describe_topics(Kafka()) == ()
    assert cluster.asked == 3


@pytest.mark.parametrize("left", [KafkaConnectionError("closed"), ConnectionResetError(104, "reset"), TimeoutError()])
async def test_a_start_that_meets_a_leaving_broker_asks_again(monkeypatch: pytest.MonkeyPatch, left: Exception) -> None:
    cluster = Cluster(monkeypatch, left, left)
    assert await topics.describe_topics(Kafka()) == ()
    assert cluster.asked == 3


async def test_that_no_broker_answers_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch)
    cluster.answers = False
    with pytest.raises(BrokerUnavailable):
        await topics.describe_topics(Kafka())
    assert cluster.asked == 0


async def test_what_will_not_pass_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(monkeypatch, TopicAuthorizationFailedError("no"))
    with pytest.raises(BrokerError):
        await topics.describe_topics(Kafka())
    assert cluster.asked == 1
