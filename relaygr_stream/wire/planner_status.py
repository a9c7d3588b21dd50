"""The status of a planner, on `worker-status` beside those of workers: how many workers each scenario wants, and why.

`relaygr plan show` shows it. Nothing that serves depends on it.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.scenarios import MAX_SCENARIOS
from relaygr_stream.wire.messages import Finite, Id, Label, LeastVersion, UnixMillis
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.versions import SCHEMA_VERSION, VersionedDecoder
from relaygr_stream.wire.worker_status import StatusReader

#: The value of HEADER_KIND, and the prefix of the record's key, before the planner's name.
KIND: Final = "planner"
KEY_PREFIX: Final = "planner/"

Count = Annotated[int, Meta(ge=0, lt=2**53)]
#: Longest reason.
MOST_TEXT: Final = 500
Text = Annotated[str, Meta(max_length=MOST_TEXT)]
#: What decides how many workers a scenario wants: its demand, that it stated no fewer, that all its workers were late
#: with as many as the demand asks for, that fewer kept its SLO, or what is remembered of one that no worker serves.
REASON_KINDS: Final = ("demand", "min_workers", "late", "kept", "unserved")


class ScenarioPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a scenario has and wants. demand: in workers. headroom_ms: the SLO less the P99; None: no answers.

    reason_kind: demand, min_workers, late, kept or unserved; "": of an earlier release. served_by: the scenario whose
    workers serve it, and whose numbers have its part; absent: it has workers of its own.
    """

    workers: Count
    wanted: Count
    demand: Finite
    headroom_ms: Finite | None = None
    reason: Text = ""
    reason_kind: Label = ""
    served_by: Label | UnsetType = UNSET


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One worker of `source` ("": of none) is to serve `target`."""

    source: Label
    target: Label
    reason: Text = ""


class SharedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Scenarios that had better share one group."""

    scenarios: Annotated[tuple[Label, ...], Meta(max_length=MAX_SCENARIOS)]
    reason: Text = ""


class FleetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The proposals at a Unix time in seconds."""

    at_s: Finite
    scenarios: Annotated[dict[Label, ScenarioPlan], Meta(max_length=MAX_SCENARIOS)]
    move: Move | None = None
    shared: SharedGroup | None = None


class PlannerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """On `worker-status`, header relaygr-kind = planner, key = planner/NAME."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    name: Id
    incarnation: Count  # Unix time of its start, in milliseconds
    sent_ms: UnixMillis
    state: Label  # "serving", "standby": another planner acts; later releases may add more
    mode: Label = "advise"  # or "act"; later releases may add more
    plan: FleetPlan
    moves: Text = ""  # of a planner that acts: the move under way, or how the last one ended, for people
    version: Label = ""  # of this package


_decoder = VersionedDecoder(PlannerStatus, min_v=1)
_encoder = msgspec.msgpack.Encoder()


def encode_planner(status: PlannerStatus) -> bytes:
    """The status as MessagePack."""
    return _encoder.encode(status)


def read_planner(record: Record, reader: StatusReader) -> PlannerStatus | None:
    """The planner's status in a record; None for a tombstone or another kind of record. Raises DecodeError."""
    status = reader.other(record, KIND, _decoder)
    if status is not None and (record.key or b"") != (KEY_PREFIX + status.name).encode():
        raise DecodeError("invalid", f"the key does not belong to planner {status.name!r}")
    return status
