"""The options of a run: presets, which the command line may change.

The processes' settings (model, memory, SLO) are in workers/slo-quick.toml and workers/slo-paper.toml.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from relaygr_lab.bench import capacity
from relaygr_lab.bench.modes import CACHE, FULL, MODES, RELAY, Mode
from relaygr_lab.bench.statistics import STAGES_AT_MOST
from relaygr_stream.errors import ConfigError
from relaygr_stream.workload.arrivals import ArrivalLog
from relaygr_stream.workload.items import StageDelay
from relaygr_stream.workload.traffic import Mix, Spread, Tide, Traffic

#: Sigma of the log-normal head start.
DELAY_SIGMA: Final = 0.1
#: Timeout of a ranking, in SLOs, unless asked for otherwise: long enough to measure how late a late one is.
TIMEOUT_SLOS: Final = 8.0


@dataclass(frozen=True, kw_only=True)
class SloOptions:
    """The options of one run. Raises ConfigError for numbers out of range."""

    preset: str
    broker: Literal["embedded", "kafka"] | None = None  # None: kafka.bootstrap names a running cluster
    workers: int = 1
    modes: tuple[Mode, ...] = MODES
    length: int  # prefix tokens at which rates are searched
    rate: float | None = None  # requests/s at which lengths are searched; None: full inference's largest
    revisits: tuple[float, ...] = (0.0, 0.5, 0.9)
    length_revisits: tuple[float, ...] = (0.5, 0.9)  # revisit ratios at which lengths are searched
    every_cell: bool = False  # every mode at every ratio; otherwise those that distinguish the modes
    delay: StageDelay = field(default_factory=lambda: StageDelay(150.0, DELAY_SIGMA))
    suffix: int = 8
    candidates: int = 32
    growth: float = 3.0
    known: int = 100  # users with 512 tokens who are about to return at any moment; fewer if longer
    users: int = 200_000  # among whom first visits are drawn: with 1,000 known, one in 200 draws gives a known user
    zipf: float = 0.0
    sigma: float = 0.0
    mix: Mix | None = None
    tide: Tide | None = None
    hot: float = 0.0  # share of the users who are all on the first lane
    arrivals: ArrivalLog | None = None
    samples: int  # requests judged in a stage of a probe
    stages: int = STAGES_AT_MOST
    least_s: float = 2.5
    warm_up_s: float = 1.0
    settle_s: float = 4.0  # seconds that users return before the first probe of a population
    tolerance: float
    repeats: int
    budget_s: float  # time of the run: no probe starts that would end later
    seed: int = 7
    out: Path = Path("out/slo")
    starts: Mapping[str, float] = field(default_factory=dict)  # mode → rate at which its search starts, where known
    most_probes: int = 12  # of a search
    timeout_slos: float = TIMEOUT_SLOS  # of a ranking
    most_rate: float = math.inf  # no probe exceeds it
    overload: tuple[float, ...] = ()  # of the largest rate that the relay carries, offered to callers who wait a second
    whole: bool = False  # probes run to their end, whatever the verdict: their P99 is then no lower bound
    shared_broker: bool = False  # the cluster at kafka.bootstrap is this run's own, on this machine

    @property
    def private(self) -> bool:
        """Whether all processes of the run are descendants of this one."""
        return self.broker is not None or self.shared_broker

    def __post_init__(self) -> None:
        if self.arrivals is not None and self.arrivals.users is not None:  # returns are the log's
            for name in ("revisits", "length_revisits"):
                if getattr(self, name):
                    object.__setattr__(self, name, (self.arrivals.returns,))
        if not self.revisits or not all(0 <= ratio < 1 for ratio in (*self.revisits, *self.length_revisits)):
            raise ConfigError(f"revisit ratios {self.revisits}, {self.length_revisits}: must be within 0…1, 1 excluded")
        for name in ("workers", "suffix", "known", "samples", "repeats", "budget_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be above 0")
        # Refuses, before any process starts, what the traffic of a probe would. The settings bound the length (run.py).
        Traffic(**self.shape, rate=1.0 if self.rate is None else self.rate, max_prefix=sys.maxsize)
        if self.tolerance <= 1:
            raise ConfigError(f"tolerance = {self.tolerance:g}: is a factor above 1")

    @property
    def shape(self) -> dict[str, Any]:
        """What its traffic has in common at all rates, as `Traffic` names it."""
        names = (one.name for one in fields(Traffic) if one.name != "rate")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def requests(self, most: int) -> capacity.Traffic:
        """Its requests, of at most `most` prefix tokens, for bounds and estimates."""
        spread = Spread(self.sigma, self.mix, most) if self.sigma or self.mix else None
        rows = self.candidates + self.suffix
        return capacity.Traffic(self.length, self.revisits[0], self.growth, rows, self.delay.median_ms, spread)

    def rate_cells(self) -> list[tuple[Mode, float]]:
        """Modes and revisit ratios for which the largest rate is searched."""
        cells: list[tuple[Mode, float]] = []
        for mode in self.modes:
            ratios = self.revisits
            if not mode.keeps:
                ratios = self.revisits[:1]  # without reuse, the ratio makes no difference
            elif not self.every_cell and mode is not RELAY:
                ratios = self.revisits[-1:]  # where keeping and tiers matter most
            cells += [(mode, ratio) for ratio in ratios]
        return cells

    def length_cells(self) -> list[tuple[Mode, float]]:
        """Modes and revisit ratios for which the largest length is searched."""
        modes = self.modes if self.every_cell else [mode for mode in self.modes if mode in (FULL, RELAY)]
        cells: list[tuple[Mode, float]] = []
        for mode in modes:
            if mode.keeps:
                cells += [(mode, ratio) for ratio in self.length_revisits]
            elif self.rate is not None:  # otherwise the rate is its largest, whose length is known
                cells += [(mode, ratio) for ratio in self.length_revisits[:1]]
        return cells


#: Only modes that share one pipeline: the start of another pipeline takes more of three minutes than its search.
QUICK: Final[dict[str, Any]] = {
    "modes": (FULL, CACHE, RELAY),
    "samples": 100,
    "tolerance": 1.2,
    "repeats": 1,
    "budget_s": 170.0,
}
PAPER: Final = {
    "samples": 1000,
    "tolerance": 1.05,
    "repeats": 3,
    "budget_s": 4 * 3600.0,
    "every_cell": True,
    "warm_up_s": 3.0,
    "least_s": 10.0,
}
PRESETS: Final = {"quick": QUICK, "paper": PAPER}
