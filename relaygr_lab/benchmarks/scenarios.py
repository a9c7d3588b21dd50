"""Two scenarios with opposite tides on a few devices: `python relaygr_lab/benchmarks/scenarios.py`.

In simulated time: a feed (2,000 tokens, 50 ms) and a search page (300 tokens, 20 ms), whose rates swing by 60 %, on
devices with the assumed costs of an NPU. What share of each is answered within its SLO, and the mean of both, by one
mixed pool, by the best fixed split, by groups that the planner's own rules move, and by an oracle that knows the day.
First, what one device carries of each. With CHECK=1 in the environment it exits non-zero where moving groups are below
their bounds, or the planner does not propose the mixed pool though it is ahead, or proposes it though it is not. The
load of this machine does not matter; it takes half an hour of a core, five minutes with --quick.

With --fleet, or --moves, on real processes (scenarios_fleet.py), which want a quiet machine: four days of ten minutes,
or of three with --quick.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

from judge import judge
from relaygr_lab.pools import pool_of
from relaygr_lab.simulate.groups import Day, GroupsDay, Mover, Outcome, run_mixed
from relaygr_lab.simulate.movers import Planned, foreseen
from relaygr_lab.tides.days import ARMS
from relaygr_lab.tides.traffic import CARRIED, FEED, LENGTHS, LOAD, LOAD_S, SCENARIOS, SWING, day_of, rates_of
from scenarios_fleet import MOVES_LOAD, dilated_day, moves_in_a_row, ways

from relaygr_stream.ops.planner.demand import demand_of
from relaygr_stream.ops.planner.plan import Damping
from relaygr_stream.ops.planner.seen import Observation
from relaygr_stream.ops.planner.shared import AHEAD
from relaygr_stream.settings.scenarios import Scenario

#: Of the oracle, and of the best fixed split.
OF_ORACLE: Final = 0.9
OF_STATIC: Final = 1.15


def carried(scenario: Scenario, seconds: float, feed: int) -> tuple[float, float]:
    """Requests a second within the SLO for one of two devices that serve this scenario alone, 1 % late; and the devices
    that the planner says are needed for what it sees at that rate, of one."""
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


def run(arm: str, day: Day, capacity: Mapping[str, float]) -> Outcome:
    """One day. arm: mixed, moving, oracle, or the devices of the feed."""
    if arm == "mixed":
        return run_mixed(day)
    of_feed = int(arm) if arm.isdigit() else day.devices // 2
    mover: Mover | None = None
    seconds = day.seconds
    if arm == "moving":
        # A day of 86,400 s in so many seconds cannot have a planner's pace: its minutes are a sixtieth of the day.
        mover = Planned(SCENARIOS, Damping(floor_s=seconds / 60, patience_s=seconds / 120, settle_s=seconds / 60))
    elif arm == "oracle":
        mover = foreseen(day, capacity, LOAD_S + 1.0)
    outcome = GroupsDay(day, {"feed": of_feed, "search": day.devices - of_feed}, mover, seconds / 120).run()
    return dataclasses.replace(outcome, shared=mover.shared) if isinstance(mover, Planned) else outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short day, of four devices")
    parser.add_argument("--devices", type=int, choices=[4, 5, 6], help="simulated [6; 4 with --quick]")
    parser.add_argument("--seconds", type=float, help="of the day [600; 60 with --quick, 180 with --fleet]")
    parser.add_argument(
        "--load", type=float, help=f"mean, of what the devices carry [{LOAD:g}; --moves: {MOVES_LOAD:g}]"
    )
    parser.add_argument("--steady", action="store_true", help="rates of simulated days do not swing")
    parser.add_argument("--candidates", type=int, default=FEED, help="of a ranking of the feed (default %(default)s)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--fleet", action="store_true", help="real processes, four ways of so many seconds")
    parser.add_argument("--ways", nargs="+", choices=ARMS, default=ARMS, help="only these (default all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[7], help="of simulated days (default 7)")
    parser.add_argument(
        "--moves", type=int, metavar="N", help="N moves in a row of a worker of real processes, instead"
    )
    parser.add_argument("--dilation", type=float, help="of real processes' times [20; 10 with --moves]")
    chosen = parser.parse_args()
    if chosen.moves:
        judge(lambda: asyncio.run(moves_in_a_row(chosen.moves, chosen.dilation or 10.0, chosen.load or MOVES_LOAD)))
    elif chosen.fleet:
        judge(lambda: on_a_fleet(chosen))
    else:
        judge(lambda: simulated(chosen))


def on_a_fleet(chosen: argparse.Namespace) -> list[str]:
    """Choose the fixed split by simulation, then play the day; returns the bounds not kept."""
    seconds = chosen.seconds or (180.0 if chosen.quick else 600.0)
    dilation = chosen.dilation or 20.0
    day = dilated_day(chosen.load or LOAD, seconds, dilation, chosen.candidates)
    splits = [str(feed) for feed in range(1, day.devices)]
    with pool_of(chosen.processes) as pool:
        shares = [mean_share(each) for each in pool.map(partial(run, day=day, capacity=CARRIED), splits)]
    best = max(range(len(splits)), key=shares.__getitem__)
    told = ", ".join(f"{split} for feed {share:.1%}" for split, share in zip(splits, shares, strict=True))
    print(f"fixed splits, simulated: {told}; played: {splits[best]} for feed")
    return asyncio.run(ways(day, dilation, {"feed": best + 1, "search": day.devices - best - 1}, chosen.ways))


def simulated(chosen: argparse.Namespace) -> list[str]:
    """All ways in simulated time; returns the bounds not kept."""
    devices = chosen.devices or (4 if chosen.quick else 6)
    seconds = chosen.seconds or (60.0 if chosen.quick else 600.0)
    started = time.monotonic()
    with pool_of(chosen.processes) as pool:
        found = list(pool.map(partial(carried, seconds=10.0, feed=chosen.candidates), SCENARIOS))
        capacity = {each.name: rate for each, (rate, _) in zip(SCENARIOS, found, strict=True)}
        rates = rates_of(chosen.load or LOAD, devices, capacity)
        for (name, rate), (_, need) in zip(capacity.items(), found, strict=True):
            say = f"for which the planner asks for {need:.2f} devices"
            floors = [rates[name] * (1 + swing) / rate for swing in (-SWING, 0, SWING)]
            print(
                f"{name}: a device carries {rate:.1f}/s, {say}; the day has {rates[name]:.1f}/s ± {SWING:.0%}: "
                f"{floors[0]:.1f}, {floors[1]:.1f} and {floors[2]:.1f} devices at its ebb, mean and flood",
                flush=True,
            )
        splits = [str(feed) for feed in range(1, devices)]
        arms = [arm for way in chosen.ways for arm in (splits if way == "fixed" else [way])]
        day = day_of(rates, devices, seconds, chosen.candidates, tide=not chosen.steady)
        days = [dataclasses.replace(day, seed=seed) for seed in chosen.seeds]
        running = {arm: [pool.submit(run, arm, each, capacity) for each in days] for arm in arms}
        outcomes = {}
        for arm, each in running.items():
            outcomes[arm] = [future.result() for future in each]
            print(line(f"{arm} devices for feed" if arm.isdigit() else arm, outcomes[arm]), flush=True)
    print(f"took {time.monotonic() - started:.0f} s")
    return judged(outcomes)


def line(arm: str, outcomes: Sequence[Outcome]) -> str:
    """One arm's days."""
    parts = []
    for name in outcomes[0].told:
        told = [each.told[name] for each in outcomes]
        within = in_words([each.within / each.asked for each in told], ".1%")
        parts.append(f"{name} {within} (hits {statistics.mean(each.hits for each in told):.0%})")
    if outcomes[0].moves:
        parts.append(f"{in_words([len(each.moves) for each in outcomes], 'g')} moves")
    if arm == "moving":
        parts.append(
            f"one pool proposed on {sum(each.shared is not None for each in outcomes)} of {len(outcomes)} days"
        )
    return f"{arm:>20}: {in_words([mean_share(each) for each in outcomes], '.1%')}; {', '.join(parts)}"


def in_words(values: Sequence[float], form: str) -> str:
    """Their mean, and of several their range."""
    spread = f" ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}"


def mean_share(outcome: Outcome) -> float:
    """Of the scenarios' shares within their SLOs: by numbers of answers, cheap requests alone would count."""
    return statistics.mean(told.within / told.asked for told in outcome.told.values())


def judged(outcomes: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """Print the ratios of the ways that were played; returns the bounds not kept."""
    within = {arm: [mean_share(each) for each in several] for arm, several in outcomes.items()}
    static = max((arm for arm in within if arm.isdigit()), key=lambda arm: sum(within[arm]), default="")

    def over(one: str, other: str) -> Sequence[float]:
        pairs = zip(within[one], within[other], strict=True) if {one, other} <= within.keys() else ()
        return [mine / theirs for mine, theirs in pairs]

    if ratios := over("oracle", static):
        print(f"the oracle over the best fixed split: {in_words(ratios, '.3f')}")
    broken = []
    for name, other, least in (
        ("the oracle", "oracle", OF_ORACLE),
        (f"the best fixed split ({static} for feed)", static, OF_STATIC),
        ("the mixed pool", "mixed", 1.0),
    ):
        if ratios := over("moving", other):
            told = f"moving over {name}: {in_words(ratios, '.3f')}"
            print(told)
            if other == "mixed":
                broken += misjudged(statistics.mean(ratios), outcomes["moving"])
            elif statistics.mean(ratios) < least:
                broken.append(f"{told}; bound: at least {least:g}")
    return broken


def misjudged(ratio: float, moving: Sequence[Outcome]) -> list[str]:
    """Where the planner proposes one pool on most days that is behind, or does not though it is ahead by more than
    AHEAD. ratio: of moving groups to the pool."""
    proposed = 2 * sum(each.shared is not None for each in moving) > len(moving)
    if proposed and ratio > 1:
        return [f"the planner proposes one pool, and moving is {ratio:.3f} of it"]
    if not proposed and ratio < 1 - AHEAD:
        return [f"moving is {ratio:.3f} of the mixed pool, which the planner does not propose"]
    return []


if __name__ == "__main__":
    main()
