"""The simulated device: beside the laboratory's queue with one kind of rankings, and what several do to each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relaygr_lab.bench.oracle import relayed

from relaygr_stream.ops.planner.device import DeviceLoad, answered

times = st.floats(0.0, 5.0)
requests = st.lists(st.tuples(times, times, st.floats(0.01, 3.0), st.integers(0, 2)), min_size=1, max_size=60)


def asked(
    rows: Sequence[tuple[float, float, float, int]], lead: float, within: float = math.inf, leads: Sequence[float] = ()
) -> DeviceLoad:
    """rows: gap, prefix, score and kind of each. leads: by kind, instead of `lead`."""
    gaps, prefixes, scores, kinds = zip(*rows, strict=True)
    announced = np.cumsum(gaps).tolist()
    ranked = [at + (leads[kind] if leads else lead) for at, kind in zip(announced, kinds, strict=True)]
    return DeviceLoad(announced, ranked, prefixes, scores, [at + within for at in ranked], kinds)


def took(of: DeviceLoad, piece: float) -> list[float]:
    """By number."""
    found = dict(answered(of, piece))
    assert sorted(found) == list(range(len(of.announced))), "each once"
    return [found[number] for number in range(len(found))]


@given(requests, st.floats(0.0, 20.0))
def test_with_short_slices_one_kinds_answers_are_those_of_the_laboratorys_queue(
    rows: list[tuple[float, float, float, int]], lead: float
) -> None:
    of = asked([(*row[:3], 0) for row in rows], lead)
    announced, ranked, prefixes, scores = (np.array(column) for column in of[:4])
    assert took(of, 0.01) == pytest.approx(relayed(announced, ranked, prefixes, scores, 1).tolist(), abs=0.02)


def test_a_ranking_waits_for_the_slice_that_has_begun_and_no_longer() -> None:
    """The second request's prefix begins at 6 in slices of 4, and the first one's ranking comes at 7."""
    assert took(asked([(0.0, 6.0, 1.0, 0), (0.0, 20.0, 1.0, 0)], 7.0), 4.0) == [4.0, 4.0 + 16.0 + 1.0]


def test_a_ranking_that_cannot_be_in_time_is_refused_and_takes_nothing() -> None:
    """Three come at once, and two fit."""
    rows = [(0.0, 0.0, 2.0, 0)] * 3
    assert took(asked(rows, 1.0, within=4.5), 1.0) == [2.0, 4.0, math.inf]


def test_the_kind_that_was_given_less_has_its_turn_though_others_are_due_earlier() -> None:
    """Twenty rankings of one kind, due first, and one of another: within a slice it is its turn."""
    of = asked([*[(0.0, 0.0, 1.0, 0)] * 20, (0.0, 0.0, 1.0, 1)], 1.0)
    of = of._replace(due=[*[50.0] * 20, 90.0])
    assert took(of, 4.0)[-1] == 6.0
    assert took(of._replace(kinds=[0] * 21), 4.0)[-1] == 21.0


def test_a_kind_that_was_idle_claims_no_time_of_before() -> None:
    """One kind has had 10 of its 20 ms when ten of another come: they take turns, and end together."""
    first, later = [(0.0, 0.0, 1.0, 0)] * 20, [(10.5, 0.0, 1.0, 1), *[(0.0, 0.0, 1.0, 1)] * 9]
    assert took(asked([*first, *later], 1.0), 1.0)[-1] > 15.0


@given(requests, st.floats(0.0, 20.0), st.floats(0.1, 10.0), st.floats(0.1, 5.0))
def test_whatever_comes_each_ranking_is_in_time_or_is_refused(
    rows: list[tuple[float, float, float, int]], lead: float, within: float, piece: float
) -> None:
    of = asked(rows, lead, within, [lead, lead / 2, 0.0])
    for each, score in zip(took(of, piece), of.scores, strict=True):
        assert each == math.inf or score - 1e-9 <= each <= within + 1e-9
