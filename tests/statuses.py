"""What workers state: one status of plain numbers, which tests change where they need to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from relaygr_stream.settings.worker import Handover
from relaygr_stream.wire.messages import CostModel, LaneStatus, WorkerStatus

_SECRET, _NEXT = "a secret of the fleet", "the fleet's next secret"
#: The settings of a fleet that changes its secret, from round to round of restarts.
SECRET_CHANGE = (
    Handover(secret=_SECRET),
    Handover(secret=_SECRET, accepted_secret=_NEXT),
    Handover(secret=_NEXT, accepted_secret=_SECRET),
    Handover(secret=_NEXT),
)


def lane_statuses(lanes: Iterable[int], **changes: Any) -> tuple[LaneStatus, ...]:
    """What an owner states of lanes of these numbers; changes: fields of all of them."""
    plain = LaneStatus(lane=0, budget_bytes=1, pinned_bytes=0, pre_infer_offset=0)
    return tuple(msgspec.structs.replace(plain, **{"lane": lane, **changes}) for lane in lanes)


def worker_status(name: str = "w", lanes: Iterable[LaneStatus] = (), **changes: Any) -> WorkerStatus:
    """A serving worker's status; changes: its other fields."""
    plain = WorkerStatus(
        name=name,
        incarnation=1,
        host="h",
        pid=1,
        sent_ms=1,
        state="serving",
        lanes=tuple(lanes),
        costs=CostModel(c0=1, c1=0, c2=0, c3=0),
        bytes_per_token=1,
        alloc_bytes=1,
        queue_ms=0.0,
        model_version="m",
    )
    return msgspec.structs.replace(plain, **changes) if changes else plain
