"""The status of a trigger, on `worker-status` beside those of the workers: its lanes, its settings, its decisions.

`relaygr status` shows it, and `relaygr explain` decides with its settings. Serving does not depend on it.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from relaygr_stream.errors import DecodeError
from relaygr_stream.wire.messages import Finite, Id, Label, LeastVersion, UnixMillis
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.versions import SCHEMA_VERSION, VersionedDecoder
from relaygr_stream.wire.worker_status import StatusReader

#: The value of HEADER_KIND, and the prefix of the record's key, before the trigger's name.
KIND: Final = "trigger"
KEY_PREFIX: Final = "trigger/"
#: Seconds between statuses: they are for people, not for decisions.
STATUS_S: Final = 1.0

Lane = Annotated[int, Meta(ge=0, lt=10_000)]
Count = Annotated[int, Meta(ge=0, lt=2**53)]


class PolicyStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a trigger's decisions depend on (trigger/decision.py: Policy)."""

    risk_ms: Finite = 0.0  # of former releases, which skipped what was predicted to take less
    stale_ms: Finite
    life_ms: Finite
    burst_ms: Finite = 0.0  # of former releases, which bounded the device time of what they admitted
    max_prefix_tokens: Count
    delegate: bool = False


class TriggerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """On `worker-status`, header relaygr-kind = trigger, key = trigger/NAME."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    name: Id
    incarnation: Count  # Unix time of its start, in milliseconds
    host: Annotated[str, Meta(max_length=300)]
    pid: Count
    sent_ms: UnixMillis
    state: Label  # "serving", "stopped"; later releases may add more
    group: Id  # its consumer group on `retrieval`, prefix included
    lanes: Annotated[tuple[Lane, ...], Meta(max_length=10_000)]
    policy: PolicyStatus
    version: Label = ""  # of this package
    decisions: Annotated[dict[Label, Finite], Meta(max_length=64)] = {}  # events since its start, by reason
    backlog: Count = 0  # events read and not yet decided
    throttled_ms: Finite = 0.0  # for which brokers have throttled it by quotas, since its start
    erased: Annotated[tuple[Id, ...], Meta(max_length=64)] | UnsetType = UNSET  # as of a worker
    scenario: Label | UnsetType = UNSET  # as of a worker


_decoder = VersionedDecoder(TriggerStatus, min_v=1)
_encoder = msgspec.msgpack.Encoder()


def encode_trigger(status: TriggerStatus) -> bytes:
    """The status as MessagePack."""
    return _encoder.encode(status)


def read_trigger(record: Record, reader: StatusReader, *, fresh: bool = True) -> TriggerStatus | None:
    """The trigger's status in a record; None for a tombstone or another kind of record. Raises DecodeError."""
    status = reader.other(record, KIND, _decoder)
    if status is None:
        return None
    if (record.key or b"") != (KEY_PREFIX + status.name).encode():
        raise DecodeError("invalid", f"the key does not belong to trigger {status.name!r}")
    if fresh:
        reader.check_fresh(status.sent_ms)
    return status
