"""What a planner sees of a fleet in a window: the argument of its rules, and a line of a recorded day."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

#: Of an amount and of a count in a window; whatever a worker states beyond is not believed.
MOST_AMOUNT: Final = 1e12
MOST_COUNT: Final = 10_000_000

Amount = Annotated[float, Meta(ge=0, le=MOST_AMOUNT)]
Count = Annotated[int, Meta(ge=0, le=MOST_COUNT)]
#: Until the year 9999, the last that a calendar shows.
UnixSeconds = Annotated[float, Meta(ge=0, le=253_402_300_799)]
Share = Annotated[float, Meta(ge=0, le=1)]
Epoch = Annotated[int, Meta(ge=0, lt=2**53)]
#: The squared coefficient of variation of device times where no worker tells more than their sum.
VARIATION: Final = 0.25


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A serving worker in the window: its answers, those late or without scores, those with scores, its device's busy
    share.

    lanes: that it owns. epoch: of the assignments that it obeys. given_up: of those of which it gave its move up, and
    why; 0: of none.
    """

    name: str
    answers: Count = 0
    late: Count = 0
    scored: Count = 0
    busy: Share = 0.0
    lanes: Count = 0
    epoch: Epoch = 0
    given_up: Epoch = 0
    why: str = ""


class PartSeen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One scenario's part of what a group does that serves several: its rankings a second, the P99 of its answers, and
    its share of the device time for prefixes and of that for scores."""

    per_second: Amount = 0.0
    prefix_share: Share = 0.0
    score_share: Share = 0.0
    p99_ms: Amount | None = None


class GroupSeen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scenario's group in the window. per_second: rankings. prefix_ms, score_ms: mean device time of one; variation:
    its squared coefficient. p99_ms: of the answers with scores, on the worker; None: there were none. parts: by
    scenario, where it serves several."""

    workers: tuple[WorkerSeen, ...] = ()
    per_second: Amount = 0.0
    prefix_ms: Amount = 0.0
    score_ms: Amount = 0.0
    prefix_variation: Amount = VARIATION
    score_variation: Amount = VARIATION
    p99_ms: Amount | None = None
    parts: dict[str, PartSeen] = {}


class Observation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All groups in a window that ended at `at_s`. reserve: workers that serve none. moving: none may begin now."""

    at_s: UnixSeconds
    groups: dict[str, GroupSeen]
    reserve: Count = 0
    moving: bool = False


def bounded(value: float) -> float:
    """As an amount."""
    return min(max(0.0, value), MOST_AMOUNT)
