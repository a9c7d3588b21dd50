"""Lanes and reply partitions added on a live cluster: who knows of them and who does not yet are both served."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path

import msgspec
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions
from confluent_kafka import Producer as ForeignProducer

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.ops.brokers.distribution import free_ports
from relaygr_stream.ops.lane_growth import grow_lanes
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import RankingRequest, ScoreReply
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION, Record
from relaygr_stream.wire.topic_files import lane_of
from relaygr_stream.workload.driver import drive
from tests.e2e.fleet import Results, serving_fleet, traffic
from tests.e2e.test_fleet_page import dashboard
from tests.e2e.test_gateway import ask
from tests.waiting import until

LANES, MORE = 4, 16
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
        request = msgspec.structs.replace(request, sent_ms=int(time.time() * 1e3), timeout_ms=60_000.0)
        headers: list[tuple[str, str | bytes | None]] = [
            (HEADER_CORRELATION, correlation),
            (HEADER_REPLY_PARTITION, str(REPLY_PARTITION)),
        ]
        self._producer.produce(self._topic, encode(request), key=request.user_id.encode(), headers=headers)
        self._producer.flush(30)
        return correlation


async def more_replies(kafka: Kafka, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        await admin.create_partitions({topic: NewPartitions(2 * REPLY_PARTITION)})
    finally:
        await admin.close()


async def test_lanes_grow_while_everything_serves(kafka_settings: Kafka, tmp_path: Path) -> None:
    await apply_topics(msgspec.structs.replace(kafka_settings, partitions=LANES))
    kafka = msgspec.structs.replace(kafka_settings, partitions=0)  # as the cluster has
    said: list[str] = []
    async with serving_fleet(kafka, tmp_path, "w1", "w2") as fleet:
        foreign, results, after = Foreign(kafka, fleet.topics.ranking.name), Results(), Results()
        await more_replies(kafka, fleet.topics.scores.name)
        async with (
            TopicTail(kafka, fleet.topics.scores.name, [REPLY_PARTITION], "latest", foreign.on_scores),
            RelayClient(settings=fleet.settings) as client,
        ):
            requests = [item.request for item in traffic(seconds=4, rate=10, run="f")]
            owned = {name: {lane.lane for lane in fleet.statuses[name].lanes} for name in ("w1", "w2")}
            asked = {foreign.ask(request) for request in requests[:12]}  # of both workers, which know fewer partitions
            await until(lambda: asked <= foreign.answers.keys(), "the first requests answered")
            growing = asyncio.create_task(grow_lanes(fleet.settings, "", MORE, said.append))
            number = 0
            while not growing.done():
                load = traffic(seconds=1, rate=10, run=f"g{number}")
                await drive(client, load, timeout=60.0, on_result=results)
                asked.update(foreign.ask(request) for request in requests[4 * (number % 8) : 4 * (number % 8) + 4])
                number += 1
            await growing
            assert results.errors() == {}
            await until(lambda: asked <= foreign.answers.keys(), "every foreign request answered")
            assert {foreign.answers[each] for each in asked} == {"ok"}
            # No user moved: a lane that was added has the worker of the lane that it splits.
            for name, lanes in owned.items():
                assert {lane.lane % LANES for lane in fleet.statuses[name].lanes} == lanes
            users = {request.user_id for request in requests}
            await until(
                lambda: {client.lane(user) for user in users} == {lane_of(user, MORE) for user in users},
                "the client goes by more lanes",
            )
            await drive(client, traffic(seconds=2, rate=10, run="after"), timeout=60.0, on_result=after)
            assert after.errors() == {}
            assert any(result.outcome != "full" for result in after.by_id.values())
    assert said[-1] == f"announced: clients go by {MORE} lanes, {LANES} before"


@pytest.mark.stack
async def test_boards_learn_of_lanes_that_were_added(kafka_settings: Kafka, tmp_path: Path) -> None:
    """A gateway's page and `relaygr dashboard`, which both started before."""
    await apply_topics(msgspec.structs.replace(kafka_settings, partitions=LANES))
    kafka = msgspec.structs.replace(kafka_settings, partitions=0)
    async with serving_fleet(kafka, tmp_path, "w1") as fleet, dashboard(tmp_path) as page:
        (port,) = free_ports(1)
        fleet.start("gateway", "gateway", f"gateway.port={port}")
        await fleet.ready("gateway")
        dashboard_port = int(page.rstrip("/").rpartition(":")[2])

        async def say(lanes: int) -> bool:
            boards = [await ask(each, "GET", "/") for each in (port, dashboard_port)]
            return [board["lanes"] for board in boards] == [lanes, lanes]

        await until(lambda: say(LANES), "both boards have the lanes that there were")
        await grow_lanes(fleet.settings, "", MORE, lambda _: None)
        await until(lambda: say(MORE), "both boards have more lanes")
