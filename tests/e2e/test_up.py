"""`relaygr up` with real processes: all come up, a killed one comes back, all go when asked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
from relaygr_lab.processes import servable

from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.ops.children import probe, write_settings
from relaygr_stream.settings.schema import Kafka
from tests.e2e.fleet import TEST_SETTINGS
from tests.ports import ports_in_a_row
from tests.waiting import WITHIN_S, until


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


async def test_all_come_up_a_killed_one_comes_back_and_all_go(embedded_settings: Kafka, tmp_path: Path) -> None:
    async with up(embedded_settings, tmp_path, "--workers", "2", "--name", "w") as running:
        names = ("trigger", "w-0", "w-1")
        await until(lambda: running.ready(*names), "all ready")
        killed = running.pid("w-0")
        os.kill(killed, signal.SIGKILL)
        await until(lambda: any("ended with signal 9" in line for line in running.lines), "the end noticed")
        await until(lambda: running.ready(*names) and running.pid("w-0") != killed, "w-0 ready again")
        assert running.last("w-0").endswith("restarts 1")
        pids = [running.pid(name) for name in names]
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.process.wait(), WITHIN_S) == 0, (tmp_path / "up.log").read_text()[-2000:]
        assert not [pid for pid in pids if psutil.pid_exists(pid)]


async def test_a_stopped_worker_starts_again_and_all_are_rolled_one_at_a_time(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    async with up(embedded_settings, tmp_path, "--workers", "2", "--name", "w") as running:
        names = ("trigger", "w-0", "w-1")
        await until(lambda: running.ready(*names), "all ready")
        first = {name: running.pid(name) for name in names}
        os.kill(first["w-0"], signal.SIGTERM)
        await until(lambda: "ended with exit code 0" in running.last("w-0"), "stopped")
        assert "each of 2 workers takes 0.4 GiB of memory at its start" in running.lines[0]
        lines = len(running.lines)
        running.process.send_signal(signal.SIGUSR1)
        await until(lambda: any(line.startswith("trigger") for line in running.lines[lines:]), "rolled up to the last")
        await until(lambda: running.ready(*names), "all ready again")
        assert not set(first.values()) & {running.pid(name) for name in names}
        rolled = [line.split()[0] for line in running.lines[lines:] if " ready" in line]
        assert rolled == ["w-0", "w-1", "trigger"], running.lines
        assert not any("restarts" in line for line in running.lines)
    log = (tmp_path / "up.log").read_text()
    assert '"name":"w-0"' in log
    assert '"name":"w-1"' in log


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


async def test_rolling_waits_until_all_are_back_and_fails_where_one_does_not_load(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    name = f"roll-{os.getpid()}"
    code, said = await rolling(name)
    assert (code, "no `relaygr up` of this" in said) == (1, True), said
    async with up(embedded_settings, tmp_path, "--workers", "2", "--name", name) as running:
        names = (f"{name}-0", f"{name}-1", "trigger")
        await until(lambda: running.ready(*names), "all ready")
        first = {each: running.pid(each) for each in names}
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


async def test_a_setting_that_no_worker_starts_with_ends_all(embedded_settings: Kafka, tmp_path: Path) -> None:
    arguments = ("--workers", "2", "--set", f"model.checkpoint={tmp_path}/none")
    async with up(embedded_settings, tmp_path, *arguments) as running:
        assert await asyncio.wait_for(running.process.wait(), WITHIN_S) == 1
        assert not any("starts again" in line for line in running.lines)
    assert "none: no such folder" in (tmp_path / "up.log").read_text()


async def test_two_on_one_host_end_nobody(embedded_settings: Kafka, tmp_path: Path) -> None:
    """Their workers had the same names, and later ones of a name end the earlier."""
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    async with (
        up(embedded_settings, first, "--no-trigger") as one,
        up(embedded_settings, second, "--no-trigger") as two,
    ):
        await until(lambda: all(any("pid" in line for line in each.lines) for each in (one, two)), "both start")
        names = [next(line.split()[0] for line in each.lines if "pid" in line) for each in (one, two)]
        await until(lambda: one.ready(names[0]) and two.ready(names[1]), "both ready")
        assert names[0] != names[1]
        async with up(embedded_settings, first, "--name", names[0].removesuffix("-0")) as third:
            assert await third.process.wait() == 1
        assert one.process.returncode is None


async def test_a_process_that_hangs_is_killed_and_started_again(embedded_settings: Kafka, tmp_path: Path) -> None:
    async with up(embedded_settings, tmp_path, "--workers", "0") as running:
        await until(lambda: running.ready("trigger"), "ready")
        hung = running.pid("trigger")
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: any("hangs (does not answer" in line for line in running.lines), "the hang noticed")
        await until(lambda: running.ready("trigger") and running.pid("trigger") != hung, "ready again")
        assert running.last("trigger").endswith("restarts 1")


async def test_the_first_process_gets_the_port_and_the_next_ones_those_after_it(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    first = ports_in_a_row(2)
    arguments = ("--workers", "1", "--name", "w", "--set", f"telemetry.port={first}")
    async with up(embedded_settings, tmp_path, *arguments) as running:
        await until(lambda: running.ready("trigger", "w-0"), "both ready")
        await until(lambda: 'process="trigger"' in probe(first, "/metrics").body)
        await until(lambda: 'process="worker"' in probe(first + 1, "/metrics").body)


async def test_ports_beyond_the_last_are_refused(embedded_settings: Kafka, tmp_path: Path) -> None:
    arguments = ("--workers", "2", "--set", "telemetry.port=65534")
    async with up(embedded_settings, tmp_path, *arguments) as running:
        assert await running.process.wait() == 1
    assert "telemetry.port = 65534: 3 processes need ports" in (tmp_path / "up.log").read_text()


@pytest.mark.parametrize("arguments", [("--devices", "cpu,gpu"), ("--name", "a b")])
async def test_what_no_worker_could_start_with_is_refused_before_any(
    embedded_settings: Kafka, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    async with up(embedded_settings, tmp_path, "--workers", "2", *arguments) as running:
        assert await running.process.wait() == 1
    assert not running.lines
    assert f"flag for worker.{'device' if arguments[0] == '--devices' else 'name'}" in (tmp_path / "up.log").read_text()


async def test_a_mistake_in_the_settings_is_said_once(embedded_settings: Kafka, tmp_path: Path) -> None:
    async with up(embedded_settings, tmp_path, "--set", "worker.max_bach=3") as running:
        assert await running.process.wait() == 1
    assert not running.lines
    assert (tmp_path / "up.log").read_text().count("did you mean `worker.max_batch`") == 1
