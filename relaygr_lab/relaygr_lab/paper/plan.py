"""What `relaygr bench paper` measures: setups of a fleet and its traffic, curves over them, and regimes for ablations.

Lengths are a fixed grid by the cost file, never the run's choice: shares of the length whose full inference takes 0.4
of the SLO. Beyond it full inference may carry nothing. Curves are simulated densely, and measured at a few points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from relaygr_lab.bench.modes import ABLATIONS, CACHE, FLEET_MODES, FULL_ANY, FULL_LANE, RELAY, Mode
from relaygr_lab.bench.options import TIMEOUT_SLOS
from relaygr_lab.paper.setup import GRID, HEADLINE, Setup
from relaygr_stream.workload.arrivals import ArrivalLog

Where = Literal["fleet", "simulated"]
#: What a curve shows: the largest rate within the SLO; at a given one the P99, or scores within the SLO a second; or
#: where rankings found their prefix KV.
Shown = Literal["rate", "p99", "goodput", "hits"]

REVISITS: Final = (0.0, 0.5, 0.9)
#: Known users whose prefix KV fill more than the HBM tiers of four npu devices: 2,000 · 512 tokens of 192 KiB are
#: 190 GiB, the tiers 128.
MANY: Final = 2_000
#: Tiers in which their prefix KV do not fit together, so that it matters which leave: 32 and 64 GiB on four workers.
SMALL: Final[dict[str, Any]] = {"known": MANY, "hbm_gib": 8, "dram_gib": 16}
#: A short head start. Below 45 ms a trigger delegates nothing (NOTICE_MS, the event's way); in dilated time it would.
SHORT_MS: Final = 60.0
#: Loads of the curves of P99, as shares of the oracle's largest rate for the relay; the last is beyond saturation.
LOADS: Final = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0, 1.2)
FLEET_LOADS: Final = (0.1, 0.5, 0.8)
#: Arrivals of a log that are played: enough for its bursts, and simulated in seconds.
LOGGED_ARRIVALS: Final = 6_000
#: Beyond what the relay without delegates carries, where it is compared with them; and beyond what any mode carries.
HIGH, OVERLOAD = Setup(load=1.1), Setup(load=1.25)
#: Where callers wait no longer than the SLO, and workers refuse or pass on what would be late by that.
IN_TIME: Final = OVERLOAD.at(timeout=1.0)
#: In these every mode tells how much is within the SLO, its hits, its decisions and its use of devices and memory.
AT_LOADS: Final = (Setup(load=0.8), OVERLOAD, IN_TIME)
TIMEOUTS: Final = (1.0, 2.0, TIMEOUT_SLOS)
#: Callers who wait for a second, as by default: what is in time is then the workers' doing, not that of timeouts.
PATIENT: Final = Setup(timeout=20.0)
#: Up to three times what the oracle carries; those from 1 on are judged.
GOODPUT_LOADS: Final = (0.5, 0.8, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
GOODPUT_FLEET: Final = (1.0, 1.25, 2.0, 3.0)

USUAL: Final = (RELAY, FULL_ANY, FULL_LANE, CACHE)  # in the order of turns, for when time runs out
TWO: Final = (FULL_ANY, RELAY)
UNDELEGATED, LRU = (next(mode for mode in ABLATIONS if mode.name == f"relay-{part}") for part in ("undelegated", "lru"))

#: In each of these the relay is compared with itself without one part. The first is the usual one.
REGIMES: Final[dict[str, Setup]] = {
    "usual": Setup(),
    "no returns": Setup(revisit=0.0),
    "4 × length": Setup(share=4.0),
    "long beside short": Setup(share=4.0, long=0.2),
    "many users": Setup(known=MANY),
    "small tiers, hot users": Setup(**SMALL, zipf=1.1),
    "small tiers, hot users, short head start": Setup(**SMALL, zipf=1.1, delay_ms=SHORT_MS),
    "a hot lane": Setup(hot=0.3),
    "short head start": Setup(delay_ms=SHORT_MS),
}
#: Where the relay need not be ahead of itself without a part, but must not be behind: mode → the setups, and why.
NO_GAIN: Final[dict[str, tuple[Callable[[Setup], bool], str]]] = {
    "relay-hbm": (lambda setup: setup.known < MANY, "HBM holds all prefix KV"),
    "relay-lru": (lambda setup: setup.hbm_gib == Setup().hbm_gib, "the tiers hold all prefix KV"),
    "relay-whole": (lambda setup: setup.share <= 1, "a prefill takes less than the SLO"),
}


@dataclass(frozen=True, kw_only=True)
class PaperOptions:
    """The options of one run. only: measure, or simulate, what is lacking there, or report what there is; None: all."""

    quick: bool
    costs: str  # the cost file, as named
    broker: Literal["embedded", "kafka"]
    samples: int  # requests judged in a stage of a probe
    stages: int
    tolerance: float
    least_s: float  # judged seconds of a probe, at least: in short ones no queue grows
    repeats: int  # of measured values
    seeds: int  # of simulated ones
    budget_s: float
    seed: int
    out: Path
    only: Where | Literal["report"] | None = None
    arrivals: ArrivalLog | None = None  # for one more curve


@dataclass(frozen=True)
class Step:
    """A setup and the modes that are searched in it."""

    setup: Setup
    modes: tuple[Mode, ...]
    where: Where = "simulated"


@dataclass(frozen=True)
class Curve:
    """One property of the setups, and what is shown over it."""

    name: str
    words: str
    axis: str  # of the property
    x: str  # the property: a field of Setup
    steps: tuple[Step, ...]
    shown: Shown = "rate"
    log: bool = False  # the axis
    drawn: bool = True  # else its table says all: its axis has no order


def curves(quick: bool, arrivals: ArrivalLog | None = None) -> tuple[Curve, ...]:
    """The curves of a run, the most valuable first."""
    logged = () if arrivals is None else (_logged(arrivals),)
    if quick:
        few = _goodput((1.0, 2.0, 3.0), (2.0,))
        return (_lengths(HEADLINE, (1.0,), quick=True), _parts((REGIMES["usual"],), fleet=False), few, *logged)
    heads = (20.0, 40.0, 60.0, 80.0, 150.0, 300.0)
    candidates = (32, 128, 512, 1024, 2048)
    hot, layers = (0.0, 0.1, 0.3, 0.5, 0.7), (0.25, 0.5, 1.0, 1.5, 2.0)
    return (
        _lengths(GRID, GRID),
        _loads("load", "P99 against load", USUAL, Setup(), (RELAY, FULL_ANY)),
        _goodput(GOODPUT_LOADS, GOODPUT_FLEET),
        _loads("delegation", "P99 of first visits, with and without delegation", (RELAY, UNDELEGATED), FIRST_VISITS),
        _anchors(),
        _dram(),
        _parts(tuple(REGIMES.values()), fleet=True),
        _modes(),
        _timeouts(),
        _over("revisit", "Revisit ratio", "share of returns", (0.0, 0.25, 0.5, 0.75, 0.9, 0.95), (0.25, 0.75)),
        _over("delay_ms", "Head start", "ms", heads, (20.0, 80.0, 300.0)),
        _over("candidates", "Candidates", "candidates", candidates, (128, 512, 2048), log=True),
        _over("workers", "Workers", "workers", (1, 2, 4, 8), (1, 2, 8)),
        _over("long", "Share of long users", "share", (0.05, 0.1, 0.2, 0.4, 1.0), (0.1, 0.4), of=Setup(share=2.0)),
        _over("hot", "A hot lane", "share of the users on it", hot, (0.3, 0.7), modes=HOT, fleet_modes=HOT),
        _over("swing", "A tide", "swing of the rate", (0.0, 0.2, 0.4, 0.6, 0.8), (0.4, 0.8)),
        _over("layers", "Layers", "× layers of the cost file", layers, (0.5, 1.5)),
        *logged,
    )


FIRST_VISITS: Final = Setup(revisit=0.0)
ANCHORS_WORDS: Final = "The real engine of this machine, one worker, undilated"
HOT: Final = (RELAY, UNDELEGATED)


def _lengths(shares: Sequence[float], others: Sequence[float], *, quick: bool = False) -> Curve:
    """Full inference does not depend on the revisit ratio: it is measured at the middle one only.

    others: the lengths at which other revisit ratios are simulated; the relay is measured at them up to the unit.
    quick: these, and `cache`, are not measured.
    """
    every = [Step(Setup(share=share), USUAL) for share in shares]
    every += [Step(Setup(share=share, revisit=other), (RELAY, CACHE)) for share in others for other in (0.9, 0.0)]
    fleet = [Step(Setup(share=share), USUAL[:3] if quick else USUAL, "fleet") for share in (1.0, 0.5, 0.25, 0.75)]
    if not quick:
        fleet += [Step(Setup(revisit=other), (RELAY,), "fleet") for other in (0.9, 0.0)]
        fleet += [Step(Setup(share=share), (RELAY,), "fleet") for share in shares if share > 1.0]
        short = [share for share in HEADLINE if share < 1.0]
        fleet += [Step(Setup(share=share, revisit=other), (RELAY,), "fleet") for other in (0.9, 0.0) for share in short]
    return Curve("length", "Throughput within the SLO against length", "× unit length", "share", (*every, *fleet))


def _parts(regimes: Sequence[Setup], *, fleet: bool) -> Curve:
    modes = (RELAY, *ABLATIONS)
    steps = [Step(setup, modes) for setup in regimes]
    if fleet:
        steps += [Step(setup, modes, "fleet") for setup in regimes[:1]]
    return Curve("parts", "What each mechanism is worth", "× unit length", "share", tuple(steps), drawn=False)


def _modes() -> Curve:
    steps = [Step(setup, FLEET_MODES) for setup in AT_LOADS]
    steps += [Step(HIGH, (RELAY, UNDELEGATED)), Step(HIGH, (RELAY, UNDELEGATED), "fleet")]
    steps += [Step(OVERLOAD, FLEET_MODES, "fleet"), Step(IN_TIME, (RELAY, CACHE), "fleet")]
    return Curve("modes", "Each mode at and beyond saturation", "load", "load", tuple(steps), "p99", drawn=False)


def _timeouts() -> Curve:
    steps = [Step(Setup(timeout=timeout), USUAL) for timeout in TIMEOUTS]
    steps += [Step(Setup(timeout=1.0), USUAL, "fleet")]
    return Curve("timeout", "How long callers wait", "timeout of a ranking, SLOs", "timeout", tuple(steps), log=True)


def logged_setups(log: ArrivalLog) -> tuple[Setup, Setup]:
    """Poisson arrivals, and the log's, with the same share of returns: the log's own, if it has users."""
    poisson = Setup() if log.users is None else Setup(revisit=min(0.99, round(log.returns, 2)))
    return poisson, poisson.at(arrivals=log.name)


def _logged(log: ArrivalLog) -> Curve:
    places: tuple[Where, ...] = ("simulated", "fleet")
    steps = tuple(Step(setup, USUAL, where) for where in places for setup in logged_setups(log))
    return Curve("arrivals", "Arrivals of a log", "arrivals", "arrivals", steps, drawn=False)


def _loads(name: str, words: str, modes: tuple[Mode, ...], of: Setup, fleet: tuple[Mode, ...] = ()) -> Curve:
    steps = [Step(of.at(load=load), modes) for load in LOADS]
    steps += [Step(of.at(load=load), fleet or modes, "fleet") for load in FLEET_LOADS]
    return Curve(name, words, "share of the oracle's largest rate for the relay", "load", tuple(steps), "p99")


def _goodput(loads: Sequence[float], fleet: Sequence[float]) -> Curve:
    steps = [Step(PATIENT.at(load=load), USUAL) for load in loads]
    steps += [Step(PATIENT.at(load=load), (RELAY,), "fleet") for load in fleet]
    words, axis = "Scores within the SLO against load", "share of the oracle's largest rate for the relay"
    return Curve("goodput", words, axis, "load", tuple(steps), "goodput")


def _over(
    name: str,
    words: str,
    axis: str,
    values: Sequence[float],
    fleet: Sequence[float] = (),
    *,
    of: Setup | None = None,
    modes: tuple[Mode, ...] = TWO,
    fleet_modes: tuple[Mode, ...] = (RELAY,),
    log: bool = False,
) -> Curve:
    of = of or Setup()
    steps = [Step(of.at(**{name: value}), modes) for value in values]
    steps += [Step(of.at(**{name: value}), fleet_modes, "fleet") for value in fleet]
    return Curve(name, words, axis, name, tuple(steps), log=log)


def _anchors() -> Curve:
    """The curves that one worker can have, on the real engine: more would share this machine's cores."""
    unit = Setup(real=True, workers=1)
    setups = (
        unit.at(revisit=0.9),
        unit.at(revisit=0.0),
        unit.at(load=0.5),
        unit.at(delay_ms=60.0),
        unit.at(candidates=128),
        unit.at(share=2.0, long=0.2),
        unit.at(swing=0.4),
    )
    of_one = (RELAY, FULL_LANE, CACHE)
    some = [(unit, of_one), (unit.at(share=0.5), of_one), *((one, (RELAY,)) for one in setups)]
    places: tuple[Where, ...] = ("simulated", "fleet")
    steps = tuple(Step(setup, modes, where) for where in places for setup, modes in some)
    return Curve("anchors", ANCHORS_WORDS, "× unit length", "share", steps, drawn=False)


def _dram() -> Curve:
    of = Setup(**SMALL, load=0.5)
    steps = tuple(Step(of.at(dram_gib=gib), (RELAY, LRU)) for gib in (0, 8, 16, 32, 48))
    return Curve("dram_gib", "DRAM against hits", "GiB of DRAM a worker, 8 of HBM", "dram_gib", steps, "hits")


def steps(planned: Sequence[Curve]) -> Iterator[Step]:
    """Each setup once a place, with all modes that any curve wants in it: simulations first, then by curve."""
    wanted: dict[tuple[Setup, Where], dict[str, Mode]] = {}
    for curve in planned:
        for step in curve.steps:
            wanted.setdefault((step.setup, step.where), {}).update({mode.name: mode for mode in step.modes})
    for place in ("simulated", "fleet"):
        for (setup, where), modes in wanted.items():
            if where == place:
                yield Step(setup, tuple(modes.values()), where)
