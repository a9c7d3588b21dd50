"""Simulates a setup in a mode as the fleet runs it: in the same dilated time, on a bus of the same real milliseconds.

A value is the median of several seeds: traffic, bus and random choices are drawn anew for each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from relaygr_lab.averages import stretched
from relaygr_lab.bench.dilation import dilated
from relaygr_lab.bench.modes import Mode, apply_mode
from relaygr_lab.bench.populations import known_users
from relaygr_lab.bench.run import LANES_PER_WORKER
from relaygr_lab.bench.search import Search
from relaygr_lab.paper.results import SIGNALS, Outcome
from relaygr_lab.paper.setup import GIB, TIDE_REQUESTS, Ground
from relaygr_lab.simulate.bus import BusLatency
from relaygr_lab.simulate.run import TooLateError, run_group
from relaygr_lab.simulate.scenario import Scenario
from relaygr_lab.simulate.story import (
    ALLOWED_LATE,
    OUTCOMES,
    Floats,
    Story,
    counts,
    late_share,
    latencies,
    percentile,
)
from relaygr_stream.trigger.decision import REASONS
from relaygr_stream.workload.arrivals import ArrivalLog

#: One way of the bus, in real milliseconds: about what a quiet fleet of this bench shows (`bus` in the report).
BUS: Final = BusLatency(p50_ms=2.0, p99_ms=6.0)
#: Judged requests of a probe: twelve beyond the P99, and whole tides.
REQUESTS: Final = 4 * TIDE_REQUESTS
#: Requests before them, and so many for each user who returns: each has been there, and prefix KV are where they stay.
WARM_UP: Final = 300
ROUNDS: Final = 3
#: The share of a log's arrivals before the judged ones.
LOG_WARM_UP: Final = 0.2
#: Rates are found to within this. A search begins at the oracle's rate with steps of two tolerances, or at what another
#: seed found with steps of one; each step outwards is twice as long as the one before, since some modes carry a tenth.
TOLERANCE: Final = 1.05
WIDENING: Final = 2.0
#: The least rate tried, undilated, requests/s.
LEAST_RATE: Final = 1.0


@dataclass(frozen=True)
class Simulation:
    """One value to simulate; can be sent to another process. blank: its outcome, in which nothing is found yet.

    most: the oracle's largest rate for the relay, of which the setup's load is a share; other: what another seed found.
    A log is played once, from its beginning, so that its mean rate is the probe's.
    """

    blank: Outcome
    mode: Mode
    ground: Ground
    seed: int
    most: float
    other: float | None = None
    log: ArrivalLog | None = None  # of the setup's arrivals

    def run(self) -> Outcome:
        """Search the largest rate, or look at the given one."""
        setup = self.blank.setup
        if setup.load:
            rate = setup.load * self.most
            story = self._simulate(rate)
            return self._outcome(story, rate, rate if self._holds(story) else None, None, settled=True)
        start, step = self.other, TOLERANCE
        if start is None:
            start, step = (self.blank.oracle or self.most / 4) / (1 + setup.swing), TOLERANCE**2
        highest = max(2 * LEAST_RATE, 4 * self.most)
        search = Search(start, LEAST_RATE, highest, step, TOLERANCE, widening=WIDENING)
        best: Story | None = None
        while (rate_now := search.next()) is not None:
            passing = self._passing(rate_now)
            search.record(rate_now, passing is not None)
            best = passing or best  # each rate that passes is larger than those before
        return self._outcome(best, search.passed, search.passed, search.failed, settled=search.settled)

    def _passing(self, rate: float) -> Story | None:
        """The simulation at this rate, if it passes."""
        try:
            story = self._simulate(rate, self._slo_ms)
        except TooLateError:
            return None
        return story if self._holds(story) else None

    def _holds(self, story: Story) -> bool:
        return self._late(story) <= ALLOWED_LATE

    def _late(self, story: Story) -> float:
        return late_share(story, self._slo_ms).value

    @property
    def _slo_ms(self) -> float:
        """Dilated."""
        return self.blank.factor * self.ground.slo_ms

    def _simulate(self, rate: float, within_ms: float = math.inf) -> Story:
        setup, factor, ground = self.blank.setup, self.blank.factor, self.ground
        dilated_rate = rate / factor
        known, judged = known_users(setup.known, self.blank.length, setup.revisit), float(REQUESTS)
        warm = WARM_UP + ROUNDS * known / max(setup.revisit, 0.1)
        if self.log is not None:
            warm = LOG_WARM_UP * len(self.log.times)
            judged = len(self.log.times) - warm
        traffic = setup.traffic(ground, factor, dilated_rate, self.log)
        traffic = replace(traffic, return_s=known / setup.revisit / dilated_rate if known else 1.0)
        mode, asked = self.mode, setup.settings(ground.settings)
        client = msgspec.structs.replace(
            asked.client, timeout_ms=setup.timeout * ground.slo_ms
        )  # as a probe's rankings
        scenario = Scenario(
            settings=dilated(apply_mode(mode, msgspec.structs.replace(asked, client=client)), factor),
            costs=setup.costs(ground.costs).dilated(factor),
            traffic=traffic,
            workers=setup.workers,
            sample=setup.workers,
            lanes_per_worker=LANES_PER_WORKER,
            seconds=judged / dilated_rate,
            warm_s=warm / dilated_rate,
            mode="full" if mode.request == "full" else "relay" if mode.announce else "cache",
            bus=BUS,
            route=mode.route,
            policy=mode.policy,
            hot=setup.hot,
            seed=self.seed,
        )
        (group,) = scenario.groups
        with stretched(factor):
            return run_group(scenario, group, within_ms)

    def _outcome(
        self, story: Story | None, at: float | None, rate: float | None, failed: float | None, *, settled: bool
    ) -> Outcome:
        """story: at the given rate, or the largest; None: none passed."""
        setup, given = self.blank.setup, at if self.blank.setup.load else None
        outcome = msgspec.structs.replace(self.blank, rate=rate, failed=failed, settled=settled, given=given)
        if story is None:
            return outcome
        every, short = latencies(story), setup.long < 1
        reasons = counts(story.reason[story.reason >= 0], REASONS)
        return msgspec.structs.replace(
            outcome,
            p99_ms=self._p99(every),
            p99_short=self._p99(every[~story.long]) if short else None,
            p99_long=self._p99(every[story.long]) if short else None,
            requests=len(story.at),
            within=1 - self._late(story),
            outcomes=counts(story.outcome[story.outcome >= 0], OUTCOMES),
            signals={name: story.signals[name] for name in SIGNALS},
            decisions=reasons,
            announced=sum(reasons.values()),
            busy=float(story.busy.mean()),
            tiers={"hbm": float(story.hbm_bytes.sum()) / GIB, "dram": float(story.dram_bytes.sum()) / GIB},
        )

    def _p99(self, latencies_ms: Floats) -> float | None:
        """Undilated; a request without scores counts as its timeout, as in a probe. None: no request."""
        most = self.blank.setup.timeout * self.ground.slo_ms
        return min(most, percentile(latencies_ms, 0.99) / self.blank.factor) if len(latencies_ms) else None
