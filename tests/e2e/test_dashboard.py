"""Every query of the Grafana dashboards, and every alert rule, on a real Prometheus that scrapes a real fleet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import pytest
import yaml  # type: ignore[import-untyped]

from relaygr_stream.settings.schema import Kafka
from tests import needs
from tests.chart import render
from tests.e2e.test_alerts import RECORDS, RULES
from tests.e2e.test_up import up
from tests.ports import ports_in_a_row
from tests.waiting import until

DOCKER = Path(__file__).resolve().parents[2] / "docker"
BOARDS = [json.loads(path.read_text()) for path in sorted(DOCKER.glob("grafana/dashboards/*.json"))]
FLEET, SCENARIO = "one", "feed"
QUERIES = [
    target["expr"].replace("$__rate_interval", "30s").replace("$fleet", FLEET).replace("$scenario", SCENARIO)
    for board in BOARDS
    for panel in board["panels"]
    for target in panel["targets"]
]
RECORDED = [rule["record"] for rule in RECORDS["rules"]]
LOOPBACK = build_opener(ProxyHandler({}))


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def ask(self, path: str, **parameters: str) -> Any:
        with LOOPBACK.open(f"{self._url}/api/v1/{path}?{urlencode(parameters)}", timeout=60) as response:
            return json.load(response)["data"]

    def values(self, expression: str) -> list[float]:
        """The present values of an expression, those that are no number left out; none if there is no answer."""
        with contextlib.suppress(OSError):
            found = [float(each["value"][1]) for each in self.ask("query", query=expression)["result"]]
            return [value for value in found if not math.isnan(value)]
        return []

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.ask("status/buildinfo"))
        return False


@contextlib.asynccontextmanager
async def prometheus(folder: Path, port: int, targets: dict[str, list[str]]) -> AsyncIterator[Prometheus]:
    """With the testbed's rules, scraping these every second."""
    program = shutil.which("prometheus")
    assert program is not None
    config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DOCKER / "prometheus" / name) for name in config["rule_files"]]
    config["scrape_configs"] = [
        {"job_name": job, "static_configs": [{"targets": addresses, "labels": {"fleet": FLEET}}]}
        for job, addresses in targets.items()
    ]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
        )
    try:
        running = Prometheus(port)
        await until(running.answers, "Prometheus answers")
        yield running
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def relaygr(folder: Path, port: int, command: str, *options: str) -> AsyncIterator[None]:
    """A command of `relaygr` with the fleet's settings, until the end. port: of its metrics."""
    files = (*("--config", str(folder / "settings.toml")), *("--config", str(folder / "fleet.toml")))
    with (folder / f"{command}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "relaygr_stream", command, *files, "--set", f"telemetry.port={port}", *options),
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


def keda_query() -> str:
    """By which the Helm chart has KEDA scale the scenario."""
    keda = {"enabled": True, "prometheus": {"serverAddress": "http://prometheus:9090"}}
    settings = {"kafka": {"bootstrap": "kafka:9092"}, "scenario": {SCENARIO: {}}}
    (objects,) = render({"fleetName": FLEET, "fleet": settings, "keda": keda})
    (scaled,) = (each for each in objects if isinstance(each, dict) and each["kind"] == "ScaledObject")
    return str(scaled["spec"]["triggers"][0]["metadata"]["query"])


#: A client of the scenario: its histories are short, and its requests as many as a busy machine serves.
REPLAY = ("--generate", "--requests", "0", "--rate", "5", "--length", "150", "--candidates", "20", "--items", "5000")


@pytest.mark.stack
async def test_every_query_of_the_dashboards_has_data(embedded_settings: Kafka, tmp_path: Path) -> None:
    needs.programs("prometheus")
    wanted = keda_query()
    first = ports_in_a_row(6)  # the trigger's, the workers', the client's, the planner's, Prometheus's
    addresses = [f"127.0.0.1:{first + number}" for number in range(5)]
    targets = {"trigger": addresses[:1], "worker": addresses[1:3], "client": addresses[3:4], "planner": addresses[4:]}
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(f'[scenario.{SCENARIO}]\ntenants = ["shop"]\nmin_workers = 2\n', encoding="utf-8")
    arguments = ("--fleet", str(fleet), "--name", "w", "--set", f"telemetry.port={first}")
    async with (
        up(embedded_settings, tmp_path, *arguments) as relay,
        prometheus(tmp_path, first + 5, targets) as server,
    ):
        await until(lambda: relay.ready(f"trigger-{SCENARIO}", f"w-{SCENARIO}-0", f"w-{SCENARIO}-1"), "all ready")
        async with (
            relaygr(tmp_path, first + 3, "replay", "--set", "client.tenant=shop", *REPLAY),
            relaygr(tmp_path, first + 4, "planner", "--period", "1"),
        ):
            for query in [*QUERIES, wanted]:
                await until(lambda query=query: server.values(query), f"data for {query}", 120)  # type: ignore[misc]
            (hits,) = server.values('sum(relaygr_answers_total{status="ok",outcome=~"hbm|dram|joined"})')
            assert hits > 0
        groups = server.ask("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys([*RULES, *RECORDED], "ok")
        scraped = server.ask("label/__name__/values")
        assert sorted(name for rule in rules for name in _named(rule["query"]) if name not in {*scraped, *ABSENT}) == []


#: Metrics that the rules name and that need a history store, tracing, a gateway, or a client that was made anew.
ABSENT = {
    "relaygr_history_reads_total",
    "relaygr_spans_total",
    "relaygr_gateway_requests_total",
    "relaygr_parts_made_anew_total",
}


def _named(query: str) -> list[str]:
    return re.findall(r"\brelaygr_\w+", query)
