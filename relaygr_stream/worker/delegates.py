"""Delegates: other workers that computed prefix KV on this one's behalf (trigger/delegation.py).

The trigger's notice names a request's delegate. Its ranking goes there, one hop, to a hit. Where none will, because the
request was answered here or cancelled, the delegate is told, so that it pins the prefix KV no longer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress

from relaygr_stream.engine.commands import RankTask
from relaygr_stream.engine.queue import RecentIds
from relaygr_stream.engine.scheduler import RECENT_ANSWERS
from relaygr_stream.errors import DecodeError
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import Cancel, split_tenant_key
from relaygr_stream.wire.records import HEADER_KIND, KIND_CANCEL, Record
from relaygr_stream.wire.refusals import Reasons
from relaygr_stream.worker.forwarding import Forwarding


class Delegates:
    """The delegates of the requests that a worker's rankings belong to.

    ranking: the topic. pass_on(cancel, lane): sends a copy of it to that lane. gone: called for a ranking whose
    delegate is no longer there, or would be too late.
    """

    def __init__(
        self,
        reasons: Reasons,
        forwarding: Forwarding,
        ranking: str,
        pass_on: Callable[[Record, int], None],
        gone: Callable[[], None],
    ) -> None:
        self._reasons = reasons
        self._forwarding = forwarding
        self._ranking = ranking
        self._pass_on = pass_on
        self._gone = gone
        self._answered_here = RecentIds(RECENT_ANSWERS)  # request keys, for notices that come behind the answer

    def notice(self, record: Record, age_ms: float) -> None:
        """Read a notice of the trigger. One that cannot be read is ignored: nothing depends on it."""
        with suppress(DecodeError):
            for request_key in self._reasons.read(record, age_ms):
                if request_key in self._answered_here:
                    self.release(request_key)

    def lane(self, task: RankTask) -> int | None:
        """A lane of the worker that has this ranking's prefix KV; None: there is none, or none any more."""
        if task.hops or task.full or not (name := self._reasons.delegate(task.request_key)):
            return None
        lane = self._forwarding.lane_of_delegate(name, (task.deadline - time.monotonic()) * 1e3)
        if lane is None:
            self._gone()
        return lane

    def answered(self, request_key: str) -> None:
        """The request has its final answer from here."""
        self._answered_here.add(request_key)
        self.release(request_key)

    def release(self, request_key: str, cancel: Record | None = None) -> None:
        """Have released what a delegate pins for this request, unless a ranking went there.

        cancel: the client's, to be passed on; None: one of our own is sent.
        """
        name = self._reasons.drop_delegate(request_key)
        lane = self._forwarding.lane_of_delegate(name, math.inf) if name else None
        if lane is None:
            return
        if cancel is None:
            tenant, request_id = split_tenant_key(request_key)
            value = encode(Cancel(request_id=request_id, tenant=tenant))
            cancel = Record(self._ranking, lane, 0, 0, b"", value, ((HEADER_KIND, KIND_CANCEL.encode()),))
        self._pass_on(cancel, lane)
