"""Whole processes whose clocks are two hours off, on Apache Kafka: they serve, or name the wrong clock."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from relaygr_stream.ops.children import Child
from relaygr_stream.settings.files import packaged_dir
from relaygr_stream.settings.schema import Kafka
from tests import needs
from tests.conftest import Brokers, _unique_settings
from tests.e2e.fleet import LONG_LIVED, Fleet
from tests.waiting import until

pytestmark = [pytest.mark.kafka, pytest.mark.stack]

HOURS_S: Final = 7200.0
REQUESTS: Final = 30
#: Every Python process that finds it on its path starts with it.
SHIFT: Final = """
import time
wall, wall_ns = time.time, time.time_ns
time.time = lambda: wall() + {0}
time.time_ns = lambda: wall_ns() + int({0} * 1e9)
"""


@contextmanager
def clock_off(folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """Processes started within have a clock that is so many seconds ahead."""
    shim = folder / f"off{seconds:g}"
    shim.mkdir(exist_ok=True)
    (shim / "sitecustomize.py").write_text(SHIFT.format(seconds), encoding="utf-8")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(shim))
        patch.setenv("AIOKAFKA_NO_EXTENSIONS", "1")  # its C code asks the clock without Python
        yield


@pytest.fixture
def kafka(brokers: Brokers, tmp_path: Path) -> Kafka:
    needs.kafka_home()
    return _unique_settings(brokers.kafka())


async def replayed(folder: Path, seed: int = 1) -> tuple[int, dict[str, Any], str]:
    """What a client in a process of its own got: exit code, report, output."""
    report = folder / f"report-{seed}.json"
    options = ["--requests", str(REQUESTS), "--rate", "15", "--length", "60", "--items", "5000", "--timeout", "20"]
    options += ["--stage-delay", "2000"]  # rankings overtake no signal
    arguments = ["replay", "--generate", *options, "--candidates", "20", "--seed", str(seed), "--json", str(report)]
    client = Child(f"client-{seed}", [*arguments, "--config", str(folder / "settings.toml")], folder)
    code = await client.wait()
    found = json.loads(report.read_text()) if report.exists() else {}
    return code, found, client.log.read_text()


@pytest.mark.parametrize("ahead_s", [HOURS_S, -HOURS_S], ids=["worker ahead", "trigger ahead"])
async def test_processes_whose_clocks_are_off_serve_and_are_served(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """No two of worker, trigger and client agree, and each of them is ahead and behind the broker once."""
    async with Fleet(kafka, tmp_path) as fleet:
        fleet.use(msgspec.structs.replace(fleet.settings, relay=LONG_LIVED))
        for process, off_s in (("trigger", -ahead_s), ("worker", ahead_s)):
            with clock_off(tmp_path, monkeypatch, off_s):
                fleet.start(process, process)
        await fleet.ready("trigger", "worker")
        await fleet.lanes_settled("worker")
        await fleet.owners_known()
        for seed, off_s in enumerate((0.0, 2 * ahead_s)):
            with clock_off(tmp_path, monkeypatch, off_s):
                code, report, log = await replayed(tmp_path, seed)
            assert code == 0, log
            assert report["answered"] == REQUESTS
            assert report["admissions"].get("admitted", 0) > REQUESTS // 2, report
            assert report["outcomes"].get("full", 0) < REQUESTS // 2, report


async def test_where_a_broker_refuses_times_far_off_the_clock_is_named(
    kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Topics of an earlier checkout, whose times are the senders'."""
    folder = tmp_path / "topics"
    shutil.copytree(packaged_dir("topics"), folder)
    for file in folder.glob("*.toml"):
        text = file.read_text(encoding="utf-8").replace('"LogAppendTime"', '"CreateTime"')
        file.write_text(text, encoding="utf-8")
    async with Fleet(msgspec.structs.replace(kafka, topics_dir=str(folder)), tmp_path) as fleet:
        fleet.start("trigger", "trigger")
        fleet.start("worker", "sound")
        await fleet.ready("trigger", "sound")
        with clock_off(tmp_path, monkeypatch, HOURS_S):
            ahead = fleet.start("worker", "ahead")
            late = fleet.start("trigger", "late")

            def told() -> bool:
                return all("clock of this machine" in child.ask("/readyz").body for child in (ahead, late))

            await until(lambda: asyncio.to_thread(told), "unready for their clocks")
            assert ahead.healthy()
            assert late.healthy()
            code, report, log = await replayed(tmp_path)
        assert code == 1
        assert report["answered"] == 0, log
        assert "clock of this machine" in log
