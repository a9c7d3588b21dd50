"""A short soak on a broker that stays: workers and triggers come, go, hang and die under load, and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.faults.soak.report import outside
from tests.faults.soak.run import Options, save, soak
from tests.faults.soak.traffic import Note, disturbed, silence


@pytest.mark.faults
async def test_a_short_soak_loses_nothing(tmp_path: Path) -> None:
    options = Options(seconds=28.0, seed=3, rate=15.0, brokers="embedded", folder=tmp_path / "soak")
    soaked = await soak(options, Console(quiet=True))
    assert not soaked.broken, soaked.broken  # whether targets are met is a matter of the machine
    figures = soaked.figures
    assert figures["faults"] >= 1
    assert figures["sent"] == sum(figures["ends"].values())
    assert figures["compared"] == figures["ends"]["scores"]
    save(soaked, tmp_path / "out" / "soak.json")
    assert json.loads((tmp_path / "out" / "soak.json").read_text())["seed"] == 3


def notes(*sent_and_error: tuple[float, str | None]) -> list[Note]:
    return [Note(sent, sent + 0.1, "u", 0, error) for sent, error in sent_and_error]


def test_recovery_lasts_until_the_last_disturbed_second_before_the_next_fault() -> None:
    bad = "DeadlineExceeded"
    seen = notes((9.5, bad), (10.2, None), (11.4, bad), (11.6, None), (12.5, None), (13.5, bad))
    assert disturbed(seen, 10.0, 13.0) == 2.0  # what came before the fault or after the next one is not its own
    assert disturbed(seen, 10.0, 11.0) == 0.0
    assert disturbed(seen, 10.0, 14.0) == 4.0


def test_silence_is_time_in_which_a_user_asks_and_gets_nothing() -> None:
    bad = "DeadlineExceeded"
    assert silence(notes((1.0, None), (2.0, bad), (5.0, None)), "user") == pytest.approx(
        0.1
    )  # 2.1 to 5.0: nobody asked
    assert silence(notes((1.0, None), (2.0, bad), (5.0, bad), (9.0, None)), "user") == pytest.approx(3.1)
    assert silence(notes((1.0, None), (2.0, bad), (5.0, bad)), "user") == pytest.approx(3.1)
    assert silence(notes((1.0, None), (2.0, bad), (2.05, None)), "user") == pytest.approx(0.15)  # others' scores end it
    assert silence(notes((1.0, None)), "lane") == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("kept", "of_control", "requests", "is_missed"),
    [(399.0, 200.0, 200, False), (401.0, 200.0, 200, True), (999.0, 1.0, 199, False)],
)
def test_what_a_move_costs_is_judged_by_what_a_start_costs_here(
    kept: float, of_control: float, requests: int, is_missed: bool
) -> None:
    figures = {"rate_held": 25.0, "rate_asked": 25.0, "scored_share": 1.0}
    figures |= {"kept_lanes_p99_ms": kept, "kept_lanes_requests": 1000}
    figures |= {"control_p99_ms": of_control, "control_requests": requests}
    assert bool(outside(figures)) == is_missed
