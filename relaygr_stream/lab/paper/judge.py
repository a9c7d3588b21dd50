"""Judges a run against the targets, from its points and outcomes. Knows nothing of how they were measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from relaygr_stream.lab.bench.modes import ABLATIONS, BASELINES, CACHE, FULL_ANY, FULL_LANE, RELAY
from relaygr_stream.lab.paper.plan import HEADLINE, MOST_RATE, REVISITS, Setup
from relaygr_stream.lab.paper.results import Outcome, Point, Verdict
from relaygr_stream.lab.workload.report import HITS

#: The relay reaches this share of the oracle queue's throughput.
ORACLE_SHARE = 0.85
#: Times the throughput of full inference by the lane's owner, by revisit ratio, wherever the oracle allows it.
LANE_TARGETS = {0.0: 2.0, 0.5: 4.5, 0.9: 8.0}
#: Times the throughput of `cache` at half returning.
CACHE_TARGET = 1.5
#: Hits over all announced, and over the admitted.
ANNOUNCED_HITS, ADMITTED_HITS = 0.97, 0.99
BUS_TARGET_MS = 10.0
#: The bus is judged by probes of at least this share of MOST_RATE.
NEAR_MOST = 0.8


def judge(points: Sequence[Point], outcomes: Sequence[Outcome]) -> list[Verdict]:
    """A verdict for each target; `not allowed` where the oracle says that no relay can reach it."""
    return [*_oracle(points), *_baselines(points), *_ablations(points), *_hits(outcomes), *_bus(outcomes)]


def headline(points: Sequence[Point], revisit: float) -> dict[str, list[float]]:
    """Baseline → geometric mean, least and greatest ratio of the relay over the first four lengths.

    Only where all four are known: a mean over other lengths is another number. The relay's values may be lower bounds.
    """
    found: dict[str, list[float]] = {}
    for mode in BASELINES:
        ratios = [
            relay.value / base.value
            for share in HEADLINE
            if (relay := _at(points, RELAY.name, share, revisit)) is not None
            and (base := _baseline(points, mode.name, share, revisit)) is not None
            and relay.value
            and base.value
        ]
        if len(ratios) == len(HEADLINE):
            found[mode.name] = [math.prod(ratios) ** (1 / len(ratios)), min(ratios), max(ratios)]
    return found


def _at(points: Sequence[Point], mode: str, share: float, revisit: float) -> Point | None:
    """A mode's point at a length. Full inference is the same at every revisit ratio, and measured at one."""
    wanted = Setup(share=share, revisit=revisit)
    some = [one for one in points if one.mode == mode]
    exact = next((one for one in some if one.setup == wanted), None)
    if exact is None and mode in (FULL_LANE.name, FULL_ANY.name):
        return next((one for one in some if one.setup == Setup(share=share, revisit=one.setup.revisit)), None)
    return exact


def _baseline(points: Sequence[Point], mode: str, share: float, revisit: float) -> Point | None:
    """The same, if its search came to an end: a lower bound of a baseline would be an upper one of the ratio."""
    found = _at(points, mode, share, revisit)
    return found if found is not None and found.settled else None


def _oracle(points: Sequence[Point]) -> Iterator[Verdict]:
    for revisit in REVISITS:
        shares = {
            share: (one.value or 0.0) / one.oracle
            for share in HEADLINE
            if (one := _at(points, RELAY.name, share, revisit)) is not None
            and one.oracle
            and (one.settled or (one.value or 0.0) >= ORACLE_SHARE * one.oracle)
        }
        target = f"relay ≥ {ORACLE_SHARE:g} of the oracle's throughput at revisit {revisit:.0%}"
        if not shares:
            yield Verdict(target=target, found="", state="not measured")
            continue
        each = ", ".join(f"{value:.2f} at {share:g}×" for share, value in sorted(shares.items()))
        yield Verdict(target=target, found=each, state="met" if min(shares.values()) >= ORACLE_SHARE else "missed")


def _baselines(points: Sequence[Point]) -> Iterator[Verdict]:
    for revisit, times in LANE_TARGETS.items():
        yield _against(points, FULL_LANE.name, revisit, times)
    yield _against(points, CACHE.name, 0.5, CACHE_TARGET)
    yield Verdict(
        target="length ≥ 4 × that of full-lane at one rate", found="no search of lengths", state="not measured"
    )


def _against(points: Sequence[Point], baseline: str, revisit: float, times: float) -> Verdict:
    """The ratio to a baseline over the first four lengths; judged where the oracle's own ratio allows it."""
    target = f"relay ≥ {times:g} × {baseline} at revisit {revisit:.0%}, where the oracle allows it"
    parts, states = [], set()
    for share in HEADLINE:
        relay, base = _at(points, RELAY.name, share, revisit), _baseline(points, baseline, share, revisit)
        if relay is None or base is None or not base.value:
            continue
        ratio, allowed = (relay.value or 0.0) / base.value, relay.oracle / base.value
        state = "met" if ratio >= times else "missed" if allowed >= times else "not allowed"
        states.add(state)
        parts.append(f"{ratio:.1f} of {allowed:.1f} at {share:g}×")
    if not parts:
        return Verdict(target=target, found="", state="not measured")
    verdict = next((state for state in ("missed", "met") if state in states), "not allowed")
    return Verdict(target=target, found=", ".join(parts), state=verdict)  # type: ignore[arg-type]


def _ablations(points: Sequence[Point]) -> Iterator[Verdict]:
    for mode in ABLATIONS:
        target = f"relay ahead of {mode.name}"
        parts, behind = [], False
        for one in points:
            relay = next((each for each in points if each.mode == RELAY.name and each.setup == one.setup), None)
            if one.mode != mode.name or relay is None:
                continue
            parts.append(f"{_rate(relay)} against {_rate(one)} at {one.setup.share:g}×")
            behind |= (relay.value or 0.0) < (one.value or 0.0)
        state = "not measured" if not parts else "missed" if behind else "met"
        yield Verdict(target=target, found=", ".join(parts), state=state)  # type: ignore[arg-type]


def _rate(point: Point) -> str:
    return "none" if point.value is None else f"{point.value:,.0f}/s"


def _hits(outcomes: Sequence[Outcome]) -> Iterator[Verdict]:
    probes = [probe for one in outcomes if one.mode == RELAY.name for probe in one.passing]
    announced, admitted = (sum(getattr(probe, name) for probe in probes) for name in ("announced", "admitted"))
    hits = sum(probe.outcomes.get(name, 0) for probe in probes for name in HITS)
    of_admitted = sum(probe.admitted_hits for probe in probes)
    for words, hit, of, least in (
        ("hits over all announced", hits, announced, ANNOUNCED_HITS),
        ("hits over all admitted", of_admitted, admitted, ADMITTED_HITS),
    ):
        state = "not measured" if not of else "met" if hit >= least * of else "missed"
        found = f"{hit / of:.1%} of {of:,}" if of else ""
        yield Verdict(target=f"{words} ≥ {least:.0%}", found=found, state=state)  # type: ignore[arg-type]


def _bus(outcomes: Sequence[Outcome]) -> Iterator[Verdict]:
    """The bus at the highest rates, in real milliseconds."""
    near = [
        one.bus_ms[1]
        for one in outcomes
        if one.mode == RELAY.name
        and len(one.bus_ms) > 1
        and one.rate
        and one.rate / one.factor >= NEAR_MOST * MOST_RATE
    ]
    worst = max(near, default=None)
    yield Verdict(
        target=f"the bus, both ways, P99 ≤ {BUS_TARGET_MS:g} ms at up to {MOST_RATE:g} requests/s",
        found="" if worst is None else f"{worst:.1f} ms at worst of {len(near)} searches",
        state="not measured" if worst is None else "met" if worst <= BUS_TARGET_MS else "missed",
    )
