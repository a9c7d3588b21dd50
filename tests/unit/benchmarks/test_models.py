"""The bench of model families: every family is measured, and what follows from times is what must follow."""

from __future__ import annotations

import math

import models
import msgspec
import pytest
from models import FAMILIES, SLO_MS, Family, Times, find, measure, rows, table


def times(prefix_ms: float, hit_ms: float, *, extends: bool) -> Times:
    """A model whose prefix takes so long per 1,024 tokens, and a hit any number of tokens."""
    made = Times()
    for length in (256, 1024, 4096):
        whole = prefix_ms * length / 1024
        made.prefix[length] = [whole, 9 * whole, 0.9 * whole]  # the median is the first
        made.extension[length] = [0.1 if extends else whole]
        made.hit[length] = [hit_ms]
    return made


@pytest.mark.parametrize("length", [100, 256, 700, 1024, 5000])
def test_costs_between_and_beyond_the_measured_lengths_follow_the_line(length: int) -> None:
    cost = times(8.0, 2.0, extends=True).cost(length)
    assert cost.full == pytest.approx(8.0 * length / 1024 + 2.0)


def test_a_prefix_that_grows_pays_with_returning_users_and_one_that_cannot_does_not() -> None:
    grows, anew = find(times(8.0, 2.0, extends=True)), find(times(8.0, 2.0, extends=False))
    assert grows.length == pytest.approx(18.0 / 8.0 * 1024, rel=1e-3)  # full inference takes 20 ms
    assert grows.rates[0.9] > grows.rates[0.5] > grows.rates[0.0] > 1.0
    assert anew.rates[0.9] == pytest.approx(anew.rates[0.0], rel=0.05)


def test_a_device_that_is_too_slow_carries_nothing() -> None:
    found = find(times(8.0 * SLO_MS, 2.0, extends=True))
    assert found.full_rate == 0
    assert math.isnan(found.rates[0.5])


def test_every_family_is_measured_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    small = msgspec.structs.replace(models.SHAPE, layers=1, dim=16, heads=1, dqk=8, dv=8, vocab=50)
    monkeypatch.setattr(models, "SHAPE", small)
    lengths = (64, 128)
    families = [Family(name, lengths) for name in FAMILIES]
    measure(families, lengths, 1, lambda line: None)
    shown = table(list(FAMILIES), rows(families, lengths)).splitlines()
    assert len({len(line) for line in shown}) == 1
    (first,) = [line for line in shown if line.startswith("| 64 tokens: KiB")]
    assert [cell.strip() for cell in first.split("|")[2:-1]] == ["4", "4", "0", "4"]
    assert all("×" in line for line in shown if "against full" in line)
