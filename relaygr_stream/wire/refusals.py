"""Why requests were not admitted, and which worker has their prefix KV instead: sent by the trigger to their owner.

On `pre-infer`, header relaygr-kind = refusals: one small record per owner and flush. A late or lost record leaves the
answer's `admission` empty, and has a delegated request inferred in full by its owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from relaygr_stream.wire.messages import AdmissionReason, Id, LeastVersion, tenant_key
from relaygr_stream.wire.versions import SCHEMA_VERSION, VersionedDecoder

#: The value of HEADER_KIND.
KIND: Final = "refusals"
#: Most requests in a record. A key has at most 385 characters of four bytes, and may stand in both maps: 0.75 of the
#: topic's limit at worst.
MAX_IDS: Final = 256

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
