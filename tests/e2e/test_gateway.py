"""Two gateways as processes before a whole relay: a hit by HTTP, a cancel by the other gateway, a stop in order."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relaygr_stream.ops.brokers.distribution import free_ports
from relaygr_stream.settings.schema import Kafka
from tests.e2e.fleet import LONG_LIVED, Fleet, traffic
from tests.waiting import until


async def ask(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The answer as JSON; None: it has no body."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "accept": "application/json", "relaygr-timeout-ms": "20000"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers, method=method)

    def asked() -> bytes:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text: bytes = answer.read()
            return text

    text = await asyncio.to_thread(asked)
    return json.loads(text) if text else None


async def test_services_without_kafka_are_served_by_any_gateway(kafka_settings: Kafka, tmp_path: Path) -> None:
    async with Fleet(kafka_settings, tmp_path) as fleet:
        fleet.use(msgspec.structs.replace(fleet.settings, relay=LONG_LIVED))
        ports = free_ports(2)
        for number, port in enumerate(ports):
            fleet.start("gateway", f"g{number}", f"gateway.port={port}")
        fleet.start("trigger", "trigger")
        fleet.start("worker", "w1")
        await fleet.ready("trigger", "w1", "g0", "g1")
        await fleet.lanes_settled("w1")
        await fleet.owners_known()

        items, actions, times = (array.tolist() for array in traffic(9, rate=1)[0].request.prefix.arrays())
        history = {"items": items, "actions": actions, "times": times}
        announce = {"user_id": "u", "history": history, "candidates": 3}
        rank = {"user_id": "u", "history": history, "candidates": [11, 12, 13]}

        ranked_id = (await ask(ports[0], "POST", "/v1/announce", announce))["request_id"]
        await fleet.announced(ranked_id)
        relayed = await ask(ports[1], "POST", "/v1/rank", {**rank, "request_id": ranked_id})
        assert (relayed["outcome"], relayed["admission"]) in (("hbm", "admitted"), ("joined", "admitted"))
        full = await ask(ports[0], "POST", "/v1/rank", {**rank, "mode": "full"})
        for one, other in zip(relayed["scores"], full["scores"], strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
        await until(lambda: fleet.pinned() == 0, "ranked")

        left_id = (await ask(ports[0], "POST", "/v1/announce", announce))["request_id"]
        await fleet.announced(left_id)
        await ask(ports[1], "DELETE", f"/v1/requests/{left_id}")
        await until(lambda: fleet.pinned() == 0, "cancelled")

        seen = await ask(ports[0], "GET", "/")
        assert [worker["name"] for worker in seen["workers"]] == ["w1"]
        for gateway in ("g0", "g1"):
            fleet.children[gateway].terminate()
            assert await fleet.children[gateway].wait() == 0, fleet.children[gateway].log_tail()
