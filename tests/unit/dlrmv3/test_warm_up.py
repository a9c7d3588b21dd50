"""The warm-up leaves prefix KV of all its users, also where a ranking alone would be too late for the SLO."""

from __future__ import annotations

import asyncio

from relaygr_lab.dlrmv3.warm_up import AT_ONCE, serve
from relaygr_lab.dlrmv3.workload import Item, Visit, Workload

from relaygr_stream.errors import Overloaded
from relaygr_stream.wire.features import NO_FEATURES

WORKLOAD = Workload(users=30, candidates=2, scale=0.02)
VISITS = WORKLOAD.requests[1][:5]


class Refusing:
    """Refuses the first `times` rankings of each user, as a worker whose forecast exceeds the SLO."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.announced: list[str] = []
        self.ranked: list[str] = []
        self.at_once = self.most_at_once = 0

    async def announce(self, item: Item) -> None:
        self.announced.append(item.event.request_id)

    async def rank(self, item: Item, timeout_s: float) -> str:
        request = item.request
        assert request.request_id in self.announced
        assert request.request_id not in self.ranked
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        self.ranked.append(request.request_id)
        if sum(name.startswith(f"{request.user_id}-") for name in self.ranked) <= self.times:
            raise Overloaded("it takes 300 ms, and 80 ms are left")
        return "joined"


def item(visit: Visit) -> Item:
    return WORKLOAD.item(visit, "r", NO_FEATURES)


async def test_every_visit_is_announced_and_one_that_is_refused_is_tried_again() -> None:
    system = Refusing(times=2)
    assert await serve(system, VISITS, item, timeout_s=3600.0) == len(VISITS)
    assert len(system.ranked) == 3 * len(VISITS)
    assert sorted(system.announced) == sorted(system.ranked), "a request id stands for one ranking"
    assert system.most_at_once == AT_ONCE


async def test_one_that_is_always_refused_is_left_out() -> None:
    assert await serve(Refusing(times=1000), VISITS[:1], item, timeout_s=0.2) == 0
