"""A request that its client leaves without ranking holds nothing any more, long before its life window ends."""

from __future__ import annotations

from pathlib import Path

from relaygr_stream.client import RelayClient
from relaygr_stream.settings.schema import Kafka
from tests.e2e.fleet import LONG_LIVED, serving_fleet, traffic
from tests.waiting import until


async def test_pinned_bytes_fall_when_a_client_leaves(kafka_settings: Kafka, tmp_path: Path) -> None:
    async with serving_fleet(kafka_settings, tmp_path, "w1", relay=LONG_LIVED) as fleet:
        event = traffic(seconds=9, rate=1)[0].request
        async with RelayClient(settings=fleet.settings) as client:
            async with client.request("left", event.prefix, candidates=9) as left:
                await until(lambda: fleet.pinned() > 0, "pinned")
            await until(lambda: fleet.pinned() == 0, "released")
            async with client.request("left", event.prefix, candidates=9) as again:
                await fleet.announced(again.request_id)
                assert (await again.rank([1, 2], timeout=20)).admission == "admitted"
            # The trigger takes the same id for a duplicate, and the worker answers what it no longer pins.
            async with client.request("left", event.prefix, candidates=9, request_id=left.request_id) as late:
                assert len((await late.rank([1, 2], timeout=20)).scores) == 2
