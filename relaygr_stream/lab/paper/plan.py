"""What `relaygr bench paper` measures: setups of a fleet, the modes that are compared in each, and their curves.

Lengths are a fixed grid by the cost file, never the run's choice: shares of the length whose full inference takes 0.4
of the SLO. Beyond it full inference may carry nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from relaygr_stream.errors import ConfigError
from relaygr_stream.lab.bench.cells import LENGTH_STEP
from relaygr_stream.lab.bench.modes import ABLATIONS, CACHE, FULL_ANY, FULL_LANE, RELAY, Mode
from relaygr_stream.lab.bench.oracle import Shape
from relaygr_stream.lab.simulate.costs import DeviceCosts

#: Full inference of the grid's unit length takes this share of the SLO.
FULL_SHARE: Final = 0.4
#: The headline is the geometric mean over the first four.
HEADLINE: Final = (0.25, 0.5, 0.75, 1.0)
GRID: Final = (*HEADLINE, 2.0, 4.0)
REVISITS: Final = (0.0, 0.5, 0.9)
#: No probe exceeds this rate: broker, trigger, workers and client share two cores.
MOST_RATE: Final = 60.0
#: Searches begin at this share of the oracle's rate, and may end at this multiple of it.
FIRST_SHARE: Final = 0.85
#: Known users with whom prefix KV fill more than the HBM tiers of four npu devices: 2,000 · 512 tokens of 192 KiB are
#: 190 GiB, the tiers 128.
MANY: Final = 2_000
SUFFIX: Final = 8
GROWTH: Final = 3.0
#: The packaged cost files.
COSTS_DIR: Final = Path(__file__).parent.parent / "emulate" / "costs"


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet and its traffic. share: of the grid's unit length. delay_ms: head start, undilated.

    known: users with 512 tokens that it knows before it is measured, fewer if longer.
    """

    share: float = 1.0
    revisit: float = 0.5
    workers: int = 4
    candidates: int = 32
    delay_ms: float = 150.0
    known: int = 100

    def length(self, costs: DeviceCosts, slo_ms: float) -> int:
        """Prefix tokens. The unit is that of 32 candidates, whatever the setup's own."""
        unit = costs.longest_full(FULL_SHARE * slo_ms, SUFFIX + Setup().candidates, LENGTH_STEP)
        return max(LENGTH_STEP, round(self.share * unit / LENGTH_STEP) * LENGTH_STEP)

    def shape(self, costs: DeviceCosts, slo_ms: float) -> Shape:
        """The same for the oracle."""
        return Shape(
            length=self.length(costs, slo_ms),
            revisit=self.revisit,
            rows=SUFFIX + self.candidates,
            growth=GROWTH,
            delay_ms=self.delay_ms,
            slo_ms=slo_ms,
            workers=self.workers,
        )

    @property
    def words(self) -> str:
        """For the progress and the tables."""
        parts = [f"{self.share:g} × length", f"revisit {self.revisit:.0%}"]
        usual = Setup()
        parts += [f"{self.workers} workers"] if self.workers != usual.workers else []
        parts += [f"{self.candidates} candidates"] if self.candidates != usual.candidates else []
        parts += [f"head start {self.delay_ms:g} ms"] if self.delay_ms != usual.delay_ms else []
        parts += [f"{self.known} known users of 512 tokens"] if self.known != usual.known else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Step:
    """A setup and the modes that are searched in it."""

    setup: Setup
    modes: tuple[Mode, ...]


@dataclass(frozen=True)
class Curve:
    """Throughput within the SLO over one property of the setups."""

    name: str
    words: str
    axis: str  # of the property
    x: Literal["share", "revisit", "workers", "candidates", "delay_ms"]
    steps: tuple[Step, ...]


def curves(quick: bool) -> tuple[Curve, ...]:
    """The curves of a run, the most valuable first."""
    usual = (RELAY, FULL_ANY, FULL_LANE, CACHE)  # in the order of turns, for when time runs out
    # Full inference does not depend on the revisit ratio: it is searched at the middle one only.
    middle, others = (1.0, 0.5, 0.25, 0.75), (0.9, 0.0)
    lengths = [Step(Setup(share=share), usual) for share in middle]
    lengths += [Step(Setup(revisit=revisit), (RELAY,)) for revisit in others]
    lengths += [Step(Setup(share=share, revisit=revisit), (RELAY,)) for share in middle[1:] for revisit in others]
    if quick:
        return (Curve("length", "Throughput within the SLO against length", "× unit length", "share", tuple(lengths)),)
    lengths += [Step(Setup(share=share), usual) for share in GRID[len(HEADLINE) :]]
    lengths += [
        Step(Setup(share=share, revisit=revisit), (RELAY,)) for share in GRID[len(HEADLINE) :] for revisit in others
    ]
    parts = [Step(Setup(share=share, known=MANY), (RELAY, *ABLATIONS)) for share in (1.0, 2.0)]
    return (
        Curve("length", "Throughput within the SLO against length", "× unit length", "share", tuple(lengths)),
        Curve("parts", "What each mechanism is worth", "× unit length", "share", tuple(parts)),
        Curve("revisit", "Revisit ratio", "share of returns", "revisit", _over("revisit", REVISITS, (0.25, 0.75))),
        Curve("head start", "Head start", "ms", "delay_ms", _over("delay_ms", (20.0, 80.0, 150.0, 300.0))),
        Curve("candidates", "Candidates", "items", "candidates", _over("candidates", (32, 128, 512, 2048))),
        Curve("workers", "Workers", "workers", "workers", _over("workers", (1, 2, 4, 8))),
    )


def _over(name: str, *values: Sequence[float]) -> tuple[Step, ...]:
    every = sorted(value for some in values for value in some)
    return tuple(Step(Setup(**{name: value}), (FULL_ANY, RELAY)) for value in every)  # type: ignore[arg-type]


def steps(planned: Sequence[Curve]) -> Iterator[Step]:
    """Each setup once, with all modes that any curve wants in it, in the order of the curves."""
    wanted: dict[Setup, dict[str, Mode]] = {}
    for curve in planned:
        for step in curve.steps:
            wanted.setdefault(step.setup, {}).update({mode.name: mode for mode in step.modes})
    for setup, modes in wanted.items():
        yield Step(setup, tuple(modes.values()))


def factor_for(rates: Sequence[float]) -> int:
    """The dilation with which the largest of these rates (undilated, requests/s) becomes MOST_RATE or less."""
    return max(1, math.ceil(max(rates, default=0.0) / MOST_RATE))


def costs_named(name: str) -> DeviceCosts:
    """The packaged cost file of this name, or the file at this path. Raises ConfigError, or InputError as read."""
    packaged = COSTS_DIR / f"{name}.toml"
    if packaged.is_file():
        return DeviceCosts.read(packaged)
    if not Path(name).is_file():
        known = ", ".join(sorted(path.stem for path in COSTS_DIR.glob("*.toml")))
        raise ConfigError(f"costs {name}: no such file; packaged are {known}")
    return DeviceCosts.read(Path(name))
