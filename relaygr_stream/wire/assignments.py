"""Which group each worker serves: one record on `routes`, which a planner or a rollout writes, and workers obey.

The record says how things are to be, not what to do: a worker that starts reads it, too, and the last one holds while
nobody writes. A worker that it does not name serves what it was started for; if that is no scenario, `home`, as
triggers of no scenario do.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from relaygr_stream.errors import DecodeError
from relaygr_stream.wire.messages import Id, LeastVersion, UnixMillis
from relaygr_stream.wire.records import HEADER_KIND, Record, kind_of
from relaygr_stream.wire.routes import MAX_AHEAD_MS, Count, GroupName
from relaygr_stream.wire.versions import SCHEMA_VERSION, VersionedDecoder
from relaygr_stream.wire.worker_status import StatusReader

#: HEADER_KIND of the record, and its key, which is no scenario's name (settings/scenarios.py: RESERVED).
KIND: Final = "assignments"
KEY: Final = b"assignments"
HEADERS: Final = ((HEADER_KIND, KIND.encode()),)
#: `planner` in a record of `relaygr rollout --in-place`.
ROLLOUT: Final = "rollout"
MAX_WORKERS: Final = 4096
#: Groups whose model a record names: the one that users come from, the one they go to, and those of later releases.
MAX_CHECKPOINTS: Final = 16

#: A folder on the host of the worker. It holds weights and a shape, never code (models/loading.py).
Checkpoint = Annotated[str, Meta(pattern=r"\A/[^\x00]*\Z", max_length=4096)]


class Assignments(msgspec.Struct, frozen=True, kw_only=True):
    """On `routes`, header relaygr-kind = assignments: the group of each worker. The highest epoch counts."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    epoch: Count  # Unix ms, or one more than the last
    sent_ms: UnixMillis
    planner: Id  # who wrote them: a planner's name, or ROLLOUT
    # By the worker's name; "": the group of the requests that are of no scenario.
    workers: Annotated[dict[Id, GroupName], Meta(max_length=MAX_WORKERS)]
    home: GroupName = ""  # of triggers and of workers not named above that were started for the group ""
    # The model of a group without a section, in place of that of a worker's settings.
    checkpoints: Annotated[dict[GroupName, Checkpoint], Meta(max_length=MAX_CHECKPOINTS)] = {}

    @classmethod
    def after(
        cls,
        known: Assignments | None,
        planner: str,
        workers: Mapping[str, str],
        now_ms: int,
        home: str = "",
        checkpoints: Mapping[str, str] | None = None,
    ) -> Assignments:
        """Those that count in place of the known ones."""
        epoch = now_ms if known is None else max(now_ms, known.epoch + 1)
        return cls(
            epoch=epoch,
            sent_ms=now_ms,
            planner=planner,
            workers=dict(workers),
            home=home,
            checkpoints=dict(checkpoints or {}),
        )


_encoder = msgspec.msgpack.Encoder()
_decoder = VersionedDecoder(Assignments, min_v=1)


def encode_assignments(assignments: Assignments) -> bytes:
    """The message as MessagePack."""
    return _encoder.encode(assignments)


def newer_assignments(record: Record, reader: StatusReader, known: Assignments | None) -> Assignments | None:
    """Those of the record if their epoch is not lower than that of the known ones; else `known` itself.

    Signed as the statuses are. Raises DecodeError for a record that is not to be believed.
    """
    if kind_of(record.headers) != KIND or (found := reader.other(record, KIND, _decoder)) is None:
        return known
    if record.key != KEY:
        raise DecodeError("invalid", f"the key of assignments is {KEY.decode()!r}, not {(record.key or b'')[:30]!r}")
    if found.epoch > time.time() * 1e3 + MAX_AHEAD_MS:
        raise DecodeError("invalid", f"epoch {found.epoch} is more than a day ahead, and no later one would count")
    return known if known is not None and found.epoch < known.epoch else found
