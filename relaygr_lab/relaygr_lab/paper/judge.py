"""Judges a run against the targets, from its points and outcomes. Knows nothing of how they were found.

A target is judged by the fleets where they were measured, and by the simulations; `found` says by which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal

from relaygr_lab.bench.interference import LATE_DEVICE
from relaygr_lab.bench.modes import ABLATIONS, CACHE, FULL_LANE, RELAY
from relaygr_lab.bench.results import Probe
from relaygr_lab.bench.search import ROUNDING
from relaygr_lab.paper.plan import GOODPUT_LOADS, NO_GAIN, PATIENT, REGIMES, REVISITS, UNDELEGATED, Where
from relaygr_lab.paper.readings import (
    ALIKE,
    PLACES,
    differences,
    find,
    in_both,
    length_at,
    point_at,
    settled_at,
)
from relaygr_lab.paper.results import Outcome, Point, Verdict
from relaygr_lab.paper.setup import GRID, HEADLINE, MOST_RATE, Setup
from relaygr_stream.wire.messages import HITS

#: The relay reaches this share of the oracle queue's throughput, and of its length.
ORACLE_SHARE: Final = 0.85
#: Times the throughput of full inference by the lane's owner, by revisit ratio, wherever the oracle allows it.
LANE_TARGETS: Final = {0.0: 2.0, 0.5: 4.5, 0.9: 8.0}
#: Times the throughput of `cache` at half returning.
CACHE_TARGET: Final = 1.5
#: Times the length of full inference by the lane's owner, at a rate that it carries.
LENGTH_TARGET: Final = 4.0
#: Beyond its largest rate the relay goes on serving this share of it within the SLO.
KEPT: Final = 0.9
#: Hits over all announced, and over the admitted.
ANNOUNCED_HITS, ADMITTED_HITS = 0.97, 0.99
#: With delegation the P99 of first visits at this load is at most this share of that without; at the low load no more.
DELEGATED_LOAD, DELEGATED_SHARE, LOW_LOAD = 0.8, 0.7, 0.1
BUS_TARGET_MS: Final = 10.0
#: The bus is judged where its load is at least this share of the highest one: whatever that is, since a slow bus
#: keeps it low.
NEAR_MOST: Final = 0.8
#: Share of the cores' time that any process may use in a probe.
MOST_CORES: Final = 0.5
#: A value is worse than another by more than so much before it counts: that of a search's tolerance.
NOISE: Final = 0.05

State = Literal["met", "missed", "not allowed", "not measured"]


def judge(points: Sequence[Point], outcomes: Sequence[Outcome]) -> list[Verdict]:
    """A verdict for each target; `not allowed` where the oracle says that no relay can reach it."""
    lengths = (_lengths(points, revisit) for revisit in (0.5, 0.9))
    outcomes = [one for one in outcomes if not one.setup.real]  # the rest is about fleets
    return [
        *_oracle(points),
        *_oracle_lengths(points),
        *(_against(points, FULL_LANE.name, revisit, times) for revisit, times in LANE_TARGETS.items()),
        _against(points, CACHE.name, 0.5, CACHE_TARGET),
        _goodput(points),
        *lengths,
        *_ablations(points),
        *_hits(outcomes),
        _delegation(points),
        _bus(outcomes),
        _alike(points),
        *_bounds(outcomes),
    ]


def _verdict(target: str, states: set[State], parts: Sequence[str]) -> Verdict:
    """Missed if anywhere, else met if anywhere."""
    worst = next((state for state in ("missed", "met", "not allowed") if state in states), "not measured")
    return Verdict(target=target, found="; ".join(parts), state=worst)  # type: ignore[arg-type]


def _state(reached: bool, *, bound: bool, allowed: bool = True) -> set[State]:
    """bound: the value is a lower bound, which may be enough and is never too little."""
    if reached:
        return {"met"}
    if not allowed:
        return {"not allowed"}
    return set() if bound else {"missed"}


def _least(one: Point) -> str:
    return "" if one.settled else "≥ "


def _each(judged: Callable[[Where], tuple[set[State], list[str]]]) -> tuple[set[State], list[str]]:
    """The same in both places."""
    states: set[State] = set()
    parts = []
    for where in PLACES:
        found, words = judged(where)
        states |= found
        parts += [f"{where}: {', '.join(words)}"] if words else []
    return states, parts


def _oracle(points: Sequence[Point]) -> Iterator[Verdict]:
    for revisit in REVISITS:

        def judged(where: Where, revisit: float = revisit) -> tuple[set[State], list[str]]:
            states: set[State] = set()
            parts = []
            for share in HEADLINE:
                one = point_at(points, RELAY.name, share, revisit, where)
                if one is None or not one.oracle:
                    continue
                value = (one.value or 0.0) / one.oracle
                states |= _state(value >= ORACLE_SHARE, bound=not one.settled)
                parts.append(f"{_least(one)}{value:.2f} at {share:g}×")
            return states, parts

        target = f"relay ≥ {ORACLE_SHARE:g} of the oracle's throughput at revisit {revisit:.0%}"
        yield _verdict(target, *_each(judged))


def _against(points: Sequence[Point], baseline: str, revisit: float, times: float) -> Verdict:
    """The ratio to a baseline over the first four lengths; judged where the oracle's own ratio allows it."""

    def judged(where: Where) -> tuple[set[State], list[str]]:
        states: set[State] = set()
        parts = []
        for share in HEADLINE:
            relay = point_at(points, RELAY.name, share, revisit, where)
            base = settled_at(points, baseline, share, revisit, where)
            if relay is None or base is None or not base.value:
                continue
            ratio, allowed = (relay.value or 0.0) / base.value, relay.oracle / base.value
            states |= _state(ratio >= times, bound=not relay.settled, allowed=allowed >= times)
            parts.append(f"{_least(relay)}{ratio:.1f} of {allowed:.1f} at {share:g}×")
        return states, parts

    target = f"relay ≥ {times:g} × {baseline} at revisit {revisit:.0%}, where the oracle allows it"
    return _verdict(target, *_each(judged))


def _goodput(points: Sequence[Point]) -> Verdict:
    """Scores within the SLO at loads of the oracle's rate and more, for callers who wait for a second."""

    def judged(where: Where) -> tuple[set[State], list[str]]:
        carried = find(points, Setup(), RELAY.name, where)
        if carried is None or not (carried.value and carried.settled):
            return set(), []
        states: set[State] = set()
        parts = []
        for load in (load for load in GOODPUT_LOADS if load >= 1):
            one = find(points, PATIENT.at(load=load), RELAY.name, where)
            if one is None or one.given is None or (good := one.shown("goodput")) is None:
                continue
            kept = good[0] / min(carried.value, one.given)
            states.add("met" if kept >= KEPT else "missed")
            parts.append(f"{kept:.2f} at {load:g} × load")
        return states, parts

    return _verdict(f"relay ≥ {KEPT:g} of its largest rate within the SLO, at up to 3 × load", *_each(judged))


def _lengths(points: Sequence[Point], revisit: float) -> Verdict:
    """Length at the rates that full inference carries at the first four lengths."""

    def judged(where: Where) -> tuple[set[State], list[str]]:
        states: set[State] = set()
        parts = []
        bound = _bound(points, revisit, where)
        for share, rate, mine, allowed in _at_full_rates(points, revisit, where):
            if mine or allowed:
                reached, can = mine >= LENGTH_TARGET * share, allowed >= LENGTH_TARGET * share
                states |= _state(reached, bound=bound, allowed=can)
                parts.append(_of_allowed(mine / share, allowed / share, GRID[-1] / share, rate, bound=bound))
        return states, parts

    target = f"relay ≥ {LENGTH_TARGET:g} × full-lane's length at revisit {revisit:.0%}, where the oracle allows it"
    return _verdict(target, *_each(judged))


def _oracle_lengths(points: Sequence[Point]) -> Iterator[Verdict]:
    """Length at the same rates, against the oracle's: both as shares of the grid's last length, where it ends there."""
    for revisit in REVISITS:

        def judged(where: Where, revisit: float = revisit) -> tuple[set[State], list[str]]:
            states: set[State] = set()
            parts = []
            bound = _bound(points, revisit, where)
            for _, rate, mine, allowed in _at_full_rates(points, revisit, where):
                if not allowed or (math.isinf(mine) and math.isinf(allowed)):
                    continue  # both carry the grid's last length: which of them carries more is not known
                enough = mine >= ORACLE_SHARE * min(allowed, GRID[-1])
                # Where the oracle carries more than the grid's last length, a share of that length is no proof.
                states |= _state(enough, bound=bound) if not (enough and math.isinf(allowed)) else set()
                parts.append(_of_allowed(mine, allowed, GRID[-1], rate, bound=bound))
            return states, parts

        target = f"relay ≥ {ORACLE_SHARE:g} of the oracle's length at revisit {revisit:.0%} (lengths in units)"
        yield _verdict(target, *_each(judged))


def _at_full_rates(
    points: Sequence[Point], revisit: float, where: Where
) -> Iterator[tuple[float, float, float, float]]:
    """For each length of the headline: it, the rate that full inference carries there, and the lengths of the relay and
    of the oracle at that rate, where they are known."""
    for share in HEADLINE:
        base = settled_at(points, FULL_LANE.name, share, revisit, where)
        if base is not None and base.value:
            mine, allowed = (
                length_at(points, RELAY.name, revisit, where, base.value, oracle=oracle) for oracle in (False, True)
            )
            if not math.isnan(mine):
                yield share, base.value, mine, allowed


def _of_allowed(mine: float, allowed: float, most: float, rate: float, *, bound: bool) -> str:
    """Two lengths in words. most: the grid's end. bound: what the relay carries is a lower bound."""
    words = [f"> {most:.0f}" if math.isinf(value) else f"{value:.1f}" for value in (mine, allowed)]
    return f"{'≥ ' if bound else ''}{words[0]} of {words[1]} at {rate:.0f}/s"


def _bound(points: Sequence[Point], revisit: float, where: Where) -> bool:
    """Whether any rate from which the relay's lengths are read is a lower bound."""
    known = (point_at(points, RELAY.name, share, revisit, where) for share in GRID)
    return any(one is not None and not one.settled for one in known)


def _ablations(points: Sequence[Point]) -> Iterator[Verdict]:
    for mode in ABLATIONS:

        def judged(where: Where, name: str = mode.name) -> tuple[set[State], list[str]]:
            states: set[State] = set()
            parts = []
            for regime, setup in REGIMES.items():
                mine, other = (find(points, setup, one, where) for one in (RELAY.name, name))
                if mine is None or other is None or not (mine.value or other.value) or not other.settled:
                    continue
                ratio = (mine.value or 0.0) / other.value if other.value else math.inf
                level, why = NO_GAIN.get(name, (lambda setup: False, ""))
                even = level(setup)
                states |= _state(ratio >= 1 - NOISE if even else ratio > 1, bound=not mine.settled)
                words = "only relay" if math.isinf(ratio) else f"{_least(mine)}{ratio:.2f}×"
                parts.append(f"{words} {regime}{f' ({why})' if even else ''}")
            return states, parts

        but = f", or within {NOISE:.0%} where that part can gain nothing" if mode.name in NO_GAIN else ""
        yield _verdict(f"relay ahead of {mode.name}{but}", *_each(judged))


def _hits(outcomes: Sequence[Outcome]) -> Iterator[Verdict]:
    """Judged by all probes up to the rate carried, or at a given load, whether they passed; told of those beyond it
    and of the curve of goodput, whose loads nobody carries."""
    within: list[Probe] = []
    beyond: list[Probe] = []
    for one in outcomes:
        if one.mode == RELAY.name and one.where == "fleet":
            carried = 0.0 if one.setup.timeout == PATIENT.timeout else one.given or one.rate or 0.0
            most = ROUNDING * carried / one.factor
            for probe in one.probes:
                if not probe.set_aside:
                    (within if probe.rate <= most else beyond).append(probe)
    for words, least, announced in (
        ("hits over all announced", ANNOUNCED_HITS, True),
        ("hits over all admitted", ADMITTED_HITS, False),
    ):
        hit, of = _hit(within, announced=announced)
        more, of_more = _hit(beyond, announced=announced)
        found = [f"fleet: {hit / of:.1%} of {of:,} up to the rate carried"] if of else []
        found += [f"{more / of_more:.1%} of {of_more:,} beyond it"] if of_more else []
        yield _verdict(f"{words} ≥ {least:.0%}", _state(hit >= least * of, bound=False) if of else set(), found)


def _hit(probes: Sequence[Probe], *, announced: bool) -> tuple[int, int]:
    """(hits, all) of what was announced, or of what was admitted."""
    if announced:
        hits = sum(probe.outcomes.get(name, 0) for probe in probes for name in HITS)
        return hits, sum(probe.announced for probe in probes)
    return sum(probe.admitted_hits for probe in probes), sum(probe.admitted for probe in probes)


def _delegation(points: Sequence[Point]) -> Verdict:
    def judged(where: Where) -> tuple[set[State], list[str]]:
        states: set[State] = set()
        parts = []
        for load, share in ((DELEGATED_LOAD, DELEGATED_SHARE), (LOW_LOAD, 1 + NOISE)):
            setup = Setup(revisit=0.0, load=load)
            with_it, without = (find(points, setup, mode.name, where) for mode in (RELAY, UNDELEGATED))
            mine, other = (None if one is None else one.shown("p99") for one in (with_it, without))
            if mine is None or other is None:
                continue
            states.add("met" if mine[0] <= share * other[0] else "missed")
            parts.append(f"{mine[0]:.1f} against {other[0]:.1f} ms at {load:.0%}")
        # Half of the claim proves nothing.
        return states if len(parts) == 2 else states - {"met"}, parts

    target = f"delegation: P99 of first visits ≤ {DELEGATED_SHARE:.0%} at {DELEGATED_LOAD:.0%} load, no worse without"
    return _verdict(target, *_each(judged))


def _bus(outcomes: Sequence[Outcome]) -> Verdict:
    """The bus at the highest rates, in real milliseconds."""
    known = [
        (rate / one.factor, one.bus_ms[1])
        for one in outcomes
        if one.mode == RELAY.name and len(one.bus_ms) > 1 and (rate := one.given or one.rate)
    ]
    target = f"the bus, both ways, P99 ≤ {BUS_TARGET_MS:g} ms at the highest rates"
    if not known:
        return _verdict(target, set(), [])
    most = max(rate for rate, _ in known)
    near = [ms for rate, ms in known if rate >= NEAR_MOST * most]
    words = f"fleet: {min(near):.1f} to {max(near):.1f} ms in {len(near)} searches at up to {most:.0f} requests/s"
    return _verdict(target, {"met" if max(near) <= BUS_TARGET_MS else "missed"}, [words])


def _alike(points: Sequence[Point]) -> Verdict:
    """Of rates that are known to within as much: the others could not differ, or not be seen to."""
    points = [one for one in points if not one.setup.real]
    found = [row for row in differences(points) if row[2] == "rate"]
    beyond = sum(abs(row[-1]) > ALIKE for row in found)
    words = [f"{len(found) - beyond} of {len(found)} rates are"] if found else []
    others = sum(not one.given and bool(one.value or other.value) for one, other in in_both(points)) - len(found)
    words += [f"{others} more are lower bounds or known less exactly"] if others else []
    states: set[State] = {"missed" if beyond else "met"} if found else set()
    return _verdict(f"simulation and fleet within {ALIKE:.0%}", states, words)


def _bounds(outcomes: Sequence[Outcome]) -> Iterator[Verdict]:
    """What no probe that counts may exceed, so that devices and bus are what they are said to be."""
    probes = [probe for one in outcomes for probe in one.probes if not probe.set_aside]
    for words, values, most, form in (
        (f"no probe beyond {MOST_RATE:g} requests/s", [one.rate for one in probes], MOST_RATE * (1 + NOISE), ".1f"),
        ("no probe beyond half of the cores", [one.cores_busy for one in probes], MOST_CORES, ".0%"),
        (f"no device more than {LATE_DEVICE:.0%} late", [one.device_late for one in probes], LATE_DEVICE, ".1%"),
    ):
        known = [value for value in values if value is not None]
        beyond = sum(value > most for value in known)
        found = [f"at most {max(known):{form}}, beyond it {beyond} of {len(known)} probes"] if known else []
        yield _verdict(words, {"missed" if beyond else "met"} if known else set(), found)
