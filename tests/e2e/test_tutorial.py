"""docs/tutorial/index.md, followed line by line: its files written, its commands run in order, in real processes.

Two lines are not run here but before: `make setup`, of which only the target is tried, and the activation of what it
makes, in place of which this interpreter's folder leads the PATH. A line that this test does not know fails it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from relaygr_stream.ops.brokers.distribution import free_ports

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial" / "index.md"
ACTIVATE = ". .venv/bin/activate"
#: Commands that run until they are stopped, and the words of theirs after which the next line is typed.
READY = {
    "relaygr broker": [r"serves localhost:"],
    "relaygr up": [r"^trigger .*ready", r"-0 .*ready"],
    "relaygr gateway": [],  # the next line waits for it
}
#: What the page says where the port is free.
GATEWAY = "localhost:8080"
#: A busy machine may infer the history too late, or start the trigger behind the worker: the page says to ask again.
TRIES = 10


class Block(NamedTuple):
    """A fenced block: its language, its title (a file, a terminal), its text."""

    language: str
    title: str
    text: str


def blocks() -> list[Block]:
    found = re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', TUTORIAL.read_text("utf-8"), re.M | re.S)
    return [Block(*each) for each in found]


class Desk:
    """One person's folder and terminals."""

    def __init__(self, folder: Path) -> None:
        port, gateway = free_ports(2)
        self.gateway = f"localhost:{gateway}"
        self.folder = folder
        self.serving: dict[str, subprocess.Popen[str]] = {}
        self._environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "RELAYGR_KAFKA_BOOTSTRAP": f"localhost:{port}",  # as the page says where port 9092 is taken
            "RELAYGR_GATEWAY_PORT": str(gateway),
            "PYTHONUNBUFFERED": "1",
        }

    def type(self, line: str) -> str:
        """What a line prints, when it has ended or says that it serves. A command that fails is an AssertionError."""
        line = line.replace(GATEWAY, self.gateway)
        serves = next((name for name in READY if line.startswith(name)), "")
        with (self.folder / "stderr.log").open("a") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=self.folder,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        if serves:
            self.serving[serves] = process
            return self._read_until_ready(process, READY[serves])
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0, f"{line}: {out}\n{self.log()[-3000:]}"
        return out

    def interrupt(self, name: str) -> int:
        """Ctrl-C; the exit code."""
        process = self.serving.pop(name)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        return process.returncode

    def log(self) -> str:
        return (self.folder / "stderr.log").read_text()

    def _read_until_ready(self, process: subprocess.Popen[str], words: list[str]) -> str:
        assert process.stdout is not None
        said = ""
        while not all(re.search(each, said, re.M) for each in words):
            line = process.stdout.readline()
            assert line, f"ended before {words} were said:\n{said}\n{self.log()[-3000:]}"
            said += line
        return said


@contextlib.contextmanager
def desk(folder: Path) -> Iterator[Desk]:
    place = Desk(folder)
    try:
        yield place
    finally:
        for process in place.serving.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def test_its_blocks_are_files_commands_and_what_they_print() -> None:
    assert [block.title for block in blocks() if block.language == "python"] == ["my_model.py", "ask.py"]
    assert [block.title for block in blocks() if block.language == "json"] == ["announce.json", "rank.json"]
    assert {block.language for block in blocks()} == {"sh", "python", "text", "json"}
    assert len([block for block in blocks() if block.language == "text"]) == 1


@pytest.mark.timeout(300)
def test_every_line_of_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    (prints,) = (block.text for block in blocks() if block.language == "text")
    typed = []
    with desk(tmp_path) as place:
        for block in blocks():
            if block.language in ("python", "json"):
                (tmp_path / block.title).write_text(block.text, encoding="utf-8")
            for line in block.text.splitlines() if block.language == "sh" else []:
                typed.append(line)
                if line == "make setup":
                    subprocess.run(["make", "--dry-run", "setup"], cwd=ROOT, check=True, capture_output=True)
                elif line.startswith("relaygr model check"):
                    assert place.type(line).splitlines()[-1] == "every property holds"
                elif line == "python ask.py":
                    said = [place.type(line)]
                    while said[-1] != prints and len(said) < TRIES:
                        said.append(place.type(line))
                    assert said[-1] == prints, said
                    assert {answer.partition("\n")[2] for answer in said} == {prints.partition("\n")[2]}, said
                elif "/v1/rank" in line:
                    answer = json.loads(place.type(line))
                    assert (len(answer["scores"]), answer["tasks"]) == (3, ["click"])
                    assert answer["outcome"] in ("hbm", "joined", "full")
                elif "/v1/announce" in line:
                    assert json.loads(place.type(line)) == {"request_id": "visit-1"}
                elif line != ACTIVATE:
                    place.type(line)
        assert typed[:2] == ["make setup", ACTIVATE]
        assert set(place.serving) == set(READY)
        assert place.interrupt("relaygr gateway") == 0
        assert place.interrupt("relaygr up") == 0
        assert place.interrupt("relaygr broker") == 0
    assert "Traceback" not in place.log()
