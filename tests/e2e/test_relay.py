"""The whole relay with real processes: a worker dies under load, and no request is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

from relaygr_stream.client import RelayClient
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.workload.driver import drive
from tests.e2e.fleet import Results, serving_fleet, traffic
from tests.waiting import until


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
