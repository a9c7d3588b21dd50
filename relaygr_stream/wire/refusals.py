"""Why requests were not admitted: sent by the trigger to the worker that ranks them, which puts it into its answers.

On `pre-infer`, header relaygr-kind = refusals: one small record per owner and flush. A late or lost record only leaves
the answer's `admission` empty.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from relaygr_stream.errors import DecodeError
from relaygr_stream.wire.messages import Id, Label, LeastVersion
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.versions import NOT_DECODED, SCHEMA_VERSION, VersionedDecoder

#: The value of HEADER_KIND.
KIND: Final = "refusals"
#: Most ids in a record: each has at most 256 characters of four bytes, so a quarter of the topic's limit at worst.
MAX_IDS: Final = 256
#: Most requests whose admission a worker keeps: some seconds of traffic, 3 MB at 200 bytes for an id and its entry.
MAX_REQUESTS: Final = 16_384


class Refusals(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of requests that were not admitted, by reason."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    reasons: Annotated[dict[Label, Annotated[list[Id], Meta(max_length=MAX_IDS)]], Meta(max_length=64)]


_encoder = msgspec.msgpack.Encoder()
_decoder = VersionedDecoder(Refusals, min_v=1)


def encode_refusals(refused: list[tuple[str, str]]) -> bytes:
    """At most MAX_IDS pairs (request id, reason) as MessagePack."""
    reasons: dict[str, list[str]] = {}
    for request_id, reason in refused:
        reasons.setdefault(reason, []).append(request_id)
    return _encoder.encode(Refusals(reasons=reasons))


class Reasons:
    """The trigger's decisions on requests that a worker will rank; beyond MAX_REQUESTS the oldest are dropped.

    late_ms: a record that is older by its own timestamp is ignored.
    """

    def __init__(self, late_ms: float, wall: Callable[[], float] = time.time) -> None:
        self._late_ms = late_ms
        self._wall = wall
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def admitted(self, request_id: str) -> None:
        """Note that a signal for this request was read."""
        self._put(request_id, "admitted")

    def read(self, record: Record) -> None:
        """Note the refusals of a record. Raises DecodeError."""
        if self._wall() * 1e3 - record.timestamp_ms > self._late_ms:
            return
        try:
            refused = _decoder.decode(record.value or b"")
        except NOT_DECODED as error:
            raise DecodeError("malformed", str(error)[:300]) from error
        for reason, ids in refused.reasons.items():
            for request_id in ids:
                self._put(request_id, reason)

    def take(self, request_id: str) -> str:
        """Pop the trigger's decision on a request; empty: unknown."""
        return self._reasons.pop(request_id, "")

    def _put(self, request_id: str, reason: str) -> None:
        self._reasons[request_id] = reason
        if len(self._reasons) > MAX_REQUESTS:
            self._reasons.popitem(last=False)
