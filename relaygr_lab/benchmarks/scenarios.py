"""Two scenarios with opposite tides on a few devices: `python relaygr_lab/benchmarks/scenarios.py`.

In simulated time: a feed (2,000 tokens, 50 ms) and a search page (300 tokens, 20 ms), whose rates swing by 60 %, on
devices with the assumed costs of an NPU. What share of each is answered within its SLO, and the mean of both, by one
mixed pool, by the best fixed split, by groups that the planner's own rules move, and by an oracle that knows the day.
First, what one device carries of each. With CHECK=1 in the environment it exits non-zero where moving groups miss their
targets. The load of this machine does not matter; it takes half an hour of a core, five minutes with --quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Final

import torch
from relaygr_lab.bench.lengths import costs_named
from relaygr_lab.simulate.groups import Day, GroupsDay, Outcome, Surface, run_mixed
from relaygr_lab.simulate.movers import foreseen, planned
from targets import end

from relaygr_stream.ops.planner.demand import demand_of
from relaygr_stream.ops.planner.plan import Damping
from relaygr_stream.ops.planner.seen import Observation
from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.workload.items import StageDelay
from relaygr_stream.workload.traffic import Tide, Traffic

#: Of the oracle, and of the best fixed split.
OF_ORACLE: Final = 0.9
OF_STATIC: Final = 1.15
SCENARIOS: Final = (
    Scenario(name="feed", slo_ms=50.0, lead_ms=150.0),
    Scenario(name="search", slo_ms=20.0, lead_ms=150.0),
)
LENGTHS: Final = {"feed": 2000.0, "search": 300.0}
#: So a ranking of search takes 5 of its 20 ms. One of the feed takes 16 ms with FEED candidates, as long as search can
#: wait, and 7 ms with 400.
CANDIDATES: Final = 300
FEED: Final = 1000
#: Users return after so many seconds, half of the requests are theirs: a day of minutes must not begin cold.
RETURN_S: Final = 4.0
SWING: Final = 0.6
#: A device's change of model: weights of 1 GB, their check, the warm-up of each size. Assumed.
LOAD_S: Final = 2.0
#: Mean load of all devices, of what they carry with 1 % late. A device that gets more is late more often, and carries
#: about twice as much before it refuses: at 1.25 the best fixed split loses a twentieth, and no mover can win more.
LOAD: Final = 1.75
GIVEN: Final = {
    # A ranking that no worker has in time is refused, not cut to its newest behaviours: it does not count as answered.
    "worker.truncate_to": "0", "worker.hbm_bytes": "32GiB", "worker.dram_bytes": "64GiB", "worker.audit_share": "0",
    "relay.max_prefix_tokens": "4096",
}  # fmt: skip


def surface(scenario: Scenario, rate: float, tide: Tide | None, phase: float, feed: int) -> Surface:
    """A scenario's traffic. feed: candidates of a ranking of the feed."""
    traffic = Traffic(
        rate=rate, revisit=0.5, return_s=RETURN_S, length=LENGTHS[scenario.name], sigma=0.3, max_prefix=4096, tide=tide,
        candidates=feed if scenario.name == "feed" else CANDIDATES, delay=StageDelay(150.0, 0.1),
    )  # fmt: skip
    return Surface(scenario, traffic, phase)


def day_of(rates: Mapping[str, float], devices: int, seconds: float, feed: int, *, tide: bool) -> Day:
    """A day with these mean rates."""
    swing = Tide(SWING, seconds) if tide else None
    surfaces = tuple(surface(each, rates[each.name], swing, index / 2, feed) for index, each in enumerate(SCENARIOS))
    settings = load_settings([], GIVEN).settings
    return Day(surfaces, settings, costs_named("npu"), devices, seconds, 2 * RETURN_S, LOAD_S)


def carried(scenario: Scenario, seconds: float, feed: int) -> tuple[float, float]:
    """Requests a second within the SLO for one of two devices that serve this scenario alone, 1 % late; and the devices
    that the planner says are needed for what it sees at that rate, of one."""
    torch.set_num_threads(1)
    low, high, need = 10.0, 80.0, 0.0
    while high > 1.1 * low:
        rate = (low * high) ** 0.5
        day = day_of(dict.fromkeys(LENGTHS, 2 * rate), 2, seconds, feed, tide=False)
        day = dataclasses.replace(day, surfaces=tuple(each for each in day.surfaces if each.scenario == scenario))
        needs: list[float] = []

        def look(seen: Observation, at_s: float, needs: list[float] = needs) -> None:
            del at_s
            needs.append(demand_of(seen.groups[scenario.name], scenario) / 2)

        told = GroupsDay(day, {scenario.name: 2}, look, seconds / 2).run().told[scenario.name]
        if told.within >= 0.99 * told.asked:
            low, need = rate, needs[-1]
        else:
            high = rate
    return low, need


def run(
    arm: str, rates: Mapping[str, float], capacity: Mapping[str, float], devices: int, seconds: float, feed: int
) -> Outcome:
    """One day. arm: mixed, moving, oracle, or the devices of the feed."""
    torch.set_num_threads(1)
    day = day_of(rates, devices, seconds, feed, tide=True)
    if arm == "mixed":
        return run_mixed(day)
    of_feed = int(arm) if arm.isdigit() else devices // 2
    mover = None
    if arm == "moving":
        # A day of 86,400 s in so many seconds cannot have a planner's pace: its minutes are a sixtieth of the day.
        mover = planned(SCENARIOS, Damping(floor_s=seconds / 60, patience_s=seconds / 120, settle_s=seconds / 60))
    elif arm == "oracle":
        mover = foreseen(day, capacity, LOAD_S + 1.0)
    return GroupsDay(day, {"feed": of_feed, "search": devices - of_feed}, mover, seconds / 120).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four devices and a day of a minute")
    parser.add_argument("--devices", type=int, choices=[4, 5, 6], help="[6; 4 with --quick]")
    parser.add_argument("--seconds", type=float, help="of the day [600; 60 with --quick]")
    parser.add_argument(
        "--load", type=float, default=LOAD, help="mean, of what the devices carry (default %(default)s)"
    )
    parser.add_argument("--candidates", type=int, default=FEED, help="of a ranking of the feed (default %(default)s)")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    devices = chosen.devices or (4 if chosen.quick else 6)
    seconds = chosen.seconds or (60.0 if chosen.quick else 600.0)
    started = time.monotonic()
    with ProcessPoolExecutor(chosen.processes, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(partial(carried, seconds=10.0, feed=chosen.candidates), SCENARIOS))
        capacity = {each.name: rate for each, (rate, _) in zip(SCENARIOS, found, strict=True)}
        rates = {name: chosen.load * devices / 2 * rate for name, rate in capacity.items()}
        for (name, rate), (_, need) in zip(capacity.items(), found, strict=True):
            say = f"for which the planner's bound asks for {need:.2f} devices"
            floors = [rates[name] * (1 + swing) / rate for swing in (-SWING, 0, SWING)]
            print(
                f"{name}: a device carries {rate:.1f}/s, {say}; the day has {rates[name]:.1f}/s ± {SWING:.0%}: "
                f"{floors[0]:.1f}, {floors[1]:.1f} and {floors[2]:.1f} devices at its ebb, mean and flood",
                flush=True,
            )
        arms = ["mixed", "moving", "oracle", *(str(feed) for feed in range(1, devices))]
        outcomes = {}
        day = {"rates": rates, "capacity": capacity, "devices": devices, "seconds": seconds, "feed": chosen.candidates}
        for arm, outcome in zip(arms, pool.map(partial(run, **day), arms), strict=True):
            outcomes[arm] = outcome
            print(line(f"{arm} devices for feed" if arm.isdigit() else arm, outcome), flush=True)
    end(judged(outcomes))
    print(f"took {time.monotonic() - started:.0f} s")


def line(arm: str, outcome: Outcome) -> str:
    """One arm's day."""
    parts = [f"{name} {told.within / told.asked:.1%} (hits {told.hits:.0%})" for name, told in outcome.told.items()]
    moves = f", {len(outcome.moves)} moves" if outcome.moves else ""
    return f"{arm:>20}: {mean_share(outcome):.1%}; {', '.join(parts)}{moves}"


def mean_share(outcome: Outcome) -> float:
    """Of the scenarios' shares within their SLOs: by numbers of answers, cheap requests alone would count."""
    return statistics.mean(told.within / told.asked for told in outcome.told.values())


def judged(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Print the ratios; returns the targets missed."""
    within = {arm: mean_share(outcome) for arm, outcome in outcomes.items()}
    static = max((arm for arm in within if arm.isdigit()), key=lambda arm: within[arm])
    print(f"the oracle over the best fixed split: {within['oracle'] / within[static]:.3f}")
    missed = []
    for name, against, least in (
        ("the oracle", within["oracle"], OF_ORACLE),
        (f"the best fixed split ({static} for feed)", within[static], OF_STATIC),
        ("the mixed pool", within["mixed"], 1.0),
    ):
        ratio = within["moving"] / against
        print(f"moving over {name}: {ratio:.3f}, aim {least:g}")
        if ratio < least:
            missed.append(f"moving over {name} is {ratio:.3f}, aim {least:g}")
    return missed


if __name__ == "__main__":
    main()
