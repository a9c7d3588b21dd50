"""Reads a run's points: ratios over lengths, lengths at a rate, simulation beside fleet. Judges nothing.

A value whose search ended without a failing rate within the tolerance is a lower bound, and is marked as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final

from relaygr_lab.bench.modes import BASELINES, FULL_ANY, FULL_LANE, RELAY
from relaygr_lab.paper.plan import Where
from relaygr_lab.paper.results import Headline, Point
from relaygr_lab.paper.setup import GRID, HEADLINE, Setup

PLACES: Final[tuple[Where, ...]] = ("fleet", "simulated")
#: Simulation and fleet differ by at most this share.
ALIKE: Final = 0.15


def headline(points: Sequence[Point], revisit: float) -> list[Headline]:
    """Geometric mean, least and greatest ratio of the relay to each baseline over the first four lengths.

    Only where all four are known: a mean over other lengths is another number. With a lower bound of the relay's among
    them, the mean is one, too.
    """
    found = []
    for where in PLACES:
        for mode in BASELINES:
            pairs = [
                (relay, relay.value / base.value)
                for share in HEADLINE
                if (relay := point_at(points, RELAY.name, share, revisit, where)) is not None
                and (base := settled_at(points, mode.name, share, revisit, where)) is not None
                and relay.value
                and base.value
            ]
            ratios = [ratio for _, ratio in pairs]
            if len(ratios) == len(HEADLINE):
                mean = math.prod(ratios) ** (1 / len(ratios))
                bound = not all(relay.settled for relay, _ in pairs)
                found.append(
                    Headline(
                        baseline=mode.name, where=where, mean=mean, least=min(ratios), most=max(ratios), bound=bound
                    )
                )
    return found


def differences(points: Sequence[Point]) -> list[list[Any]]:
    """[mode, setup, what, fleet, simulated, fleet ÷ simulated − 1] of each value that tells in both places.

    A rate tells if it is known to within ALIKE. A P99 is compared only where both keep the SLO.
    """
    found: list[list[Any]] = []
    for one, other in in_both(points):
        if one.given:
            mine, simulated = one.shown("p99"), other.shown("p99")
            if mine and simulated and one.value and other.value:
                found.append([one.mode, one.setup, "p99", mine[0], simulated[0], mine[0] / simulated[0] - 1])
        elif (one.value or other.value) and tells(one) and tells(other):
            rate, expected = one.value or 0.0, other.value or 0.0
            found.append([one.mode, one.setup, "rate", rate, expected, rate / expected - 1 if expected else math.inf])
    return found


def in_both(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """(fleet, simulated) of each setup and mode that was run in both places."""
    simulated = {(one.setup, one.mode): one for one in points if one.where == "simulated"}
    fleet = [one for one in points if one.where == "fleet" and (one.setup, one.mode) in simulated]
    return [(one, simulated[one.setup, one.mode]) for one in fleet]


def tells(one: Point) -> bool:
    """Whether a rate is known well enough to see a difference of ALIKE: no lower bound, and of a narrow bracket."""
    if not one.settled:
        return False
    return one.value is None or (bool(one.failed) and median(one.failed) <= (1 + ALIKE) * one.value)


def length_at(points: Sequence[Point], mode: str, revisit: float, where: Where, rate: float, *, oracle: bool) -> float:
    """The longest prefix, × unit length, that a mode carries at a rate.

    Between the grid's lengths it is interpolated, on logarithmic axes. 0: less than the grid's first; infinite: more
    than its last; NaN: more than the last that is known.
    """
    known = [(share, one.oracle if oracle else one.value or 0.0) for share in GRID
             if (one := point_at(points, mode, share, revisit, where)) is not None]  # fmt: skip
    if not known or rate > known[0][1]:
        return 0.0
    for (share, most), (longer, least) in pairwise(known):
        if least < rate:
            at = math.log(most / rate) / math.log(most / max(least, 1e-3 * rate))
            return float(share * (longer / share) ** at)
    return math.inf if known[-1][0] == GRID[-1] else math.nan


def find(points: Sequence[Point], setup: Setup, mode: str, where: Where) -> Point | None:
    """A mode's point in a setup."""
    return next((one for one in points if (one.setup, one.mode, one.where) == (setup, mode, where)), None)


def point_at(points: Sequence[Point], mode: str, share: float, revisit: float, where: Where) -> Point | None:
    """A mode's point at a length. Full inference is the same at every revisit ratio, and measured at one."""
    exact = find(points, Setup(share=share, revisit=revisit), mode, where)
    if exact is None and mode in (FULL_LANE.name, FULL_ANY.name):
        return find(points, Setup(share=share), mode, where)
    return exact


def settled_at(points: Sequence[Point], mode: str, share: float, revisit: float, where: Where) -> Point | None:
    """The same, if its search came to an end: a lower bound of a baseline would be an upper one of the ratio."""
    found = point_at(points, mode, share, revisit, where)
    return found if found is not None and found.settled else None
