"""Plays a day on real processes: with what is fixed, with the planner or an oracle, or many moves in a row."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

from relaygr_lab.simulate.groups import Day
from relaygr_lab.simulate.movers import foreseen
from relaygr_lab.tides.fleet import Moved, TidalFleet
from relaygr_lab.tides.load import DayLoad
from relaygr_lab.tides.traffic import CARRIED
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import Say

Arm = Literal["mixed", "fixed", "moving", "oracle"]

EVEN: Final = {"feed": 2, "search": 2}
#: A planner's minutes on a day of so many seconds: of an hour where it passes in a second.
PACE_DAY_S: Final = 3600.0
#: Of many moves, clients wait longer than a move or a rebalance takes.
TIMEOUT_S: Final = 20.0
#: Of a move, about, as the oracle foresees it.
MOVE_S: Final = 8.0
#: Rankings before the first of many moves, and after each: so long.
BEFORE_S: Final = 20.0
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


class AfterMove(NamedTuple):
    """Of a move. hits, of the mean scenario and as multiples of those before: meanwhile, from its beginning until the
    next one; since, from its arrival until the next one, WITHIN_S from its beginning at most. rankings: meanwhile."""

    took_s: float
    meanwhile: float
    since: float
    rankings: int


async def move_in_turns(
    moves: int, cluster: Settings, folder: Path, day: Day, factor: float, pause_s: float, say: Say
) -> tuple[TidalFleet, dict[str, float], list[AfterMove]]:
    """One worker to the other scenario and back, so many times, under steady load; a pause after each.

    Returns the fleet, each scenario's hits before, and what came after each move, of which hits are multiples of those
    before. Raises RelayError.
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
    return fleet, *after_each(fleet.moves, fleet.load, ended_s)


def after_each(moves: Sequence[Moved], load: DayLoad, ended_s: float) -> tuple[dict[str, float], list[AfterMove]]:
    """Each scenario's hits before the first move, and what came after each. ended_s: of the last one's pause."""
    begun = [each.began_s for each in moves]
    before = {name: load.served(name, load.begins_s, begun[0]).hits for name in load.samples}
    after = []
    for moved, until_s in zip(moves, [*begun[1:], ended_s], strict=True):
        end_s, arrived_s = min(until_s, moved.began_s + WITHIN_S), moved.began_s + moved.took_s
        hits = []
        for since_s in (moved.began_s, arrived_s):
            found = {name: load.served(name, since_s, end_s).hits / of for name, of in before.items()}
            hits.append(statistics.mean(found.values()))
        asked = sum(load.served(name, moved.began_s, end_s).asked for name in before)
        after.append(AfterMove(moved.took_s, hits[0], hits[1], asked))
    return before, after


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
