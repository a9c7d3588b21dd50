from __future__ import annotations

import asyncio
import io

import pytest
from relaygr_lab.demo import live
from relaygr_lab.demo.live import LiveState, LiveView
from rich.console import Console

from relaygr_stream.bus.away import ranges
from relaygr_stream.wire.messages import WorkerStatus
from tests.statuses import lane_statuses, worker_status
from tests.waiting import Clock, until


def status(name: str, lanes: list[int], incarnation: int = 1, sent_ms: int = 1) -> WorkerStatus:
    return worker_status(
        name,
        lane_statuses(lanes),
        incarnation=incarnation,
        sent_ms=sent_ms,
        queue_ms=1.5,
        model_version="v",
        device="cpu",
        hbm_used_bytes=300 << 20,
        hbm_bytes=1 << 30,
        dram_used_bytes=7 << 20,
        dram_bytes=2 << 30,
    )


@pytest.fixture
def state() -> LiveState:
    return LiveState(clock=Clock())


def later(state: LiveState, seconds: float) -> None:
    assert isinstance(state.clock, Clock)
    state.clock.now += seconds


def test_lanes_are_shown_as_ranges() -> None:
    assert ranges([5, 0, 1, 2, 9, 8]) == "0–2, 5, 8–9"
    assert ranges([]) == ""


def test_the_line_tells_phase_rates_hits_latency_and_workers(state: LiveState) -> None:
    state.enter("relay and full inference", 60)
    state.worker(status("worker-1", [0, 1, 2, 7]))
    view = LiveView(state, Console(file=io.StringIO()))
    for number in range(200):
        state.announced()
        state.ranked(10.0 if number < 197 else 90.0, "hbm" if number % 2 else "full")
    state.failed("DeadlineExceeded")
    later(state, 4)
    assert view.line() == (
        "relay and full inference, 56 s left; 50 events/s, 50 rankings/s; "
        "hits: hbm 100, dram 0, joined 0, full 100; P50 10.0 ms, P99 90.0 ms; "
        "worker-1: lanes 0–2, 7, HBM 300 and DRAM 7 MiB; no scores: DeadlineExceeded 1"
    )


def test_latencies_older_than_the_window_do_not_count(state: LiveState) -> None:
    state.ranked(500.0, "full")
    later(state, live.WINDOW_S + 1)
    state.ranked(5.0, "hbm")
    state.ranked(5.0, "hbm")
    assert state.recent_ms() == [5.0, 5.0]
    state.enter("full inference alone")
    assert state.recent_ms() == [], "phases are not mixed"


def test_an_earlier_incarnation_does_not_replace_a_later_one(state: LiveState) -> None:
    state.worker(status("w", [1], incarnation=2, sent_ms=10))
    state.worker(status("w", [2], incarnation=1, sent_ms=20))
    state.worker(status("w", [3], incarnation=2, sent_ms=5))
    assert [lane.lane for lane in state.workers["w"][1].lanes] == [1]
    state.worker(status("w", [4], incarnation=3, sent_ms=1))
    assert [lane.lane for lane in state.workers["w"][1].lanes] == [4]


def shown(view: LiveView) -> str:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as captured:
        console.print(view.table())
    return captured.get()


def test_the_table_shows_memory_and_who_is_silent(state: LiveState) -> None:
    state.worker(status("worker-1", [0]))
    view = LiveView(state, Console(file=io.StringIO()))
    assert "300 of 1,024 MiB" in shown(view)
    assert "7 of 2,048 MiB" in shown(view)
    assert "serving" in shown(view)
    later(state, live.SILENT_S + 1)
    assert "silent for 3 s" in shown(view)


async def test_where_there_is_no_terminal_lines_are_printed(state: LiveState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PLAIN_EVERY_S", 0.01)
    out = io.StringIO()
    state.enter("[one] warming up")
    async with LiveView(state, Console(file=out, width=40)):
        await until(lambda: out.getvalue().count("\n") >= 3)
    lines = out.getvalue().splitlines()
    assert all(line.startswith("[one] warming up; ") and line.endswith("no answers yet") for line in lines)
    assert "\x1b" not in out.getvalue()


async def test_on_a_terminal_the_table_is_drawn_and_removed(state: LiveState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "TERMINAL_EVERY_S", 0.01)
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    state.worker(status("worker-1", [0, 1]))
    async with LiveView(state, console):
        await until(lambda: out.getvalue().count("worker-1") >= 2)
    assert out.getvalue().endswith("\x1b[1A\x1b[2K"), "the result table takes its place"
    assert [task for task in asyncio.all_tasks() if task.get_name() == "live-view"] == []
