"""Encodes messages, and decodes and checks what others wrote.

The size is checked before decoding, and decoding is typed (msgspec), so that hostile nesting is refused without
building it.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar, get_args

import msgspec
from msgspec import UNSET

from relaygr_stream.errors import DecodeError
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.features import NO_TABLES, Columns, FeatureSchema, FeatureTables
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import (
    Cancel,
    Mode,
    Outcome,
    PreInferSignal,
    RankingRequest,
    RequestEvent,
    RequestEventInPlace,
    ScoreReply,
    State,
    Status,
    WorkerStatus,
)
from relaygr_stream.wire.records import HEADER_UNREADABLE, Headers, header
from relaygr_stream.wire.versions import OpenEnum, VersionedDecoder

Message = RequestEvent | PreInferSignal | RankingRequest | Cancel | ScoreReply | WorkerStatus
M = TypeVar("M", RequestEvent, PreInferSignal, RankingRequest, Cancel, ScoreReply, WorkerStatus)

#: Bytes of the reason on a record that could not be read: our readers write less, and anyone may send the header.
MAX_WHY_BYTES: Final = 500

_encoder = msgspec.msgpack.Encoder()
#: A reference of another form, beside a prefix, is ignored.
_HISTORY: Final = {"history": OpenEnum((), UNSET)}
_decoders: dict[type, VersionedDecoder[Any]] = {
    RequestEvent: VersionedDecoder(RequestEvent, _HISTORY),
    RequestEventInPlace: VersionedDecoder(RequestEventInPlace, _HISTORY),
    PreInferSignal: VersionedDecoder(PreInferSignal, _HISTORY),
    RankingRequest: VersionedDecoder(RankingRequest, {"mode": OpenEnum(get_args(Mode), "auto"), **_HISTORY}),
    Cancel: VersionedDecoder(Cancel),
    ScoreReply: VersionedDecoder(
        ScoreReply,
        {
            "status": OpenEnum(get_args(Status), "failed", note="detail"),
            "outcome": OpenEnum(get_args(Outcome), "full"),
        },
    ),
    # An unknown state counts as serving: otherwise the lanes in the status would have no owner.
    # min_v=1: every process of the fleet reads each status, so a later version is readable unless it states otherwise.
    WorkerStatus: VersionedDecoder(WorkerStatus, {"state": OpenEnum(get_args(State), "serving")}, min_v=1),
}

#: Longest message that is decoded. The topics' files bound messages on the broker.
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
#: Most bytes of unknown fields in a message: room for the fields of a later release, not for filling a reader's memory.
MAX_UNKNOWN_BYTES: Final = 4096
#: Heads of MessagePack maps: of up to 15 fields in one byte, of up to 255 fields in the form of three bytes.
SHORT_MAP, SHORT_MAP_SIZES, LONG_MAP = 0x80, 16, b"\xde\x00"


def encode(message: Message) -> bytes:
    """The message as MessagePack.

    The type's number of fields, absent ones included, decides how long the encoder's head of a map is: the shortest one
    keeps a message's bytes when its type gains a field that it does not have.
    """
    data = _encoder.encode(message)
    return bytes((SHORT_MAP | data[2],)) + data[3:] if data.startswith(LONG_MAP) and data[2] < SHORT_MAP_SIZES else data


def decode(kind: type[M], data: bytes | None, max_bytes: int = MAX_MESSAGE_BYTES, headers: Headers = ()) -> M:
    """Decode and validate one message of the given kind. headers: of its record; where that could not be read they say
    why, and so does the error.

    Raises DecodeError with reason `oversized` (the whole message, or its unknown fields), `malformed` (not MessagePack,
    or another shape), `unknown_version` (for readers of a later version) or `invalid` (well-formed but contradictory).
    """
    if data is None:
        why = header(headers, HEADER_UNREADABLE)[:MAX_WHY_BYTES].decode("utf-8", "replace")
        raise DecodeError("malformed", why or "the message has no value")
    if len(data) > max_bytes:
        raise DecodeError("oversized", f"{len(data)} bytes, the limit is {max_bytes}")
    message: M = _decoders[kind].decode(data)
    if len(data) > MAX_UNKNOWN_BYTES:
        _check_unknown(message, len(data))
    message.validate()
    return message


def validated(message: M) -> M:
    """The message, if receivers accept its values; a Struct does not check them when it is made.

    Raises DecodeError, or a ValueError that names the field.
    """
    for array in (getattr(message, "prefix", None), getattr(message, "suffix", None)):
        if isinstance(array, Behaviours):
            if {type(part) for part in array.parts()} != {bytes}:
                raise DecodeError(
                    "invalid", "behaviours must be made of bytes; pack arrays with Behaviours.from_arrays"
                )
            if array.table:  # the Struct's own values are not checked below
                msgspec.convert(dict(array.table), Columns)
    fields = msgspec.structs.asdict(message)
    msgspec.convert({name: value for name, value in fields.items() if value is not UNSET}, type(message))
    if isinstance(columns := fields.get("columns"), FeatureTables):
        msgspec.convert(msgspec.structs.asdict(columns), FeatureTables)
    if isinstance(history := fields.get("history"), HistoryReference):
        msgspec.convert(msgspec.structs.asdict(history), HistoryReference)
    message.validate()
    return message


def check_features(message: RequestEvent | PreInferSignal | RankingRequest, schema: FeatureSchema) -> None:
    """Raise DecodeError, naming the column, unless the message has exactly the columns of the schema."""
    suffix = message.suffix if isinstance(message, RankingRequest) else message.prefix
    if not (schema.columns or message.columns or message.prefix.columns or suffix.columns):
        return  # the common case
    columns = message.columns or NO_TABLES
    schema.check("user", 1, columns.user)
    if not message.history:  # otherwise the reader of the history checks its columns
        schema.check("behaviour", len(message.prefix), message.prefix.table)
    if isinstance(message, RankingRequest):
        schema.check("behaviour", len(suffix), suffix.table)
        candidates = len(message.candidates) // message.candidate_dtype.itemsize
        schema.check("candidate", candidates, columns.candidate)
    schema.check_digest(columns.schema)


def _check_unknown(message: Message, size: int) -> None:
    """Raise DecodeError if unknown fields, or known fields stated twice, take more than MAX_UNKNOWN_BYTES."""
    arrays = 0
    if isinstance(message, RequestEvent | PreInferSignal | RankingRequest):
        arrays = message.prefix.nbytes() + (message.columns.nbytes() if message.columns else 0)
    if size - arrays <= MAX_UNKNOWN_BYTES:  # the common case: everything but the arrays is small
        return
    unknown = size - len(encode(message))
    if unknown > MAX_UNKNOWN_BYTES:
        what = f"{unknown} of {size} bytes are in fields that this program does not know"
        raise DecodeError("oversized", f"{what}, the limit is {MAX_UNKNOWN_BYTES}")
