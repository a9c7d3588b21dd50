"""Why requests were not admitted, from the trigger to the worker that will rank them: so that an answer can tell.

On `pre-infer`, header relaygr-kind = refusals: one small record per owner and turn of the flush. Nothing depends on it:
a record that is late or lost leaves the answer's `admission` empty.
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
#: Ids in a record: 256 characters of four bytes each at most, so a quarter of what the topic takes at worst.
MOST_IDS: Final = 256
#: Requests a worker remembers the trigger's word on: some seconds of traffic, 3 MB at 100 bytes an id and its place.
REMEMBERED: Final = 16_384


class Refusals(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of requests by the reason why they were not admitted."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    reasons: Annotated[dict[Label, Annotated[list[Id], Meta(max_length=MOST_IDS)]], Meta(max_length=64)]


_encoder = msgspec.msgpack.Encoder()
_decoder = VersionedDecoder(Refusals, min_v=1)


def encode_refusals(refused: list[tuple[str, str]]) -> bytes:
    """(request id, reason) of at most MOST_IDS requests, as they travel."""
    reasons: dict[str, list[str]] = {}
    for request_id, reason in refused:
        reasons.setdefault(reason, []).append(request_id)
    return _encoder.encode(Refusals(reasons=reasons))


class Reasons:
    """What the trigger decided on requests that a worker will rank; the oldest are forgotten first.

    late_ms: a record written longer ago by its own time tells nothing any more.
    """

    def __init__(self, late_ms: float, wall: Callable[[], float] = time.time) -> None:
        self._late_ms = late_ms
        self._wall = wall
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def admitted(self, request_id: str) -> None:
        """A signal came for it."""
        self._put(request_id, "admitted")

    def read(self, record: Record) -> None:
        """A record of refusals. Raises DecodeError."""
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
        """The trigger's word on it, once; empty: unknown."""
        return self._reasons.pop(request_id, "")

    def _put(self, request_id: str, reason: str) -> None:
        self._reasons[request_id] = reason
        if len(self._reasons) > REMEMBERED:
            self._reasons.popitem(last=False)
