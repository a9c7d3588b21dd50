"""Makes the reports from what a run has measured and simulated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from relaygr_lab.bench.modes import RELAY
from relaygr_lab.bench.probe import Measured
from relaygr_lab.bench.results import SloReport, Spread
from relaygr_lab.bench.run import Bench
from relaygr_lab.bench.wakes import chain
from relaygr_lab.paper.plan import Curve
from relaygr_lab.paper.results import Outcome, PaperReport, Point, points
from relaygr_lab.paper.setup import Setup
from relaygr_lab.report import conditions, slo_readings
from relaygr_lab.report.judge import judge_paper, judge_slo
from relaygr_lab.report.paper_readings import differences, find, headline
from relaygr_stream.errors import RelayError
from relaygr_stream.workload.report import HIT_WORDS

#: A value beyond the oracle's by more than this factor is no matter of a search's tolerance.
BEYOND: Final = 1.1


def slo_report(bench: Bench, command: str, ended: str = "") -> SloReport:
    """The report of a bench that has run; ended: what ended it early. Raises RelayError if there was no time for a
    single probe."""
    if bench.world is None or not bench.measured:
        raise RelayError(f"no probe fitted into {bench.options.budget_s:g} s; give --budget more seconds")
    reached = [cell for cell in bench.cells if cell.given]
    founds = [slo_readings.found(cell, bench.worlds) for cell in reached]
    ratios = slo_readings.ratios(reached, bench.worlds)
    within = {id(probe) for cell in reached for probe in slo_readings.up_to_found(cell)}
    counted = [one for one in bench.measured if one.probe.mode == RELAY.name and not one.probe.set_aside]
    relayed = [one for one in counted if id(one.probe) in within]
    bus = _bus(relayed) | {"wakes": chain([late for one in relayed for late in bench.wakes_in(one.probe)])}
    hits = {
        "admitted": sum(one.probe.admitted for one in relayed),
        "hit": sum(one.probe.admitted_hits for one in relayed),
        "announced": sum(one.probe.announced for one in relayed),
        "admitted_beyond": sum(one.probe.admitted for one in counted if id(one.probe) not in within),
        "hit_beyond": sum(one.probe.admitted_hits for one in counted if id(one.probe) not in within),
    } | {word: sum(one.probe.outcomes.get(found, 0) for one in relayed) for found, word in HIT_WORDS.items()}
    return SloReport(
        conditions=conditions.of_slo(bench, command),
        probes=[one.probe for one in bench.measured],
        found=founds,
        ratios=ratios,
        costs=msgspec.structs.asdict(bench.world.costs),
        memory=bench.memory,
        budgets=bench.budgets,
        bus=bus,
        hits=hits,
        verdicts=judge_slo(ratios, founds, bus, hits),
        remarks=[f"the run ended early: {ended}"] if ended else [],
        wall_s=bench.clock(),
    )


def _bus(measured: Sequence[Measured]) -> dict[str, Spread]:
    into = [ms for one in measured for ms in one.bus_in]
    out = [ms for one in measured for ms in one.bus_out]
    both = [sum(pair) for pair in zip(into, out, strict=True)]
    return {"in": Spread.of(into), "out": Spread.of(out), "both": Spread.of(both)}


def paper_report(
    outcomes: Sequence[Outcome],
    planned: Sequence[Curve],
    conditions: dict[str, Any],
    left_out: Sequence[str],
    wall_s: float,
) -> PaperReport:
    """The report of these outcomes."""
    known = points(outcomes)
    aside = sum(probe.set_aside for one in outcomes for probe in one.probes)
    every = sum(len(one.probes) for one in outcomes)
    return PaperReport(
        complete=not left_out,
        conditions=conditions,
        points=known,
        curves={curve.name: _rows(curve, known) for curve in planned},
        headline=headline(known, Setup().revisit),
        differences=differences(known),
        verdicts=judge_paper(known, outcomes),
        remarks=[
            *left_out,
            f"{aside} of {every} probes were set aside and repeated: devices more than 5 % late, other processes, or a "
            f"machine that stood still",
            *_codes(outcomes),
            *_beyond(known),
        ],
        wall_s=wall_s,
    )


def _rows(curve: Curve, known: Sequence[Point]) -> list[list[Any]]:
    """[x, revisit ratio, mode, where, what, median, least, greatest, oracle, settled] of each point; two of one of
    hits. oracle: of goodput, what the oracle could serve of the load."""
    shown = {"hits": ("hits", "dram")}.get(curve.shown, (curve.shown,))
    rows = []
    for step in curve.steps:
        for mode in step.modes:
            one = find(known, step.setup, mode.name, step.where)
            if one is None:
                continue
            x, by = getattr(one.setup, curve.x), one.setup.revisit
            for what in shown:
                value = one.shown(what) or (None, None, None)
                oracle = one.ideal if what == "goodput" else one.oracle
                rows.append([x, by, one.mode, one.where, what, *value, oracle, one.settled])
    return rows


def _codes(outcomes: Sequence[Outcome]) -> Iterable[str]:
    codes = {one.code for one in outcomes}
    if len(codes) > 1:
        yield f"outcomes of {len(codes)} versions of the code: the run was continued after a change"


def _beyond(known: Sequence[Point]) -> Iterable[str]:
    """Values beyond the oracle's, in words: the probes were too short, or the oracle does not know the setup."""
    for one in known:
        if one.value and one.given is None and one.oracle and one.value > BEYOND * one.oracle:
            yield (
                f"beyond the oracle: {one.mode} ({one.where}) {one.value:,.0f} of {one.oracle:,.0f}/s at "
                f"{one.setup.words}"
            )
