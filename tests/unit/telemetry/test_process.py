"""Real processes: what a supervisor sees of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import Settings, Telemetry
from relaygr_stream.telemetry.process import process, run_process, version
from tests.waiting import until_blocking

PROGRAM = """
import asyncio, signal, sys, time
from pathlib import Path
from relaygr_stream.settings.load import load_settings
from relaygr_stream.errors import BrokerUnavailable, ConfigError, Superseded
from relaygr_stream.telemetry.process import run_process

async def main(ctx):
    assert "torch" not in sys.modules
    ctx.set_ready(True)
    WHAT

sys.exit(run_process("worker", load_settings().settings, main))
"""
PATIENCE_S = 30.0
#: A body whose loop is stuck; the file is there once the first SIGTERM was handled.
STUCK = """
    handle = signal.getsignal(signal.SIGTERM)
    def noted(*arguments):
        handle(*arguments)
        Path({heard!r}).touch()
    signal.signal(signal.SIGTERM, noted)
    Path({stuck!r}).touch()
    time.sleep(0.5)
    while True: pass
"""


class Child:
    """A process of PROGRAM with this body."""

    def __init__(self, body: str, folder: Path, **settings: str) -> None:
        self.port_file = folder / "port"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RELAYGR_")}
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.replace("WHAT", body)],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **environment,
                "RELAYGR_TELEMETRY_PORT_FILE": str(self.port_file),
                **settings,
            },
        )

    def port(self) -> int:
        until_blocking(lambda: self.port_file.exists() and self.port_file.read_text(), "a port in its file")
        return int(self.port_file.read_text())

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port(), timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def wait_ready(self) -> None:
        until_blocking(lambda: self.get("/readyz")[0] == 200, "ready")

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        """Its exit code and its log."""
        _, err = self.popen.communicate(timeout=PATIENCE_S)
        return self.popen.returncode, [json.loads(line) for line in err.splitlines()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    children: list[Child] = []

    def start(body: str, **settings: str) -> Child:
        children.append(Child(body, tmp_path, **settings))
        return children[-1]

    yield start
    for child in children:
        if child.popen.poll() is None:
            child.popen.kill()
        child.popen.wait()
        assert child.popen.stderr is not None
        child.popen.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(start: Any, number: signal.Signals) -> None:
    child = start("await ctx.stop.wait()")
    child.wait_ready()
    port = child.port()
    metrics = child.get("/metrics")[1]
    assert f'process="worker",python="{sys.version.split()[0]}",version="{version()}"' in metrics
    assert "process_resident_memory_bytes" in metrics
    child.popen.send_signal(number)
    code, log = child.end()
    assert code == 0
    assert [line["event"] for line in log] == ["started", "stopping", "stopped"]
    assert log[0]["pid"] == child.popen.pid
    assert log[0]["metrics"] == f"http://127.0.0.1:{port}/metrics"
    assert log[0]["version"] == version()
    assert log[1]["signal"] == number.name
    assert not child.port_file.exists()


def test_a_process_that_stops_is_live_but_not_ready(start: Any) -> None:
    child = start("await ctx.stop.wait(); await asyncio.sleep(60)")
    child.wait_ready()
    child.popen.send_signal(signal.SIGTERM)
    until_blocking(lambda: child.get("/readyz")[0] == 503, "stopping")
    assert json.loads(child.get("/readyz")[1])["reason"] == "stopping"
    assert child.get("/healthz")[0] == 200


@pytest.mark.parametrize(("second", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_it_at_once_even_when_the_loop_is_stuck(
    start: Any, second: signal.Signals, code: int, tmp_path: Path
) -> None:
    heard, stuck = tmp_path / "heard", tmp_path / "stuck"
    child = start(STUCK.format(heard=str(heard), stuck=str(stuck)), RELAYGR_TELEMETRY_STALL_MS="500")
    until_blocking(stuck.exists, "stuck")
    until_blocking(lambda: child.get("/healthz")[0] == 503, "told by /healthz")
    assert "the event loop has not run for" in json.loads(child.get("/healthz")[1])["reason"]
    child.popen.send_signal(signal.SIGTERM)
    # Two signals that wait together are one, or come in the order of their numbers.
    until_blocking(heard.exists, "the first signal handled")
    assert child.popen.poll() is None
    child.popen.send_signal(second)
    _, err = child.popen.communicate(timeout=PATIENCE_S)
    assert child.popen.returncode == code
    assert err.splitlines()[-1] == f"second {second.name}: leaving at once"


def test_an_error_with_a_name_is_one_line_and_exit_code_1(start: Any) -> None:
    code, log = start('raise BrokerUnavailable("no broker answers\\nat localhost:1")').end()
    assert code == 1
    (line,) = [line for line in log if line["level"] == "error"]
    assert line["event"] == "error: no broker answers at localhost:1"
    assert line["kind"] == "BrokerUnavailable"
    assert "exception" not in line


def test_the_same_for_a_person(start: Any) -> None:
    child = start('raise BrokerUnavailable("no broker")', RELAYGR_TELEMETRY_LOG_FORMAT="console")
    _, err = child.popen.communicate(timeout=PATIENCE_S)
    assert child.popen.returncode == 1
    assert err.splitlines()[-1] == "error: no broker"
    assert "Traceback" not in err


def test_superseded_has_an_exit_code_of_its_own_also_from_within_a_task_group(start: Any) -> None:
    body = """
    async def fail(error):
        raise error
    async with asyncio.TaskGroup() as group:
        group.create_task(fail(BrokerUnavailable("away")))
        group.create_task(fail(Superseded("host a, pid 1 is worker w1 now")))
    """
    code, log = start(body).end()
    assert code == 3
    assert log[-1]["event"] == "error: host a, pid 1 is worker w1 now"


def test_a_defect_is_logged_with_its_traceback(start: Any) -> None:
    code, log = start("raise KeyError('lane')").end()
    assert code == 70
    assert log[-1]["level"] == "error"
    assert log[-1]["exception"].endswith("KeyError: 'lane'")


def test_a_taken_port_ends_it_with_the_setting_named(start: Any) -> None:
    first = start("await ctx.stop.wait()")
    first.wait_ready()
    second = start("await ctx.stop.wait()", RELAYGR_TELEMETRY_PORT=str(first.port()))
    code, log = second.end()
    assert code == 78
    assert "telemetry.port" in log[-1]["event"]


@pytest.mark.parametrize(("started", "code"), [(False, 78), (True, 1)])
def test_a_setting_is_to_blame_only_until_the_process_serves(start: Any, started: bool, code: int) -> None:
    body = f'ctx.started = {started}; raise ConfigError("no such folder")'
    child = start(body, RELAYGR_TELEMETRY_LOG_FORMAT="console", RELAYGR_WORKER_NAME="w-0")
    _, err = child.popen.communicate(timeout=PATIENCE_S)
    assert child.popen.returncode == code
    assert err.splitlines()[-1] == "error (w-0): no such folder"


async def test_readiness_and_liveness_are_what_main_says() -> None:
    async with process(Settings(telemetry=Telemetry(log_format="json")), "trigger") as ctx:
        assert ctx.metrics_port > 0
        assert ctx.why_not_ready() == "starting"
        ctx.set_ready(True)
        assert ctx.why_not_ready() is None
        ctx.set_ready(False, "no broker answers")
        assert ctx.why_not_ready() == "no broker answers"
        ctx.set_ready(True)
        ctx.set_live(False, "the device thread has not moved for 9 s")
        assert ctx.why_not_live() == "the device thread has not moved for 9 s"
        assert ctx.why_not_ready() == ctx.why_not_live(), "who should be restarted should get no work"
        ctx.set_live(True)
        ctx.stop.set()
        assert ctx.why_not_ready() == "stopping"
        assert ctx.why_not_live() is None


async def test_metrics_go_into_the_registry_given() -> None:
    registry = CollectorRegistry()
    Counter("relaygr_own", "Own.", registry=registry).inc()
    async with process(Settings(), "worker", registry=registry) as ctx:
        _, body = await asyncio.to_thread(_get, ctx.metrics_port)
    assert "relaygr_own_total 1.0" in body
    assert "relaygr_build_info{" in body


async def test_a_port_file_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    settings = Settings(telemetry=Telemetry(port_file=str(tmp_path / "absent" / "port")))
    with pytest.raises(ConfigError, match=r"absent/port \(telemetry\.port_file\)"):
        async with process(settings, "worker"):
            pass


def test_modules_are_left_out_of_garbage_collections() -> None:
    """A full one took 0.1 s, twice the SLO, in which neither the loop nor the device thread ran."""

    async def main(ctx: Any) -> None:
        assert gc.get_freeze_count() > 10_000

    assert run_process("worker", Settings(), main) == 0
    assert gc.get_freeze_count() == 0


def test_signal_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    async def main(ctx: Any) -> None:
        assert signal.getsignal(signal.SIGTERM) != before[0]

    assert run_process("worker", Settings(), main) == 0
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def _get(port: int) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        return response.status, response.read().decode()
