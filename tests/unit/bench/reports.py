"""A report of a made-up run, and its parts."""

from __future__ import annotations

from typing import Any

from relaygr_lab.bench.capacity import Traffic
from relaygr_lab.bench.cells import Cell, World
from relaygr_lab.bench.modes import FULL, RELAY, Mode
from relaygr_lab.bench.results import DEVICE_WORK, STAGES, Memory, Probe, SloReport, Spread
from relaygr_lab.bench.search import Search
from relaygr_lab.report import slo_readings
from relaygr_lab.report.judge import judge_slo

from relaygr_stream.wire.messages import CostModel

WORLD = World(
    costs=CostModel(c0=4.0, c1=0.018, c2=4e-6, c3=5e-5),
    slo_ms=50.0,
    workers=1,
    longest=8000,
    common=Traffic(512, 0.5, growth=3.0, candidates=40, delay_ms=150.0),
)
BUS = {"in": Spread(2.0, 5.0), "out": Spread(2.0, 4.0), "both": Spread(5.0, 9.0), "wakes": Spread(0.6, 3.0)}

HITS = {"admitted": 100, "hit": 100}


def probe(mode: Mode, rate: float, *, passed: bool, length: int = 512, revisit: float = 0.0, **changes: Any) -> Probe:
    values: dict[str, Any] = {
        "mode": mode.name,
        "revisit": revisit,
        "length": length,
        "rate": rate,
        "repeat": 0,
        "started_s": 1.0,
        "seconds": 5.0,
        "requests": 100,
        "bad": 0 if passed else 2,
        "cut_short": not passed,
        "p50": 20.0,
        "p99": 40.0 if passed else 90.0,
        "stages": dict.fromkeys(STAGES, Spread(1.0, 2.0)),
        "stage_means": dict.fromkeys(STAGES, 3.0),
        "slow_stages": {name: 5.0 + 30 * (name == "queued") for name in STAGES},
        "slow_outcomes": {"joined": 5},
        "errors": {},
        "outcomes": {"hbm": 90, "joined": 10} if mode is RELAY else {"full": 100},
        "announced": 100 if mode.announce else 0,
        "admitted": 90 if mode.announce else 0,
        "admitted_hits": 90 if mode.announce else 0,
        "decisions": {"admitted": 90, "over_load": 10} if mode.announce else {},
        "others_cores": 0.0,
        "device_ms_per_s": dict.fromkeys(DEVICE_WORK, 300.0),
    }
    return Probe(**{**values, **changes})


def cell(mode: Mode, passing: float, failing: float, *, revisit: float = 0.0) -> Cell:
    """A rate cell whose one search brackets its result so."""
    made = Cell("rate", mode, revisit, 512, 1.2)
    made.searches.append(Search(guess=passing, low=0.5, high=1000.0, tolerance=1.2))
    made.record(probe(mode, passing, passed=True, revisit=revisit))
    made.record(probe(mode, failing, passed=False, revisit=revisit))
    return made


def repeated(mode: Mode, *passing: float | None) -> Cell:
    """A rate cell with a settled search for each of these values; None: nothing passed."""
    made = Cell("rate", mode, 0.0, 512, 1.2)
    for repeat, value in enumerate(passing):
        made.searches.append(Search(guess=1.0, low=0.5, high=1000.0, tolerance=1.2))
        if value is not None:
            made.record(probe(mode, value, passed=True, repeat=repeat))
        made.record(probe(mode, 1.1 * value if value else 0.5, passed=False, repeat=repeat))
    return made


def length_cell(rate: float, passing: int, failing: int) -> Cell:
    made = Cell("length", RELAY, 0.5, rate, 1.2)
    made.searches.append(Search(guess=passing, low=32, high=8000, tolerance=1.2))
    made.record(probe(RELAY, rate, passed=True, length=passing, revisit=0.5))
    made.record(probe(RELAY, rate, passed=False, length=failing, revisit=0.5))
    return made


def report(cells: list[Cell] | None = None, **changes: Any) -> SloReport:
    cells = cells or [cell(FULL, 10.0, 11.5), cell(RELAY, 30.0, 34.0), length_cell(10.0, 1536, 1760)]
    founds, ratios = [slo_readings.found(one, [WORLD]) for one in cells], slo_readings.ratios(cells, [WORLD])
    values: dict[str, Any] = {
        "conditions": {"words": {"model": "HSTU"}, "slo_ms": 50.0, "preset": "quick", "length": 512},
        "probes": [probe for one in cells for probe in one.probes],
        "found": founds,
        "ratios": ratios,
        "costs": {"c0": 4.0},
        "memory": [Memory(1.0, "relay-0", 1 << 20, 1 << 19, 0), Memory(2.0, "relay-0", 2 << 20, 1 << 19, 1 << 20)],
        "budgets": {"relay-0": {"hbm": 8 << 20, "dram": 16 << 20}},
        "bus": BUS,
        "hits": HITS,
        "verdicts": judge_slo(ratios, founds, BUS, HITS),
        "remarks": [],
        "wall_s": 100.0,
    }
    return SloReport(**{**values, **changes})
