"""examples/clients: Node and Java, written from docs/reference/protocol.md alone, with a relay on Apache Kafka."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from relaygr_stream.settings.schema import Kafka
from tests import needs
from tests.e2e.fleet import Fleet, serving_fleet
from tests.waiting import until

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "examples" / "clients"
#: Outside the example, so that it stays as it was cloned.
NODE = ROOT / ".cache" / "clients" / "node"


def node() -> list[str]:
    """The command of the Node client, its packages installed; skips where that cannot be."""
    needs.programs("node", "npm")
    NODE.mkdir(parents=True, exist_ok=True)
    for name in ("client.mjs", "package.json"):
        shutil.copy(CLIENTS / "node" / name, NODE / name)
    environment = os.environ | {"npm_config_cache": str(ROOT / ".cache" / "npm"), "npm_config_update_notifier": "false"}
    try:
        installed = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--silent"],
            cwd=NODE, env=environment, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        needs.without("npm cannot install kafkajs: its registry does not answer within 120 s")
    if installed.returncode:
        needs.without(f"npm cannot install kafkajs: {installed.stderr[-200:].strip() or 'no registry'}")
    return ["node", str(NODE / "client.mjs")]


def java() -> list[str]:
    """The command of the Java client; skips where Java or the jars are missing."""
    home = needs.kafka_home()
    needs.programs("java")
    return ["java", "-cp", f"{home}/libs/*", str(CLIENTS / "java" / "Client.java")]


async def test_clients_of_the_protocol_alone_get_scores_and_cancel(kafka_settings: Kafka, tmp_path: Path) -> None:
    commands = [await asyncio.to_thread(command) for command in (node, java)]
    # A busy machine's events and statuses are admitted at any age.
    async with serving_fleet(kafka_settings, tmp_path, "w1", max_event_age_ms=6e4, max_status_age_ms=6e4) as fleet:
        for turn, command in enumerate(commands, start=1):
            process = await asyncio.create_subprocess_exec(
                *command, kafka_settings.bootstrap, kafka_settings.prefix,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, error = await process.communicate()
            assert process.returncode == 0, error.decode(errors="replace")[-3000:]
            said = json.loads(out)
            assert (said["status"], said["tasks"]) == ("ok", ["click", "like"])
            assert said["outcome"] in ("hbm", "joined", "full")
            assert len(said["scores"]) == 3 * 2
            await until(lambda: {said["request_id"], said["cancelled"]} <= fleet.admitted, "admitted")  # noqa: B023
            await until(lambda: _cancelled(fleet) >= turn, "cancelled")  # noqa: B023


def _cancelled(fleet: Fleet) -> float:
    """The cancel is on another topic than the signal that it is about, and may be read before it. "ranked" also counts
    a request's signal where that came behind its ranking."""
    found = re.findall(
        r'^relaygr_signals_total\{result="(?:cancelled|ranked)"\} (\S+)', fleet.children["w1"].metrics(), re.M
    )
    return sum(map(float, found))
