"""How an owner divides what triggers may ask of it among its lanes (DESIGN §6).

Half of the share goes to all lanes alike, so that a quiet lane is never shut out; half follows demand. The parts add
up to the share whatever the demand is, and what a lane still has pinned beyond its part is not given to others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

EQUAL_PART: Final = 0.5
#: Weight that a second of demand keeps after the next one: traffic shifts between lanes over seconds, not minutes.
DEMAND_DECAY: Final = 0.8


class LaneShares:
    """Shares of the owned lanes, from how much each asked for."""

    def __init__(self) -> None:
        self._demand: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    def update(self, lanes: Iterable[int], asked: Mapping[int, int], seconds: float) -> dict[int, float]:
        """asked: running totals per lane; returns lane → share, adding up to 1 over the lanes."""
        owned = sorted(lanes)
        if not owned:
            return {}
        keep = DEMAND_DECAY**seconds
        demand = {}
        for lane in owned:
            total = asked.get(lane, 0)
            new = max(0, total - self._seen.get(lane, 0))
            self._seen[lane] = total
            demand[lane] = self._demand.get(lane, 0.0) * keep + new
        self._demand = demand
        whole = sum(demand.values())
        equal = 1.0 / len(owned)
        if whole <= 0:
            return dict.fromkeys(owned, equal)
        return {lane: EQUAL_PART * equal + (1 - EQUAL_PART) * demand[lane] / whole for lane in owned}


def lane_budgets(whole: int, shares: Mapping[int, float], pinned: Mapping[int, int]) -> dict[int, int]:
    """Bytes that each lane may have pinned: its share of `whole`, less what other lanes hold beyond theirs.

    When shares move, a lane keeps for up to a life window what it was admitted. Σ max(budget, pinned) ≤ whole, as long
    as the lanes together hold no more than that.
    """
    budgets = {lane: int(whole * share) for lane, share in shares.items()}
    beyond = sum(max(0, pinned[lane] - budget) for lane, budget in budgets.items())
    room = sum(max(0, budget - pinned[lane]) for lane, budget in budgets.items())
    if not beyond or not room:
        return budgets
    left = max(0.0, 1.0 - beyond / room)
    return {
        lane: pinned[lane] + int(left * (budget - pinned[lane])) if budget > pinned[lane] else budget
        for lane, budget in budgets.items()
    }
