"""The whole relay with real processes: workers come, go and die under load, and no request is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment

from relaygr_stream.client import RelayClient
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.workload.driver import drive
from tests.e2e.fleet import Fleet, Results, check_relayed, hurried, serving_fleet, traffic
from tests.waiting import until


async def co_owned(fleet: Fleet) -> None:
    """Fail if a member of the workers' group owns a lane of one topic and not of the other."""
    kafka = fleet.settings.kafka
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        while True:
            answer = await admin.describe_consumer_groups([f"{kafka.prefix}workers"])
            for member in answer[0].groups[0][5]:
                assignment = ConsumerProtocolMemberAssignment.decode(member[4]) if member[4] else None
                lanes = {topic: sorted(partitions) for topic, partitions in assignment.assignment} if assignment else {}
                pre_infer, ranking = fleet.topics.pre_infer.name, fleet.topics.ranking.name
                assert lanes.get(pre_infer) == lanes.get(ranking), f"lanes not co-owned: {lanes}"
            await asyncio.sleep(0.2)
    finally:
        await admin.close()


async def test_a_worker_joins_and_one_leaves_under_load(kafka_settings: Kafka, tmp_path: Path) -> None:
    async with serving_fleet(kafka_settings, tmp_path, "w1", "w2") as fleet:
        watch = asyncio.create_task(co_owned(fleet))
        relayed, full = Results(), Results()
        items = traffic(seconds=14, rate=15)
        async with RelayClient(settings=fleet.settings) as client:
            load = asyncio.create_task(drive(client, items, timeout=20.0, on_result=relayed))
            fleet.start("worker", "w3")
            await fleet.ready("w3")
            await fleet.lanes_settled("w1", "w2", "w3")
            fleet.children["w1"].terminate()
            assert await fleet.children["w1"].wait() == 0, fleet.children["w1"].log_tail()
            await fleet.lanes_settled("w2", "w3")
            await load
            await drive(client, hurried(items, 4), timeout=60.0, mode="full", announce=False, on_result=full)
        assert not watch.done(), watch.exception()
        watch.cancel()
        assert set(relayed.by_id) == {item.request.request_id for item in items}
        check_relayed(fleet, relayed, full)


async def test_a_killed_workers_users_are_served_by_others(kafka_settings: Kafka, tmp_path: Path) -> None:
    async with serving_fleet(kafka_settings, tmp_path, "w1", "w2") as fleet:
        results = Results()
        items = traffic(seconds=9, rate=15)
        async with RelayClient(settings=fleet.settings) as client:
            # The dead worker's session lasts 3 s, and what was forwarded to it waits for the lane's next owner.
            load = asyncio.create_task(drive(client, items, timeout=20.0, on_result=results))
            await until(lambda: len(results.by_id) > 20, "some answers before the kill")
            fleet.children["w1"].kill()
            await load
            hedged = client.registry.get_sample_value("relaygr_client_hedges_total", {"reason": "silent"}) or 0
            await fleet.lanes_settled("w2")
            # Whatever the crash held up, its users are served again by the survivor.
            after = Results()
            await drive(client, traffic(seconds=2, rate=15, seed=2, run="after"), timeout=20.0, on_result=after)
        assert set(results.by_id) == {item.request.request_id for item in items}
        assert not results.errors()  # the timeout is several times the silence after which a lane is asked elsewhere
        assert hedged, "nobody was asked elsewhere"
        assert not after.errors()
        fleet.children.pop("w1")
