"""Judges a run against the targets, from its points and outcomes. Knows nothing of how they were found.

A target is judged by the fleets where they were measured, and by the simulations; `found` says by which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, Literal

from relaygr_stream.lab.bench.interference import LATE_DEVICE
from relaygr_stream.lab.bench.modes import ABLATIONS, BASELINES, CACHE, FULL_ANY, FULL_LANE, RELAY
from relaygr_stream.lab.paper.plan import REGIMES, REVISITS, UNDELEGATED, Where
from relaygr_stream.lab.paper.results import Headline, Outcome, Point, Verdict
from relaygr_stream.lab.paper.setup import GRID, HEADLINE, MOST_RATE, Setup
from relaygr_stream.lab.workload.report import HITS

#: The relay reaches this share of the oracle queue's throughput, and of its length.
ORACLE_SHARE: Final = 0.85
#: Times the throughput of full inference by the lane's owner, by revisit ratio, wherever the oracle allows it.
LANE_TARGETS: Final = {0.0: 2.0, 0.5: 4.5, 0.9: 8.0}
#: Times the throughput of `cache` at half returning.
CACHE_TARGET: Final = 1.5
#: Times the length of full inference by the lane's owner, at a rate that it carries.
LENGTH_TARGET: Final = 4.0
#: Hits over all announced, and over the admitted.
ANNOUNCED_HITS, ADMITTED_HITS = 0.97, 0.99
#: With delegation the P99 of first visits at this load is at most this share of that without; at the low load no more.
DELEGATED_LOAD, DELEGATED_SHARE, LOW_LOAD = 0.8, 0.7, 0.1
BUS_TARGET_MS: Final = 10.0
#: The bus is judged by probes of at least this share of MOST_RATE.
NEAR_MOST: Final = 0.8
#: Share of the cores' time that any process may use in a probe.
MOST_CORES: Final = 0.5
#: Simulation and fleet differ by at most this share.
ALIKE: Final = 0.15
#: A value is worse than another by more than so much before it counts: that of a search's tolerance.
NOISE: Final = 0.05

PLACES: Final[tuple[Where, ...]] = ("fleet", "simulated")
State = Literal["met", "missed", "not allowed", "not measured"]


def judge(points: Sequence[Point], outcomes: Sequence[Outcome]) -> list[Verdict]:
    """A verdict for each target; `not allowed` where the oracle says that no relay can reach it."""
    lengths = (_lengths(points, revisit) for revisit in (0.5, 0.9))
    return [
        *_oracle(points),
        *(_against(points, FULL_LANE.name, revisit, times) for revisit, times in LANE_TARGETS.items()),
        _against(points, CACHE.name, 0.5, CACHE_TARGET),
        *lengths,
        *_ablations(points),
        *_hits(outcomes),
        _delegation(points),
        _bus(outcomes),
        _alike(points),
        *_bounds(outcomes),
    ]


def headline(points: Sequence[Point], revisit: float) -> list[Headline]:
    """Geometric mean, least and greatest ratio of the relay to each baseline over the first four lengths.

    Only where all four are known: a mean over other lengths is another number. The relay's values may be lower bounds.
    """
    found = []
    for where in PLACES:
        for mode in BASELINES:
            ratios = [
                relay.value / base.value
                for share in HEADLINE
                if (relay := _at(points, RELAY.name, share, revisit, where)) is not None
                and (base := _settled(points, mode.name, share, revisit, where)) is not None
                and relay.value
                and base.value
            ]
            if len(ratios) == len(HEADLINE):
                mean = math.prod(ratios) ** (1 / len(ratios))
                found.append(Headline(baseline=mode.name, where=where, mean=mean, least=min(ratios), most=max(ratios)))
    return found


def differences(points: Sequence[Point]) -> list[list[Any]]:
    """[mode, setup, what, fleet, simulated, fleet ÷ simulated − 1] of each value that was found in both places.

    A P99 is compared only where both keep the SLO: beyond it, a probe ends when it cannot pass.
    """
    found = []
    for one in points:
        other = next(
            (each for each in points if each.where != one.where and (each.setup, each.mode) == (one.setup, one.mode)),
            None,
        )
        if one.where != "fleet" or other is None:
            continue
        what = "p99" if one.given else "rate"
        if what == "rate" and not one.settled:
            continue
        mine, simulated = one.shown(what), other.shown(what)
        if mine and simulated and one.value and other.value:
            found.append([one.mode, one.setup, what, mine[0], simulated[0], mine[0] / simulated[0] - 1])
    return found


def length_at(points: Sequence[Point], mode: str, revisit: float, where: Where, rate: float, *, oracle: bool) -> float:
    """The longest prefix, × unit length, that a mode carries at a rate.

    Between the grid's lengths it is interpolated, on logarithmic axes. 0: less than the grid's first; infinite: more
    than its last; NaN: more than the last that is known.
    """
    known = [(share, one.oracle if oracle else one.value or 0.0) for share in GRID
             if (one := _at(points, mode, share, revisit, where)) is not None]  # fmt: skip
    if not known or rate > known[0][1]:
        return 0.0
    for (share, most), (longer, least) in pairwise(known):
        if least < rate:
            at = math.log(most / rate) / math.log(most / max(least, 1e-3 * rate))
            return float(share * (longer / share) ** at)
    return math.inf if known[-1][0] == GRID[-1] else math.nan


def _at(points: Sequence[Point], mode: str, share: float, revisit: float, where: Where) -> Point | None:
    """A mode's point at a length. Full inference is the same at every revisit ratio, and measured at one."""
    wanted = Setup(share=share, revisit=revisit)
    some = [one for one in points if (one.mode, one.where) == (mode, where)]
    exact = next((one for one in some if one.setup == wanted), None)
    if exact is None and mode in (FULL_LANE.name, FULL_ANY.name):
        return next((one for one in some if one.setup == Setup(share=share)), None)
    return exact


def _settled(points: Sequence[Point], mode: str, share: float, revisit: float, where: Where) -> Point | None:
    """The same, if its search came to an end: a lower bound of a baseline would be an upper one of the ratio."""
    found = _at(points, mode, share, revisit, where)
    return found if found is not None and found.settled else None


def _verdict(target: str, states: set[State], parts: Sequence[str]) -> Verdict:
    """Missed if anywhere, else met if anywhere."""
    worst = next((state for state in ("missed", "met", "not allowed") if state in states), "not measured")
    return Verdict(target=target, found="; ".join(parts), state=worst)  # type: ignore[arg-type]


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
            shares = {
                share: (one.value or 0.0) / one.oracle
                for share in HEADLINE
                if (one := _at(points, RELAY.name, share, revisit, where)) is not None
                and one.oracle
                and (one.settled or (one.value or 0.0) >= ORACLE_SHARE * one.oracle)
            }
            states: set[State] = {"met" if value >= ORACLE_SHARE else "missed" for value in shares.values()}
            return states, [f"{value:.2f} at {share:g}×" for share, value in sorted(shares.items())]

        target = f"relay ≥ {ORACLE_SHARE:g} of the oracle's throughput at revisit {revisit:.0%}"
        yield _verdict(target, *_each(judged))


def _against(points: Sequence[Point], baseline: str, revisit: float, times: float) -> Verdict:
    """The ratio to a baseline over the first four lengths; judged where the oracle's own ratio allows it."""

    def judged(where: Where) -> tuple[set[State], list[str]]:
        states: set[State] = set()
        parts = []
        for share in HEADLINE:
            relay = _at(points, RELAY.name, share, revisit, where)
            base = _settled(points, baseline, share, revisit, where)
            if relay is None or base is None or not base.value:
                continue
            ratio, allowed = (relay.value or 0.0) / base.value, relay.oracle / base.value
            states.add("met" if ratio >= times else "missed" if allowed >= times else "not allowed")
            parts.append(f"{ratio:.1f} of {allowed:.1f} at {share:g}×")
        return states, parts

    target = f"relay ≥ {times:g} × {baseline} at revisit {revisit:.0%}, where the oracle allows it"
    return _verdict(target, *_each(judged))


def _lengths(points: Sequence[Point], revisit: float) -> Verdict:
    """Length at the rates that full inference carries at the first four lengths."""

    def judged(where: Where) -> tuple[set[State], list[str]]:
        states: set[State] = set()
        parts = []
        for share in HEADLINE:
            base = _settled(points, FULL_LANE.name, share, revisit, where)
            if base is None or not base.value:
                continue
            mine, allowed = (
                length_at(points, RELAY.name, revisit, where, base.value, oracle=oracle) / share
                for oracle in (False, True)
            )
            if not (mine or allowed) or math.isnan(mine):
                continue
            states.add("met" if mine >= LENGTH_TARGET else "missed" if allowed >= LENGTH_TARGET else "not allowed")
            most = GRID[-1] / share
            words = [f"> {most:.0f}" if math.isinf(value) else f"{value:.1f}" for value in (mine, allowed)]
            parts.append(f"{words[0]} of {words[1]} at {base.value:.0f}/s")
        return states, parts

    target = f"relay ≥ {LENGTH_TARGET:g} × full-lane's length at revisit {revisit:.0%}, where the oracle allows it"
    return _verdict(target, *_each(judged))


def _ablations(points: Sequence[Point]) -> Iterator[Verdict]:
    for mode in ABLATIONS:

        def judged(where: Where, name: str = mode.name) -> tuple[set[State], list[str]]:
            states: set[State] = set()
            parts = []
            for regime, setup in REGIMES.items():
                mine, other = (
                    next((each for each in points if (each.mode, each.setup, each.where) == (one, setup, where)), None)
                    for one in (RELAY.name, name)
                )
                if mine is None or other is None:
                    continue
                ratio = (mine.value or 0.0) / other.value if other.value else math.inf
                states.add("missed" if ratio < 1 - NOISE else "met")
                parts.append(f"{'only relay' if math.isinf(ratio) else f'{ratio:.2f}×'} {regime}")
            return states, parts

        yield _verdict(f"relay ahead of {mode.name}, or within {NOISE:.0%}", *_each(judged))


def _hits(outcomes: Sequence[Outcome]) -> Iterator[Verdict]:
    measured = [one for one in outcomes if one.mode == RELAY.name and one.where == "fleet"]
    probes = [probe for one in measured for probe in one.passing]
    announced, admitted = (sum(getattr(probe, name) for probe in probes) for name in ("announced", "admitted"))
    hits = sum(probe.outcomes.get(name, 0) for probe in probes for name in HITS)
    of_admitted = sum(probe.admitted_hits for probe in probes)
    for words, hit, of, least in (
        ("hits over all announced", hits, announced, ANNOUNCED_HITS),
        ("hits over all admitted", of_admitted, admitted, ADMITTED_HITS),
    ):
        state: State = "not measured" if not of else "met" if hit >= least * of else "missed"
        yield Verdict(target=f"{words} ≥ {least:.0%}", found=f"fleet: {hit / of:.1%} of {of:,}" if of else "",
                      state=state)  # fmt: skip


def _delegation(points: Sequence[Point]) -> Verdict:
    def judged(where: Where) -> tuple[set[State], list[str]]:
        states: set[State] = set()
        parts = []
        for load, share in ((DELEGATED_LOAD, DELEGATED_SHARE), (LOW_LOAD, 1 + NOISE)):
            setup = Setup(revisit=0.0, load=load)
            with_it, without = (
                next((each for each in points if (each.mode, each.setup, each.where) == (mode, setup, where)), None)
                for mode in (RELAY.name, UNDELEGATED.name)
            )
            mine, other = (None if one is None else one.shown("p99") for one in (with_it, without))
            if mine is None or other is None:
                continue
            states.add("met" if mine[0] <= share * other[0] else "missed")
            parts.append(f"{mine[0]:.1f} against {other[0]:.1f} ms at {load:.0%}")
        return states, parts

    target = f"delegation: P99 of first visits ≤ {DELEGATED_SHARE:.0%} at {DELEGATED_LOAD:.0%} load, no worse without"
    return _verdict(target, *_each(judged))


def _bus(outcomes: Sequence[Outcome]) -> Verdict:
    """The bus at the highest rates, in real milliseconds."""
    near = [
        one.bus_ms[1]
        for one in outcomes
        if one.mode == RELAY.name
        and len(one.bus_ms) > 1
        and one.rate
        and one.rate / one.factor >= NEAR_MOST * MOST_RATE
    ]
    target = f"the bus, both ways, P99 ≤ {BUS_TARGET_MS:g} ms at up to {MOST_RATE:g} requests/s"
    words = [f"fleet: {min(near):.1f} to {max(near):.1f} ms in {len(near)} searches"] if near else []
    return _verdict(target, {"met" if max(near) <= BUS_TARGET_MS else "missed"} if near else set(), words)


def _alike(points: Sequence[Point]) -> Verdict:
    found = [row for row in differences(points) if row[2] == "rate"]
    beyond = sum(abs(row[-1]) > ALIKE for row in found)
    words = [f"{len(found) - beyond} of {len(found)} rates are"] if found else []
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
