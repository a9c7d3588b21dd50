"""examples/service as a process before a whole relay: behaviours in, ranked recommendations out, and a fallback."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.error
from pathlib import Path
from typing import Any

import pytest

from relaygr_stream.ops.brokers.distribution import free_ports
from relaygr_stream.settings.schema import Kafka
from tests.e2e.fleet import serving_fleet
from tests.e2e.test_gateway import ask

ROOT = Path(__file__).parents[2]


async def answers(port: int, service: subprocess.Popen[bytes]) -> None:
    """Until the service answers."""
    while True:
        assert service.poll() is None, "the service ended at its start"
        try:
            await ask(port, "GET", "/openapi.json")
        except (urllib.error.URLError, ConnectionError):
            await asyncio.sleep(0.1)
        else:
            return


@pytest.mark.stack
async def test_it_ranks_over_the_relay_and_falls_back_without(embedded_settings: Kafka, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with serving_fleet(embedded_settings, tmp_path, "w1") as fleet:
        environment = os.environ | {
            "RELAYGR_KAFKA_BOOTSTRAP": embedded_settings.bootstrap,
            "RELAYGR_KAFKA_PREFIX": embedded_settings.prefix,
            "RELAYGR_KAFKA_PARTITIONS": str(embedded_settings.partitions),
        }
        command = [sys.executable, "-m", "uvicorn", "examples.service.app:app", "--port", str(port)]
        with (tmp_path / "service.log").open("wb") as log:
            service = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)  # noqa: ASYNC220
        try:
            await answers(port, service)

            async def recommend(user: str) -> Any:
                return await ask(port, "GET", f"/users/{user}/recommendations?count=3")

            for item in (3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 3, 14):
                await ask(port, "POST", "/users/ada/behaviours", {"item": item})
            found = await recommend("ada")
            while found["ranked_by"] != "relay":  # the machine is busy: not ranked within its half second
                found = await recommend("ada")
            assert len(found["items"]) == 3
            assert found["prefix"] in ("hbm", "dram", "joined", "full")

            await ask(port, "POST", "/users/eve/behaviours", {"item": 999})
            assert (await recommend("eve"))["ranked_by"] in ("relay", "retrieval")  # what is popular
            with pytest.raises(urllib.error.HTTPError, match="404"):
                await recommend("nobody")

            fleet.children["w1"].kill()
            lost = await recommend("ada")
            assert lost["ranked_by"] == "retrieval"
            assert len(lost["items"]) == 3
            assert lost["detail"]
        finally:
            service.send_signal(signal.SIGTERM)
            service.wait(timeout=30)
    assert b"Traceback" not in (tmp_path / "service.log").read_bytes()
