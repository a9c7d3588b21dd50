"""The pages of docs/tutorial, followed line by line: files written, commands run in order, in real processes.

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
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import needs
from tests.ports import ports_in_a_row
from tests.waiting import until

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "tutorial"
ACTIVATE = ". .venv/bin/activate"
#: Commands that run until they are stopped, and the words of theirs after which the next line is typed.
READY = {
    "redis-server": [r"Ready to accept connections"],
    "python -u -m oteltap": [],  # its words go to a file, and who exports spans tries again
    "relaygr broker": [r"serves localhost:"],
    "relaygr up": [r"^trigger .*ready", r"-0 .*ready"],
    "relaygr gateway": [],  # the next line waits for it
    "prometheus": [],  # its answers are awaited
}
#: What the pages say where these ports are free; the last two are beside each other: the trigger's, and its worker's.
PORTS = ("4318", "6379", "8080", "9090", "9092", "9464", "9465")
#: One of the gateway's, the trigger's and the worker's, which are exported apart.
SPANS = {"relaygr.announce", "relaygr.decide", "relaygr.ranking"}
#: A busy machine may infer the history too late, or start the trigger behind the worker: the page says to ask again.
TRIES = 10


class Block(NamedTuple):
    """A fenced block: its language, its title (a file, a terminal), its text."""

    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    text = (PAGES / page).read_text("utf-8")
    return [Block(*each) for each in re.findall(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', text, re.M | re.S)]


class Desk:
    """One person's folder and terminals."""

    def __init__(self, folder: Path) -> None:
        first = ports_in_a_row(len(PORTS))
        self._ports = {port: str(first + index) for index, port in enumerate(PORTS)}
        self.folder = folder
        self.serving: dict[str, subprocess.Popen[str]] = {}
        self._environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "RELAYGR_KAFKA_BOOTSTRAP": self.here("localhost:9092"),  # as the page says where port 9092 is taken
            "RELAYGR_GATEWAY_PORT": self.here("8080"),
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.here("http://localhost:4318"),
            # A gateway's curl states no timeout, and the first requests of all processes may take a second.
            "RELAYGR_CLIENT_TIMEOUT_MS": "30000",
            "RELAYGR_HISTORY_TIMEOUT_MS": "5000",
            "PYTHONUNBUFFERED": "1",
        }

    def here(self, text: str) -> str:
        """The text with this run's ports."""
        return re.sub(rf"\b({'|'.join(PORTS)})\b", lambda port: self._ports[port[0]], text)

    def save(self, block: Block) -> None:
        """Write a block that is a file."""
        (self.folder / block.title).write_text(self.here(block.text), encoding="utf-8")

    def type(self, line: str) -> str:
        """What a line prints, when it has ended or says that it serves. A command that fails is an AssertionError."""
        line = self.here(line)
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

    def counts(self, query: str) -> bool:
        """Whether Prometheus has anything for the query, a command line."""
        return bool(json.loads(self.type(query))["data"]["result"])

    def exported(self, names: set[str]) -> bool:
        """Whether spans of these names are in the file that the collector writes."""
        return names <= set(re.findall(r'"name":"([^"]+)"', (self.folder / "spans.ndjson").read_text()))

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
    page = blocks("index.md")
    assert [block.title for block in page if block.language == "python"] == ["my_model.py", "ask.py"]
    assert [block.title for block in page if block.language == "json"] == ["announce.json", "rank.json"]
    assert {block.language for block in page} == {"sh", "python", "text", "json"}
    assert len([block for block in page if block.language == "text"]) == 1


@pytest.mark.stack
def test_every_line_of_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    (prints,) = (block.text for block in blocks("index.md") if block.language == "text")
    typed = []
    with desk(tmp_path) as place:
        for block in blocks("index.md"):
            if block.language in ("python", "json"):
                place.save(block)
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
                    assert answer["outcome"] in (("hbm",) if "visit-2" in line else ("hbm", "joined"))
                elif "/v1/announce" in line:
                    assert json.loads(place.type(line)) == {"request_id": "visit-1"}
                elif line != ACTIVATE:
                    place.type(line)
        assert typed[:2] == ["make setup", ACTIVATE]
        assert set(place.serving) == {"relaygr broker", "relaygr up", "relaygr gateway"}
        assert place.interrupt("relaygr gateway") == 0
        assert place.interrupt("relaygr up") == 0
        assert place.interrupt("relaygr broker") == 0
    assert "Traceback" not in place.log()


@pytest.mark.stack
async def test_every_line_of_the_front_door_does_what_it_says(tmp_path: Path) -> None:
    needs.programs("redis-server", "prometheus", "curl")
    answers: dict[str, str] = {}
    with desk(tmp_path) as place:
        for block in blocks("front-door.md"):
            if block.language != "sh":
                place.save(block)
                continue
            for line in block.text.splitlines():
                if "9090/api" in line:
                    await until(partial(place.counts, line), line)
                elif "trace.py" in line:
                    await until(partial(place.exported, SPANS), "spans of all processes")
                    place.type(line.replace("docs/", f"{ROOT}/docs/"))
                    assert (tmp_path / "trace.png").stat().st_size > 10_000
                else:
                    answers[line] = place.type(line)
        said = {word: text for line, text in answers.items() for word in ("show", "erase") if word in line}
        assert re.search(r"-0\b.*serving", answers["relaygr status"]), answers["relaygr status"]
        assert said["show"].startswith("4 behaviours"), said
        assert said["erase"].startswith("history store: erased\nworkers: 1 have dropped the user"), said
        first, returning = (json.loads(answers[line]) for line in answers if "/v1/rank" in line)
        assert (len(first["scores"]), first["outcome"]) in [(3, "hbm"), (3, "joined")]
        assert (len(returning["scores"]), returning["outcome"]) == (3, "hbm")
        assert set(place.serving) == set(READY)
        assert place.interrupt("relaygr gateway") == 0
        assert place.interrupt("relaygr up") == 0
        assert place.interrupt("relaygr broker") == 0
    assert "Traceback" not in place.log()
