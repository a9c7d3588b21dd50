from __future__ import annotations

import dataclasses
from copy import copy
from dataclasses import replace
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relaygr_lab.bench.options import TIMEOUT_SLOS
from relaygr_lab.bench.populations import Population
from relaygr_lab.bench.probe import Judgement, _latency_ms, _sent, _Staged, _Tally, direct
from relaygr_lab.bench.statistics import STAGES_AT_MOST, passes

from relaygr_stream.workload.driver import Result
from relaygr_stream.workload.items import WorkItem
from relaygr_stream.workload.traffic import Tide
from tests.properties import examples
from tests.unit.bench.test_populations import options

JUDGEMENT = Judgement(slo_ms=50.0, samples=100, least_s=0.5, warm_up_s=0.2)


@cache
def made() -> tuple[Population, list[WorkItem]]:
    """A population, and more of its requests than any probe here sends."""
    population = Population("p", options(16, 0.0))
    return population, list(islice(population._requests, 900))


def staged() -> _Staged:
    population, requests = made()
    anew = copy(population)
    anew._requests = iter(requests)
    return _Staged(anew, 400.0, JUDGEMENT)


@cache
def stage() -> int:
    """Requests to be judged in each."""
    return staged().requests(1)


def result(item: WorkItem, latency_ms: float) -> Result:
    answer = cast(Any, object())  # only whether there is one is looked at
    return Result(item, "full", None, "", latency_ms, None, answer)


def play(bad: set[int], order: int = 0, judgement: Judgement = JUDGEMENT) -> tuple[_Tally, int]:
    """Send until decided, the results of each 40 requests in a random order; bad: judged requests that are late."""
    traffic = staged()
    tally = _Tally(judgement, traffic, lambda requests, late: None)
    rng = np.random.default_rng(order)
    sent = judged = 0
    flying: list[Result] = []

    def land() -> None:
        for index in rng.permutation(len(flying)):
            tally(flying[index])
        flying.clear()

    for item in traffic:
        if tally.decided.is_set():
            break
        late = False
        if item.at >= JUDGEMENT.warm_up_s:
            late, judged = judged in bad, judged + 1
        sent += 1
        flying.append(result(item, 60.0 if late else 10.0))
        if len(flying) == 40:
            land()
    land()
    return tally, sent


def test_one_stage_decides_where_nothing_is_late() -> None:
    tally, sent = play(set())
    assert not tally.hopeless
    assert len(tally.judged()) == stage() <= sent <= 2 * stage()


def test_a_hiccup_is_judged_with_the_stages_that_follow() -> None:
    few = {10 + i for i in range(stage() // 100 + 1)}  # one too many for one stage
    assert not passes(stage(), len(few))
    tally, _ = play(few)
    assert not tally.hopeless
    assert len(tally.judged()) > stage()
    assert sum(map(tally.is_bad, tally.judged())) == len(few)


def test_what_cannot_pass_any_more_is_cut_short() -> None:
    tally, sent = play(set(range(50, 80)))
    assert tally.hopeless
    assert sent < stage()
    assert not passes(len(tally.judged()), sum(map(tally.is_bad, tally.judged())))


@settings(max_examples=examples(15))
@given(st.sets(st.integers(0, 599), max_size=12), st.integers(0, 1000))
def test_a_verdict_is_that_of_the_requests_it_is_about(bad: set[int], order: int) -> None:
    tally, _ = play(bad, order)
    judged = tally.judged()
    assert tally.decided.is_set()
    assert passes(len(judged), sum(map(tally.is_bad, judged))) is not tally.hopeless
    if not tally.hopeless:
        due = sorted(item.at for item in staged() if item.at >= JUDGEMENT.warm_up_s)
        assert len(judged) in [stage() * stages for stages in range(1, STAGES_AT_MOST + 1)]
        assert sorted(one.item.at for one in judged) == pytest.approx(due[: len(judged)])


def test_a_whole_probe_goes_on_when_it_can_no_longer_pass() -> None:
    tally, sent = play(set(range(50, 80)), judgement=replace(JUDGEMENT, whole=True))
    assert not tally.decided.is_set()
    assert not tally.hopeless
    assert len(tally.judged()) == stage() * STAGES_AT_MOST
    assert sent == len(list(staged()))


def test_the_rate_that_came_is_that_of_the_judged_requests() -> None:
    judged = [result(item, 10.0) for item in staged() if item.at >= JUDGEMENT.warm_up_s]
    assert _sent(judged, JUDGEMENT.warm_up_s) == pytest.approx(400.0, rel=0.15)
    assert _sent([], 0.2) is None


def test_under_a_tide_a_stage_has_whole_periods() -> None:
    judgement = replace(JUDGEMENT, least_s=10.0, warm_up_s=3.0, period_s=60.0)
    assert judgement.seconds(400.0) == 63.0
    traffic = _Staged(Population("p", options(16, 0.0, tide=Tide(0.8, 60.0))), 20.0, judgement)
    assert traffic.requests(1) / 60.0 == pytest.approx(20.0, rel=0.06)  # 10 s of the flood would have 30 a second


def test_the_bus_is_judged_by_what_went_straight_to_its_worker() -> None:
    """A ranking that goes on to a delegate waits at its owner for the device's step, which is no bus's time."""
    some = [replace(result(next(iter(staged())), 10.0), ranking=cast(Any, SimpleNamespace(admission=why)))
            for why in ("admitted", "delegated", "", "over_load")]  # fmt: skip
    none = replace(some[0], ranking=None)
    assert direct([*some, none]) == [some[0], *some[2:]]


def test_a_request_without_scores_counts_as_its_timeout_however_soon_it_was_refused() -> None:
    """Baselines beyond saturation, whose workers refuse early, seemed quicker than they were."""
    item = next(iter(staged()))
    refused = replace(result(item, 12.0), ranking=None)
    assert _latency_ms(refused, JUDGEMENT) == TIMEOUT_SLOS * JUDGEMENT.slo_ms
    assert _latency_ms(result(item, 12.0), JUDGEMENT) == 12.0


def test_scores_of_the_newest_behaviours_alone_are_no_answer_to_a_whole_history() -> None:
    tally = _Tally(JUDGEMENT, staged(), lambda requests, late: None)
    (item, *_) = staged()
    assert not tally.is_bad(result(item, 10.0))
    assert tally.is_bad(dataclasses.replace(result(item, 10.0), outcome="truncated"))
