"""Whether a group keeps its SLO with fewer workers than its demand asks for: the evidence of many windows.

A slow scenario has few answers in each, and a proposal that nothing carries out, or a tide, gives it many windows.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from relaygr_stream.ops.planner.demand import ALLOWED_LATE
from relaygr_stream.ops.planner.seen import GroupSeen

#: Answers, of as many windows as it takes, below which a group does not show that it keeps its SLO.
ENOUGH: Final = 200
#: Evidence that did not suffice within a day is dropped.
FORGET_S: Final = 86_400.0


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of windows in which a group had fewer workers than its demand asked for, and those late. since_s: of the
    first. least: the least demand a worker among them."""

    since_s: float
    answers: float = 0.0
    late: float = 0.0
    least: float = math.inf

    @property
    def is_enough(self) -> bool:
        """Whether so many answers tell something."""
        return self.answers >= ENOUGH

    @property
    def keeps_slo(self) -> bool:
        """Whether as few of them were late as the SLO allows."""
        return self.late <= ALLOWED_LATE * self.answers

    def and_of(self, group: GroupSeen, per_worker: float, at_s: float, seconds: float) -> Tried:
        """With what the group answered in the last so many seconds: windows may overlap. What is old is dropped."""
        if at_s - self.since_s > FORGET_S:
            return Tried(since_s=at_s)
        answers, late = sum(each.answers for each in group.workers), sum(each.late for each in group.workers)
        new = min(1.0, group.per_second * seconds / answers) if answers else 0.0
        return Tried(
            since_s=self.since_s,
            answers=self.answers + new * answers,
            late=self.late + new * late,
            least=min(self.least, per_worker) if new else self.least,
        )
