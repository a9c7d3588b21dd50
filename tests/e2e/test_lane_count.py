"""Partitions added on a live cluster: `scores` may have more at any time; lanes change as docs/how-to/kafka.md says."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from pathlib import Path

import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from click.testing import CliRunner
from confluent_kafka import Producer as ForeignProducer

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.cli.main import main
from relaygr_stream.client import RelayClient
from relaygr_stream.errors import CoPartitionError, LanesChanged
from relaygr_stream.ops.children import Child, stop_all
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import RankingRequest, ScoreReply
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION, Record
from relaygr_stream.wire.topic_files import lane_of, load_topics
from tests.e2e.fleet import Fleet, serving_fleet, traffic
from tests.waiting import WITHIN_S, until

LANES, MORE = 4, 8
#: Beyond the 16 that the file of `scores` states.
REPLY_PARTITION = 20


class Foreign:
    """A client in another language: murmur2 over the partitions that there are, answered where it likes."""

    def __init__(self, kafka: Kafka, topic: str) -> None:
        # Its metadata are refreshed often, as those of one that starts now would be.
        options = {"partitioner": "murmur2_random", "log_level": 0, "topic.metadata.refresh.interval.ms": 500}
        self._producer = ForeignProducer({"bootstrap.servers": kafka.bootstrap, **options})
        self._topic = topic
        self.answers: dict[bytes, str] = {}

    def on_scores(self, records: list[Record]) -> None:
        for record in records:
            self.answers[dict(record.headers)[HEADER_CORRELATION]] = decode(ScoreReply, record.value).status

    def ask(self, request: RankingRequest) -> bytes:
        correlation = uuid.uuid4().bytes
        request = msgspec.structs.replace(request, sent_ms=int(time.time() * 1e3), timeout_ms=30_000.0)
        headers: list[tuple[str, str | bytes | None]] = [
            (HEADER_CORRELATION, correlation),
            (HEADER_REPLY_PARTITION, str(REPLY_PARTITION)),
        ]
        self._producer.produce(self._topic, encode(request), key=request.user_id.encode(), headers=headers)
        self._producer.flush(30)
        return correlation


async def not_ready(child: Child, words: str) -> str:
    """What /readyz says once it says no for a reason of these words; others may come before it."""
    reason = ""
    while words not in reason:
        await asyncio.sleep(0.1)
        answer = await asyncio.to_thread(child.ask, "/readyz")
        reason = "" if answer.status in (0, 200) else str(json.loads(answer.body)["reason"])
    return reason


def apply(kafka: Kafka, *options: str) -> str:
    names = ("bootstrap", "prefix", "partitions")
    settings = [f"--set=kafka.{name}={getattr(kafka, name)}" for name in names]
    result = CliRunner().invoke(main, ["topics", "apply", *settings, *options])
    assert result.exit_code == 0, result.output
    return result.output


async def more_replies(kafka: Kafka, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await admin.create_partitions({topic: NewPartitions(2 * REPLY_PARTITION)})
    finally:
        await admin.close()


async def test_partitions_added_while_everything_runs(kafka_settings: Kafka, tmp_path: Path) -> None:
    kafka = msgspec.structs.replace(kafka_settings, partitions=LANES)
    more = msgspec.structs.replace(kafka, partitions=MORE)
    requests = [item.request for item in traffic(seconds=4, rate=10)]
    assert len({lane_of(request.user_id, MORE) for request in requests} - set(range(LANES))) > 1
    async with serving_fleet(kafka, tmp_path, "w1") as fleet:
        foreign = Foreign(kafka, fleet.topics.ranking.name)
        await more_replies(kafka, fleet.topics.scores.name)
        async with (
            TopicTail(kafka, fleet.topics.scores.name, [REPLY_PARTITION], "latest", foreign.on_scores),
            RelayClient(settings=fleet.settings) as client,
        ):
            # A worker learns of new reply partitions within seconds.
            asked: set[bytes] = set()
            async with asyncio.timeout(WITHIN_S):
                while not any(foreign.answers.get(correlation) == "ok" for correlation in asked):
                    asked.add(foreign.ask(requests[0]))
                    await asyncio.sleep(0.5)
            assert (await client.rank(requests[0], timeout=20)).scores.size

            said = await asyncio.to_thread(apply, more, "--alter")
            assert f"altered   {fleet.topics.ranking.name}: partitions {LANES} → {MORE}" in said
            for child in (fleet.children["w1"], fleet.children["trigger"]):
                async with asyncio.timeout(WITHIN_S):
                    reason = await not_ready(child, f"has {MORE} partitions")
                assert f"knows {LANES} lanes" in reason
            with pytest.raises(LanesChanged, match=f"has {MORE} partitions, .*knows {LANES} lanes"):
                await rank_for_ever(client, requests[0])
            with pytest.raises(CoPartitionError):
                await client.announce(traffic(seconds=1, rate=10)[0].event)

            # As docs/how-to/kafka.md says: everything stops, and starts with the new number.
            await stop_all(list(fleet.children.values()))
            await everybody_anew(fleet, more)
            correlations = [foreign.ask(request) for request in requests]
            await until(lambda: all(each in foreign.answers for each in correlations), "every foreign request answered")
            assert {foreign.answers[each] for each in correlations} == {"ok"}
        async with RelayClient(settings=fleet.settings) as client:
            assert (await client.rank(requests[0], timeout=20)).scores.size


async def rank_for_ever(client: RelayClient, request: RankingRequest) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            await client.rank(request, timeout=20)


async def everybody_anew(fleet: Fleet, kafka: Kafka) -> None:
    fleet.use(msgspec.structs.replace(fleet.settings, kafka=kafka))
    fleet.topics = load_topics(kafka)
    fleet.start("trigger", "trigger")
    fleet.start("worker", "w1")
    await fleet.ready("trigger", "w1")
    await fleet.lanes_settled("w1")
