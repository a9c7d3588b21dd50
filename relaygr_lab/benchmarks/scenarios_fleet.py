"""The day of scenarios.py on real processes: a broker, triggers, workers with emulated devices, a planner, a client.

One way after the other, each from a fresh start: one pool, the split that is best in hindsight by the simulator, groups
that `relaygr planner --mode act` moves, and an oracle whose moves are assigned. Or moves in a row, under steady load.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from relaygr_lab.bench.broker_warm_up import compile_broker
from relaygr_lab.simulate.groups import Day
from relaygr_lab.tides.days import EVEN, Arm, move_in_turns, play
from relaygr_lab.tides.fleet import TidalFleet
from relaygr_lab.tides.traffic import FEED, day_of, rates_of

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
#: Of the hits before, from each move's arrival until the next one.
OF_HITS: Final = 0.9
#: Steady load of moves in a row, of what the devices carry with 1 % late: three workers of four carry it.
MOVES_LOAD: Final = 0.5
PAUSE_S: Final = 15.0


def dilated_day(load: float, seconds: float, factor: float, feed: int = FEED, *, tide: bool = True) -> Day:
    """So many seconds of the clock, in those of a device."""
    return day_of(rates_of(load, DEVICES), DEVICES, seconds / factor, feed, tide=tide, return_s=RETURN_S)


async def ways(day: Day, factor: float, split: Mapping[str, int]) -> list[str]:
    """Play the four ways; returns the targets missed. split: the fixed one."""
    kind, found = broker_at_hand(), dict[str, float]()
    seconds = factor * day.seconds
    print(f"real processes: a day of {seconds:.0f} s, times {factor:g} × a device's, {DEVICES} workers; broker: {kind}")
    missed = []
    with tempfile.TemporaryDirectory() as name:
        async with local_broker(kind, folder=Path(name), node=BRIEF_RELAY) as broker:
            settings = Settings(kafka=broker.kafka_settings(Kafka(replication=1)))
            if kind == "kafka":
                await compile_broker(settings.kafka, print)
            arms: tuple[Arm, ...] = ("mixed", "fixed", "moving", "oracle")
            for arm in arms:
                fleet = await play(arm, settings, Path(name), day, factor, split if arm == "fixed" else EVEN)
                found[arm] = report(arm, fleet)
                if fleet.load.lost:
                    missed += [f"{arm}: {fleet.load.lost} rankings lost", *fleet.load.unanswered[:10]]
    for name, least in (("oracle", OF_ORACLE), ("fixed", OF_FIXED), ("mixed", 1.0)):
        ratio = found["moving"] / found[name]
        print(f"moving over {name}: {ratio:.3f}, aim {least:g}")
        if ratio < least:
            missed.append(f"moving over {name} is {ratio:.3f}, aim {least:g}")
    return missed


def report(arm: str, fleet: TidalFleet) -> float:
    """Print one way's day; returns the mean of its scenarios' shares within their SLOs."""
    since_s = fleet.load.begins_s
    told = {name: fleet.load.served(name, since_s) for name in fleet.load.samples}
    mean = statistics.mean(each.within for each in told.values())
    parts = [
        f"{name} {each.within:.1%} of {each.asked} (hits {each.hits:.0%}, refused {each.refused})"
        for name, each in told.items()
    ]
    moves = len(fleet.planned) + len(fleet.moves)
    late_ms = nearest_rank(fleet.load.sent_late_ms, 0.99)
    told_of = f"{moves} moves, {fleet.load.lost} lost, sent {late_ms:.0f} ms late at P99"
    print(f"{arm:>8}: {mean:.1%}; {', '.join(parts)}; {told_of}", flush=True)
    for at_s, move in fleet.planned:
        print(f"{'':>10}{at_s - since_s:5.0f} s, {move.source} to {move.target}: {move.reason}")
    return mean


async def moves_in_a_row(moves: int, factor: float, load: float = MOVES_LOAD) -> list[str]:
    """So many moves of one worker; returns the targets missed."""
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
    lost = fleet.load.unanswered
    least, usually = min(each.since for each in after), statistics.mean(each.meanwhile for each in after)
    usual = ", ".join(f"{name} {hits:.1%}" for name, hits in before.items())
    took = [each.took_s for each in after]
    asked = sum(each.rankings for each in after)
    print(f"{len(after)} moves of {min(took):.1f} to {max(took):.1f} s, {asked} rankings, {len(lost)} lost")
    then = f"from each move's arrival to the next move at least {least:.3f} of these, all the time {usually:.3f}"
    print(f"hits before: {usual}; {then}")
    missed = [f"{len(lost)} rankings lost", *lost[:10]] if lost else []
    if least < OF_HITS:
        missed.append(f"hits fell to {least:.3f} of those before, aim {OF_HITS:g}")
    return missed
