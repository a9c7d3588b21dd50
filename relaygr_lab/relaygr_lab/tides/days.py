"""Plays a day on real processes: with what is fixed, with the planner or an oracle, or many moves in a row."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from relaygr_lab.simulate.groups import Day
from relaygr_lab.simulate.movers import foreseen
from relaygr_lab.tides.fleet import Moved, TidalFleet
from relaygr_lab.tides.load import DayLoad, Served, Span
from relaygr_lab.tides.traffic import CARRIED
from relaygr_lab.verdicts import above_0
from relaygr_stream.ops.planner.seen import GroupSeen, Observation, WorkerSeen
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import Say

Arm = Literal["mixed", "fixed", "moving", "oracle"]
ARMS: Final[tuple[Arm, ...]] = get_args(Arm)

EVEN: Final = {"feed": 2, "search": 2}
#: A planner's minutes on a day of so many seconds: of an hour where it passes in a second.
PACE_DAY_S: Final = 3600.0
#: Of many moves, clients wait longer than a move or a rebalance takes.
TIMEOUT_S: Final = 20.0
#: Of a move, about, as the oracle foresees it.
MOVE_S: Final = 8.0
#: Rankings before the first of many moves, and after each: so long.
BEFORE_S: Final = 40.0
#: Hits have come back so many seconds after a move's beginning, or at the next one.
WITHIN_S: Final = 60.0


async def play(
    arm: Arm, cluster: Settings, folder: Path, day: Day, factor: float, split: Mapping[str, int] = EVEN
) -> TidalFleet:
    """One day. cluster: settings of the brokers. day: undilated. split: of the fixed arm; others begin with it.

    Raises RelayError.
    """
    fleet = TidalFleet(arm, cluster, folder, day, factor, None if arm == "mixed" else split)
    seconds = factor * day.seconds
    async with fleet.serving(pace=PACE_DAY_S / seconds if arm == "moving" else None):
        moving = None
        if arm == "oracle":
            mover = foreseen(day, CARRIED, MOVE_S / factor)
            moving = asyncio.create_task(fleet.follow(mover, seconds / 120))
        try:
            await fleet.run(factor * (day.warm_s + day.seconds))
        finally:
            if moving is not None:
                moving.cancel()
                with suppress(asyncio.CancelledError):
                    await moving
    return fleet


class Followed(NamedTuple):
    """How a planner's move follows the tide, in seconds of the day. turned: when the tide asked for it, by an oracle
    whose moves take no time; None: never. proposed, verified: by the planner; None: it was not."""

    turned: float | None
    proposed: float
    verified: float | None


def followed(fleet: TidalFleet) -> list[Followed]:
    """Each move that the planner began."""
    began_s, asked, found = fleet.load.begins_s, turns(fleet.day, fleet.factor, fleet.split or EVEN), []
    ends_s = [at_s for at_s, _ in fleet.planned] + [math.inf]
    for (at_s, move), next_s in zip(fleet.planned, ends_s[1:], strict=True):
        proposed = at_s - began_s
        same = [(abs(proposed - turned), turned) for turned, target in asked if target == move.target]
        verified = next((each - began_s for each in fleet.verified if at_s <= each < next_s), None)
        found.append(Followed(min(same)[1] if same else None, proposed, verified))
    return found


def turns(day: Day, factor: float, split: Mapping[str, int]) -> list[tuple[float, str]]:
    """When the tide asks for another worker, and for which scenario."""
    mover, now, found = foreseen(day, CARRIED, 0.0), dict(split), []
    for second in range(round(factor * day.seconds)):
        groups = {name: GroupSeen(workers=(WorkerSeen(name=""),) * count) for name, count in now.items()}
        move = mover(Observation(at_s=second, groups=groups), second / factor)
        if move is not None:
            now[move.source] -= 1
            now[move.target] += 1
            found.append((float(second), move.target))
    return found


class Hits(NamedTuple):
    """As a multiple of those before, mean of the scenarios. error: its standard error, of so many rankings."""

    ratio: float
    error: float
    rankings: int


class AfterMoves(NamedTuple):
    """Of moves in a row. meanwhile: from the first one's beginning on. since: from each one's arrival until the next
    one, WITHIN_S from its beginning at most; together: of all these. misses: of these, and of meanwhile, by cause."""

    meanwhile: Hits
    since: Sequence[Hits]
    together: Hits
    misses: Counter[str]
    misses_meanwhile: Counter[str]


async def move_in_turns(
    moves: int, cluster: Settings, folder: Path, day: Day, factor: float, pause_s: float, say: Say
) -> tuple[TidalFleet, dict[str, Served], AfterMoves]:
    """One worker to the other scenario and back, so many times, under steady load; a pause after each.

    Returns the fleet, what each scenario had before, and what came after. Raises RelayError, NotValid among them.
    """
    fleet, there = TidalFleet("moves", cluster, folder, day, factor, EVEN), tuple(EVEN)
    fleet.load.timeout_s = TIMEOUT_S
    async with fleet.serving(), _load(fleet):
        await asyncio.sleep(factor * day.warm_s + BEFORE_S)
        for number in range(moves):
            moved = await fleet.move("w2", there[1 - number % 2])
            say(f"move {number + 1} to {moved.target}: {moved.took_s:.1f} s")
            await asyncio.sleep(pause_s)
        ended_s = time.monotonic()
    return fleet, *after_moves(fleet.moves, fleet.load, ended_s)


def after_moves(moves: Sequence[Moved], load: DayLoad, ended_s: float) -> tuple[dict[str, Served], AfterMoves]:
    """What each scenario had before the first move, and what came after. ended_s: of the last one's pause."""
    begun = [each.began_s for each in moves]
    before = _by_scenario(load, (load.begins_s, begun[0]))
    spans = [
        (moved.began_s + moved.took_s, min(until_s, moved.began_s + WITHIN_S))
        for moved, until_s in zip(moves, [*begun[1:], ended_s], strict=True)
    ]
    all_s = (begun[0], ended_s)
    return before, AfterMoves(
        _hits(before, _by_scenario(load, all_s)),
        [_hits(before, _by_scenario(load, span)) for span in spans],
        _hits(before, _by_scenario(load, *spans)),
        load.missed(*spans),
        load.missed(all_s),
    )


def _by_scenario(load: DayLoad, *spans: Span) -> dict[str, Served]:
    return {name: load.served(name, *spans) for name in load.samples}


def _hits(before: Mapping[str, Served], after: Mapping[str, Served]) -> Hits:
    """The ratio, and its error by the numbers of rankings: one hit and one miss more than were seen keep it above 0.

    Raises NotValid where there are no hits before, or no scores after.
    """
    ratios, variance = [], 0.0
    for name, usual in before.items():
        above_0(usual.hits, f"the share of hits of {name} before the first move")
        above_0(after[name].scored, f"the number of rankings of {name} with scores behind a move")
        ratio = after[name].hits / usual.hits
        ratios.append(ratio)
        for scale, served in ((1.0, after[name]), (ratio, usual)):
            share = (served.hits * served.scored + 1) / (served.scored + 2)
            variance += (scale / usual.hits) ** 2 * share * (1 - share) / (served.scored + 2)
    return Hits(statistics.mean(ratios), math.sqrt(variance) / len(ratios), sum(each.asked for each in after.values()))


@asynccontextmanager
async def _load(fleet: TidalFleet) -> AsyncIterator[None]:
    """Its load meanwhile; at the end what is under way is answered."""
    stop = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(fleet.run(float("inf"), stop))
            yield
            stop.set()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
