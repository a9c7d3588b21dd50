"""How many partitions there are, asked again and again. On a cluster: tests/e2e/test_lane_count.py."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topic_check import PartitionCounts
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.errors import ConfigError, CoPartitionError
from relaygr_stream.settings.files import packaged_dir
from relaygr_stream.settings.schema import Client, Kafka
from relaygr_stream.wire.behaviours import pack_items
from relaygr_stream.wire.messages import RankingRequest
from relaygr_stream.wire.topic_files import load_topics
from tests.unit.worker.services import history, worker_on, worker_settings

TOPICS = load_topics(Kafka(partitions=4))


class Cluster:
    """In place of a producer: what it would say."""

    def __init__(self) -> None:
        self.counts = {topic.name: topic.partitions for topic in TOPICS.all}

    async def partitions(self, topics: Sequence[str]) -> dict[str, int]:
        return {topic: self.counts[topic] for topic in topics}


async def test_another_number_of_lanes_is_told_with_both_counts() -> None:
    cluster, replies, topics = Cluster(), list[int](), load_topics(Kafka(partitions=4))
    counts = PartitionCounts(topics, cluster, SimpleNamespace(counted=replies.append))  # type: ignore[arg-type]
    await counts.ask()
    assert (counts.error, counts.why_not_ready()) == (None, None)
    cluster.counts |= {TOPICS.ranking.name: 6, TOPICS.scores.name: 32, TOPICS.retrieval.name: 0}
    await counts.ask()
    said = counts.why_not_ready() or ""
    assert f"{TOPICS.ranking.name} has 6 partitions, this process knows 4 lanes" in said
    assert TOPICS.pre_infer.name not in said
    assert TOPICS.retrieval.name not in said, "a topic that is away is another matter"
    assert replies == [TOPICS.scores.partitions, 32]
    assert isinstance(counts.error, CoPartitionError)
    assert str(copy(counts.error)) == said
    cluster.counts |= {TOPICS.ranking.name: 4, TOPICS.retrieval.name: 4}
    await counts.ask()
    assert counts.why_not_ready() is None


async def test_lanes_that_are_added_are_served_and_sent_to_once_they_are_announced() -> None:
    cluster, served, sent_to = Cluster(), load_topics(Kafka(partitions=4)), load_topics(Kafka(partitions=4))
    worker = PartitionCounts(served, cluster)  # type: ignore[arg-type]
    client = PartitionCounts(sent_to, cluster, serves=False)  # type: ignore[arg-type]

    async def count(*partitions: int) -> tuple[int, int]:
        names = (topic.name for topic in TOPICS.all if topic.lanes)
        cluster.counts |= dict(zip(names, partitions, strict=True))
        await worker.ask()
        await client.ask()
        return served.lanes, sent_to.lanes

    assert await count(4, 16, 16) == (4, 4), "in the middle of it"
    assert await count(16, 16, 16) == (16, 4)
    assert (worker.error, client.error) == (None, None)
    assert sent_to.grow(16)
    assert await count(8, 8, 8) == (16, 16)
    assert "has 8 partitions, this process knows 16 lanes" in str(worker.error)
    assert str(client.error) == str(worker.error)


async def test_a_topic_that_stays_missing_is_named() -> None:
    """Every process said ready while its topics were deleted."""
    cluster = Cluster()
    counts = PartitionCounts(TOPICS, cluster)  # type: ignore[arg-type]
    cluster.counts[TOPICS.retrieval.name] = 0
    await counts.ask()
    assert counts.why_not_ready() is None, "a broker may be behind"
    await counts.ask()
    assert f"missing on the cluster: {TOPICS.retrieval.name}; `relaygr topics apply`" in (counts.why_not_ready() or "")
    assert counts.error is None, "for clients, a call says so"
    cluster.counts[TOPICS.retrieval.name] = 4
    await counts.ask()
    assert counts.why_not_ready() is None
    cluster.counts[TOPICS.worker_status.name] = 0
    with_statuses = PartitionCounts(TOPICS, cluster, also=[TOPICS.worker_status])  # type: ignore[arg-type]
    for each in (counts, with_statuses, counts, with_statuses):
        await each.ask()
    assert counts.why_not_ready() is None
    assert TOPICS.worker_status.name in (with_statuses.why_not_ready() or "")


async def test_a_producer_tells_how_many_there_are(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topics = load_topics(kafka_settings)
    async with Producer(kafka_settings, client_id="test") as producer:
        found = await producer.partitions([topics.ranking.name, topics.scores.name])
        assert found == {topics.ranking.name: 8, topics.scores.name: 16}


async def test_clients_are_answered_on_every_partition_that_the_cluster_has(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    """`scores` may have more than its file says: workers refused those, and the client timed out."""
    folder = tmp_path / "topics"
    shutil.copytree(packaged_dir("topics"), folder)
    file = folder / "scores.toml"
    file.write_text(file.read_text(encoding="utf-8").replace("partitions = 16", "partitions = 32"), encoding="utf-8")
    await apply_topics(msgspec.structs.replace(embedded_settings, topics_dir=str(folder)))
    settings = worker_settings(embedded_settings)
    async with worker_on(settings):
        for partition in (3, 31):
            mine = msgspec.structs.replace(settings, client=Client(reply_partition=partition))
            async with RelayClient(settings=mine) as client:
                request = RankingRequest(
                    request_id="r", user_id="u", prefix=history("u", 20), candidates=pack_items(range(5))
                )
                assert (await client.rank(request, timeout=20)).scores.shape[0] == 5
        beyond = msgspec.structs.replace(settings, client=Client(reply_partition=32))
        with pytest.raises(ConfigError, match=r"`client.reply_partition` = 32: .*scores has partitions 0…31"):
            await RelayClient(settings=beyond).__aenter__()
