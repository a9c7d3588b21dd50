"""What values set by hand are worth beside the defaults: `python relaygr_lab/benchmarks/hand_set.py`.

Simulated fleets of the packaged cost files, with 0, 50 and 90 % returning users and a share that changes in the middle:
what is answered within the SLO at a load past capacity, or the largest rate within it, for the defaults and for each
value beside them. The grid takes half an hour of one core. With CHECK=1 in the environment it exits non-zero where the
defaults reach less than WITHIN of the best.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final, NamedTuple

from judge import judge
from relaygr_lab.bench.lengths import costs_named, grid_length
from relaygr_lab.bench.modes import RELAY
from relaygr_lab.bench.oracle import Shape, largest_rate
from relaygr_lab.bench.search import Search
from relaygr_lab.pools import pool_of
from relaygr_lab.simulate.run import run_group
from relaygr_lab.simulate.scenario import Scenario
from relaygr_lab.simulate.story import ALLOWED_LATE, Story, late_share

from relaygr_stream.settings.load import load_settings
from relaygr_stream.workload.items import StageDelay
from relaygr_stream.workload.traffic import Shift, Traffic

#: The defaults carry at least this share of what the best hand-set values carry.
WITHIN: Final = 0.95
WORKERS: Final = 2
#: Simulated seconds before the judged ones, and those: reuse is averaged over ten.
WARM_S: Final = 6.0
SECONDS: Final = 8.0
#: The prefix KV of the users who are about to return fill this share of the HBM tiers: the split of memory matters.
KNOWN_PART: Final = 0.6
SUFFIX: Final = 8
CANDIDATES: Final = 32
GROWTH: Final = 3.0
HEAD_START_MS: Final = 150.0
TOLERANCE: Final = 1.03
#: The tiers of each cost file's device.
TIERS: Final = {"cpu": ("256MiB", "2GiB"), "npu": ("32GiB", "256GiB"), "h100": ("32GiB", "256GiB")}
#: Returning users: share, and what it becomes in the middle of the judged seconds.
RETURNING: Final = {"0 %": (0.0, None), "50 %": (0.5, None), "90 %": (0.9, None), "90 to 30 %": (0.9, 0.3)}
#: The values that are set by hand, each alone.
VALUES: Final = {
    "worker.pinned_share": (0.25, 0.5, 0.7, 0.9),
    "worker.max_ranking_delay_ms": (2.5, 5.0, 10.0, 20.0),
}
#: All of them, as a profile for fleets of emulated devices set them until they were derived.
PROFILE: Final = (
    ("worker.pinned_share", 0.7),
    ("worker.max_ranking_delay_ms", 10.0),
)
BY_HAND: Final = (PROFILE, *(((name, value),) for name, values in VALUES.items() for value in values))


class Cell(NamedTuple):
    """One figure: a device, its traffic, and the settings by hand."""

    costs: str
    returning: str
    values: tuple[tuple[str, float], ...] = ()

    @property
    def words(self) -> str:
        return ", ".join(f"{name.partition('.')[2]} = {value:g}" for name, value in self.values) or "defaults"


@dataclass(frozen=True)
class Ground:
    """What one cell is simulated with."""

    scenario: Scenario
    oracle: float
    known: float  # users who are about to return

    @classmethod
    def of(cls, cell: Cell, lanes: int, seed: int) -> Ground:
        costs = costs_named(cell.costs)
        hbm, dram = TIERS[cell.costs]
        given = {
            "relay.max_prefix_tokens": "8192", "relay.max_suffix_tokens": "16", "worker.audit_share": "0",
            "worker.truncate_to": "0", "worker.hbm_bytes": hbm, "worker.dram_bytes": dram,
        }  # fmt: skip
        settings = load_settings([], {**given, **dict(cell.values)}).settings
        revisit, then = RETURNING[cell.returning]
        length = grid_length(costs, settings.relay.slo_ms)
        traffic = Traffic(
            rate=1.0, revisit=revisit, length=length, growth=GROWTH, max_prefix=8192,
            shift=None if then is None else Shift(then, WARM_S + SECONDS / 2),
            suffix=SUFFIX, candidates=CANDIDATES, delay=StageDelay(HEAD_START_MS, 0.1),
        )  # fmt: skip
        scenario = Scenario(
            settings=settings, costs=costs, traffic=traffic, workers=WORKERS, sample=WORKERS, lanes_per_worker=lanes,
            seconds=SECONDS, warm_s=WARM_S, seed=seed,
        )  # fmt: skip
        least = revisit if then is None else min(revisit, then)
        shape = Shape(
            length=length, revisit=least, rows=SUFFIX + CANDIDATES, growth=GROWTH, delay_ms=HEAD_START_MS,
            slo_ms=settings.relay.slo_ms, workers=WORKERS,
        )  # fmt: skip
        entry = costs.kv.layout().nbytes(length)
        known = KNOWN_PART * WORKERS * settings.worker.hbm_bytes / entry / max(scenario.traffic.returns, 0.1)
        return cls(scenario, largest_rate(RELAY, costs, shape), known)

    def at(self, rate: float) -> Story:
        scenario = self.scenario
        traffic = dataclasses.replace(scenario.traffic, rate=rate, return_s=self.known / rate)
        scenario = dataclasses.replace(scenario, traffic=traffic)
        return run_group(scenario, scenario.groups[0])

    def within(self, rate: float) -> float:
        """The share answered within the SLO at this rate."""
        return 1 - late_share(self.at(rate), self.scenario.settings.relay.slo_ms).value


def figure(cell: Cell, *, lanes: int, seed: int, load: float) -> float:
    """Requests/s: the largest rate within the SLO; with a load, what is answered within it at that."""
    ground = Ground.of(cell, lanes, seed)
    if load:
        rate = load * ground.oracle
        return rate * ground.within(rate)
    search = Search(0.9 * ground.oracle, 1.0, 4 * ground.oracle, 1.15, TOLERANCE)
    while (tried := search.next()) is not None:
        search.record(tried, ground.within(tried) >= 1 - ALLOWED_LATE)
    return search.passed or 0.0


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", type=float, default=1.25, help="of the oracle's largest rate; 0: search the largest")
    parser.add_argument("--costs", nargs="+", choices=list(TIERS), default=list(TIERS))
    parser.add_argument("--returning", nargs="+", choices=list(RETURNING), default=list(RETURNING))
    parser.add_argument("--lanes", type=int, default=8, help="of a worker")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--processes", type=int, default=1)
    chosen = parser.parse_args()
    measure = partial(figure, lanes=chosen.lanes, seed=chosen.seed, load=chosen.load)
    broken = []
    with pool_of(chosen.processes) as pool:
        for costs, returning in product(chosen.costs, chosen.returning):
            cells = [Cell(costs, returning, values) for values in ((), *BY_HAND)]
            default = best = 0.0
            for cell, found in zip(cells, pool.map(measure, cells), strict=True):
                default, best = default or found, max(best, found)
                ratio = f"{found / default:.3f} of the defaults" if default else ""
                print(f"{costs:>5}, {returning:>11} returning, {cell.words}: {found:.1f}/s, {ratio}", flush=True)
            if default < WITHIN * best:
                broken.append(
                    f"{costs}, {returning} returning: defaults at {default / best:.3f} of the best; bound: {WITHIN:g}"
                )
    return broken


if __name__ == "__main__":
    judge(main)
