"""Whenever a command is stopped, and wherever it cannot write: one line, the right exit code, no traceback."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from relaygr_stream.cli.main import main
from tests.waiting import until_blocking

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks into /proc")
NOWHERE = ("--bootstrap", "127.0.0.1:1")
#: Moments at which a command is stopped, from its first line on: imports take a second, more on a busy machine.
MOMENTS = (0.0, 0.1, 0.4, 1.0, 2.0)


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "relaygr_stream", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **options,
    )  # fmt: skip


def has_begun(process: subprocess.Popen[str]) -> bool:
    """It catches SIGTERM, which Python by itself does not; before that the interpreter starts, which is not ours."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@linux
@pytest.mark.parametrize(
    ("number", "command"),
    [
        (signal.SIGTERM, ("up", "--workers", "1", *NOWHERE)),
        (signal.SIGINT, ("worker", *NOWHERE)),
        (signal.SIGTERM, ("trigger", *NOWHERE)),
        (signal.SIGINT, ("replay", "--generate", *NOWHERE)),
        (signal.SIGTERM, ("demo", "--seconds", "5", "--out", "demo.png")),
        (signal.SIGINT, ("bench", "slo", "--out", "slo")),
        (signal.SIGTERM, ("simulate", "--seconds", "60", "--json", "out.json")),
        (signal.SIGINT, ("explain", "--seconds", "5", *NOWHERE)),
    ],
    ids=lambda given: " ".join(given[:2]) if isinstance(given, tuple) else given.name,
)
@pytest.mark.stack
def test_a_command_can_be_stopped_at_any_moment(
    command: tuple[str, ...], number: signal.Signals, tmp_path: Path
) -> None:
    moment = random.Random(" ".join(command) + number.name).choice(MOMENTS)
    with start(*command, cwd=tmp_path) as process:
        until_blocking(lambda: process.poll() is not None or has_begun(process), "begun")
        time.sleep(moment)  # the stimulus: any moment will do
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert "Traceback" not in err and "Exception ignored" not in err, err
    assert process.returncode in (0, 1, 128 + number), (process.returncode, err)
    if process.returncode == 1:  # it had found out by itself that no broker is there
        assert "error: " in err
    elif command[0] not in ("up", "worker", "trigger", "replay"):  # those log more than a line
        assert len(err.splitlines()) <= 2, err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "something is left behind"


@linux
@pytest.mark.stack
def test_a_command_started_in_the_background_of_a_script_can_be_stopped_like_any_other(tmp_path: Path) -> None:
    """There SIGINT is ignored, which a command inherits: before its imports were over it stayed so, later it did not.

    (Not the parameters of the test above: whoever runs the tests in a script's background gives them this, too.)
    """

    def in_the_background() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    with start("worker", *NOWHERE, cwd=tmp_path, preexec_fn=in_the_background) as process:
        until_blocking(lambda: process.poll() is not None or has_begun(process), "begun")
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "stopped\n")


@linux
@pytest.mark.stack
def test_the_processes_of_a_simulation_end_with_it(tmp_path: Path) -> None:
    with start(
        "simulate",
        "--seconds",
        "100000",
        "--users",
        "100000",
        "--rate",
        "100",
        "--costs",
        str(costs(tmp_path)),
        "--processes",
        "2",
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until_blocking(
            lambda: process.poll() is not None or len(children.read_text().split()) > 2,
            "two processes and multiprocessing's tracker",
        )
        pids = children.read_text().split()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (130, "stopped"), err
    assert "Traceback" not in err
    until_blocking(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "all of them gone")


def costs(folder: Path) -> Path:
    from tests.unit.simulate.scenes import COSTS

    path = folder / "costs.toml"
    path.write_text(COSTS.as_toml())
    return path


WRITING = [
    ("replay", "--generate", *NOWHERE, "--json", "{}/report.json"),
    ("demo", "--out", "{}/demo.png"),
    ("bench", "slo", "--out", "{}/slo"),
    ("simulate", "--json", "{}/out.json"),
    ("simulate", "--save-costs", "{}/costs.toml"),
]


@pytest.mark.parametrize("command", WRITING, ids=lambda command: f"{command[0]} {command[-2]}")
def test_where_it_cannot_write_a_command_does_not_begin(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    done = CliRunner().invoke(main, [argument.format(tmp_path / "file") for argument in command])
    assert done.exit_code == 1
    err = done.stderr
    assert err.startswith(f"error: {command[-2]} {tmp_path / 'file'}/") and len(err.splitlines()) == 1, err
    assert "cannot be written" in err
    assert done.stdout == ""


@pytest.mark.stack
def test_a_disk_that_has_no_room_for_the_report_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))

    with start("replay", "--generate", *NOWHERE, "--json", str(tmp_path / "r.json"), preexec_fn=full) as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert err == f"error: --json {tmp_path / 'r.json'}: cannot be written: File too large\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
@pytest.mark.parametrize("command", [("config", "show"), ("--version",)])
def test_output_that_cannot_be_written_is_one_line(command: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w", encoding="ascii") as full:
        line = [sys.executable, "-m", "relaygr_stream", *command]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device\n"
