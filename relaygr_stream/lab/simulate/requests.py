"""One simulated request, from its event to what its client got."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relaygr_stream.trigger.decision import Reason
from relaygr_stream.wire.messages import Outcome, Status


@dataclass(slots=True, eq=False)
class Request:
    """Times are seconds. Until it is over, latency is infinite and status None."""

    number: int
    at: float  # its event
    rank_at: float
    user: int
    lane: int
    prefix: int
    returning: bool  # the user was seen before
    reason: Reason | None = None  # what the trigger decided
    latency_s: float = math.inf  # from rank_at to the client's scores
    status: Status | None = None  # of the answer; None: none came in time
    outcome: Outcome | None = None
    answers: int = 0

    @property
    def name(self) -> str:
        """Its id on the wire."""
        return f"s{self.number}"

    @property
    def user_id(self) -> str:
        """The user's, on the wire."""
        return f"u{self.user}"
