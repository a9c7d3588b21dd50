"""Messages and lanes for the trigger's tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from relaygr_stream.fleet import Claim
from relaygr_stream.trigger.decision import Policy
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.messages import CostModel, LaneStatus, RequestEvent, WorkerStatus
from tests import statuses
from tests.statuses import lane_statuses

POLICY = Policy(stale_ms=1000.0, life_ms=2000.0, max_prefix_tokens=1000)
#: A millisecond a token: full inference of n tokens takes n ms.
COSTS = CostModel(c0=0.0, c1=1.0, c2=0.0, c3=0.0)


def lane_status(*, budget: int = 10_000, pinned: int = 0, offset: int = 0, lane: int = 0) -> LaneStatus:
    (status,) = lane_statuses([lane], budget_bytes=budget, pinned_bytes=pinned, pre_infer_offset=offset)
    return status


def worker_status(*lanes: LaneStatus, name: str = "w", **changes: Any) -> WorkerStatus:
    """Of a worker that computes a millisecond a token."""
    return statuses.worker_status(name, lanes, **{"costs": COSTS, "bytes_per_token": 10, "alloc_bytes": 100, **changes})


def claim(status: WorkerStatus, received_s: float = 0.0) -> Claim:
    return Claim(status, status.lanes[0], received_s)


def behaviours(count: int) -> Behaviours:
    return Behaviours.from_arrays(np.arange(count), np.zeros(count, np.uint8), np.arange(count))


def event(tokens: int, request_id: str = "r", user_id: str = "u", candidates: int = 0, **extra: Any) -> RequestEvent:
    prefix = behaviours(tokens)
    return RequestEvent(request_id=request_id, user_id=user_id, prefix=prefix, candidates=candidates, **extra)
