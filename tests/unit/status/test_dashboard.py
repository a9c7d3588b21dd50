"""The page of the fleet: what of the last fifteen minutes it keeps, what it says, and what it costs."""

from __future__ import annotations

import asyncio
import html
import json
import re
import socket
import time
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import ConfigError
from relaygr_stream.ops.dashboard import board as boards
from relaygr_stream.ops.dashboard.board import HEADERS, Board
from relaygr_stream.ops.dashboard.charts import lines, nice, stack
from relaygr_stream.ops.dashboard.history import SLOT_S, SLOTS, FleetHistory, Slot
from relaygr_stream.ops.dashboard.page import live
from relaygr_stream.ops.dashboard.picture import take
from relaygr_stream.ops.dashboard.server import answer, run_dashboard
from relaygr_stream.ops.dashboard.tables import traced
from relaygr_stream.ops.dashboard.trace import RequestTrace, Step
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.telemetry.pages import PageRequest
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.trigger_status import TriggerStatus
from relaygr_stream.wire.worker_status import StatusReader
from relaygr_stream.worker.metrics import WorkerMetrics
from tests.statuses import lane_statuses
from tests.unit.status.test_overview import record, trigger, worker
from tests.unit.status.test_tally import stated
from tests.waiting import Clock

START = 1_700_000_000.0


def board_of(lanes: int = 4, kafka: Kafka | None = None) -> Board:
    settings = Settings(kafka=kafka or Kafka(partitions=lanes))
    made = Board(settings, load_topics(settings.kafka), StatusReader(lanes))
    made.view.live = True
    return made


def feed(board: Board, *statuses: WorkerStatus | TriggerStatus) -> None:
    board.view.on_records([record(status) for status in statuses])


def values(text: str) -> dict[str, str]:
    """The numbers of a page by their names."""
    return dict(re.findall(r'<data id="([^"]+)" value="([^"]*)">', text))


async def shown(board: Board) -> str:
    return (await board.live()).decode()


# ---- fifteen minutes ----


def answered(count: int, name: str = "w1", **changes: Any) -> WorkerStatus:
    return worker(name, counters={"answers_ok": float(count), "within_slo": float(count)}, **changes)


def counts(history: FleetHistory) -> list[int | None]:
    return [None if slot is None else slot.tally.all for slot in history.slots()]


def test_what_was_answered_between_two_statuses_counts_in_the_slot_of_the_later() -> None:
    clock = Clock(START)
    history = FleetHistory(10, lambda: clock.now)
    for second in range(31):
        clock.now = START + second
        history.add(answered(5 * second), clock.now)
        history.add(answered(second, "w2"), clock.now)
    assert counts(history)[-5:] == [None, 54, 60, 60, 6]
    assert len(history.slots()) == SLOTS
    clock.now += SLOT_S * SLOTS
    assert counts(history) == [None] * SLOTS


def test_a_restart_and_a_gap_of_statuses_count_from_anew() -> None:
    history = FleetHistory(10, lambda: START + 300)
    history.add(answered(1000), START)
    history.add(answered(1010), START + 5)
    history.add(answered(3, incarnation=2), START + 10)
    history.add(answered(5, incarnation=2), START + 20)
    history.add(answered(500, incarnation=2), START + 200)  # what was answered meanwhile belongs to no slot
    history.add(answered(501, incarnation=2), START + 201)
    assert sum(count or 0 for count in counts(history)) == 10 + 2 + 1


def test_the_last_word_of_a_worker_counts_and_a_clock_ahead_does_no_harm() -> None:
    history = FleetHistory(10, lambda: START)
    history.add(answered(1), START)
    history.add(answered(2), START + 0.2)  # too soon after the last: counts with the next
    history.add(answered(4, state="stopped"), START + 0.4)
    assert counts(history)[-1] == 3
    history.add(answered(9), START + 10_000)
    history.add(answered(10), START + 10_001)
    assert counts(history)[-1] == 4


def test_what_is_kept_of_processes_and_slots_is_bounded() -> None:
    clock = Clock(START)
    history = FleetHistory(10, lambda: clock.now)
    for number in range(1000):
        clock.now += SLOT_S
        history.add(worker(f"w{number}"), clock.now)
        history.add(trigger(f"t{number}"), clock.now)
    assert (len(history._workers), len(history._triggers)) == (10, 10)
    assert len(history._slots) <= SLOTS + 1


# ---- the page ----


async def test_the_page_says_what_the_statuses_say() -> None:
    board, metrics = board_of(), WorkerMetrics(CollectorRegistry(), 50.0)
    feed(board, stated(metrics, sent_ms=0), trigger(decisions={"admitted": 0.0}))
    for _ in range(90):
        metrics.ranked("hbm", 0.004, 0.0)
    for _ in range(8):
        metrics.ranked("full", 0.04, 0.0)
    metrics.answer("overloaded")
    metrics.answer("failed")
    now = stated(metrics, sent_ms=20_000, busy_share=0.25, queue_ms=1.25)
    lanes = lane_statuses(range(4), budget_bytes=128 << 20, pinned_bytes=1 << 20, pre_infer_offset=40)
    for state in ("draining", "serving"):  # a status of the same state within a second counts later
        feed(board, msgspec.structs.replace(now, lanes=lanes, state=state))
    found = values(await shown(board))
    assert (found["rankings"], float(found["rate"])) == ("100", 5.0)
    assert (float(found["p50-relay"]), float(found["p50-relay-15"])) == (4.0, 4.0)
    assert 30 < float(found["p99-full"]) <= 50
    assert (float(found["slo"]), float(found["slo-15"])) == (98.0, 98.0)
    assert (found["count-hbm"], found["count-full"]) == ("90", "8")
    assert (found["count-overloaded"], found["count-failed"]) == ("1", "1")
    assert (float(found["busy"]), float(found["queue"])) == (25.0, 1.25)
    assert (float(found["hbm"]), float(found["dram"])) == (50.0, 0.0)
    assert "lane 2: w1, 2 signals/s, 1% of its pinned budget in use" in await shown(board)
    assert 'class="urgent">2 of the last 100 rankings had no scores' in await shown(board)


async def test_what_is_odd_has_its_colour() -> None:
    board = board_of()
    text = await shown(board)
    assert '<li class="urgent">no worker is ready' in text
    assert '<li class="soon">no trigger runs' in text
    fine = board_of()
    feed(fine, worker(), trigger())
    assert '<li class="fine">Nothing is odd.</li>' in await shown(fine)
    assert '<rect class="none"' in text
    assert '<rect class="none"' not in await shown(fine)


HOSTILE = '<script>alert(1)</script>"onload=x\x1b[31m'


async def test_foreign_text_is_text() -> None:
    board = board_of(kafka=Kafka(partitions=4, prefix="a&b."))
    name = HOSTILE[:200]
    feed(
        board,
        worker(name, lanes=range(4), counters={f"answers_{name}": 1.0, f"outcome_{name}": 1.0}),
        worker(name, lanes=range(4), counters={f"answers_{name}": 9.0}, sent_ms=9000, state="draining"),
        worker(name, lanes=range(4), counters={f"answers_{name}": 19.0}, sent_ms=9000, latencies={"<script>": (1,)}),
        trigger("t", decisions={"<b>": 1.0}),
    )
    page = (await board.page()).decode()
    assert "<script>alert" not in page
    assert '"onload' not in page
    assert "\x1b" not in page
    assert html.escape("<script>alert(1)</script>") in page
    assert "a&amp;b." in page
    assert page.count("<script>") == 1


async def test_it_is_made_once_a_second_for_all_who_look(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    def slow(picture: Any) -> str:
        made.append(picture)
        time.sleep(0.05)
        return live(picture)

    monkeypatch.setattr(boards, "live", slow)
    board, clock = board_of(), Clock(100.0)
    board._clock = lambda: clock.now
    feed(board, worker(), trigger())
    looked = await asyncio.gather(*(board.page() for _ in range(50)), *(board.live() for _ in range(50)))
    assert len(made) == 1
    assert len(set(looked)) == 2
    clock.now += 0.9
    await board.live()
    assert len(made) == 1
    clock.now += 0.2
    await board.live()
    assert len(made) == 2


def test_a_large_fleet_has_a_page_of_bounded_size() -> None:
    lanes = 10_000
    board = board_of(lanes)
    share = lanes // 1000
    feed(board, *(worker(f"worker-{n:04}" + "x" * 200, range(n * share, (n + 1) * share)) for n in range(1000)))
    text = live(take(board.view, board._history.slots()))
    assert text.count("<tr>") == 101
    assert "900 more" in text
    assert text.count('<rect class="h') <= 1024
    assert len(text) < 600_000


def test_the_page_runs_and_loads_nothing_from_elsewhere() -> None:
    policy = HEADERS["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    files = (boards._PAGE, boards._STYLE, boards._SCRIPT)
    assert not any(re.search(r"https?://|//[a-z]|@import|url\(", text.replace("// ", "")) for text in files)


# ---- charts ----


def test_axes_end_at_round_numbers() -> None:
    assert [nice(value) for value in (0, 0.3, 1, 1.01, 19, 21, 99, 100, 2400)] == [1, 0.5, 1, 2, 20, 25, 100, 100, 2500]


def test_lines_are_broken_where_nothing_is_known_and_a_lone_point_is_seen() -> None:
    drawn = lines([("relay", [None, 1.0, None, 2.0, 2.0])], 2.0)
    assert 'd="M1 20.0L1.5 20.0 M3 0.0 L4 0.0"' in drawn


def test_areas_lie_upon_each_other() -> None:
    drawn = stack([("hbm", [1.0, None]), ("full", [1.0, 2.0]), ("dram", [0.0, 0.0])], 4.0)
    assert 'd="M0 30.0 1 40.0 1 40.0 0 40.0Z"' in drawn
    assert 'd="M0 20.0 1 20.0 1 40.0 0 30.0Z"' in drawn
    assert "dram" not in drawn


def test_slots_that_say_nothing_have_no_mean() -> None:
    assert Slot().mean("busy") is None


# ---- without a gateway ----


async def asked(path: str, host: str = "localhost:8090", **headers: str) -> tuple[int, dict[str, str], str]:
    status, found, body = await answer(board_of(), PageRequest(path, "", {"host": host, **headers}))
    return int(status[:3]), dict(found), body.decode()


async def test_the_dashboard_serves_the_page_its_live_part_and_json() -> None:
    status, headers, page = await asked("/")
    assert (status, headers["content-security-policy"]) == (200, HEADERS["content-security-policy"])
    assert page.startswith("<!doctype html>")
    assert (await asked("/live"))[2].startswith('<p class="fleet">0 trigger(s), 0 worker(s)')
    assert json.loads((await asked("/", accept="application/json"))[2])["workers"] == []
    assert (await asked("/metrics"))[0] == 404


@pytest.mark.parametrize("host", ["", "evil.example", "evil.example:8090", "localhost.evil.example:8090", "[::1]:8090"])
async def test_a_name_from_elsewhere_reads_nothing(host: str) -> None:
    status, _, text = await asked("/", host)
    assert (status, "worker" in text) == (421, False)


async def test_a_port_that_is_taken_is_named_with_its_option(embedded_settings: Kafka) -> None:
    await apply_topics(embedded_settings)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*--port"):
            await run_dashboard(Settings(kafka=embedded_settings), port, print)


async def test_a_trace_is_asked_for_by_its_form_and_foreign_text_in_it_is_text() -> None:
    assert "Name a request id." in (await asked("/trace"))[2]
    found = RequestTrace("r", [Step(1000, "announced", {"tenant": HOSTILE}), Step(1012, "answered ok", {})], ["<why>"])
    text = traced(found, HOSTILE, HOSTILE)
    assert "<script>" not in text
    assert '"onload' not in text
    assert "12 ms" in text
    assert "&lt;why&gt;" in text


async def test_the_largest_counters_spoil_no_page() -> None:
    """Whoever may write statuses may write these: each is finite, and their sum is not."""
    board, huge = board_of(), 1.7e308
    for second in (0, 2, 4):
        counters = dict.fromkeys(("answers_ok", "answers_failed", "outcome_hbm", "within_slo"), huge * (second > 0))
        feed(
            board,
            *(worker(f"w{number}", sent_ms=1000 * second, counters=counters) for number in (1, 2)),
            *(trigger(f"t{number}", decisions={"admitted": huge * (second > 0)}) for number in (1, 2)),
        )
    assert "Workers" in await shown(board)
    assert json.loads(board.json())
