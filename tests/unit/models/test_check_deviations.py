"""What the checker measures: relative to full inference, or to its own deviation in half precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from relaygr_stream.models.check.probe import Deviations, Measure


def test_deviations_that_are_not_numbers_fail() -> None:
    one, nan = torch.ones(2, 1).numpy(), torch.full((2, 1), math.nan).numpy()
    for half in (False, True):
        deviations = Deviations(half=half)
        deviations.add(one, one, one)
        assert deviations.measure.holds
        deviations.add(nan, one, one)
        assert not deviations.measure.holds
    assert not Measure(math.nan, 1.0).holds


@pytest.mark.parametrize("which", ["full", "truth"])
def test_an_infinite_full_score_does_not_hide_the_others(which: str) -> None:
    one, infinite = torch.ones(2, 1).numpy(), torch.full((2, 1), math.inf).numpy()
    deviations = Deviations(half=True)
    deviations.add(5 * one, one, one)
    assert not deviations.measure.holds
    deviations.add(one, *((infinite, one) if which == "full" else (one, infinite)))
    assert not deviations.measure.holds


def test_scores_that_cancel_are_judged_with_the_others() -> None:
    deviations, small, one = Deviations(half=False), torch.full((1, 2), 0.01), torch.ones(2, 1).numpy()
    deviations.add((small * (1 + 2e-5)).numpy(), small.numpy(), small.numpy())
    assert not deviations.measure.holds  # nothing else is known
    deviations.add(one, one, one)
    assert deviations.measure.holds
    deviations.add((small * (1 + 2e-3)).numpy(), small.numpy(), small.numpy())
    assert not deviations.measure.holds


def test_in_half_precision_too_scores_that_cancel_are_judged_with_the_others() -> None:
    """One such score, relative to itself alone, outweighed a thousand."""
    deviations, random = Deviations(half=True), np.random.default_rng(0)
    truth = random.standard_normal((100, 8)).astype(np.float32)
    truth[0] /= 1000
    full, found = (truth + 0.01 * random.standard_normal(truth.shape).astype(np.float32) for _ in range(2))
    found[0] += 0.02
    for scores in zip(found, full, truth, strict=True):
        deviations.add(*(each[:, None] for each in scores))
    assert deviations.measure.holds
