"""From a file to a report, and the flags of `relaygr replay`."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from structlog.testing import capture_logs

from relaygr_stream.cli.replay import GENERATOR_FLAGS, LOG_FLAGS, build_options, replay_command
from relaygr_stream.errors import ConfigError, InputError, ModelError, Overloaded
from relaygr_stream.models.loading import save_checkpoint
from relaygr_stream.settings.load import load_settings, with_packaged_model
from relaygr_stream.settings.schema import Relay, Settings
from relaygr_stream.settings.worker import Model
from relaygr_stream.telemetry.printable import render_plain
from relaygr_stream.wire.messages import RankingRequest
from relaygr_stream.workload.generator import GeneratorOptions
from relaygr_stream.workload.publish import LogOptions, PublishOptions, Workload, prepare, send
from relaygr_stream.workload.replay import ReplayOptions
from relaygr_stream.workload.report import LiveLine, PublishReport, print_report, render
from tests.unit.models.small_models import small_model
from tests.unit.workload.logs_for_tests import movielens_rows, write_udata
from tests.unit.workload.recording_client import RecordingClient

SETTINGS = Settings()
#: It counts from the schedule: by default, a process that stands still for a second would fail requests.
TIMEOUT_MS = 60_000


@pytest.fixture
def udata(tmp_path: Path) -> Path:
    path = write_udata(tmp_path / "u.data", movielens_rows())
    path.write_text("broken\n" + path.read_text() + "1\t2\tgood\t5\n")
    return path


def prepared(options: PublishOptions, settings: Settings = SETTINGS) -> Workload:
    return prepare(options, settings, LiveLine(io.StringIO()), asyncio.Event())


async def run(options: PublishOptions, client: RecordingClient) -> PublishReport:
    line = LiveLine(io.StringIO())
    return await send(client, prepared(options), options, SETTINGS, asyncio.Event(), line)


def replay_options(path: Path, requests: int = 60) -> PublishOptions:
    source = LogOptions(path=path, replay=ReplayOptions(requests=requests, rate=500))
    return PublishOptions(source=source, timeout_ms=TIMEOUT_MS)


async def test_from_udata_to_hit_rate(udata: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # in fewer, lines are folded
    report = await run(replay_options(udata), RecordingClient())
    assert report.complete
    assert (report.requests, report.answered, report.outcomes) == (60, 60, {"hbm": 60})
    assert report.admissions == {"admitted": 60}
    assert "admission admitted 60" in " ".join(render_plain(render(report), 100).replace("│", " ").split())
    assert (report.lines, report.broken_lines) == (3002, 2)
    assert report.broken_examples[0].startswith(f"{udata}:1: 1 fields")
    assert report.chance is not None
    assert report.chance.hr == pytest.approx(0.1)
    assert report.served is not None
    assert report.popularity is not None
    assert report.latency_ms["p50"] <= report.latency_ms["p90"] <= report.latency_ms["p99"] <= report.latency_ms["max"]
    out = io.StringIO()
    print_report(report, out)
    for part in (
        "u.data (u.data): 3000 interactions of 100 users",
        "2 broken and skipped",
        "60 answered",
        "hbm",
        "latency p99",
        "HR@10",
        "NDCG@10",
        "0.1000 chance",
        "popularity",
    ):
        assert part in out.getvalue()


async def test_served_quality_is_that_of_the_scores(udata: Path) -> None:
    """The client ranks low item ids first: HR@1 is the share of requests whose next item has the lowest id."""
    source = LogOptions(path=udata, replay=ReplayOptions(requests=100, candidates=3, rate=1000))
    options = PublishOptions(source=source, k=1, timeout_ms=TIMEOUT_MS)
    ids = [np.frombuffer(item.request.candidates, np.uint32) for item in prepared(options).items]
    targets = [item.target for item in prepared(options).items]
    report = await run(options, RecordingClient())
    assert report.served is not None
    assert report.chance is not None
    assert report.served.hr == np.mean([np.argmin(row) == target for row, target in zip(ids, targets, strict=True)])
    assert report.chance.hr == pytest.approx(1 / 3)


async def test_errors_by_type_make_the_report_incomplete(udata: Path) -> None:
    def fail(request: RankingRequest) -> Overloaded | None:
        return Overloaded("queue is full") if int(request.request_id[1:]) % 3 == 0 else None

    report = await run(replay_options(udata), RecordingClient(fail=fail))
    assert not report.complete
    assert report.errors == {"Overloaded": 20}
    assert report.error_examples == {"Overloaded": "queue is full"}
    assert "queue is full" in _printed(report)


async def test_generated_workload_and_its_json(tmp_path: Path) -> None:
    source = GeneratorOptions(users=20, items=300, length=30, candidates=20, rate=500)
    report = await run(PublishOptions(source=source, requests=25, timeout_ms=TIMEOUT_MS), RecordingClient())
    parsed = json.loads(report.json())
    assert parsed["requests"] == parsed["answered"] == 25
    assert parsed["lines"] is None
    assert parsed["served"].keys() == {"hr", "ndcg"}
    assert set(parsed) == {field.name for field in dataclasses.fields(PublishReport)}
    assert any("a model that was not trained on them" in note for note in report.notes)


async def test_nothing_sent_is_not_complete_and_still_prints(udata: Path) -> None:
    options, stop = replay_options(udata), asyncio.Event()
    stop.set()
    report = await send(RecordingClient(), prepared(options), options, SETTINGS, stop, LiveLine(io.StringIO()))
    assert not report.complete
    assert report.served is None
    assert "0 sent" in _printed(report)


def test_stop_is_heard_while_a_long_file_is_read(tmp_path: Path) -> None:
    path = write_udata(tmp_path / "u.data", movielens_rows(users=2000))
    stop = asyncio.Event()
    stop.set()
    with pytest.raises(InputError, match="stopped while reading"):
        prepare(replay_options(path), SETTINGS, LiveLine(), stop)


def test_what_workers_would_refuse_is_refused_before_sending(udata: Path) -> None:
    tight = Settings(relay=Relay(max_prefix_tokens=100, max_suffix_tokens=4, max_candidates=50))
    source = ReplayOptions(max_prefix=100, suffix=4, candidates=50)
    prepared(PublishOptions(source=LogOptions(path=udata, replay=source)), tight)
    for wrong, key in (
        ({"max_prefix": 101}, "101 prefix behaviours, the limit is 100 .relay.max_prefix_tokens"),
        ({"suffix": 5}, "5 suffix behaviours, the limit is 4 .relay.max_suffix_tokens"),
        ({"candidates": 51}, "51 candidates, the limit is 50 .relay.max_candidates"),
    ):
        shape = ReplayOptions(**{"max_prefix": 100, "suffix": 4, "candidates": 50, **wrong})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=key):
            prepared(PublishOptions(source=LogOptions(path=udata, replay=shape)), tight)


def test_notes_about_the_model(udata: Path, tmp_path: Path) -> None:
    def notes(model: Model) -> str:
        return "\n".join(prepared(replay_options(udata), Settings(model=model)).notes)

    def saved(**shape: int) -> Model:
        save_checkpoint(small_model(**shape), tmp_path / "ck")
        return Model(checkpoint=str(tmp_path / "ck"))

    assert notes(saved(vocab=1000)) == ""
    assert "from vocab = 300 on in 8 rows by hash" in notes(saved(vocab=300, oov_rows=8))
    assert "random weights or, as `relaygr up`" in notes(Model())
    assert "from vocab = 300 on modulo it" in notes(Model(vocab=300))
    assert notes(Model(factory="mine:make", vocab=300)) == ""


def test_a_checkpoint_that_is_not_here_is_named(udata: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, said in (("absent", "absent: no such folder here.*model.checkpoint="), ("empty", "empty/config.json")):
        with pytest.raises(ModelError, match=said):
            prepared(replay_options(udata), Settings(model=Model(checkpoint=str(tmp_path / name))))


def test_without_a_model_the_packaged_one_and_the_users_that_it_knows() -> None:
    flags = dict.fromkeys((*LOG_FLAGS, *GENERATOR_FLAGS, "events", "features", "requests", "timeout", "speed", "rate"))
    flags |= {"generate": True, "mode": "auto", "announce": True, "seed": 7}
    for given, items, exponent in (
        ({}, 4000, 0.25),
        ({"model.checkpoint": "demo"}, 4000, 0.25),
        ({"model.checkpoint": ""}, 50_000, 1.0),
        ({"model.factory": "mine:make"}, 50_000, 1.0),
    ):
        settings = with_packaged_model(load_settings(flags=given, environ={}))
        options = build_options(settings, flags)
        assert isinstance(options.source, GeneratorOptions)
        assert (options.source.items, options.source.item_exponent) == (items, exponent), given


def _printed(report: PublishReport) -> str:
    out = io.StringIO()
    print_report(report, out)
    return out.getvalue()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_live_line_is_rewritten_on_a_terminal_and_logged_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "21")
    terminal, file = _Terminal(), io.StringIO()
    with capture_logs() as logged:
        for stream in (terminal, file):
            line = LiveLine(stream)
            assert not line.due()
            line.show("a line that is longer than that")
            line.show("short")
            line.close()
    assert terminal.getvalue() == "\ra line that is longe\rshort" + " " * 15 + "\r" + " " * 5 + "\r"
    assert file.getvalue() == ""
    assert [entry["line"] for entry in logged] == ["a line that is longer than that", "short"]


# The command -----------------------------------------------------------------------------------------------------


def options_of(*arguments: str) -> PublishOptions:
    """The options as the command parses them."""
    with replay_command.make_context("replay", list(arguments)) as context:
        flags = {
            name: value for name, value in context.params.items() if name not in ("files", "assignments", "bootstrap")
        }
        flags.pop("json_path")
        return build_options(Settings(relay=Relay(max_prefix_tokens=777)), flags)


def test_flags_reach_the_options(tmp_path: Path) -> None:
    options = options_of("--events", "x.csv", "--columns", "user=u,item=i,time=t", "--time-unit", "ms", "--speed", "60",
                         "--requests", "12", "--suffix", "3", "--min-history", "5", "--timeout", "0.25")  # fmt: skip
    source = options.source
    assert isinstance(source, LogOptions)
    assert (source.path, source.time_unit, options.timeout_ms) == (Path("x.csv"), "ms", 250)
    assert source.columns is not None
    assert source.columns.user == "u"
    replay = source.replay
    assert (replay.speed, replay.requests, replay.suffix, replay.min_history, replay.max_prefix) == (60, 12, 3, 5, 777)
    generated = options_of("--generate", "--requests", "0", "--rate", "99", "--users", "7", "--revisit", "0.9")
    assert generated.requests is None
    assert isinstance(generated.source, GeneratorOptions)
    assert (generated.source.rate, generated.source.users, generated.source.revisit) == (99, 7, 0.9)
    assert generated.source.max_prefix == 777


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--events FILE or --generate"),
        (["--events", "x", "--generate"], "--events FILE or --generate"),
        (["--events", "x", "--speed", "2", "--rate", "3"], "--speed keeps the log's times"),
        (["--events", "x", "--length", "3"], "--length goes with --generate only"),
        (["--events", "x", "--return-after", "3"], "--return-after goes with --generate only"),
        (["--generate", "--columns", "user=a"], "--columns goes with --events only"),
        (["--events", "x", "--requests", "0"], "--generate only"),
        (["--generate", "--timeout", "0"], "--timeout 0"),
        (["--generate", "--stage-delay", "-1"], "--stage-delay -1"),
    ],
)
def test_flags_that_clash(arguments: list[str], words: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        options_of(*arguments)
    assert words in str(caught.value)


def test_help_has_examples() -> None:
    result = CliRunner().invoke(replay_command, ["--help"])
    assert result.exit_code == 0
    assert "relaygr replay --events ml-100k/u.data" in result.output


def test_an_unusable_file_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = CliRunner().invoke(replay_command, ["--events", str(tmp_path / "absent")])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert "absent: no such file" in done.stderr
    assert done.stdout == ""


def test_two_runs_have_different_request_ids() -> None:
    runs = [options_of("--generate").source for _ in range(2)]
    assert isinstance(runs[0], GeneratorOptions)
    assert isinstance(runs[1], GeneratorOptions)
    assert runs[0].run != runs[1].run


def test_publishing_loads_no_torch() -> None:
    code = "import sys, relaygr_stream.cli.replay; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
