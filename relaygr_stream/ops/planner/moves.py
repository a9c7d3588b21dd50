"""What follows a proposed move: a worker is assigned, and then verified or taken back. Pure, like plan.py.

    followed(moves, observation, damping) ─► (moves, ended)     what became of the move under way
    decide(…)                                                   proposes nothing while `moves.busy`
    begun(moves, observation, move, scenarios) ─► moves         one worker is assigned to the move's target

The assignments say which scenario each worker that was ever moved serves. `moves.epoch` grows with each change of
theirs, and whoever leads then publishes them (acting.py). A worker that serves another scenario than it is assigned is
a move under way, whoever began it: a planner that takes over ends what the last one began.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple

from relaygr_stream.ops.planner.plan import Damping
from relaygr_stream.ops.planner.seen import Observation, WorkerSeen
from relaygr_stream.settings.scenarios import RESERVE, Scenario
from relaygr_stream.wire.assignments import MAX_WORKERS
from relaygr_stream.wire.planner_status import Move

#: The assignment of a worker that was not seen for so long is dropped: workers of a cluster may never come back under
#: the same name. A host that is repaired within a day has its workers where they were.
ABSENT_S: Final = 86_400.0


class PendingMove(NamedTuple):
    """A move under way. epoch: a status counts from this one on. since_s: when this planner saw it first. found: it is
    another planner's, or the way back from one that was given up."""

    worker: str
    source: str
    target: str
    epoch: int
    since_s: float
    found: bool = False


class EndedMove(NamedTuple):
    """A move that is over. reason: why it was given up."""

    move: PendingMove
    result: Literal["verified", "given_up"]
    reason: str = ""


@dataclass(frozen=True)
class MovesMemory:
    """The assignments, worker → scenario, their epoch, and what is remembered of moves.

    given_up_s: when a worker's move was given up last, and by "" when any was. seen_s: when an assigned worker was.
    """

    epoch: int = 0
    assigned: Mapping[str, str] = field(default_factory=dict)
    pending: PendingMove | None = None
    given_up_s: Mapping[str, float] = field(default_factory=dict)
    seen_s: Mapping[str, float] = field(default_factory=dict)

    def busy(self, at_s: float, damping: Damping) -> bool:
        """Whether no move may begin: one is under way, or was given up a moment ago."""
        last = self.given_up_s.get("")
        return self.pending is not None or (last is not None and at_s - last < damping.settle_s)

    def taken(self, epoch: int, assigned: Mapping[str, str]) -> MovesMemory:
        """With the assignments of a record, if it is newer."""
        if epoch <= self.epoch:
            return self
        return replace(self, epoch=epoch, assigned=dict(assigned), pending=None)

    def taken_over(self, at_ms: int) -> MovesMemory:
        """As a planner that takes over publishes them: above every epoch that the last one can reach, which grows by
        one with each of its changes."""
        return replace(self, epoch=max(at_ms, self.epoch + 1), pending=None)

    def _assign(self, worker: str, scenario: str) -> MovesMemory:
        if self.assigned.get(worker) == scenario:
            return self
        return replace(self, epoch=self.epoch + 1, assigned={**self.assigned, worker: scenario})


def followed(moves: MovesMemory, seen: Observation, damping: Damping) -> tuple[MovesMemory, EndedMove | None]:
    """What became of the move under way, if there is one; a move that is given up is written back."""
    moves = _with_absent_dropped(moves, seen)
    pending = moves.pending or _misplaced(moves, seen)
    if pending is None:
        return moves, None
    if _has_arrived(pending, seen, damping):
        return replace(moves, pending=None), EndedMove(pending, "verified")
    if not (reason := _why_given_up(pending, seen, damping)):
        return replace(moves, pending=pending), None
    back = moves._assign(pending.worker, _back(moves, pending, seen))
    given_up_s = {**moves.given_up_s, pending.worker: seen.at_s, "": seen.at_s}
    return replace(back, pending=None, given_up_s=given_up_s), EndedMove(pending, "given_up", reason)


def begun(moves: MovesMemory, seen: Observation, move: Move, scenarios: Sequence[Scenario]) -> MovesMemory:
    """With one worker of the move's source assigned to its target: the least busy one, of those whose last move was
    given up longest ago. `moves` itself if the source has none to spare."""
    least = next((each.min_workers for each in scenarios if each.name == move.source), 0)
    group = seen.groups.get(move.source)
    if moves.pending is not None or group is None or len(group.workers) <= least:
        return moves
    chosen = min(group.workers, key=lambda each: (moves.given_up_s.get(each.name, 0.0), each.busy, each.name))
    after = moves._assign(chosen.name, move.target)
    if len(after.assigned) > MAX_WORKERS:
        return moves
    return replace(after, pending=PendingMove(chosen.name, move.source, move.target, after.epoch, seen.at_s))


def _seen_in(seen: Observation, scenario: str, name: str) -> WorkerSeen | None:
    group = seen.groups.get(scenario)
    return next((each for each in group.workers if each.name == name), None) if group is not None else None


def _places(seen: Observation) -> dict[str, list[str]]:
    """By worker, the scenarios that it serves, in the order of their names."""
    found = defaultdict[str, list[str]](list)
    for scenario in sorted(seen.groups):
        for worker in seen.groups[scenario].workers:
            found[worker.name].append(scenario)
    return found


def _misplaced(moves: MovesMemory, seen: Observation) -> PendingMove | None:
    """The first worker by name that serves another scenario than it is assigned."""
    places = _places(seen)
    for name, target in sorted(moves.assigned.items()):
        there = places.get(name)
        if there and target in seen.groups and target not in there:
            return PendingMove(name, there[0], target, moves.epoch, seen.at_s, found=True)
    return None


def _back(moves: MovesMemory, pending: PendingMove, seen: Observation) -> str:
    """What is assigned in place of a move that is given up: where it came from. But a worker that did not come back
    either is slow, or broken, and is left where it is: a further order would be given up, too, and so on for ever."""
    if pending.found and pending.worker in moves.given_up_s:
        return next(iter(_places(seen).get(pending.worker, ())), pending.target)
    return pending.source


def _has_arrived(pending: PendingMove, seen: Observation, damping: Damping) -> bool:
    """Whether its status says so, and it serves: it has given scores, or has lanes and was asked nothing, because the
    group has no traffic, or for so long that its lanes have none. In the reserve it does neither."""
    worker = _seen_in(seen, pending.target, pending.worker)
    if worker is None or worker.epoch < pending.epoch:
        return False
    is_quiet = not seen.groups[pending.target].per_second or seen.at_s - pending.since_s >= damping.settle_s
    return pending.target == RESERVE or bool(worker.scored or (worker.lanes and not worker.answers and is_quiet))


def _why_given_up(pending: PendingMove, seen: Observation, damping: Damping) -> str:
    """ "" while it may still arrive."""
    for group in seen.groups.values():
        for worker in group.workers:
            if worker.name == pending.worker and worker.given_up >= pending.epoch:
                return worker.why or "the worker gave it up"
    waited_s = seen.at_s - pending.since_s
    if waited_s <= damping.arrive_s:
        return ""
    if (there := _seen_in(seen, pending.target, pending.worker)) is None:
        return f"it does not serve {pending.target} after {waited_s:.0f} s"
    what = f"scored none of {there.answers} rankings" if there.answers else "has no lane"
    what = what if there.epoch >= pending.epoch else f"has not obeyed epoch {pending.epoch}"
    return f"it {what} after {waited_s:.0f} s"


def _with_absent_dropped(moves: MovesMemory, seen: Observation) -> MovesMemory:
    """Without the assignments of workers that are gone for good; the change is published with the next one."""
    present = {worker.name for group in seen.groups.values() for worker in group.workers}
    seen_s = {name: seen.at_s if name in present else moves.seen_s.get(name, seen.at_s) for name in moves.assigned}
    kept = {name: to for name, to in moves.assigned.items() if seen.at_s - seen_s[name] < ABSENT_S}
    return replace(moves, assigned=kept, seen_s=seen_s)
