"""The day of scenarios.py on real processes: a broker, triggers, workers with emulated devices, a planner, a client.

One way after the other, each from a fresh start: one pool, the split that is best in hindsight by the simulator, groups
that `relaygr planner --mode act` moves, and an oracle whose moves are assigned. Or moves in a row, under steady load.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from relaygr_lab.bench.broker_warm_up import compile_broker
from relaygr_lab.simulate.groups import Day
from relaygr_lab.tides.days import EVEN, Arm, Hits, followed, move_in_turns, play
from relaygr_lab.tides.fleet import TidalFleet
from relaygr_lab.tides.traffic import FEED, day_of, rates_of
from relaygr_lab.verdicts import NotValid, above_0, some

from relaygr_stream.ops.brokers.distribution import BRIEF_RELAY
from relaygr_stream.ops.brokers.local import broker_at_hand, local_broker
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.workload.quantiles import nearest_rank

DEVICES: Final = 4
#: Users return after so many seconds of a device: they must be known when a day of half a minute of it begins.
RETURN_S: Final = 1.0
#: Of the oracle and of the best fixed split; not even the oracle reaches 1.15 of the latter (explanation/planner.md).
OF_ORACLE: Final = 0.9
OF_FIXED: Final = 1.0
#: Of the hits before, from each move's arrival until the next one: of all moves together with 95 % confidence, and of
#: each one unless its few rankings make it chance, at 2.8 standard errors: one of twenty moves, one time in twenty.
OF_HITS: Final = 0.9
SURE: Final = 1.64
CHANCE: Final = 2.8
#: Steady load of moves in a row, of what the devices carry with 1 % late: three workers of four carry it.
MOVES_LOAD: Final = 0.5
PAUSE_S: Final = 15.0


def dilated_day(load: float, seconds: float, factor: float, feed: int = FEED, *, tide: bool = True) -> Day:
    """So many seconds of the clock, in those of a device."""
    return day_of(rates_of(load, DEVICES), DEVICES, seconds / factor, feed, tide=tide, return_s=RETURN_S)


async def ways(day: Day, factor: float, split: Mapping[str, int], arms: Sequence[Arm]) -> list[str]:
    """Play these ways; returns the bounds not kept. split: the fixed one."""
    kind, found = broker_at_hand(), dict[str, float]()
    seconds = factor * day.seconds
    print(f"real processes: a day of {seconds:.0f} s, times {factor:g} × a device's, {DEVICES} workers; broker: {kind}")
    broken, disturbed = [], dict[str, str]()
    with tempfile.TemporaryDirectory() as name:
        async with local_broker(kind, folder=Path(name), node=BRIEF_RELAY) as broker:
            settings = Settings(kafka=broker.kafka_settings(Kafka(replication=1)))
            if kind == "kafka":
                await compile_broker(settings.kafka, print)
            for arm in arms:
                fleet = await play(arm, settings, Path(name), day, factor, split if arm == "fixed" else EVEN)
                found[arm] = report(arm, fleet)
                if fleet.disturbed:
                    disturbed[arm] = fleet.disturbed
                if lost := len(fleet.load.unanswered):
                    broken.append(f"{arm}: {lost} rankings lost")
    for name, least in (("oracle", OF_ORACLE), ("fixed", OF_FIXED), ("mixed", 1.0)):
        if not {"moving", name} <= found.keys():
            continue
        ratio = found["moving"] / above_0(found[name], f"{name}'s share within the SLOs")
        print(told := f"moving over {name}: {ratio:.3f}")
        if ratio < least:
            broken.append(f"{told}; bound: at least {least:g}")
    if disturbed:
        raise NotValid("; ".join(f"{arm}: {what}" for arm, what in disturbed.items()))
    return broken


def report(arm: str, fleet: TidalFleet) -> float:
    """Print one way's day; returns the mean of its scenarios' shares within their SLOs."""
    since_s = fleet.load.begins_s
    told = {name: fleet.load.served(name, (since_s, math.inf)) for name in fleet.load.samples}
    mean = statistics.mean(each.within for each in told.values())
    parts = [
        f"{name} {each.within:.1%} of {each.asked} (hits {each.hits:.0%}, refused {each.refused})"
        for name, each in told.items()
    ]
    moves = len(fleet.planned) + len(fleet.moves)
    late_ms = nearest_rank(some(fleet.load.sent_late_ms, "rankings"), 0.99)
    told_of = f"{moves} moves, {len(fleet.load.unanswered)} lost, sent {late_ms:.0f} ms late at P99"
    print(f"{arm:>8}: {mean:.1%}; {', '.join(parts)}; {told_of}", flush=True)
    for (_, move), each in zip(fleet.planned, followed(fleet), strict=True):
        after = (
            "by no turn of the tide" if each.turned is None else f"{each.proposed - each.turned:.0f} s after the tide"
        )
        then = "not verified" if each.verified is None else f"verified {each.verified - each.proposed:.0f} s later"
        print(f"{'':>10}{each.proposed:5.0f} s, {after}, {then}: {move.source} to {move.target}, {move.reason}")
    return mean


async def moves_in_a_row(moves: int, factor: float, load: float = MOVES_LOAD) -> list[str]:
    """So many moves of one worker; returns the bounds not kept."""
    kind = broker_at_hand()
    day = dilated_day(load, 600.0, factor, tide=False)
    print(
        f"{moves} moves in a row: {DEVICES} workers at {load:g} × what they carry, times {factor:g} × a device's; "
        f"broker: {kind}"
    )
    with tempfile.TemporaryDirectory() as name:
        async with local_broker(kind, folder=Path(name), node=BRIEF_RELAY) as broker:
            settings = Settings(kafka=broker.kafka_settings(Kafka(replication=1)))
            told = await move_in_turns(moves, settings, Path(name), day, factor, PAUSE_S, print)
    fleet, before, after = told
    took, lost, together = [each.took_s for each in fleet.moves], fleet.load.unanswered, after.together
    asked = after.meanwhile.rankings
    usual = ", ".join(f"{name} {each.hits:.1%} of {each.scored}" for name, each in before.items())
    print(f"{moves} moves of {min(took):.1f} to {max(took):.1f} s, {asked} rankings, {len(lost)} lost")
    print(f"hits before: {usual}; then, as multiples of these with 95 % confidence:")
    print(f"  all the time {_told(after.meanwhile)}; without: {_causes(after.misses_meanwhile)}")
    print(f"  from each move's arrival to the next move {_told(together)}; without: {_causes(after.misses)}")
    least = min(after.since, key=lambda each: each.ratio)
    print(f"  the least of these {_told(least)}")
    if fleet.disturbed:
        raise NotValid(fleet.disturbed)
    broken = [f"{len(lost)} rankings lost"] if lost else []
    if together.ratio - SURE * together.error < OF_HITS:
        broken.append(f"hits after moves are {_told(together)} of those before; bound: surely at least {OF_HITS:g}")
    fell = [each for each in after.since if each.ratio + CHANCE * each.error < OF_HITS]
    broken += [f"hits fell to {_told(each)} of those before; bound: at least {OF_HITS:g}" for each in fell]
    return broken


def _told(hits: Hits) -> str:
    return f"{hits.ratio:.3f} ± {1.96 * hits.error:.3f} (of {hits.rankings})"


def _causes(misses: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {why}" for why, count in sorted(misses.items())) or "none"
