"""What the planner sees is what workers state."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relaygr_stream.ops.planner.demand import MOST_WORKERS
from relaygr_stream.ops.planner.observing import observed
from relaygr_stream.ops.planner.plan import Memory, decide
from relaygr_stream.ops.planner.replay import read_observations
from relaygr_stream.ops.planner.seen import VARIATION, Observation
from relaygr_stream.ops.status.overview import LATELY_S, Overview
from relaygr_stream.settings.scenarios import MAX_SHARING, Scenario
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import GivenUp, ScenarioTotals, WorkerStatus
from relaygr_stream.wire.planner_status import KEY_PREFIX, KIND, PlannerStatus, encode_planner, read_planner
from relaygr_stream.wire.records import HEADER_KIND, Record
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader
from tests.statuses import lane_statuses, worker_status
from tests.waiting import Clock

SETTINGS = Settings(kafka=Kafka(partitions=4))
#: Of ten seconds: 100 rankings, 90 of them with scores, 5 of those late.
COUNTERS = {
    "answers_ok": 90.0,
    "answers_overloaded": 10.0,
    "outcome_hbm": 80.0,
    "outcome_full": 10.0,
    "within_slo": 85.0,
    "signal_computed": 40.0,
    "signal_hbm": 50.0,
    "pre_infer_ms": 800.0,
    "full_ms": 200.0,
    "ranking_ms": 180.0,
    "prefix_ms2": 20_000.0,
    "ranking_ms2": 540.0,
}


def status(name: str, second: float, counters: dict[str, float], **changes: Any) -> WorkerStatus:
    given = {
        "counters": counters,
        "busy_share": 0.4,
        "latencies": {"hbm": (0, 0, 0, int(counters.get("answers_ok", 0)))},
    }
    return worker_status(name, lane_statuses([0]), sent_ms=int(second * 1e3), **{**given, **changes})


def view(*statuses: WorkerStatus) -> Overview:
    topics = load_topics(SETTINGS.kafka)
    made = Overview(SETTINGS, topics, StatusReader.from_settings(SETTINGS, topics), clock=Clock())
    made.live = True
    for each in statuses:
        made.on_records([Record("s", 0, 0, each.sent_ms, each.name.encode(), encode(each), ())])
    return made


def test_rates_costs_and_late_answers_are_those_of_the_window() -> None:
    before = {name: 1000.0 + total for name, total in COUNTERS.items()}
    after = {name: total + COUNTERS[name] for name, total in before.items()}
    pairs = [each for name in ("w1", "w2") for each in (status(name, 1.0, before), status(name, 1.0 + LATELY_S, after))]
    seen = observed(view(*pairs))
    assert seen.per_second == pytest.approx(20.0)
    assert seen.prefix_ms == pytest.approx(1000.0 / 100)  # 90 signals, and 10 rankings that did it themselves
    assert seen.score_ms == pytest.approx(180.0 / 90)
    assert seen.prefix_variation == pytest.approx(20_000 / 100 / 10**2 - 1)
    assert seen.score_variation == pytest.approx(540 / 90 / 2**2 - 1)
    assert [(each.name, each.answers, each.late, each.scored, each.busy) for each in seen.workers] == [
        ("w1", 100, 15, 90, 0.4),
        ("w2", 100, 15, 90, 0.4),
    ]
    assert seen.p99_ms is not None
    assert 3.0 < seen.p99_ms <= 5.0


def test_where_a_worker_tells_no_squares_the_variation_is_assumed() -> None:
    after = {name: 2 * total for name, total in COUNTERS.items()}
    told = [status("w1", 1.0, COUNTERS), status("w1", 11.0, after)]
    for second, totals in ((1.0, COUNTERS), (11.0, after)):
        told.append(status("w2", second, {name: total for name, total in totals.items() if "ms2" not in name}))
    seen = observed(view(*told))
    assert (seen.prefix_variation, seen.score_variation) == (VARIATION, VARIATION)


def test_without_signals_each_ranking_with_scores_counts() -> None:
    quiet = dict.fromkeys(COUNTERS, 0.0)
    cached = quiet | {"answers_ok": 50.0, "outcome_hbm": 40.0, "outcome_full": 10.0, "full_ms": 100.0}
    seen = observed(view(status("w", 1.0, quiet), status("w", 1.0 + LATELY_S, cached)))
    assert seen.prefix_ms == pytest.approx(2.0)


def test_a_worker_that_withholds_outcomes_tells_by_its_busy_share() -> None:
    one, two = ({"answers_ok": 0.0}, {"answers_ok": 100.0})
    seen = observed(view(status("w", 1.0, one, latencies={}), status("w", 11.0, two, latencies={})))
    assert (seen.prefix_ms, seen.p99_ms) == (0.0, None)
    assert seen.score_ms == pytest.approx(40.0)
    assert seen.workers[0].late == 0


def test_what_a_worker_states_of_its_moves_is_seen() -> None:
    told = {"assigned": 8, "given_up": GivenUp(epoch=7, reason="it did not drain")}
    (each,) = observed(view(status("w", 1.0, COUNTERS, **told))).workers
    assert (each.lanes, each.epoch, each.given_up, each.why) == (1, 8, 7, "it did not drain")
    (each,) = observed(view(status("w", 1.0, COUNTERS))).workers
    assert (each.epoch, each.given_up, each.why) == (0, 0, "")


@pytest.mark.parametrize("state", ["starting", "draining", "stopped"])
def test_only_serving_workers_count(state: str) -> None:
    assert observed(view(status("w", 1.0, COUNTERS, state=state))).workers == ()


def test_a_worker_seen_once_tells_nothing_yet() -> None:
    seen = observed(view(status("w", 1.0, COUNTERS)))
    assert (seen.per_second, seen.prefix_ms, seen.score_ms) == (0.0, 0.0, 0.0)
    assert len(seen.workers) == 1


# ---- statuses are foreign ----

totals = st.dictionaries(
    st.sampled_from([*COUNTERS, "answers_failed"]),
    st.sampled_from([-sys.float_info.max, -1.0, 0.0, 5e-324, 1.0, 1e9, 2.0**53, sys.float_info.max])
    | st.floats(allow_nan=False, allow_infinity=False),
)
names = st.text("ab\x00\u202e\ud7ff", min_size=1, max_size=256)
hostile = st.builds(
    status,
    st.sampled_from(["a", "b"]) | names,
    st.sampled_from([0.0, 1.0, 1.001, 9.0, 20.0, 1e12]),
    totals,
    busy_share=st.floats(0, 1),
    latencies=st.just({}) | st.just({"hbm": (0, 2**53 - 1)}),
    scenarios=st.just(msgspec.UNSET) | st.dictionaries(names, st.builds(ScenarioTotals, counters=totals), max_size=2),
    given_up=st.builds(GivenUp, epoch=st.integers(0, 2**53 - 1), reason=names.map(lambda text: text[:200])),
)
SCENARIOS = (
    Scenario(name="feed"),
    *(Scenario(name=f"{'s' * 20}{number}", served_by="feed") for number in range(MAX_SHARING - 1)),
    Scenario(name="gone"),
)


@given(statuses=st.lists(hostile, max_size=6))
@example(statuses=[status("a", at, {"pre_infer_ms": at, "prefix_ms2": at}, busy_share=1e-200) for at in (1.0, 9.0)])
@example(statuses=[status("a", at, {"answers_failed": at * 1e300, "answers_ok": at}) for at in (1.0, 1.001)])
def test_whatever_workers_state_plans_are_readable_and_right_again_within_an_hour(
    statuses: list[WorkerStatus], tmp_path_factory: pytest.TempPathFactory
) -> None:
    seen = Observation(at_s=0.0, groups={"feed": observed(view(*statuses))})
    file: Path = tmp_path_factory.getbasetemp() / "hostile.ndjson"
    file.write_bytes(msgspec.json.encode(seen))
    assert list(read_observations(file)) == [seen], "what is recorded is replayed"
    memory, plan = decide(Memory(), seen, SCENARIOS)
    made = PlannerStatus(name="p", incarnation=1, sent_ms=1, state="serving", plan=plan)
    record = Record("s", 0, 0, 1, f"{KEY_PREFIX}p".encode(), encode_planner(made), ((HEADER_KIND, KIND.encode()),))
    assert read_planner(record, StatusReader()) == made, "`plan show` shows it"
    assert all(each.wanted <= MOST_WORKERS for each in plan.scenarios.values())
    after = {name: 2 * total for name, total in COUNTERS.items()}
    calm = observed(view(status("w", 1.0, COUNTERS), status("w", 11.0, after)))
    for at_s in range(30, 3630, 30):
        memory, plan = decide(memory, Observation(at_s=float(at_s), groups={"feed": calm}), SCENARIOS)
    assert plan.scenarios["feed"].wanted == 1
