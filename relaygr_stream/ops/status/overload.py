"""Overload: rankings that get no scores in time from workers whose devices have no time to spare.

The rule of `relaygr status`, of the page of a fleet and of `relaygr explain`; the alert RelaygrOverload has the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from relaygr_stream.ops.status.overview import Seen
from relaygr_stream.ops.status.tally import lately
from relaygr_stream.wire.messages import Status, WorkerStatus

#: A device busier than this has no time to spare: simulated, it is at 0.74 to 0.81 at the largest rate carried, at 0.83
#: to 0.89 with a tenth more.
BUSY: Final = 0.8
#: Share of rankings with scores within the SLO below which something is odd: the SLO is one at P99.
SLO_SHARE: Final = 0.99
#: How a ranking is answered that there was no time, or no place, for.
REFUSED: Final[tuple[Status, ...]] = ("overloaded", "deadline_exceeded")


def is_busy(status: WorkerStatus) -> bool:
    """Whether the worker's device has no time to spare."""
    return status.busy_share > BUSY


@dataclass(frozen=True)
class Overload:
    """What a fleet's busy workers refused, or answered later than the SLO, of all its rankings lately."""

    refused: int
    late: int
    workers: int


def overload(seen: Iterable[Seen[WorkerStatus]], rankings: int, scenario: str = "") -> Overload | None:
    """Whether workers are overloaded, by what they answered lately. rankings: answers of the whole fleet. scenario: the
    only one that counts (told_of)."""
    busy = [lately([each], scenario)[0] for each in seen if is_busy(each.last)]
    refused = sum(tally.answers[status] for tally in busy for status in REFUSED)
    found = Overload(refused, sum(tally.late for tally in busy), len(busy))
    return found if found.refused + found.late > (1 - SLO_SHARE) * rankings else None
