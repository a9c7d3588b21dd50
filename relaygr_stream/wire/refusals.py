"""Why requests were not admitted, and which worker has their prefix KV instead: sent by the trigger to their owner.

On `pre-infer`, header relaygr-kind = refusals: one small record per owner and flush. A late or lost record leaves the
answer's `admission` empty, and has a delegated request inferred in full by its owner.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Annotated, Final, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from relaygr_stream.wire.messages import AdmissionReason, Id, LeastVersion, tenant_key
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.versions import SCHEMA_VERSION, VersionedDecoder

T = TypeVar("T")

#: The value of HEADER_KIND.
KIND: Final = "refusals"
#: Most requests in a record. A key has at most 385 characters of four bytes, and may stand in both maps: 0.75 of the
#: topic's limit at worst.
MAX_IDS: Final = 256
#: Most requests whose admission a worker keeps: some seconds of traffic, 3 MB at 200 bytes for an id and its entry.
MAX_REQUESTS: Final = 16_384

#: A request and its tenant (wire/messages.py: tenant_key): 256 characters, 128, and the NUL between them.
RequestKey = Annotated[str, Meta(min_length=1, max_length=385)]


class Refusals(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of requests that were not admitted, by reason; of those that were delegated, by delegate, too."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    reasons: Annotated[
        dict[AdmissionReason, Annotated[list[RequestKey], Meta(max_length=MAX_IDS)]], Meta(max_length=64)
    ]
    delegates: (
        Annotated[dict[Id, Annotated[list[RequestKey], Meta(max_length=MAX_IDS)]], Meta(max_length=MAX_IDS)] | UnsetType
    ) = UNSET


class Refusal(NamedTuple):
    """A request that was not admitted, and why. delegate: the worker that has its prefix KV; empty: none."""

    request_id: str
    reason: str
    tenant: str = ""
    delegate: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = VersionedDecoder(Refusals, min_v=1)


def encode_refusals(refused: Iterable[Refusal]) -> bytes:
    """At most MAX_IDS refusals as MessagePack."""
    reasons: dict[str, list[str]] = {}
    delegates: dict[str, list[str]] = {}
    for one in refused:
        key = tenant_key(one.tenant, one.request_id)
        reasons.setdefault(one.reason, []).append(key)
        if one.delegate:
            delegates.setdefault(one.delegate, []).append(key)
    return _encoder.encode(Refusals(reasons=reasons, delegates=delegates or UNSET))


def decode_refusals(value: bytes | None) -> Refusals:
    """The record's refusals. Raises DecodeError."""
    return _decoder.decode(value or b"")


class _Delegate(NamedTuple):
    worker: str
    until: float  # end of the life window
    pins: bool = True  # no ranking went there, which would end its pin


class Reasons:
    """The trigger's decisions on requests (tenant_key) that a worker will rank; beyond MAX_REQUESTS the oldest are
    dropped.

    late_ms: the life window. A record that is older is ignored, and a delegate counts no longer.
    """

    def __init__(self, late_ms: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._late_ms = late_ms
        self._clock = clock
        self._reasons: OrderedDict[str, str] = OrderedDict()
        self._delegates: OrderedDict[str, _Delegate] = OrderedDict()

    def admitted(self, request_key: str, *, delegated: bool = False) -> None:
        """Note that a signal for this request was read; delegated: on another worker's behalf."""
        _put(self._reasons, request_key, "delegated" if delegated else "admitted")

    def read(self, record: Record, age_ms: float) -> list[str]:
        """Note the refusals of a record of this age; returns the keys of delegated requests. Raises DecodeError."""
        left_s = (self._late_ms - age_ms) / 1e3
        if left_s < 0:
            return []
        refused = decode_refusals(record.value)
        for reason, keys in refused.reasons.items():
            for key in keys:
                _put(self._reasons, key, reason)
        until = self._clock() + left_s
        delegates = {key: worker for worker, keys in (refused.delegates or {}).items() for key in keys}
        for key, worker in delegates.items():
            _put(self._delegates, key, _Delegate(worker, until))
        return list(delegates)

    def admission(self, request_key: str) -> str:
        """The trigger's decision on a request; empty: unknown. A request may be ranked several times."""
        return self._reasons.get(request_key, "")

    def delegate(self, request_key: str) -> str:
        """The worker that has the request's prefix KV; empty: none, or its life window is over."""
        found = self._delegates.get(request_key)
        return found.worker if found is not None and self._clock() <= found.until else ""

    def passed_on(self, request_key: str) -> None:
        """A broker has taken a ranking of the request to its delegate."""
        if (found := self._delegates.get(request_key)) is not None:
            self._delegates[request_key] = found._replace(pins=False)

    def drop_delegate(self, request_key: str) -> str:
        """Forget the request's delegate. Returns the worker if it pins the prefix KV and no ranking went there."""
        worker, found = self.delegate(request_key), self._delegates.pop(request_key, None)
        return worker if found is not None and found.pins else ""


def _put(table: OrderedDict[str, T], key: str, value: T) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > MAX_REQUESTS:
        table.popitem(last=False)
