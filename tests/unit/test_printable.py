"""What others wrote cannot steer a terminal, by whichever command it is shown."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from relaygr_lab.demo.live import LiveState, LiveView

import relaygr_stream
from relaygr_stream.bus.dead_letter import dead_letter_headers
from relaygr_stream.cli.explain_table import as_json, as_table
from relaygr_stream.errors import DecodeError, Superseded
from relaygr_stream.ops.dead_letters.letter import letters_of
from relaygr_stream.ops.dead_letters.table import as_json as letter_as_json
from relaygr_stream.ops.dead_letters.table import line_of, print_letter, print_letters
from relaygr_stream.settings.schema import Settings, Telemetry
from relaygr_stream.telemetry.logs import configure_logging
from relaygr_stream.telemetry.printable import SafeConsole, printable, printable_json, printable_lines, readable_id
from relaygr_stream.telemetry.process import run_process
from relaygr_stream.trigger.explain import Explanation
from relaygr_stream.wire.records import Record
from relaygr_stream.workload.driver import DriveSummary
from relaygr_stream.workload.metrics import QualityMeter
from relaygr_stream.workload.report import make_report, print_report
from tests.unit.demo.test_live import status

EVIL = (
    "\x1b]0;pwned\x07\x1b[2J",
    "[/nope]",
    "[link=http://evil]click[/link]",
    "[bold red]fine[/]",
    ":skull:",
    "a\nerror: b",
    "\x9b31m",
    "\u202etxt.exe",
    "\u2028\u200f",
)
LONE_SURROGATE = "\ud800"  # in what Python decoded with surrogateescape: names of files, arguments
FOREIGN = st.sampled_from(EVIL) | st.text(max_size=30) | st.text("\x1b[]/\\=;:m\n\r\x07\x9b\u202eal", max_size=30)
EXPLAINED: dict[str, Any] = dict.fromkeys(Explanation.__dataclass_fields__, 1.0) | {
    "scenario": "", "lane": 0, "tokens": 1, "candidates": 1,
    "reason": "admitted", "delegate": None, "signalled": True
}  # fmt: skip


def steers(text: str) -> list[str]:
    """Characters that a line of plain text has not."""
    turning = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
    return [
        c
        for c in text
        if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(c) in turning
    ]


def shown(*renderables: Any) -> str:
    out = io.StringIO()
    console = SafeConsole(file=out, width=400, force_terminal=True, color_system="truecolor")
    for each in renderables:
        console.print(each)
    return out.getvalue()


def without_styles(text: str) -> str:
    """Less what the console itself writes: colours and line ends."""
    return re.sub(r"\x1b\[[0-9;]*m|\n", "", text)


@given(FOREIGN | st.text(st.characters(), max_size=30))
def test_one_line_without_what_steers(text: str) -> None:
    assert not steers(printable(text))
    assert not steers(printable_lines(text).replace("\n", "").replace("\t", ""))
    assert printable(printable(text)) == printable(text)


@given(st.dictionaries(FOREIGN, FOREIGN, max_size=3))
def test_json_stays_the_same_json(value: dict[str, str]) -> None:
    line = printable_json(json.dumps(value, ensure_ascii=False))
    assert not steers(line)
    assert json.loads(line) == value


@given(st.binary(max_size=40))
def test_an_id_is_text_or_hexadecimal(raw: bytes) -> None:
    text = readable_id(raw)
    assert not steers(text)
    assert text.encode() == raw or bytes.fromhex(text.removeprefix("0x")) == raw


@given(FOREIGN, FOREIGN)
def test_an_explanation_shows_the_words_and_no_more(user: str, owner: str) -> None:
    row = Explanation(
        **{**EXPLAINED, "request_id": user, "user_id": user, "owner": owner, "delegate": owner, "scenario": owner}
    )
    assert not steers(without_styles(shown(as_table([row]))))
    assert not steers(as_json([row]).removesuffix("\n"))


@pytest.mark.parametrize("text", EVIL)
def test_markup_is_shown_as_it_was_written(text: str) -> None:
    row = Explanation(**{**EXPLAINED, "request_id": "r", "user_id": text, "owner": "w", "scenario": ""})
    assert printable(text) in without_styles(shown(as_table([row])))


@given(FOREIGN, FOREIGN, st.binary(max_size=20))
def test_a_dead_letter(detail: str, topic: str, key: bytes) -> None:
    bad = Record(topic.encode("utf-8", "replace").decode(), 3, 17, 0, key, b"v", ((topic, key),))
    found = letters_of(
        [Record("d", 0, 5, 0, key, b"v", tuple(dead_letter_headers(bad, DecodeError("invalid", detail))))]
    )
    out = io.StringIO()
    for terminal in (True, False):
        console = SafeConsole(file=out, width=80, force_terminal=terminal)
        print_letters(console, found)
        print_letter(console, found[0])
    text = out.getvalue() + line_of(found[0], "no origin", detail) + letter_as_json(found[0], value=True)
    assert not steers(without_styles(text))


@given(FOREIGN)
def test_the_live_view_and_the_report_of_a_publish(name: str) -> None:
    state = LiveState(clock=lambda: 0.0)
    state.workers[name] = (0.0, msgspec.structs.replace(status("w", [1]), name=name, device=name))
    state.failed(name)
    view = LiveView(state, SafeConsole(file=io.StringIO()))
    report = make_report(
        DriveSummary(), QualityMeter(10), workload=[name], notes=[name], models=[name], error_examples={name: name},
        lines=1, broken_lines=1, broken_examples=[name],
    )  # fmt: skip
    out = io.StringIO()
    print_report(report, out)
    assert not steers(without_styles(shown(view.table(), view.line()) + out.getvalue()))


@pytest.mark.parametrize("text", [*EVIL, LONE_SURROGATE])
@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_log_line_and_its_traceback(log_format: Any, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(Telemetry(log_format=log_format), "worker")
    try:
        raise ValueError(text)
    except ValueError:
        structlog.get_logger().exception(text, detail=text, listed=[text])
    assert not steers(capsys.readouterr().err.replace("\n", ""))


@pytest.mark.parametrize("text", EVIL)
def test_the_last_line_of_a_process(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def main(_: object) -> None:
        raise Superseded(f"another worker named 'w1' started later: host {text}")

    assert run_process("worker", Settings(telemetry=Telemetry(log_format="console")), main) == 3
    err = capsys.readouterr().err
    assert not steers(err.replace("\n", ""))
    assert err.splitlines()[-1].startswith("error: another worker")


def test_there_is_no_other_console() -> None:
    package = Path(relaygr_stream.__file__).parent
    made = [str(path) for path in package.rglob("*.py") if re.search(r"\bConsole\(", path.read_text("utf-8"))]
    assert made == []
