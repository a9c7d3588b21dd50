"""How many workers, and how much memory in each: the smallest fleet that keeps the SLO, found by simulating fleets.

Workers are searched by bisection between a fleet that fails and one that holds, with memory as configured. Then DRAM:
what a share of hits among returning users needs, by reuse distances; and HBM: doubled from the least that the cache
takes until the SLO holds. Little's law tells what admitted requests pin on average, but each of a worker's lanes has a
budget of its own that must hold several prefixes, which only the simulation knows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import msgspec

from relaygr_stream.cache.memory import ALIGNMENT
from relaygr_stream.cache.tiers import capacity_for
from relaygr_stream.errors import CapacityError
from relaygr_stream.lab.simulate.memory import bytes_for, reuse_bytes
from relaygr_stream.lab.simulate.scenario import Scenario
from relaygr_stream.lab.simulate.story import ALLOWED_LATE, Story, late_share
from relaygr_stream.lab.simulate.traffic import Part, arrivals
from relaygr_stream.trigger.decision import REASONS

#: Simulates one fleet.
Simulate = Callable[[Scenario], Story]

#: The bracket of the search: the fleet that holds is at most this much larger than one that fails.
TOLERANCE: Final = 1.05
#: Fleets tried at most. From a guess within a factor of two: two steps outwards, then five halvings of ×2 to ×1.02.
MOST_PROBES: Final = 10
STEP: Final = 1.5
#: Device time that a first guess fills.
GUESS_BUSY: Final = 0.7
#: Reuse distances are taken over so many mean times to a return, in so many workers' lanes.
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
    """Bytes a worker needs."""

    entry: int  # one prefix KV of median length
    pinned: int  # the most that admitted requests held at once, as simulated
    little: float  # their mean by Little's law: admissions/s × seconds from event to ranking × bytes
    hbm: int  # the least that was found to keep the SLO
    reuse: int  # cached prefix KV for the share of hits asked for


def search(scenario: Scenario, simulate: Simulate, report: Callable[[Probe], None]) -> Probe:
    """The smallest fleet that holds. Raises CapacityError if none of those tried does."""
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
            f"{scenario.settings.relay.slo_ms:g} ms: with these costs a request may need longer by itself "
            f"(relay.slo_ms, --length, --costs)"
        )
    return passed


def size(best: Probe, hit_target: float, simulate: Simulate, report: Callable[[Probe], None]) -> tuple[Memory, Probe]:
    """The memory that this fleet needs, and the fleet with it. hit_target: among returns, what caches are to find.

    HBM stays as configured if nothing smaller holds.
    """
    scenario, settings = best.scenario, best.scenario.settings
    layout = scenario.costs.kv.layout()

    def nbytes(tokens: int) -> int:
        return -(-layout.nbytes(capacity_for(tokens)) // ALIGNMENT) * ALIGNMENT

    dram = _reuse(scenario, nbytes, hit_target)
    hbm = 2 * nbytes(settings.relay.max_prefix_tokens + settings.relay.max_suffix_tokens)
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
    return Memory(entry, int(story.pinned_bytes.max()), little, hbm, dram), probe


def _reuse(scenario: Scenario, nbytes: Callable[[int], int], share: float) -> int:
    """Cached prefix KV that finds this share of the returns, on the worst of some workers."""
    traffic, lanes = scenario.traffic, scenario.lanes_per_worker
    until = RETURN_TIMES * traffic.return_s
    needs = []
    for index in range(min(REUSE_WORKERS, scenario.workers)):
        part = Part(index * lanes, lanes, scenario.workers * lanes)
        requests = takewhile(lambda one: one.at < until, arrivals(traffic, part, scenario.seed + index))
        needs.append(bytes_for(reuse_bytes(requests, nbytes), share))
    return max(needs)


def _guess(scenario: Scenario) -> int:
    """By the device time of a request: prefix or extension, and the ranking."""
    costs, traffic = scenario.costs, scenario.traffic
    length, rows = round(traffic.length), traffic.suffix + traffic.candidates
    prefix = costs.extend(0, length)
    if scenario.mode != "full":
        extension = costs.extend(length, round(traffic.growth))
        prefix = (1 - traffic.revisit) * prefix + traffic.revisit * min(prefix, extension)
    ms = prefix + costs.score([(length, rows)]) + 2 * costs.step_ms
    return max(1, math.ceil(traffic.rate * ms / 1e3 / GUESS_BUSY))
