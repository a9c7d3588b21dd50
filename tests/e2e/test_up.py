"""`relaygr up` with real processes: all come up, a killed one comes back, all go when asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
from click.testing import CliRunner
from relaygr_lab.processes import servable

from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.cli.main import main
from relaygr_stream.client import RelayClient
from relaygr_stream.ops.children import probe, write_settings
from relaygr_stream.ops.names import reserved_name
from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.schema import Client, Kafka, Settings
from relaygr_stream.wire.behaviours import Behaviours
from tests.e2e.fleet import TEST_SETTINGS
from tests.ports import ports_in_a_row
from tests.waiting import WITHIN_S, until

HISTORY = Behaviours.from_arrays(list(range(1, 21)), [1] * 20, list(range(20)))


class Up:
    """The command as a process, and the lines it printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())

    def last(self, name: str) -> str:
        return next((line for line in reversed(self.lines) if line.split()[0] == name), "")

    def ready(self, *names: str) -> bool:
        return all(" ready" in self.last(name) for name in names)

    def pid(self, name: str) -> int:
        found = re.search(r"pid (\d+)", self.last(name))
        assert found, self.lines
        return int(found[1])


@contextlib.asynccontextmanager
async def up(kafka: Kafka, folder: Path, *arguments: str) -> AsyncIterator[Up]:
    await apply_topics(kafka)
    config = write_settings(
        folder / "settings.toml", servable(msgspec.structs.replace(TEST_SETTINGS, kafka=kafka), folder)
    )
    with (folder / "up.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "relaygr_stream", "up", "--config", config, *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            # A proxy is no way to this machine's own processes.
            env=os.environ | {"PYTHONUNBUFFERED": "1", "http_proxy": "http://127.0.0.1:9", "no_proxy": ""},
        )
    running = Up(process)
    reading = asyncio.create_task(running.read())
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading
        print(*running.lines, (folder / "up.log").read_text()[-4000:], sep="\n")  # what a failed test shows


@pytest.mark.stack
async def test_all_come_up_a_killed_and_a_hung_one_come_back_and_all_go(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    """The first process has the port that is set, the next ones those after it."""
    port = ports_in_a_row(2)
    arguments = ("--workers", "1", "--name", "w", "--set", f"telemetry.port={port}")
    async with up(embedded_settings, tmp_path, *arguments) as running:
        names = ("trigger", "w-0")
        await until(lambda: running.ready(*names), "all ready")
        await until(lambda: 'process="trigger"' in probe(port, "/metrics").body)
        await until(lambda: 'process="worker"' in probe(port + 1, "/metrics").body)
        before = {name: running.pid(name) for name in names}
        os.kill(before["trigger"], signal.SIGSTOP)
        os.kill(before["w-0"], signal.SIGKILL)
        await until(lambda: any("ended with signal 9" in line for line in running.lines), "the end noticed")
        await until(lambda: any("hangs (does not answer" in line for line in running.lines), "the hang noticed")
        await until(lambda: running.ready(*names) and not before.items() & pids(running, *names).items(), "ready again")
        assert all(running.last(name).endswith("restarts 1") for name in names)
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.process.wait(), WITHIN_S) == 0, (tmp_path / "up.log").read_text()[-2000:]
        assert not [pid for pid in pids(running, *names).values() if psutil.pid_exists(pid)]


def pids(running: Up, *names: str) -> dict[str, int]:
    return {name: running.pid(name) for name in names}


async def rolling(name: str) -> tuple[int, str]:
    """`relaygr up --rolling`: its exit code, and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "relaygr_stream", "up", "--rolling", "--name", name),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await asyncio.wait_for(process.communicate(), WITHIN_S)
    assert process.returncode is not None
    return process.returncode, out.decode()


@pytest.mark.stack
async def test_all_are_rolled_one_at_a_time_by_a_signal_and_by_a_command_which_fails_where_one_does_not_load(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    name = f"roll-{os.getpid()}"
    code, said = await rolling(name)
    assert (code, "no `relaygr up` of this" in said) == (1, True), said
    async with up(embedded_settings, tmp_path, "--workers", "2", "--name", name) as running:
        names = (f"{name}-0", f"{name}-1", "trigger")
        await until(lambda: running.ready(*names), "all ready")
        assert "each of 2 workers takes 0.4 GiB of memory at its start" in running.lines[0]
        started = {running.pid(each) for each in names}
        os.kill(running.pid(names[0]), signal.SIGTERM)
        await until(lambda: "ended with exit code 0" in running.last(names[0]), "stopped")
        lines = len(running.lines)
        running.process.send_signal(signal.SIGUSR1)
        await until(lambda: any(line.startswith("trigger") for line in running.lines[lines:]), "rolled up to the last")
        await until(lambda: running.ready(*names), "all ready again")
        first = {each: running.pid(each) for each in names}
        assert not started & set(first.values()), "one that was stopped has started, too"
        rolled = [line.split()[0] for line in running.lines[lines:] if " ready" in line]
        assert rolled == list(names), running.lines
        assert not any("restarts" in line for line in running.lines)
        log = (tmp_path / "up.log").read_text()
        assert all(f'"name":"{each}"' in log for each in names[:2])

        code, said = await rolling(name)
        assert code == 0, said
        assert [line.split()[0] for line in said.splitlines() if " ready" in line] == list(names)
        assert all(running.ready(each) and running.pid(each) != first[each] for each in names)
        second = {each: running.pid(each) for each in names}
        config = tmp_path / "settings.toml"
        config.write_text(config.read_text() + "no_such_key = 1\n")
        code, said = await rolling(name)
        assert code == 1
        assert f"error: --rolling: {names[0]} ended with exit code" in said
        assert all(running.ready(each) and running.pid(each) == second[each] for each in names[1:])


FLEET = """
[worker]
max_ranking_delay_ms = 10.0
[scenario.ads]
tenants = ["adverts"]
[scenario.feed]
slo_ms = 60000.0
[scenario.search]
served_by = "feed"
tenants = ["finder"]
slo_ms = 0.01
"""


@pytest.mark.stack
async def test_a_fleet_serves_each_scenario_by_workers_of_its_own(embedded_settings: Kafka, tmp_path: Path) -> None:
    """One command: topics, routes, a trigger and workers for each; a client's requests find their scenario's group."""
    toml = tmp_path / "fleet.toml"
    toml.write_text(FLEET, encoding="utf-8")
    sections = load_settings([toml], environ={}).settings.scenarios
    devices = ("--devices", "cpu,cpu,cpu")
    async with up(embedded_settings, tmp_path, "--fleet", str(toml), *devices, "--name", "w") as running:
        names = ("trigger-ads", "trigger-feed", "planner", "w-ads-0", "w-ads-1", "w-feed-0")
        await until(lambda: running.ready(*names), "all ready")
        settings = Settings(kafka=embedded_settings, scenarios=sections, client=Client(timeout_ms=60_000))
        async with RelayClient(settings=settings) as relay:
            for each in sections:  # a crowded machine reaches a group later than the client opens
                assert await relay.worker_serves(WITHIN_S, each.name)
            async with relay.request("u", HISTORY, candidates=3, scenario="feed") as request:
                assert (await request.rank([1, 2, 3])).worker == "w-feed-0"
            async with relay.request("u", HISTORY, candidates=3, tenant="finder") as request:
                assert (await request.rank([1, 2, 3])).worker == "w-feed-0", "it shares the feed's group"
            async with relay.request("u", HISTORY, candidates=3, tenant="adverts") as request:
                assert (await request.rank([1, 2, 3])).worker in ("w-ads-0", "w-ads-1")
        status = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "relaygr_stream", "status", "--json", "--config", str(tmp_path / "settings.toml")),
            stdout=asyncio.subprocess.PIPE,
        )
        told = json.loads((await asyncio.wait_for(status.communicate(), WITHIN_S))[0])["scenarios"]
        assert [(each["scenario"], [of["scenario"] for of in each["workers"]]) for each in told] == [
            ("ads", ["ads", "ads"]),
            ("feed", ["feed"]),
            ("search", ["feed"]),
        ]
        (worker,) = told[-1]["workers"]
        totals = {name: each["counters"] for name, each in worker["scenarios"].items()}
        assert [(name, each["answers_ok"], each["within_slo"]) for name, each in sorted(totals.items())] == [
            ("feed", 1, 1),
            ("search", 1, 0),
        ], "each by its own SLO"
        shown = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "relaygr_stream", "plan", "show", "--config", str(tmp_path / "settings.toml")),
            stdout=asyncio.subprocess.PIPE,
        )
        plan = (await asyncio.wait_for(shown.communicate(), WITHIN_S))[0].decode()
        assert ", mode act, " in plan
        assert "by the workers of feed" in plan
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.process.wait(), WITHIN_S) == 0, (tmp_path / "up.log").read_text()[-2000:]


@pytest.mark.stack
async def test_a_setting_that_no_worker_starts_with_ends_all(embedded_settings: Kafka, tmp_path: Path) -> None:
    arguments = ("--workers", "2", "--set", f"model.checkpoint={tmp_path}/none")
    async with up(embedded_settings, tmp_path, *arguments) as running:
        assert await asyncio.wait_for(running.process.wait(), WITHIN_S) == 1
        assert not any("starts again" in line for line in running.lines)
        assert any(line.startswith(socket.gethostname()) for line in running.lines), "named after the host"
    assert "none: no such folder" in (tmp_path / "up.log").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "telemetry.port=65534"), "telemetry.port = 65534: 3 processes need ports"),
        (("--devices", "cpu,gpu"), "flag for worker.device"),
        (("--name", "a b"), "flag for worker.name"),
        (("--name", "taken"), "--name taken: another `relaygr up` on this host"),
        (("--set", "worker.max_stale_token=3"), "did you mean `worker.max_stale_tokens`"),
    ],
)
def test_what_no_process_could_start_with_is_said_once_before_any(arguments: tuple[str, ...], said: str) -> None:
    nowhere = Settings(kafka=Kafka(bootstrap="127.0.0.1:1", prefix=f"up-{os.getpid()}."))  # others run this test, too
    given = ["--workers", "2", "--bootstrap", nowhere.kafka.bootstrap, "--set", "model.checkpoint="]
    given += ["--set", f"kafka.prefix={nowhere.kafka.prefix}", *arguments]
    with reserved_name("taken", nowhere):
        done = CliRunner().invoke(main, ["up", *given])
    assert done.exit_code == 1
    assert done.output.count(said) == 1
    assert done.stdout == ""


def test_a_fleet_whose_workers_share_devices_is_told_so(tmp_path: Path) -> None:
    toml = tmp_path / "fleet.toml"
    toml.write_text("[scenario.feed]\nmin_workers = 3\n", encoding="utf-8")
    given = ("--fleet", str(toml), "--devices", "cpu,cpu", "--set", "model.checkpoint=", "--bootstrap", "127.0.0.1:1")
    done = CliRunner().invoke(main, ["up", *given, "--set", f"kafka.prefix=up-{os.getpid()}."])
    assert "warning: 3 workers share 2 devices; lower min_workers, or list more devices" in done.stdout
