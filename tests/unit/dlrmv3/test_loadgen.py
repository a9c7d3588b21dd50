"""LoadGen itself behind `Sut`: what it issues is answered, and its schedule and verdict are those predicted."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from relaygr_lab.dlrmv3.loadgen import FEWEST, Load, allowed_late, loadgen
from relaygr_lab.dlrmv3.sut import SUMMARY, Outcome, Sut
from relaygr_lab.dlrmv3.workload import Item, Workload

from relaygr_stream.cli.main import main
from relaygr_stream.errors import ConfigError, Overloaded, RelayError
from relaygr_stream.wire.features import NO_FEATURES
from tests.needs import without

WORKLOAD = Workload(users=150, candidates=2, scale=0.02)
#: Longer than any machine takes.
PATIENT_MS = 60_000.0


class Recorder:
    """Answers at once, and notes what it was asked; `refuses` says which it does not rank."""

    def __init__(self, refuses: int = -1, error: Exception | None = None) -> None:
        self.announced: list[str] = []
        self.ranked: list[str] = []
        self.known: list[bool] = []
        self._refuses, self._error = refuses, error

    async def announce(self, item: Item) -> None:
        self.announced.append(item.event.request_id)

    async def rank(self, item: Item, timeout_s: float) -> str:
        self.known.append(item.event.request_id in self.announced)
        self.ranked.append(item.request.request_id)
        refused = len(self.ranked) - 1 == self._refuses
        await asyncio.sleep(0)
        if refused:
            raise self._error or Overloaded("too much")
        return "hbm"


def needs_loadgen() -> Any:
    if importlib.util.find_spec("mlperf_loadgen") is None:
        without("pip install mlcommons-loadgen")
    return loadgen()


@cache
def item(index: int, head_start_ms: float) -> Item:
    return WORKLOAD.item(WORKLOAD.requests[1][index], "r", NO_FEATURES, head_start_ms)


async def ran(system: Recorder, test: Load, folder: Path, heads: list[float] | None = None) -> Outcome:
    return await Sut(needs_loadgen(), test, system, item, heads).run(folder)


async def test_what_loadgen_issues_is_answered_in_time_order_and_valid(tmp_path: Path) -> None:
    system = Recorder()
    outcome = await ran(system, Load(2000.0, FEWEST, PATIENT_MS, seed=3), tmp_path)
    assert outcome.valid
    assert outcome.outcomes == {"hbm": FEWEST}
    assert system.ranked == [item(index, 0.0).request.request_id for index in range(FEWEST)]
    assert not system.announced
    assert 0 < outcome.p99_ms < PATIENT_MS
    assert "Result is : VALID" in (tmp_path / SUMMARY).read_text()
    assert {path.name for path in tmp_path.glob("*")} == {"mlperf_log_detail.txt", SUMMARY}  # noqa: ASYNC240


async def test_late_answers_are_invalid_and_so_are_too_few(tmp_path: Path) -> None:
    late = await ran(Recorder(), Load(2000.0, FEWEST, 1e-6, seed=3), tmp_path)
    few = await ran(Recorder(), Load(2000.0, FEWEST - 1, PATIENT_MS, seed=3), tmp_path)
    assert not late.valid
    assert not few.valid


async def test_one_query_without_scores_counts_as_late(tmp_path: Path) -> None:
    """459 queries may have none that is late."""
    outcome = await ran(Recorder(refuses=7), Load(2000.0, FEWEST, 500.0, seed=3), tmp_path)
    assert outcome.errors == {"Overloaded": 1}
    assert not outcome.valid


async def test_a_run_that_cannot_be_valid_any_more_ends_early(tmp_path: Path) -> None:
    """LoadGen ends it, by its own bound on queries that wait, and its summary says INVALID."""
    outcome = await ran(Recorder(), Load(60.0, FEWEST, 1e-3, seed=3), tmp_path)
    assert not outcome.valid
    assert outcome.late >= 1
    assert sum(outcome.outcomes.values()) <= outcome.issued < FEWEST
    assert "Result is : INVALID" in (tmp_path / SUMMARY).read_text()


async def test_another_error_is_raised_when_loadgen_has_ended(tmp_path: Path) -> None:
    system = Recorder(refuses=7, error=RelayError("no broker"))
    with pytest.raises(RelayError, match="no broker"):
        await ran(system, Load(2000.0, FEWEST, 500.0, seed=3), tmp_path)
    assert len(system.ranked) == FEWEST


async def test_requests_are_announced_before_loadgen_issues_them(tmp_path: Path) -> None:
    """The first one is issued when nothing is known; head starts are longer than the run, so the rest is at once."""
    system, heads = Recorder(), [60.0] * 60
    outcome = await ran(system, Load(60.0, 60, PATIENT_MS, seed=3), tmp_path, heads)
    assert system.known == [False] + [True] * 59
    assert system.announced == system.ranked[1:]
    assert len(outcome.heads_ms) == 59


async def test_a_schedule_that_loadgen_does_not_keep_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Load(2000.0, FEWEST, PATIENT_MS, seed=4).schedule()
    monkeypatch.setattr(Load, "schedule", lambda self: other)
    with pytest.raises(RelayError, match="draws other times from its seed"):
        await ran(Recorder(), Load(2000.0, FEWEST, PATIENT_MS, seed=3), tmp_path)


def test_a_schedule_is_poisson_and_scales_with_its_rate() -> None:
    one, ten = Load(1.0, 20_000, 80.0, seed=9).schedule(), Load(10.0, 20_000, 80.0, seed=9).schedule()
    assert one[0] == 0
    np.testing.assert_allclose(one, 10 * ten)
    gaps = np.diff(one)
    assert gaps.mean() == pytest.approx(1.0, rel=0.03)
    assert gaps.std() == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize(("queries", "late"), [(458, -1), (459, 0), (661, 0), (662, 1), (20_000, 167)])
def test_loadgen_asks_for_confidence(queries: int, late: int) -> None:
    """459: 0.99⁴⁵⁹ is the first below 1 %."""
    assert allowed_late(queries) == late


def test_without_loadgen_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_loadgen", None)
    with pytest.raises(ConfigError, match="pip install mlcommons-loadgen"):
        loadgen()
    shown = CliRunner().invoke(main, ["bench", "dlrmv3", "--out", str(tmp_path / "out")])
    assert shown.exit_code != 0
    assert "pip install mlcommons-loadgen" in shown.output


def test_a_process_leaves_at_once_only_while_loadgen_goes_on() -> None:
    """LoadGen's thread would make an orderly exit crash."""
    code = (
        "import threading\nfrom relaygr_lab.dlrmv3.loadgen import THREAD, leave\nleave(3)\nprint('on')\n"
        "threading.Thread(target=threading.Event().wait, name=THREAD, daemon=True).start()\nleave(4)\nprint('never')"
    )
    left = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (left.returncode, left.stdout) == (4, "on\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modes", "full,half"], "half: no such mode"),
        (["--queries", "100"], "fewer than 459 never VALID"),
        (["--queries", "700", "--users", "20"], "give more --users"),
        (["--costs", "h100", "--device", "cpu"], "give one of them"),
        (["--costs", "h100", "--modes", "engine"], "leave `engine` out"),
        (["--candidates", "5000"], "relay.max_candidates"),
        (["--scale", "0"], "scale = 0"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(arguments: list[str], words: str, tmp_path: Path) -> None:
    needs_loadgen()
    shown = CliRunner().invoke(main, ["bench", "dlrmv3", "--out", str(tmp_path / "out"), *arguments])
    assert shown.exit_code != 0
    assert words in shown.output
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())
