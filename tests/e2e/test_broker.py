"""`relaygr broker`, and the README's "Run it", followed word for word against it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from relaygr_stream.cli.main import main
from relaygr_stream.ops.brokers.distribution import free_ports
from tests import needs
from tests.waiting import WITHIN_S

README = Path(__file__).parents[2] / "README.md"
#: These run until they are stopped.
SERVE = ("broker", "up", "trigger", "worker")


@contextlib.contextmanager
def running(line: str, folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A command as it stands in the README, with this interpreter's `relaygr`."""
    name, *arguments = shlex.split(line, comments=True)
    assert name == "relaygr"
    with (
        (folder / f"{arguments[0]}.log").open("a") as log,
        subprocess.Popen(
            [sys.executable, "-m", "relaygr_stream", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if words in line:
            return seen
    raise AssertionError(f"ended before {words!r} was said:\n{seen}")


def test_it_says_where_it_serves_and_what_to_do_next_and_stops_clean(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with running(f"relaygr broker --port {port}", tmp_path, TMPDIR=str(tmp_path)) as broker:
        said = read_until(broker, "relaygr replay")
        assert f"serves localhost:{port}" in said
        assert f"export RELAYGR_KAFKA_BOOTSTRAP=localhost:{port}" in said
        with running(f"relaygr broker --port {port}", tmp_path) as second:
            assert second.wait(WITHIN_S) == 1
        broker.send_signal(signal.SIGINT)
        assert broker.wait(WITHIN_S) == 0
    log = (tmp_path / "broker.log").read_text()
    assert "Traceback" not in log
    assert not [path for path in tmp_path.iterdir() if path.name != "broker.log"], "something is left behind"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--data here", "--kind kafka can keep them"),
        ("--bootstrap kafka.example:9092", "give --port"),
        ("--kind kafka", "KAFKA_HOME is not set"),
        ("--kind kafka --data used", "KAFKA_HOME is not set"),  # a folder of the last time is no obstacle
    ],
)
def test_what_it_cannot_do_is_said_in_words(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "used" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(main, ["broker", *arguments.split()], env={"KAFKA_HOME": ""})
    assert said.exit_code in (1, 2)
    assert words in said.output


@pytest.mark.kafka
def test_kafka_keeps_its_messages_in_the_folder_named(tmp_path: Path) -> None:
    needs.kafka_home()
    for turn in (1, 2):
        (port,) = free_ports(1)
        with running(f"relaygr broker --kind kafka --port {port} --data data", tmp_path) as broker:
            read_until(broker, "relaygr replay")
            command = "apply" if turn == 1 else "verify"
            with running(f"relaygr topics {command} --bootstrap localhost:{port}", tmp_path) as topics:
                assert topics.wait(100) == 0, (tmp_path / "topics.log").read_text()
            broker.send_signal(signal.SIGINT)
            assert broker.wait(WITHIN_S) == 0


#: A patience for machines of any speed: whether the commands work is what is asked here.
ANY_MACHINE = {"RELAYGR_CLIENT_TIMEOUT_MS": "30000", "RELAYGR_RELAY_SLO_MS": "30000"}


def commands() -> list[str]:
    """The lines of the first block under "Run it"."""
    section = README.read_text(encoding="utf-8").split("\n## Run it\n", 1)[1].split("\n## ", 1)[0]
    lines = re.findall(r"^    (relaygr .*)$", section, re.MULTILINE)
    return lines[: lines.index(next(line for line in lines if " replay " in line)) + 1]


@pytest.mark.stack
def test_the_readme_can_be_followed_word_for_word(tmp_path: Path) -> None:
    """But for a fifth of the requests. Where port 9092 is taken, as here it may be, another is set in each terminal, as
    the README says."""
    (port,) = free_ports(1)
    words = {"broker": "relaygr replay", "up": " ready"}
    lines = [line.replace("--requests 200 ", "--requests 40 ") for line in commands()]
    assert [line.split()[1] for line in lines] == ["broker", "topics", "up", "replay"]
    with contextlib.ExitStack() as terminals:
        for line in lines:
            name = line.split()[1]
            here = running(line, tmp_path, RELAYGR_KAFKA_BOOTSTRAP=f"localhost:{port}", **ANY_MACHINE)
            process = terminals.enter_context(here)
            if name == "up":
                said = ""
                while not all(f"{child} " in said for child in ("trigger", "-0", "-1")):
                    said += "".join(each for each in read_until(process, words[name]).splitlines() if " ready" in each)
            elif name in SERVE:
                read_until(process, words[name])
            else:
                out, _ = process.communicate(timeout=200)
                assert process.returncode == 0, out + (tmp_path / f"{name}.log").read_text()[-2000:]
        assert "40 sent, 40 answered" in out
        found = re.search(r"HR@10\W+([\d.]+)", out)
        assert found, out
        assert float(found[1]) > 0.5, out  # the packaged model's 0.8; chance has 0.1
