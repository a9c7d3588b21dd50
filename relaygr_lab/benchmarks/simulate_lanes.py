"""Which member gets which lanes, by number and by measured load: the real assignment through many joins and leaves.

Not simulated: what a moved lane costs, and that forwarding helps a worker that has too much.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from relaygr_stream.bus.balance import MemberClaim, assign_lanes
from relaygr_stream.bus.loads import level_of
from relaygr_stream.worker.fair_share import stated_speed

LANES = 64
USERS = 100_000
#: What a lane's measured load is off by, each time anew (the standard deviation of its logarithm); and a worker's
#: speed, an average over minutes of a fit to some hundred operations.
NOISE = 0.05
SPEED_NOISE = 0.02
#: Members of a group: a join or a leave that would go beyond does not happen.
FEWEST, MOST = 3, 12
#: Records a second of a lane on average.
RATE = 20.0
#: Bounds: moves beside those by numbers, where lanes are alike; and, where users or devices differ, the largest ratio
#: of load to fair share beside that by numbers.
MORE_MOVES = 1.1
LARGEST = 0.85

#: What members state: nothing, so that numbers of lanes are even; capacities by hand; or what they measure.
By = Literal["numbers", "capacities by hand", "measured loads"]


@dataclass(frozen=True)
class Change:
    """One rebalance. moved: lanes with another owner. largest: of members' loads over their fair shares."""

    moved: frozenset[int]
    largest: float


class Group:
    """Members of true speeds, lanes of true loads, and what is measured of them."""

    def __init__(self, by: By, loads: Sequence[float], speeds: Sequence[int], seed: int) -> None:
        self._by, self._loads, self._speeds = by, loads, speeds
        self._choice = random.Random(seed)
        self._measured = np.random.default_rng(seed)
        self._joined = 0
        self.speed: dict[str, int] = {}
        self.owned: dict[str, list[int]] = {}
        self._stated: dict[str, float] = {}
        self._known: set[int] = set()  # lanes whose owner has had them for a while

    def join(self) -> None:
        """One more member, without a lane."""
        name = f"{self._joined:04}"
        self._joined += 1
        self.speed[name] = self._choice.choice(self._speeds)
        self.owned[name] = []

    def leave(self) -> None:
        """One member less; nobody knows the loads of its lanes."""
        name = self._choice.choice(sorted(self.owned))
        self._known -= set(self.owned.pop(name))

    def change(self) -> None:
        """One joins or leaves."""
        joins = self._choice.random() < 0.5
        if len(self.owned) <= FEWEST or (joins and len(self.owned) < MOST):
            self.join()
        else:
            self.leave()

    def rebalance(self) -> Change:
        """Assign; then all measure for a while."""
        before = {lane: member for member, lanes in self.owned.items() for lane in lanes}
        claims = {member: self._claim(member) for member in self.owned}
        for member, now in assign_lanes(len(self._loads), claims).items():
            kept = [lane for lane in self.owned[member] if lane in now]
            self.owned[member] = kept + sorted(now.difference(kept))
        self._known = set(range(len(self._loads)))
        after = {lane: member for member, lanes in self.owned.items() for lane in lanes}
        moved = frozenset(lane for lane, member in after.items() if before.get(lane) != member)
        return Change(moved, max(self._ratios()))

    def _claim(self, member: str) -> MemberClaim:
        lanes = tuple(self.owned[member])
        if self._by == "numbers":
            return MemberClaim(lanes, 1)
        if self._by == "capacities by hand":
            return MemberClaim(lanes, 1, float(self.speed[member]))
        loads = (level_of(RATE * self._loads[lane] * self._off(NOISE)) if lane in self._known else 0 for lane in lanes)
        self._stated[member] = stated_speed(self._stated.get(member, 0.0), self.speed[member] * self._off(SPEED_NOISE))
        return MemberClaim(lanes, 1, loads=tuple(loads), speed=self._stated[member])

    def _off(self, noise: float) -> float:
        return math.exp(self._measured.normal(0.0, noise))

    def _ratios(self) -> Iterator[float]:
        fair = math.fsum(self._loads) / sum(self.speed[member] for member in self.owned)
        for member, lanes in self.owned.items():
            yield math.fsum(self._loads[lane] for lane in lanes) / (fair * self.speed[member])


def user_loads(skew: float, seed: int) -> list[float]:
    """Loads of lanes over their mean: users of Zipf's law (skew 0: all alike, and so are the lanes)."""
    if not skew:
        return [1.0] * LANES
    lanes = np.random.default_rng(seed).integers(0, LANES, USERS)
    loads = np.bincount(lanes, np.arange(1.0, USERS + 1.0) ** -skew, LANES)
    return [float(load) for load in loads / loads.mean()]


def through_changes(by: By, skew: float, speeds: Sequence[int], changes: int, seed: int) -> list[Change]:
    """So many rebalances, each after a join or a leave; each is followed by one without, as a worker asks for it."""
    group = Group(by, user_loads(skew, seed), speeds, seed)
    for _ in range(2 * FEWEST):
        group.join()
    group.rebalance()
    found = []
    for _ in range(changes):
        group.change()
        first, asked = group.rebalance(), group.rebalance()
        found.append(Change(first.moved | asked.moved, asked.largest))
    return found


def unchanged(skew: float, speeds: Sequence[int], rebalances: int, seed: int) -> tuple[int, int]:
    """(lanes that move, those that move more than once) where nobody joins or leaves, behind the first rebalances."""
    group = Group("measured loads", user_loads(skew, seed), speeds, seed)
    for _ in range(2 + seed % 9):
        group.join()
    for _ in range(2):
        group.rebalance()
    moves = [lane for _ in range(rebalances) for lane in group.rebalance().moved]
    return len(moves), len(moves) - len(set(moves))


def moves_of(changes: Sequence[Change]) -> float:
    """Mean number of lanes that moved."""
    return sum(len(each.moved) for each in changes) / len(changes)


def largest_of(changes: Sequence[Change]) -> float:
    """Mean of the largest ratio."""
    return sum(each.largest for each in changes) / len(changes)


def judged(found: Mapping[By, Sequence[Change]], skew: float, speeds: Sequence[int]) -> list[str]:
    """The bounds not kept."""
    numbers, measured = found["numbers"], found["measured loads"]
    broken = []
    if not skew and moves_of(measured) > MORE_MOVES * moves_of(numbers):
        broken.append(
            f"{moves_of(measured):.1f} lanes move by load; bound: {MORE_MOVES:g} × {moves_of(numbers):.1f} by number"
        )
    if (skew >= 1.0 or len(speeds) > 1) and largest_of(measured) > LARGEST * largest_of(numbers):
        broken.append(
            f"ratio {largest_of(measured):.2f} by load; bound: {LARGEST:g} × {largest_of(numbers):.2f} by numbers"
        )
    return broken


def compare(changes: int, seeds: Sequence[int]) -> list[str]:
    """Print what moves, and how uneven it is, by each rule. Returns the bounds not kept."""
    broken = []
    print(f"{LANES} lanes, {FEWEST} to {MOST} workers, {changes} joins and leaves each; loads within {NOISE:.0%}")
    print("speeds  skew  by                  lanes moved  largest load over fair share: mean    P90")
    for speeds in ((1,), (1, 2)):
        for skew in (0.0, 0.8, 1.0):
            found: dict[By, list[Change]] = {}
            for by in ("numbers", "capacities by hand", "measured loads"):
                rule: By = by
                found[rule] = [one for seed in seeds for one in through_changes(rule, skew, speeds, changes, seed)]
                ranked = sorted(each.largest for each in found[rule])
                print(
                    f"{'/'.join(map(str, speeds)):>6}  {skew:4.1f}  {by:<18}  {moves_of(found[rule]):11.2f}  "
                    f"{largest_of(found[rule]):34.2f} {ranked[int(0.9 * len(ranked))]:6.2f}"
                )
            broken += judged(found, skew, speeds)
            still = [unchanged(skew, speeds, changes, seed) for seed in seeds]
            print(f"{'':14}without joins or leaves: {sum(each[0] for each in still)} lanes move")
            if any(twice for _, twice in still) or (not skew and any(moves for moves, _ in still)):
                broken.append(f"noise moves lanes: {still}")
    return broken
