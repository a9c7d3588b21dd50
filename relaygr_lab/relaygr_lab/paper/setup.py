"""A setup of `relaygr bench paper`: a fleet and its traffic, undilated; what follows from it and a cost file."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, Self

import msgspec

from relaygr_lab.bench.lengths import grid_length
from relaygr_lab.bench.options import DELAY_SIGMA, TIMEOUT_SLOS
from relaygr_lab.bench.oracle import Shape
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_stream.settings.schema import Settings
from relaygr_stream.workload.arrivals import ArrivalLog
from relaygr_stream.workload.items import StageDelay
from relaygr_stream.workload.traffic import Mix, Tide, Traffic

#: The headline is the geometric mean over the first four.
HEADLINE: Final = (0.25, 0.5, 0.75, 1.0)
GRID: Final = (*HEADLINE, 2.0, 4.0)
#: No probe exceeds this rate: broker, trigger, workers and client share two cores.
MOST_RATE: Final = 60.0
#: The relay may carry more than the oracle, as rankings that are scored together share a fixed time: so many times
#: the oracle's rate can be sent, so that searches end where the relay does and not at MOST_RATE.
HEADROOM: Final = 1.25
SUFFIX: Final = 8
GROWTH: Final = 3.0
#: Short users' prefixes, as a share of the unit length.
SHORT_SHARE: Final = 0.05
#: Users among whom first visits are drawn: the more, the fewer of them have been there before.
USERS: Final = 200_000
#: Requests in a period of a tide: a simulated probe has four, a measured one about three.
TIDE_REQUESTS: Final = 300
GIB: Final = 1 << 30


class Ground(NamedTuple):
    """What setups run on, undilated: the costs of a device, and the settings of the processes."""

    costs: DeviceCosts
    settings: Settings

    @property
    def slo_ms(self) -> float:
        """The SLO of the ranking P99."""
        return self.settings.relay.slo_ms


class Setup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fleet and its traffic. share: of the grid's unit length. delay_ms: head start, undilated.

    known: users with 512 tokens that it knows before it is measured, fewer if longer. long: share of the users who have
    the length; the others are short. hot: share of the users on one lane. layers: × those of the cost file.
    timeout: of a ranking, in SLOs: workers refuse what would be late by it.
    load: the probe's rate as a share of the oracle's largest for the relay; 0: the largest rate is searched.
    arrivals: the log whose times, and users if it has them, the requests have; "": Poisson.
    real: on the engine of this machine, with its own memory and undilated, not on emulated devices.
    """

    share: float = 1.0
    revisit: float = 0.5
    workers: int = 4
    candidates: int = 32
    delay_ms: float = 150.0
    known: int = 100
    long: float = 1.0
    zipf: float = 0.0
    hot: float = 0.0
    swing: float = 0.0
    hbm_gib: int = 32
    dram_gib: int = 256
    layers: float = 1.0
    timeout: float = TIMEOUT_SLOS
    load: float = 0.0
    arrivals: str = ""
    real: bool = False

    def at(self, **changed: Any) -> Self:
        """The same with other values; whole numbers stay whole."""
        kinds = {name: type(getattr(self, name)) for name in changed}
        return msgspec.structs.replace(self, **{name: kinds[name](value) for name, value in changed.items()})

    def length(self, costs: DeviceCosts, slo_ms: float) -> int:
        """Prefix tokens. The unit is that of 32 candidates by the cost file, whatever the setup's own."""
        return grid_length(costs, slo_ms, self.share)

    def mix(self, costs: DeviceCosts, slo_ms: float) -> Mix | None:
        """The short majority; None: all users are long."""
        return None if self.long >= 1 else Mix(1 - self.long, grid_length(costs, slo_ms, SHORT_SHARE))

    def costs(self, costs: DeviceCosts) -> DeviceCosts:
        """The costs of its devices."""
        return costs if self.layers == 1.0 else costs.scaled(self.layers, 1.0)

    def settings(self, settings: Settings) -> Settings:
        """The settings of its processes."""
        if self.real:
            return settings
        sizes = {"hbm_bytes": self.hbm_gib * GIB, "dram_bytes": self.dram_gib * GIB}
        return msgspec.structs.replace(settings, worker=msgspec.structs.replace(settings.worker, **sizes))

    def traffic(self, ground: Ground, factor: float, rate: float, log: ArrivalLog | None) -> Traffic:
        """Its traffic in time dilated by this factor. rate: dilated. log: that of the run."""
        return Traffic(
            rate=rate,
            users=USERS,
            zipf=self.zipf,
            revisit=self.revisit,
            length=self.length(ground.costs, ground.slo_ms),
            mix=self.mix(ground.costs, ground.slo_ms),
            growth=GROWTH,
            tide=Tide(self.swing, TIDE_REQUESTS / rate) if self.swing else None,
            arrivals=log if self.arrivals else None,
            max_prefix=ground.settings.relay.max_prefix_tokens,
            suffix=SUFFIX,
            candidates=self.candidates,
            delay=StageDelay(factor * self.delay_ms, DELAY_SIGMA),
        )

    def shape(self, costs: DeviceCosts, slo_ms: float) -> Shape:
        """The same for the oracle, which knows neither lanes nor tides nor tiers."""
        mix = self.mix(costs, slo_ms)
        return Shape(
            length=self.length(costs, slo_ms),
            revisit=self.revisit,
            rows=SUFFIX + self.candidates,
            growth=GROWTH,
            delay_ms=self.delay_ms,
            slo_ms=slo_ms,
            workers=self.workers,
            short=0 if mix is None else round(mix.tokens),
            short_share=0.0 if mix is None else mix.share,
        )

    @property
    def words(self) -> str:
        """For the progress and the tables: what differs from the usual, behind length and revisit ratio."""
        usual = Setup()
        parts = [f"{self.share:g} × length", f"revisit {self.revisit:.0%}"]
        parts += [
            text
            for name, text in (
                ("workers", f"{self.workers} workers"),
                ("candidates", f"{self.candidates} candidates"),
                ("delay_ms", f"head start {self.delay_ms:g} ms"),
                ("known", f"{self.known} known users of 512 tokens"),
                ("long", f"{self.long:.0%} long users"),
                ("zipf", f"Zipf {self.zipf:g}"),
                ("hot", f"{self.hot:.0%} on one lane"),
                ("swing", f"tide ± {self.swing:.0%}"),
                ("hbm_gib", f"{self.hbm_gib} GiB HBM"),
                ("dram_gib", f"{self.dram_gib} GiB DRAM"),
                ("layers", f"{self.layers:g} × layers"),
                ("timeout", f"timeouts of {self.timeout:g} SLO{'s' * (self.timeout != 1)}"),
                ("load", f"load {self.load:.0%}"),
                ("arrivals", f"arrivals of {self.arrivals}"),
                ("real", "the real engine"),
            )
            if getattr(self, name) != getattr(usual, name)
        ]
        return ", ".join(parts)


def factor_for(oracle: float, load: float = 0.0) -> int:
    """The dilation with which HEADROOM times this rate (undilated, requests/s) becomes MOST_RATE or less; of a given
    load, a share of that rate, if more, that load."""
    return max(1, math.ceil(max(HEADROOM, load) * oracle / MOST_RATE))
