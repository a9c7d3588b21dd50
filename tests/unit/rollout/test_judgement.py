"""What a rollout decides, from what both groups did: nothing without enough answers, back for each bad model."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.ops.rollout.judgement import MAX_PSI, MIN_ANSWERS, UNOWNED_S, Observed, StepDecision, decide, psi
from relaygr_stream.ops.status.tally import Tally
from relaygr_stream.wire.latencies import BOUNDS_S

HOLD_S = 600.0


def tally(ok: int = 1000, *, hits: float = 0.5, p99: int = 5, within: float = 1.0, **others: int) -> Tally:
    """ok: rankings with scores, all of them in the latency interval p99. others: answers by status."""
    found = int(ok * hits)
    answers = Counter({"ok": ok, **others})
    counts = [0] * p99
    return Tally(
        answers,
        Counter({"hbm": found, "full": ok - found}),
        {"hbm": (*counts, found), "full": (*counts, ok - found)},
        int(ok * within),
        answers.total(),
    )


def scores(size: int = 5000, scale: float = 1.0, shift: float = 0.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=size) * scale + shift).astype(np.float32)


def group(seed: int = 0, **changes: Any) -> Observed:
    plain = {"tally": tally(), "settled": tally(), "scored": 1000, "scores": {"click": scores(seed=seed)}}
    return Observed(**{"version": f"v{seed}", **plain, **changes})


OLD = group(seed=1)


def decided(new: Observed, old: Observed = OLD, in_step_s: float = HOLD_S, *, last: bool = False) -> StepDecision:
    return decide(new, old, in_step_s, HOLD_S, last=last)


def test_a_group_as_good_goes_on_when_the_time_is_over() -> None:
    assert decided(group(), in_step_s=HOLD_S - 1) == StepDecision("stay")
    assert decided(group()) == StepDecision("next")
    assert decided(group(), last=True) == StepDecision("done")


def test_a_step_waits_as_long_again_for_those_who_move_next_to_be_warm() -> None:
    assert decide(group(), OLD, HOLD_S, HOLD_S, last=False, warm=False).action == "stay"
    assert decide(group(), OLD, 2 * HOLD_S, HOLD_S, last=False, warm=False).action == "next"
    assert decide(group(distrusted=1), OLD, HOLD_S, HOLD_S, last=False, warm=False).action == "back"


def test_too_few_answers_hold_the_step_and_say_so() -> None:
    few = group(tally=tally(MIN_ANSWERS - 1), scored=MIN_ANSWERS - 1)
    found = decided(few, in_step_s=100 * HOLD_S)
    assert found.action == "stay"
    assert str(MIN_ANSWERS - 1) in found.reason


def test_answers_that_cannot_be_read_hold_the_step() -> None:
    """Not before its time: until then nothing would follow from them."""
    for new, old in ((group(unread="user lacks an ACL"), OLD), (group(), group(seed=1, unread="user lacks an ACL"))):
        found = decided(new, old, in_step_s=HOLD_S)
        assert (found.action, "lacks an ACL" in found.reason) == ("stay", True)
    assert decided(group(), Observed(), last=True).action == "done"


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (group(tally=tally(0, failed=60)), "60 of 60 answers"),
        (group(tally=tally(960, rejected=40)), "40 of 1000 answers"),
        (group(distrusted=1), "audit"),
        (group(unowned_s=UNOWNED_S + 1), "no owner"),
        (group(settled=tally(1000, within=0.9)), r"relay\.slo_ms"),
        (group(tally=tally(p99=9)), "P99"),
        (group(scores={"click": scores(scale=10)}), "population stability index"),
        (group(scores={"click": scores(shift=1)}), "population stability index"),
        (group(scores={"buy": scores()}), "scores buy"),
    ],
)
def test_each_kind_of_bad_model_goes_back_at_once(new: Observed, reason: str) -> None:
    found = decided(new, in_step_s=1.0)
    assert found.action == "back"
    assert decided(new, last=True).action == "back"
    assert re.search(reason, found.reason), found.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"tally": tally(0, failed=49)},
        {"tally": tally(992, failed=8)},
        {"tally": tally(p99=6)},  # within what intervals tell
        {"settled": tally(1000, within=0.985)},
        {"scored": MIN_ANSWERS - 1, "scores": {"click": scores(scale=10)}},
        {"tally": tally(900, hits=0.0)},  # cold prefix KV are no fault of the model
    ],
)
def test_what_may_be_chance_does_not_go_back(changes: dict[str, Any]) -> None:
    assert decided(group(**changes)).action != "back"


def test_what_the_old_group_does_as_well_is_no_objection() -> None:
    """An outage of what both use, or a tight SLO."""
    bad: dict[str, Any] = {"tally": tally(500, failed=500), "settled": tally(500, failed=500)}
    assert decided(group(**bad), group(seed=1, **bad)).action == "next"


def test_without_an_old_group_only_its_own_failures_count() -> None:
    assert decided(group(), Observed(), last=True).action == "done"
    assert decided(group(tally=tally(900, failed=100)), Observed(), last=True).action == "back"


@given(st.integers(0, 10_000), st.sampled_from([1e-3, 1.0, 1e6]), st.sampled_from(["normal", "ties", "constant"]))
def test_samples_of_one_distribution_are_near(seed: int, scale: float, shape: str) -> None:
    random = np.random.default_rng(seed)

    def sample() -> np.ndarray:
        values = random.normal(size=MIN_ANSWERS)
        if shape != "normal":
            values = np.round(values) if shape == "ties" else np.ones(MIN_ANSWERS)
        return (values * scale).astype(np.float32)

    assert psi(sample(), sample()) < MAX_PSI


def test_the_index_is_that_of_its_formula() -> None:
    before = np.arange(1000, dtype=np.float32)
    now = np.concatenate([before[:500], before[:500]])  # the lower half twice, the upper half never
    low, high = 5 * (0.2 - 0.1) * np.log(0.2 / 0.1), 5 * (0.1 - 0.0005) * np.log(0.1 / 0.0005)
    assert psi(before, now) == pytest.approx(low + high, rel=0.02)
    assert psi(before, before) == 0.0


def test_intervals_are_finer_than_the_limit_of_p99() -> None:
    assert max(b / a for a, b in pairwise(BOUNDS_S)) <= 2.0
