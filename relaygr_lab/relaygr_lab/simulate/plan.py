"""Plans a fleet: the smallest number of workers that keeps the SLO, and their memory, found by simulating fleets.

The number of workers is found by bisection between a fleet that fails and one that holds, with the configured memory.
DRAM is what a share of hits among returning users needs, by reuse distances. HBM is doubled from the cache's minimum
until the SLO holds. Little's law gives the mean of pinned bytes, but each lane has its own budget, which must hold
several prefixes; only the simulation shows that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import msgspec

from relaygr_lab.simulate.memory import bytes_for, reuse_bytes
from relaygr_lab.simulate.scenario import Scenario
from relaygr_lab.simulate.story import ALLOWED_LATE, Story, late_share
from relaygr_stream.cache.memory import ALIGNMENT
from relaygr_stream.cache.tiers import capacity_for
from relaygr_stream.errors import CapacityError
from relaygr_stream.trigger.decision import REASONS
from relaygr_stream.workload.users import Part
from relaygr_stream.workload.visits import arrivals

#: Simulates one fleet.
Simulate = Callable[[Scenario], Story]

#: Tolerance of the search: the fleet that holds is at most this factor larger than one that fails.
TOLERANCE: Final = 1.05
#: Most fleets tried. From a guess within a factor of two: two steps outwards, then five halvings from ×2 to ×1.02.
MOST_PROBES: Final = 10
STEP: Final = 1.5
#: Busy share of the devices in the first guess.
GUESS_BUSY: Final = 0.7
#: Reuse distances cover this many mean times to a return, on the lanes of this many workers.
RETURN_TIMES: Final = 12
REUSE_WORKERS: Final = 4


@dataclass(frozen=True)
class Probe:
    """One fleet that was tried."""

    scenario: Scenario
    story: Story

    @property
    def holds(self) -> bool:
        """At most 1 % of the requests were late."""
        return late_share(self.story, self.scenario.settings.relay.slo_ms).value <= ALLOWED_LATE


@dataclass(frozen=True)
class Memory:
    """The bytes that a worker needs."""

    entry: int  # one prefix KV of median length
    longest: int  # one of the longest prefix and suffix
    pinned: int  # the most that admitted requests pinned at once in the simulation
    little: float  # the mean of pinned bytes by Little's law: admissions/s × seconds from event to ranking × bytes
    hbm: int  # the least found that keeps the SLO
    reuse: int  # cached prefix KV for the requested share of hits


def search(scenario: Scenario, simulate: Simulate, report: Callable[[Probe], None]) -> Probe:
    """The smallest fleet that holds. Raises CapacityError if no fleet tried does."""
    passed: Probe | None = None
    failed = 0
    workers = _guess(scenario)
    for _ in range(MOST_PROBES):
        tried = dataclasses.replace(scenario, workers=workers, failure=None)
        probe = Probe(tried, simulate(tried))
        report(probe)
        if probe.holds:
            passed = probe
        else:
            failed = workers
        if passed is None:
            workers = math.ceil(workers * STEP)
        elif failed == 0:
            workers = max(1, math.floor(workers / STEP))
            if workers == passed.scenario.workers:
                return passed
        elif passed.scenario.workers <= max(failed * TOLERANCE, failed + 1):
            return passed
        else:
            workers = math.ceil(math.sqrt(failed * passed.scenario.workers))
    if passed is None:
        raise CapacityError(
            f"no fleet of up to {failed:,} workers answers 99 % of the requests within "
            f"{scenario.settings.relay.slo_ms:g} ms: with these costs a single request may take longer; change "
            f"relay.slo_ms, --length or --costs"
        )
    return passed


def size(best: Probe, hit_target: float, simulate: Simulate, report: Callable[[Probe], None]) -> tuple[Memory, Probe]:
    """The memory that this fleet needs, and the fleet with that memory.

    hit_target: required share of returns that hit. HBM stays as configured if no smaller size holds.
    """
    scenario, settings = best.scenario, best.scenario.settings
    layout = scenario.costs.kv.layout()

    def nbytes(tokens: int) -> int:
        return -(-layout.nbytes(capacity_for(tokens)) // ALIGNMENT) * ALIGNMENT

    longest = nbytes(settings.relay.max_prefix_tokens + settings.relay.max_suffix_tokens)
    dram = max(longest, _reuse(scenario, nbytes, hit_target))  # the tiers' least
    hbm = 2 * longest
    if settings.worker.pinned_share:
        hbm = max(hbm, math.ceil(nbytes(settings.relay.max_prefix_tokens) / settings.worker.pinned_share))
    while True:
        hbm = min(hbm, settings.worker.hbm_bytes)
        worker = msgspec.structs.replace(settings.worker, hbm_bytes=hbm, dram_bytes=dram)
        tried = dataclasses.replace(scenario, settings=msgspec.structs.replace(settings, worker=worker))
        probe = Probe(tried, simulate(tried))
        report(probe)
        if probe.holds or hbm == settings.worker.hbm_bytes:
            break
        hbm *= 2
    story, traffic = probe.story, scenario.traffic
    entry = nbytes(round(traffic.length))
    admitted = float((story.reason == REASONS.index("admitted")).mean()) if len(story.reason) else 0.0
    per_worker = admitted * traffic.rate / scenario.workers
    little = per_worker * traffic.delay.median_ms / 1e3 * entry
    return Memory(entry, longest, int(story.pinned_bytes.max()), little, hbm, dram), probe


def _reuse(scenario: Scenario, nbytes: Callable[[int], int], share: float) -> int:
    """Bytes of cached prefix KV with which this share of the returns hits, on the worst of some workers."""
    traffic, lanes = scenario.traffic, scenario.lanes_per_worker
    until = RETURN_TIMES * traffic.return_s
    needs = []
    for index in range(min(REUSE_WORKERS, scenario.workers)):
        part = Part(index * lanes, lanes, scenario.workers * lanes)
        requests = takewhile(lambda one: one.at < until, arrivals(traffic, part, scenario.seed + index))
        needs.append(bytes_for(reuse_bytes(requests, nbytes), share))
    return max(needs)


def request_ms(scenario: Scenario) -> float:
    """A request's device time: its prefix or extension, and its ranking."""
    costs, traffic = scenario.costs, scenario.traffic
    length, rows = round(traffic.length), traffic.suffix + traffic.candidates
    prefix = costs.extend(0, length)
    if scenario.mode != "full":
        extension = costs.extend(length, round(traffic.growth))
        prefix = (1 - traffic.returns) * prefix + traffic.returns * min(prefix, extension)
    return prefix + costs.score([(length, rows)]) + 2 * costs.step_ms


def _guess(scenario: Scenario) -> int:
    """A number of workers from a request's device time."""
    return max(1, math.ceil(scenario.traffic.rate * request_ms(scenario) / 1e3 / GUESS_BUSY))
