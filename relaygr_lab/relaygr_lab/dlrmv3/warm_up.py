"""Serves the visits before those that are measured, so that their users' prefix KV are there.

They are announced: a ranking alone whose inference would take longer than the SLO is refused, and its user would have
no prefix KV in any later visit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import structs

from relaygr_lab.dlrmv3.sut import System
from relaygr_lab.dlrmv3.workload import Item, Visit
from relaygr_stream.errors import DeadlineExceeded, Overloaded

#: Requests at a time.
AT_ONCE: Final = 2
#: The first pause between another announcement and its ranking; each further one is twice as long, up to the longest.
PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0


async def serve(system: System, visits: Sequence[Visit], make: Callable[[Visit], Item], timeout_s: float) -> int:
    """Serve the visits, AT_ONCE at a time; returns how many. One that is refused for timeout_s is left out."""
    waiting, served = iter(visits), 0

    async def some() -> None:
        nonlocal served
        for visit in waiting:
            ranked = await serve_one(system, make(visit), timeout_s)
            served += ranked

    await asyncio.gather(*(some() for _ in range(AT_ONCE)))
    return served


async def serve_one(system: System, item: Item, timeout_s: float) -> bool:
    """Announce and rank until it is ranked; False: it was not within the time."""
    until, pause_s, tries = time.monotonic() + timeout_s, 0.0, 0
    while time.monotonic() < until:
        one, tries = _named(item, f"{item.request.request_id}-{tries}"), tries + 1
        await system.announce(one)
        await asyncio.sleep(pause_s)
        try:
            await system.rank(one, timeout_s)
        except (DeadlineExceeded, Overloaded):
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s or PAUSE_S)
        else:
            return True
    return False


def _named(item: Item, request_id: str) -> Item:
    event = structs.replace(item.event, request_id=request_id)
    return item._replace(event=event, request=structs.replace(item.request, request_id=request_id))
