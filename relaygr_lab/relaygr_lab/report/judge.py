"""The judge of `bench slo` and `bench paper`: how much is reached of what is possible.

A figure of fleets is judged in both places, where it was measured and where it was simulated; `found` says in which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Literal

from relaygr_lab.bench.interference import LATE_DEVICE
from relaygr_lab.bench.modes import ABLATIONS, FULL, FULL_LANE, RELAY
from relaygr_lab.bench.results import Found, Probe, Ratio, Spread, Verdict
from relaygr_lab.bench.search import ROUNDING
from relaygr_lab.paper.plan import GOODPUT_LOADS, NO_GAIN, PATIENT, REGIMES, REVISITS, UNDELEGATED, Where
from relaygr_lab.paper.results import Outcome, Point
from relaygr_lab.paper.setup import GRID, HEADLINE, MOST_RATE, Setup
from relaygr_lab.report.paper_readings import (
    ALIKE,
    PLACES,
    differences,
    find,
    in_both,
    length_at,
    point_at,
    settled_at,
)
from relaygr_stream.wire.messages import HITS

#: The relay reaches this share of what a queue of Poisson arrivals at its devices allows. The rest is for broker,
#: trigger and client, which share the cores with the devices on a small machine.
SHARE: Final = 0.85
#: A ratio beyond its bound by more than this factor is a defect of the bench; less may be the fit of the costs.
BOUND_TOLERANCE: Final = 1.1
#: Beyond its largest rate the relay goes on serving this share of it within the SLO.
KEPT: Final = 0.9
#: Hits over all announced, and over the admitted.
ANNOUNCED_HITS, ADMITTED_HITS = 0.97, 0.99
#: With delegation the P99 of first visits at this load is at most this share of that without; at the low load no more.
DELEGATED_LOAD, DELEGATED_SHARE, LOW_LOAD = 0.8, 0.7, 0.1
BUS_MS: Final = 10.0
#: The bus is judged where its load is at least this share of the highest one: whatever that is, since a slow bus
#: keeps it low.
NEAR_MOST: Final = 0.8
#: Share of the cores' time that any process may use in a probe.
MOST_CORES: Final = 0.5
#: A value is worse than another by more than so much before it counts: that of a search's tolerance.
NOISE: Final = 0.05

State = Literal["reached", "below", "not measured"]
#: A part of a figure: its state, None where it does not tell, and in words.
Part = tuple[State | None, str]


def below(verdicts: Iterable[Verdict], *, whole: bool = False) -> list[str]:
    """The bounds not kept, a line each. whole: also what was not measured."""
    states = {"below", "not measured"} if whole else {"below"}
    return [f"{one.what}: {one.found or one.state}; bound: {one.bound}" for one in verdicts if one.state in states]


def judge_slo(
    ratios: Sequence[Ratio], founds: Sequence[Found], bus: Mapping[str, Spread], hits: Mapping[str, int]
) -> list[Verdict]:
    """Of `bench slo`."""
    limits = {(one.kind, one.mode, one.revisit): "; ".join(one.limits) for one in founds}
    admitted, hit = hits["admitted"], hits["hit"]
    found = f"{hit:,} of {admitted:,} ({hit / admitted:.1%})" if admitted else ""
    return [
        *(_nothing_to_compare_with(one) for one in founds if one.mode == FULL.name and one.value is None),
        *(
            _of_queue(one, limits.get((one.kind, one.mode, one.revisit), ""))
            for one in ratios
            if one.mode == RELAY.name
        ),
        *_beyond_bound(ratios),
        _hits("admitted requests that hit", hit, admitted, ADMITTED_HITS, found),
        _bus_of(bus),
    ]


def judge_paper(points: Sequence[Point], outcomes: Sequence[Outcome]) -> list[Verdict]:
    """Of `bench paper`."""
    outcomes = [one for one in outcomes if not one.setup.real]  # nothing is asked of the real engine
    return [
        *(_throughput(points, revisit) for revisit in REVISITS),
        *(_length(points, revisit) for revisit in REVISITS),
        _in_places(
            "goodput at up to 3 × load, of the relay's largest rate", f"≥ {KEPT:g}", partial(_goodput_parts, points)
        ),
        *(_ablation(points, mode.name) for mode in ABLATIONS),
        *_fleet_hits(outcomes),
        _delegation(points),
        _bus(outcomes),
        _alike(points),
        *_bounds(outcomes),
    ]


# ---- of both ----


def _verdict(what: str, bound: str, states: Iterable[State | None], found: str) -> Verdict:
    """Below if any part is, else reached if any is."""
    state = next((state for state in ("below", "reached") if state in set(states)), "not measured")
    return Verdict(what=what, found=found, bound=bound, state=state)  # type: ignore[arg-type]


def _state(reached: bool, *, least: bool = False, most: bool = False) -> State | None:
    """least, most: the value is a lower bound, an upper one; which tells only on one side."""
    if reached:
        return None if most else "reached"
    return None if least else "below"


def _hits(what: str, hit: int, of: int, least: float, found: str) -> Verdict:
    return _verdict(what, f"≥ {least:.0%}", [_state(hit >= least * of)] if of else [], found)


# ---- bench slo ----


def _nothing_to_compare_with(one: Found) -> Verdict:
    found = (
        f"no {one.kind} kept the SLO, so there is nothing to compare with; {'; '.join(one.limits)}. If this machine is "
        f"slower than the costs that set the length: --length, or --costs with a file by relaygr simulate --save-costs"
    )
    return Verdict(what="full inference", found=found, bound=f"a {one.kind} within the SLO", state="below")


def _of_queue(ratio: Ratio, why: str) -> Verdict:
    """The relay's ratio, of that which a simulated queue allows."""
    value = "no value found" if ratio.value is None else f"{ratio.mark}{ratio.value:.2f}"
    state = _state((ratio.value or 0.0) >= SHARE * ratio.queue, least=ratio.value is not None and ratio.least,
                   most=ratio.most)  # fmt: skip
    open_ = [name for name, bound in ((ratio.mode, ratio.least), (FULL.name, ratio.most)) if bound]
    parts = [
        f"{value} of the {ratio.queue:.2f} that a queue of Poisson arrivals at the device allows",
        f"the capacity arithmetic allows {ratio.bound:.2f}",
        *([f"not known, unsettled: {', '.join(open_)}"] if state is None else []),
        *([why] if why else []),
    ]
    return _verdict(f"{described(ratio)}, × full inference", f"≥ {SHARE:g} of the queue's", [state], "; ".join(parts))


def described(ratio: Ratio) -> str:
    """What is compared."""
    return f"{'throughput' if ratio.kind == 'rate' else 'length'} of {ratio.mode} at revisit {ratio.revisit:.0%}"


def _beyond_bound(ratios: Sequence[Ratio]) -> Iterator[Verdict]:
    for one in ratios:
        if one.value is not None and one.value > BOUND_TOLERANCE * one.bound:
            found = (
                f"{one.value:.2f}× is beyond the {one.bound:.2f}× that the capacity arithmetic allows; that is a "
                f"defect of this bench or of the workers' fitted costs"
            )
            yield Verdict(what=described(one), found=found, bound="no more than is possible", state="below")


def _bus_of(bus: Mapping[str, Spread]) -> Verdict:
    both, into, out, wakes = (bus[name].p99 for name in ("both", "in", "out", "wakes"))
    found = ""
    if both is not None:
        found = f"{both:.1f} ms; {into or 0:.1f} ms from publish to the worker's read, {out or 0:.1f} ms back"
        found += f"; waking its threads alone takes {wakes:.1f} ms on these cores under this load" if wakes else ""
    states = [] if both is None else [_state(both <= BUS_MS)]
    return _verdict("the bus, both ways, P99", f"≤ {BUS_MS:g} ms", states, found)


# ---- bench paper ----


def _in_places(what: str, bound: str, parts: Callable[[Where], Iterable[Part]]) -> Verdict:
    """The same in both places."""
    found = {where: some for where in PLACES if (some := list(parts(where)))}
    words = (f"{where}: {', '.join(words for _, words in some)}" for where, some in found.items())
    return _verdict(what, bound, [state for some in found.values() for state, _ in some], "; ".join(words))


def _least(one: Point) -> str:
    return "" if one.settled else "≥ "


def _throughput(points: Sequence[Point], revisit: float) -> Verdict:
    """Over the first four lengths; in brackets the ratio to full inference by the lane's owner, of the oracle's."""

    def parts(where: Where) -> Iterator[Part]:
        for share in HEADLINE:
            one = point_at(points, RELAY.name, share, revisit, where)
            if one is None or not one.oracle:
                continue
            value, base = one.value or 0.0, settled_at(points, FULL_LANE.name, share, revisit, where)
            beside = f" ({value / base.value:.1f} of {one.oracle / base.value:.1f} ×)" if base and base.value else ""
            state = _state(value / one.oracle >= SHARE, least=not one.settled)
            yield state, f"{_least(one)}{value / one.oracle:.2f} at {share:g}×{beside}"

    what = f"throughput at revisit {revisit:.0%}, of the oracle's (× {FULL_LANE.name})"
    return _in_places(what, f"≥ {SHARE:g}", parts)


def _length(points: Sequence[Point], revisit: float) -> Verdict:
    """At the rates that full inference carries at the first four lengths, in multiples of these lengths. Judged as
    shares of the grid's last length, where the oracle's ends there."""

    def parts(where: Where) -> Iterator[Part]:
        known = (point_at(points, RELAY.name, share, revisit, where) for share in GRID)
        least = any(one is not None and not one.settled for one in known)
        for share in HEADLINE:
            base = settled_at(points, FULL_LANE.name, share, revisit, where)
            if base is None or not base.value:
                continue
            mine, allowed = (
                length_at(points, RELAY.name, revisit, where, base.value, oracle=oracle) for oracle in (False, True)
            )
            if math.isnan(mine) or not allowed or (math.isinf(mine) and math.isinf(allowed)):
                continue  # or both carry the grid's last length: which of them carries more is not known
            enough = mine >= SHARE * min(allowed, GRID[-1])
            # Where the oracle carries more than the grid's last length, a share of that length is no proof.
            state = None if enough and math.isinf(allowed) else _state(enough, least=least)
            words = (
                f"> {GRID[-1] / share:.0f}" if math.isinf(each) else f"{each / share:.1f}" for each in (mine, allowed)
            )
            yield state, f"{'≥ ' * least}{' of '.join(words)} at {base.value:.0f}/s"

    what = f"length at revisit {revisit:.0%}, × {FULL_LANE.name}'s, of the oracle's"
    return _in_places(what, f"≥ {SHARE:g} of it", parts)


def _goodput_parts(points: Sequence[Point], where: Where) -> Iterator[Part]:
    """Scores within the SLO at loads of the oracle's rate and more, for callers who wait for a second."""
    carried = find(points, Setup(), RELAY.name, where)
    if carried is None or not (carried.value and carried.settled):
        return
    for load in (load for load in GOODPUT_LOADS if load >= 1):
        one = find(points, PATIENT.at(load=load), RELAY.name, where)
        if one is not None and one.given is not None and (good := one.shown("goodput")) is not None:
            kept = good[0] / min(carried.value, one.given)
            yield _state(kept >= KEPT), f"{kept:.2f} at {load:g} × load"


def _ablation(points: Sequence[Point], name: str) -> Verdict:
    """The relay against itself without a part."""
    level, why = NO_GAIN.get(name, (lambda setup: False, ""))

    def parts(where: Where) -> Iterator[Part]:
        for regime, setup in REGIMES.items():
            mine, other = (find(points, setup, one, where) for one in (RELAY.name, name))
            if mine is None or other is None or not (mine.value or other.value) or not other.settled:
                continue
            ratio = (mine.value or 0.0) / other.value if other.value else math.inf
            even = level(setup)
            words = "only relay" if math.isinf(ratio) else f"{_least(mine)}{ratio:.2f}×"
            state = _state(ratio >= 1 - NOISE if even else ratio > 1, least=not mine.settled)
            yield state, f"{words} {regime}{f' ({why})' if even else ''}"

    but = f", or within {NOISE:.0%} where that part can gain nothing" if why else ""
    return _in_places(f"relay ÷ {name}", f"above 1{but}", parts)


def _fleet_hits(outcomes: Sequence[Outcome]) -> Iterator[Verdict]:
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
    for what, least, announced in (
        ("hits over all announced", ANNOUNCED_HITS, True),
        ("hits over all admitted", ADMITTED_HITS, False),
    ):
        hit, of = _hit(within, announced=announced)
        more, of_more = _hit(beyond, announced=announced)
        found = [f"fleet: {hit / of:.1%} of {of:,} up to the rate carried"] if of else []
        found += [f"{more / of_more:.1%} of {of_more:,} beyond it"] if of_more else []
        yield _hits(what, hit, of, least, "; ".join(found))


def _hit(probes: Sequence[Probe], *, announced: bool) -> tuple[int, int]:
    """(hits, all) of what was announced, or of what was admitted."""
    if announced:
        hits = sum(probe.outcomes.get(name, 0) for probe in probes for name in HITS)
        return hits, sum(probe.announced for probe in probes)
    return sum(probe.admitted_hits for probe in probes), sum(probe.admitted for probe in probes)


def _delegation(points: Sequence[Point]) -> Verdict:
    def parts(where: Where) -> list[Part]:
        found: list[Part] = []
        for load, share in ((DELEGATED_LOAD, DELEGATED_SHARE), (LOW_LOAD, 1 + NOISE)):
            with_it, without = (
                find(points, Setup(revisit=0.0, load=load), mode.name, where) for mode in (RELAY, UNDELEGATED)
            )
            mine, other = (None if one is None else one.shown("p99") for one in (with_it, without))
            if mine and other:
                words = f"{mine[0]:.1f} against {other[0]:.1f} ms at {load:.0%}"
                found.append((_state(mine[0] <= share * other[0]), words))
        # Half of the claim proves nothing.
        return found if len(found) == 2 else [(state if state == "below" else None, words) for state, words in found]

    bound = f"≤ {DELEGATED_SHARE:.0%} of it at {DELEGATED_LOAD:.0%} load, no more at {LOW_LOAD:.0%}"
    return _in_places("P99 of first visits with delegation, against without", bound, parts)


def _bus(outcomes: Sequence[Outcome]) -> Verdict:
    """The bus at the highest rates, in real milliseconds."""
    known = [
        (rate / one.factor, one.bus_ms[1])
        for one in outcomes
        if one.mode == RELAY.name and len(one.bus_ms) > 1 and (rate := one.given or one.rate)
    ]
    most = max((rate for rate, _ in known), default=0.0)
    near = [ms for rate, ms in known if rate >= NEAR_MOST * most]
    found = (
        f"fleet: {min(near):.1f} to {max(near):.1f} ms in {len(near)} searches at up to {most:.0f} requests/s"
        if near
        else ""
    )
    states = [_state(max(near) <= BUS_MS)] if near else []
    return _verdict("the bus, both ways, P99 at the highest rates", f"≤ {BUS_MS:g} ms", states, found)


def _alike(points: Sequence[Point]) -> Verdict:
    """Of rates that are known to within as much: the others could not differ, or not be seen to."""
    points = [one for one in points if not one.setup.real]
    found = [row for row in differences(points) if row[2] == "rate"]
    beyond = sum(abs(row[-1]) > ALIKE for row in found)
    words = [f"{len(found) - beyond} of {len(found)} rates are"] if found else []
    others = sum(not one.given and bool(one.value or other.value) for one, other in in_both(points)) - len(found)
    words += [f"{others} more are lower bounds or known less exactly"] if others else []
    states = [_state(not beyond)] if found else []
    return _verdict(f"simulation and fleet within {ALIKE:.0%}", "all", states, "; ".join(words))


def _bounds(outcomes: Sequence[Outcome]) -> Iterator[Verdict]:
    """What no probe that counts may exceed, so that devices and bus are what they are said to be."""
    probes = [probe for one in outcomes for probe in one.probes if not probe.set_aside]
    for what, values, most, form in (
        (f"no probe beyond {MOST_RATE:g} requests/s", [one.rate for one in probes], MOST_RATE * (1 + NOISE), ".1f"),
        ("no probe beyond half of the cores", [one.cores_busy for one in probes], MOST_CORES, ".0%"),
        (f"no device more than {LATE_DEVICE:.0%} late", [one.device_late for one in probes], LATE_DEVICE, ".1%"),
    ):
        known = [value for value in values if value is not None]
        beyond = sum(value > most for value in known)
        found = f"at most {max(known):{form}}, beyond it {beyond} of {len(known)} probes" if known else ""
        yield _verdict(what, "none", [_state(not beyond)] if known else [], found)
