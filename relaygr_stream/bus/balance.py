"""Which member of a group owns which lane: sticky, and even by measured load where loads are known.

A pure function of the members' claims. A lane's weight is its load, a member's share follows its speed; a lane of
unknown load weighs as the mean, and without loads the numbers of lanes are even. How much moves follows from the
weights; which lanes, from where the prefix KV are: a member that came back names its former lanes, and who must give
lanes up gives those it got last. A lane that is too heavy for every other member stays; other lanes leave its owner.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Final

#: A load's level n > 0 stands for 2^((n − 1) / LEVELS_AN_OCTAVE), in a unit that all members share (loads.py): steps of
#: 9 %, about what a lane's load wanders by.
LEVELS_AN_OCTAVE: Final = 8
MOST_LEVEL: Final = 127  # one byte in MessagePack
#: Loads of which none is more than so many levels (41 %) above another do not count: that far, noise of 5 % spreads
#: equal loads of 64 lanes.
ALIKE_LEVELS: Final = 4
#: Where loads differ, nothing moves unless a lane's taker stays this far below its giver, in fair shares; then lanes
#: move until none stays STOP below. Loads that wander by 5 % each change a member's ratio by less than a tenth, so they
#: start no moves, and hardly undo any (`make bench-simulate ARGS="--only lanes"`).
START: Final = 0.2
STOP: Final = 0.1
#: Speeds count in steps of √2 from the median's: devices of one kind, measured within 19 % of it, are alike.
STEPS_AN_OCTAVE: Final = 2
#: The most that a speed counts, against the median's: a wrong one takes no more.
MOST_STEPS: Final = 4 * STEPS_AN_OCTAVE
#: Differences of ratios below this are rounding.
ROUNDING: Final = 1e-9


@dataclass(frozen=True)
class MemberClaim:
    """A member's input to an assignment: its lanes, the one owned longest first, and the generation of their
    assignment.

    capacity: its relative weight; with a speed, beside that. loads: the levels of `lanes`, in their order; 0: unknown.
    """

    lanes: tuple[int, ...] = ()
    generation: int = 0
    capacity: float = 1.0
    draining: bool = False  # the member is about to leave and reads no more records
    warm: tuple[int, ...] = ()  # lanes whose prefix KV it had when it started, that with the most first
    loads: tuple[int, ...] = ()
    speed: float = 0.0  # work a second, in a unit that all members share; 0: unknown


def assign_lanes(lanes: int, claims: Mapping[str, MemberClaim]) -> dict[str, frozenset[int]]:
    """Assign the lanes 0…lanes−1 to the members (the keys of `claims`).

    Each lane has exactly one owner, and where there are enough each member has a lane, however slow it was measured. A
    draining member gets no lanes, unless all members drain. A lane moves only if its owner left, if its new owner then
    has less, against its share, than the former one had, or if its new owner would have none. So without loads no
    move lessens the largest ratio of lanes to share, and with equal shares at most ⌈lanes/n⌉ lanes move when one of n
    members joins or leaves. Of those that can move, a member gets its warm ones; then owners give up what they got
    last. Of two claims to a lane, the later generation counts. A lane that was added goes to the owner of the lane
    whose users it gets, as far as shares allow. The result depends only on the arguments, not on the members' order.
    """
    staying = {member: claim for member, claim in claims.items() if not claim.draining}
    if 0 < len(staying) < len(claims):
        return {**dict.fromkeys(claims, frozenset[int]()), **assign_lanes(lanes, staying)}
    if not claims or not lanes:
        return dict.fromkeys(claims, frozenset())
    held = _resolve(lanes, claims)
    before = _before(lanes, held)
    loads = _loads(claims, held)
    scales = _Scales(_weights(lanes, loads, before), _shares(claims), held)
    warm = {member: [lane for lane in claim.warm if lane < lanes] for member, claim in claims.items()}
    # A user of lane n of 64 is one of lane n modulo 16 of 16: with its owner it stays where its prefix KV are.
    scales.place((lane, scales.owner.get(lane % before)) for lane in range(before, lanes))
    scales.place((lane, member) for member in held for lane in warm[member])
    scales.place_rest()
    scales.even_out(warm, *((START, STOP) if loads else (ROUNDING, ROUNDING)))
    scales.leave_none_without()
    return {member: frozenset(owned) for member, owned in held.items()}


def _resolve(lanes: int, claims: Mapping[str, MemberClaim]) -> dict[str, list[int]]:
    """The lanes of each member after conflicting claims are resolved, in the order of its claim."""
    holder: dict[int, str] = {}
    for member in sorted(claims):
        for lane in claims[member].lanes:
            if not 0 <= lane < lanes:
                continue
            if lane not in holder or claims[member].generation > claims[holder[lane]].generation:
                holder[lane] = member
    return {
        member: [lane for lane in dict.fromkeys(claims[member].lanes) if holder.get(lane) == member]
        for member in sorted(claims)
    }


def _before(lanes: int, held: Mapping[str, Sequence[int]]) -> int:
    """The number of lanes before some were added. Lanes grow to a multiple."""
    most = max((lane for owned in held.values() for lane in owned), default=lanes)
    return next((count for count in range(most + 1, lanes) if lanes % count == 0), lanes)


def _loads(claims: Mapping[str, MemberClaim], held: Mapping[str, Sequence[int]]) -> dict[int, float]:
    """The loads that the lanes' owners state; none if all are alike."""
    owned = {member: frozenset(lanes) for member, lanes in held.items()}
    levels = {
        lane: level
        for member, claim in claims.items()
        for lane, level in zip(claim.lanes, claim.loads, strict=False)
        if level and lane in owned[member]
    }
    if not levels or max(levels.values()) - min(levels.values()) <= ALIKE_LEVELS:
        return {}
    return {lane: math.exp2((level - 1) / LEVELS_AN_OCTAVE) for lane, level in levels.items()}


def _weights(lanes: int, loads: Mapping[int, float], before: int) -> list[float]:
    """The weight of each lane; a lane that was just added has that of the lane it splits."""
    mean = math.fsum(loads.values()) / len(loads) if loads else 1.0
    return [loads.get(lane % before, mean) for lane in range(lanes)]


def _shares(claims: Mapping[str, MemberClaim]) -> dict[str, float]:
    """Each member's relative share."""
    counted = counted_speeds([claim.speed for claim in claims.values()])
    return {member: claim.capacity * speed for (member, claim), speed in zip(claims.items(), counted, strict=True)}


def counted_speeds(speeds: Sequence[float]) -> list[float]:
    """What each speed counts, against the median's; 0: unknown, and counts as the median's."""
    known = [speed for speed in speeds if speed]
    usual = math.log2(median_low(known)) if known else 0.0
    steps = (round(STEPS_AN_OCTAVE * (math.log2(speed) - usual)) if speed else 0 for speed in speeds)
    return [math.exp2(max(-MOST_STEPS, min(MOST_STEPS, each)) / STEPS_AN_OCTAVE) for each in steps]


class _Scales:
    """Moves lanes, in `held`, by their weights. A ratio is a member's load to its fair share of all loads."""

    def __init__(self, weights: Sequence[float], shares: Mapping[str, float], held: Mapping[str, list[int]]) -> None:
        self._weights = weights
        self._held = held
        self._load = {member: math.fsum(weights[lane] for lane in owned) for member, owned in held.items()}
        self.owner = {lane: member for member, owned in held.items() for lane in owned}
        whole = math.fsum(weights)
        parts = math.fsum(shares.values())
        self._fair = {member: whole * share / parts for member, share in shares.items()}
        self._mean = whole / len(weights)

    def place(self, wished: Iterable[tuple[int, str | None]]) -> None:
        """Give each of these lanes that has no owner to this member, as far as its share allows."""
        for lane, member in wished:
            if member is None or lane in self.owner:
                continue
            if self._load[member] + self._weights[lane] / 2 <= self._fair[member]:
                self._give(lane, member)

    def place_rest(self) -> None:
        """Give each lane without an owner, the heaviest first, to whom it fills least."""
        free = set(range(len(self._weights))) - self.owner.keys()
        takers = [(self._with(member, self._mean), member) for member in self._held]
        heapq.heapify(takers)
        for lane in sorted(free, key=lambda lane: (-self._weights[lane], lane)):
            member = takers[0][1]
            self._give(lane, member)
            heapq.heapreplace(takers, (self._with(member, self._mean), member))

    def even_out(self, warm: Mapping[str, Sequence[int]], start: float, stop: float) -> None:
        """Move lanes while the taker then is `start` below the giver, and after a first move `stop`."""
        slack, moved = start, set[int]()
        while (move := self._next(warm, slack, moved)) is not None:
            lane, taker = move
            self._give(lane, taker)
            moved.add(lane)
            slack = stop

    def leave_none_without(self) -> None:
        """Give each member without a lane the lightest of the fullest: without work it could never show that it is
        faster than was measured."""
        for member in [member for member, owned in self._held.items() if not owned]:
            givers = [giver for giver, owned in self._held.items() if len(owned) > 1]
            if not givers:
                return
            fullest = max(givers, key=lambda giver: (self._with(giver, 0.0), giver))
            self._give(min(reversed(self._held[fullest]), key=self._weights.__getitem__), member)

    def _next(self, warm: Mapping[str, Sequence[int]], slack: float, moved: Container[int]) -> tuple[int, str] | None:
        """The lane to move now, and to whom."""
        taker = min(self._held, key=lambda member: (self._with(member, self._mean), member))
        for lane in warm[taker]:
            giver = self.owner[lane]
            spare = self._load[giver] - self._weights[lane] / 2 >= self._fair[giver] and self._can_give(giver)
            if spare and lane not in moved and self._weights[lane] < self._room(giver, taker, slack):
                return lane, taker
        for giver in sorted(self._held, key=lambda member: (self._with(member, 0.0), member), reverse=True):
            if (room := self._room(giver, taker, slack)) <= 0.0:
                break
            if not self._can_give(giver):
                continue
            for lane in reversed(self._held[giver]):
                if self._weights[lane] < room and lane not in moved:
                    return lane, taker
        return None

    def _can_give(self, giver: str) -> bool:
        """Not its only lane, where there is one for each member."""
        return len(self._held[giver]) > 1 or len(self._weights) < len(self._held)

    def _room(self, giver: str, taker: str, slack: float) -> float:
        """The taker stays `slack` below the giver with a lane lighter than this."""
        return (self._with(giver, 0.0) - slack) * self._fair[taker] - self._load[taker]

    def _with(self, member: str, more: float) -> float:
        """The member's ratio with so much more load."""
        return (self._load[member] + more) / self._fair[member]

    def _give(self, lane: int, taker: str) -> None:
        if (giver := self.owner.get(lane)) is not None:
            self._held[giver].remove(lane)
            self._load[giver] -= self._weights[lane]
        self._held[taker].append(lane)
        self._load[taker] += self._weights[lane]
        self.owner[lane] = taker
