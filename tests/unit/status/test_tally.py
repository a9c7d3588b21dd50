"""What statuses tell of latencies, rates and errors is what the worker's own metrics tell."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from relaygr_stream.errors import DecodeError
from relaygr_stream.ops.status.odd import MUCH_CUT, Oddity, findings, oddities
from relaygr_stream.ops.status.overload import BUSY, REFUSED, SLO_SHARE
from relaygr_stream.ops.status.table import as_json, render
from relaygr_stream.ops.status.tally import FULL, RELAY, Tally
from relaygr_stream.telemetry.printable import render_plain
from relaygr_stream.wire.latencies import BOUNDS_S, quantile_s, since, total
from relaygr_stream.wire.messages import HITS, WorkerStatus
from relaygr_stream.wire.trigger_status import TriggerStatus
from relaygr_stream.wire.worker_status import BASE_BYTES, WITHIN_SLO, StatusReader
from relaygr_stream.worker.metrics import WorkerMetrics
from tests.statuses import worker_status
from tests.unit.status.test_overview import overview, record, trigger, worker

ROOT = Path(__file__).resolve().parents[3]
OUTCOMES = (*HITS, "full", "truncated")
RANKED = st.lists(st.tuples(st.sampled_from(OUTCOMES), st.floats(0.0, 5.0)), max_size=60)


def stated(metrics: WorkerMetrics, **changes: Any) -> WorkerStatus:
    """What worker/status.py states of these metrics."""
    latencies = {outcome: tuple(counts) for outcome, counts in metrics.whole.latencies.items()} or msgspec.UNSET
    return worker("w1", counters=dict(metrics.whole.counters), latencies=latencies, **changes)


def histogram_quantile(share: float, buckets: list[tuple[float, float]]) -> float | None:
    """As Prometheus computes it. buckets: upper bounds, the last infinite, and how many were at or below each."""
    rank = share * buckets[-1][1]
    if not rank:
        return None
    number = next(number for number, (_, below) in enumerate(buckets) if below >= rank)
    if number == len(buckets) - 1:
        return buckets[-2][0]
    lower, before = buckets[number - 1] if number else (0.0, 0.0)
    upper, below = buckets[number]
    return lower + (upper - lower) * (rank - before) / (below - before)


def buckets_of(samples: Iterable[Sample], outcomes: tuple[str, ...]) -> list[tuple[float, float]]:
    """The buckets of relaygr_ranking_seconds in a worker's /metrics, of these outcomes together."""
    below: Counter[float] = Counter(dict.fromkeys((*BOUNDS_S, math.inf), 0))
    for sample in samples:
        if sample.name == "relaygr_ranking_seconds_bucket" and sample.labels["outcome"] in outcomes:
            below[float(sample.labels["le"])] += int(sample.value)
    return sorted(below.items())


@given(RANKED, st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_quantiles_of_a_status_are_those_of_prometheus(ranked: list[tuple[str, float]], share: float) -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, 50.0)
    for outcome, seconds in ranked:
        metrics.ranked(outcome, seconds, 0.0)
    tally = Tally.between(None, stated(metrics))
    for kind, outcomes in ((RELAY, HITS), (FULL, ("full", "truncated"))):
        samples = [sample for family in registry.collect() for sample in family.samples]
        found, expected = tally.quantile_ms(share, kind), histogram_quantile(share, buckets_of(samples, outcomes))
        assert found == pytest.approx(None if expected is None else expected * 1e3)
    within = registry.get_sample_value("relaygr_rankings_within_slo_total")
    assert within == sum(seconds <= 0.05 for _, seconds in ranked)
    assert tally.slo_share() == (within / len(ranked) if ranked else None)


def test_counts_of_a_worker_that_started_anew_are_not_negative() -> None:
    assert since((5, 1), (3,)) == (2, 1)
    assert since((1,), (3, 4)) == (1,)
    assert total([(1,), (2, 3), ()]) == (3, 3)
    assert quantile_s((0, 0), 0.5) is None


def test_status_tells_rates_latencies_and_errors_of_the_time_since() -> None:
    metrics = WorkerMetrics(CollectorRegistry(), 50.0)
    metrics.ranked("full", 1.5, 0.0)  # long ago
    before = stated(metrics, sent_ms=1_000)
    for _ in range(15):
        metrics.ranked("hbm", 0.004, 0.0)
    for _ in range(3):
        metrics.ranked("full", 0.06, 0.0)
    metrics.answer("overloaded")
    metrics.answer("failed")
    view = overview(before, stated(metrics, sent_ms=3_000), trigger())
    found = json.loads(as_json(view))
    assert found["rankings"]["per_second"] == 10.0
    assert found["rankings"]["errors_per_second"] == 1.0
    assert found["rankings"]["within_slo"] == 0.75
    assert found["rankings"]["relay"] == {"p50_ms": 4.0, "p99_ms": pytest.approx(4.98)}
    assert 50 < found["rankings"]["full"]["p99_ms"] < 75
    assert found["workers"][0]["rankings"] == found["rankings"]
    rows = [line.split() for line in render_plain(render(view), 80).splitlines()]
    assert ["relay", "7.5", "75%", "4.0", "5.0"] in rows
    assert ["no", "scores", "1.0", "10%", "–", "–"] in rows
    assert ["within", "50", "ms", "7.5", "75%"] in rows


@pytest.mark.parametrize(
    ("late", "refused", "full", "busy", "line"),
    [
        (
            *(2, 0, 0, 0.95),
            "overload: busy devices of 1 of 1 workers refused 0 of the last 100 rankings, and were late with 2; 49 a "
            "second are within 50 ms; add workers, or send less",
        ),
        (
            *(1, 3, 0, 0.95),
            "overload: busy devices of 1 of 1 workers refused 3 of the last 100 rankings, and were late with 1; 48 a "
            "second are within 50 ms; add workers, or send less",
        ),
        (
            *(2, 0, 60, 0.1),
            "2 of the last 100 rankings took longer than 50 ms (relay.slo_ms) on the worker; few find prefix KV: "
            "`relaygr explain --seconds 5` says why",
        ),
        (
            *(2, 0, 0, 0.1),
            "2 of the last 100 rankings took longer than 50 ms (relay.slo_ms) on the worker; a trace of one shows "
            "where the time goes (telemetry.traces)",
        ),
        (
            *(0, 3, 0, 0.1),
            "3 of the last 100 rankings had no scores (3 overloaded); overloaded and deadline_exceeded: add workers; "
            "rejected and failed: the workers' logs have the reason",
        ),
        (0, 1, 0, 0.99, None),
    ],
)
def test_more_than_one_of_a_hundred_that_is_late_or_refused_is_odd(
    late: int, refused: int, full: int, busy: float, line: str | None
) -> None:
    metrics = WorkerMetrics(CollectorRegistry(), 50.0)
    before = stated(metrics, sent_ms=1_000)
    for number in range(100 - refused):
        metrics.ranked("full" if number < full else "hbm", 0.06 if number < late else 0.01, 0.0)
    for _ in range(refused):
        metrics.answer("overloaded")
    view = overview(before, stated(metrics, sent_ms=3_000, busy_share=busy), trigger())
    assert findings(view) == ([] if line is None else [Oddity(line, True)])


def test_overload_lasts_while_a_device_is_busy_and_is_told_beside_what_it_does_not_explain() -> None:
    """Also of a worker that withholds outcomes, and tells no share within the SLO."""
    metrics = WorkerMetrics(CollectorRegistry(), 50.0)
    before = stated(metrics, sent_ms=1_000)
    for status, times in (("overloaded", 4), ("deadline_exceeded", 2), ("failed", 9)):
        for _ in range(times):
            metrics.answer(status)
    for _ in range(85):
        metrics.ranked("hbm", 0.01, 0.0)
    for told in (
        dict(metrics.whole.counters),
        {name: n for name, n in metrics.whole.counters.items() if name.startswith("a")},
    ):
        start = msgspec.structs.replace(before, counters=dict.fromkeys(told, 0.0))
        now = worker("w1", counters=told, sent_ms=3_000, busy_share=BUSY + 0.01)
        overload, failed = (each.line for each in findings(overview(start, now, trigger())))
        assert overload.startswith("overload: busy devices of 1 of 1 workers refused 6 of the last 100 rankings")
        assert ("within 50 ms" in overload) == (WITHIN_SLO in told)
        assert failed.startswith("15 of the last 100 rankings had no scores (9 failed, 4 overloaded")
        over = overview(start, msgspec.structs.replace(now, busy_share=BUSY - 0.01), trigger())
        assert not any(line.startswith("overload") for line in oddities(over))


@pytest.mark.parametrize(("cut", "refused"), [(4, 0), (6, 0), (6, 5)])
def test_rankings_cut_to_their_newest_behaviours_are_told(cut: int, refused: int) -> None:
    """Beside overload's refusals, or, where there are many, alone."""
    metrics = WorkerMetrics(CollectorRegistry(), 50.0)
    before = stated(metrics, sent_ms=1_000)
    for number in range(100 - refused):
        metrics.ranked("truncated" if number < cut else "hbm", 0.01, 0.0)
    for _ in range(refused):
        metrics.answer("overloaded")
    found = [
        each.line for each in findings(overview(before, stated(metrics, sent_ms=3_000, busy_share=0.99), trigger()))
    ]
    assert len(found) == (cut > 5)
    assert all(f"{cut} are of the newest behaviours alone" in line for line in found)
    assert [line.startswith("overload") for line in found] == [bool(refused)] * len(found)


def test_the_alert_of_cut_rankings_has_the_share_of_the_status() -> None:
    assert _rule("RelaygrTruncated").rstrip().endswith(f"> {MUCH_CUT:g}")


def test_a_busy_worker_of_a_fleet_that_keeps_its_slo_is_no_overload() -> None:
    """Two rankings of its hundred are late, of the fleet's four hundred; a fifth worker's device has time."""
    views = []
    for late in (2, 8):
        statuses: list[WorkerStatus | TriggerStatus] = [trigger()]
        for number in range(4):
            counters = {"answers_ok": 100.0, WITHIN_SLO: 100.0 - (late if number == 0 else 0)}
            name, busy = f"w{number}", 0.99 if number == 0 else 0.2
            statuses.append(worker(name, counters={"answers_ok": 0.0, WITHIN_SLO: 0.0}, sent_ms=1_000))
            statuses.append(worker(name, counters=counters, sent_ms=3_000, busy_share=busy))
        views.append([line for line in oddities(overview(*statuses)) if line.startswith("overload")])
    assert views[0] == []
    assert views[1][0].startswith("overload: busy devices of 1 of 4 workers refused 0 of the last 400 rankings")


def test_the_alert_has_the_rule_of_the_status() -> None:
    expr = _rule("RelaygrOverload")
    assert f"> {BUSY:g}\n" in expr
    assert expr.rstrip().endswith(f"> {1 - SLO_SHARE:.2g}")
    assert f'status=~"{"|".join(("ok", *REFUSED))}"' in expr


def _rule(alert: str) -> str:
    rules = yaml.safe_load((ROOT / "docker" / "prometheus" / "alerts.yml").read_text())["groups"][0]["rules"]
    (expr,) = (rule["expr"] for rule in rules if rule["alert"] == alert)
    return str(expr)


def test_rates_are_those_of_lately_however_long_one_looks_on() -> None:
    statuses = [
        worker(sent_ms=1_000 * second, counters={"answers_ok": 100.0 * min(second, 100), WITHIN_SLO: 0.0})
        for second in range(1, 131)
    ]
    view = overview(*statuses, trigger())
    assert json.loads(as_json(view))["rankings"]["per_second"] == 0.0
    view = overview(*statuses[:90], trigger())
    assert json.loads(as_json(view))["rankings"]["per_second"] == 100.0


def test_workers_of_an_earlier_release_tell_no_latencies_and_break_nothing() -> None:
    view = overview(worker(sent_ms=1, counters={}), worker(sent_ms=1_001), trigger())
    found = json.loads(as_json(view))["rankings"]
    assert (found["per_second"], found["within_slo"], found["full"]["p99_ms"]) == (10.0, None, None)


def test_latencies_are_bounded_and_the_largest_fit_a_status() -> None:
    reader = StatusReader()
    largest = (2**53 - 1,) * (len(BOUNDS_S) + 1)
    most = worker_status(latencies=dict.fromkeys(OUTCOMES, largest))
    assert reader.read(record(most)) == most
    assert len(record(most).value or b"") < BASE_BYTES / 8
    for latencies in ({"hbm": (*largest, 1)}, {"hbm": (-1,)}, {"hbm": (2**53,)}, {f"{n}": () for n in range(17)}):
        with pytest.raises(DecodeError):
            reader.read(record(worker_status(latencies=latencies)))
