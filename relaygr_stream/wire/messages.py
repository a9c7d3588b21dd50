"""What travels on the topics: typed messages, their codec, and `DecodeError` for everything else.

MessagePack maps on the wire; every message carries its schema version `v`. Arrays are little-endian bytes
(behaviours.py; its names and those of headers.py are imported from here as well). Decoding is typed (msgspec), so that
hostile nesting is refused without building it; the size is checked before decoding. What later releases write is read
as versions.py says. Knows nothing of Kafka.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import LABEL
from relaygr_stream.wire.behaviours import ITEM_DTYPE, Behaviours, BehavioursInPlace, check_times, pack_items
from relaygr_stream.wire.headers import (
    HEADER_CORRELATION,
    HEADER_DETAIL,
    HEADER_KIND,
    HEADER_ORIGIN_OFFSET,
    HEADER_ORIGIN_PARTITION,
    HEADER_ORIGIN_TOPIC,
    HEADER_REASON,
    HEADER_REPLAY_OF,
    HEADER_REPLAYS,
    HEADER_REPLY_PARTITION,
    HEADER_SIGNATURE,
    MAX_CORRELATION_BYTES,
    kind_of,
)
from relaygr_stream.wire.versions import NOT_DECODED, SCHEMA_VERSION, OpenEnum, VersionedDecoder

__all__ = [
    "HEADER_CORRELATION",
    "HEADER_DETAIL",
    "HEADER_KIND",
    "HEADER_ORIGIN_OFFSET",
    "HEADER_ORIGIN_PARTITION",
    "HEADER_ORIGIN_TOPIC",
    "HEADER_REASON",
    "HEADER_REPLAYS",
    "HEADER_REPLAY_OF",
    "HEADER_REPLY_PARTITION",
    "HEADER_SIGNATURE",
    "ITEM_DTYPE",
    "MAX_CORRELATION_BYTES",
    "MAX_DETAIL",
    "MAX_MESSAGE_BYTES",
    "MAX_UNKNOWN_BYTES",
    "SCHEMA_VERSION",
    "SCORE_DTYPE",
    "Behaviours",
    "CostModel",
    "Finite",
    "Id",
    "Label",
    "LaneStatus",
    "Message",
    "Millis",
    "Mode",
    "Outcome",
    "PreInferSignal",
    "RankingRequest",
    "RequestEvent",
    "RequestEventInPlace",
    "ScoreReply",
    "State",
    "Status",
    "Timings",
    "UnixMillis",
    "WorkerStatus",
    "check_times",
    "decode",
    "encode",
    "kind_of",
    "pack_items",
    "tenant_key",
    "validated",
    "without_tenant",
]

SCORE_DTYPE: Final = np.dtype("<f4")

Id = Annotated[str, Meta(min_length=1, max_length=256)]
Label = Annotated[str, LABEL]
UnixMillis = Annotated[int, Meta(ge=0, lt=2**53)]
Millis = Annotated[float, Meta(ge=0, le=3.6e6)]
#: Neither NaN, which every comparison with a bound refuses, nor infinite.
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]

#: Where a ranking found the prefix KV: ready in HBM, in DRAM (or on its way back), still being computed, nowhere.
Outcome = Literal["hbm", "dram", "joined", "full"]
Status = Literal["ok", "deadline_exceeded", "overloaded", "rejected", "failed"]
Mode = Literal["auto", "full"]
State = Literal["starting", "serving", "draining", "stopped"]
#: The least schema version whose readers understand the message; 0: only those of its own version.
LeastVersion = Annotated[int, Meta(ge=0)]


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True):
    """On `retrieval`, key = user id: retrieval starts for a request that will be ranked soon."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    request_id: Id
    user_id: Id
    prefix: Behaviours
    candidates: Annotated[int, Meta(ge=0, le=1_000_000)]  # how many the ranking will bring, expected
    sent_ms: UnixMillis = 0  # the sender's clock when it published; 0: unknown, taken as just now
    rank_in_ms: Millis = 0.0  # the sender's guess of the time until the ranking request; 0 = unknown
    tenant: Label = ""  # whose user it is: prefix KV are found under tenant and user id

    def validate(self) -> None:
        """Raise DecodeError where the types alone cannot tell that the message is wrong."""
        self.prefix.checked(_Invalid)


class RequestEventInPlace(RequestEvent, frozen=True, kw_only=True):
    """A RequestEvent decoded without copying its arrays: for the trigger, which hands them on or drops them."""

    prefix: BehavioursInPlace


class PreInferSignal(msgspec.Struct, frozen=True, kw_only=True):
    """On `pre-infer`, key = user id: an admitted request whose prefix KV is to be computed and pinned."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    request_id: Id
    user_id: Id
    prefix: Behaviours
    admitted_ms: UnixMillis  # the trigger's clock at admission
    life_ms: Millis  # the pin ends this long after the worker read the signal, consumed or not
    rank_in_ms: Millis = 0.0
    tenant: Label = ""

    def validate(self) -> None:
        """Raise DecodeError where the types alone cannot tell that the message is wrong."""
        self.prefix.checked(_Invalid)
        if len(self.prefix) == 0:
            raise DecodeError("invalid", "a pre-infer signal needs a prefix of at least one behaviour")


class RankingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """On `ranking`, key = user id: score candidates; the prefix travels along, so that any worker can answer."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    request_id: Id
    user_id: Id
    prefix: Behaviours
    suffix: Behaviours = Behaviours()
    candidates: bytes  # m × uint32: item ids to score, m ≥ 1
    sent_ms: UnixMillis = 0  # the sender's clock when it published; 0: unknown, taken as just now
    timeout_ms: Millis = 0.0  # the answer is worthless this long after sent_ms; 0: the worker's client.timeout_ms
    mode: Mode = "auto"  # "full": infer prefix and suffix together, ignoring any prefix KV
    hops: Annotated[int, Meta(ge=0, le=2)] = 0  # times this request was forwarded to another lane
    tenant: Label = ""  # as in the request event
    client_id: Label = ""  # which client asks: claimed, not proven

    def validate(self) -> None:
        """Raise DecodeError where the types alone cannot tell that the message is wrong."""
        self.prefix.checked(_Invalid)
        self.suffix.checked(_Invalid)
        if not self.candidates or len(self.candidates) % ITEM_DTYPE.itemsize:
            raise DecodeError("invalid", f"candidates must be m ≥ 1 uint32; got {len(self.candidates)} bytes")
        if len(self.prefix) and len(self.suffix):
            last = int.from_bytes(self.prefix.times[-8:], "little", signed=True)
            first = int.from_bytes(self.suffix.times[:8], "little", signed=True)
            if first < last:
                raise DecodeError("invalid", f"the suffix starts at {first}, before the prefix ends at {last}")


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Where a ranking's time went on the worker, in milliseconds, and what it cost."""

    inbound_ms: Finite = 0.0  # age when the worker read it, by the sender's clock as far as the log's order allows
    queued_ms: Finite = 0.0  # from the worker's read to the start on the device
    device_ms: Finite = 0.0  # on the device, the joined part of a pre-inference included
    worker_ms: Finite = 0.0  # from the worker's read to the end on the device, waits for other work included
    computed_tokens: int = 0  # prefix tokens inferred for this answer at ranking time


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """On `scores`, on the requester's partition: the one typed answer. Scores are m × tasks, row-major."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    request_id: str
    status: Status
    outcome: Outcome | None = None  # None unless status is "ok"
    scores: bytes = b""  # m·tasks × float32
    tasks: tuple[str, ...] = ()  # names of the score columns
    detail: str = ""  # why there are no scores, for a person
    model_version: str = ""
    worker: str = ""
    timings: Timings = Timings()
    admission: Annotated[str, Meta(max_length=64)] = ""  # the trigger's reason; empty: the worker was told none

    def matrix(self) -> npt.NDArray[np.float32]:
        """Scores as (candidates, tasks)."""
        return np.frombuffer(self.scores, SCORE_DTYPE).reshape(-1, max(1, len(self.tasks)))

    def validate(self) -> None:
        """Raise DecodeError where the types alone cannot tell that the message is wrong."""
        row = SCORE_DTYPE.itemsize * max(1, len(self.tasks))
        if len(self.scores) % row:
            raise DecodeError("invalid", f"scores have {len(self.scores)} bytes, not a multiple of a row of {row}")


class LaneStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One lane's budget, as its owner states it."""

    lane: int
    budget_bytes: int  # pinned bytes this lane may have
    pinned_bytes: int  # pinned bytes it has, all signals below pre_infer_offset accounted
    pre_infer_offset: int  # the next pre-infer offset the owner will read
    device_ms_per_s: float  # device time for pre-infer that this lane may ask for, per second


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """T_full(n, m) = c0 + c1·n + c2·n² + c3·n·m + c4·m milliseconds, n prefix tokens, m candidates (DESIGN §6)."""

    c0: float
    c1: float
    c2: float
    c3: float
    c4: float = 0.0

    def full_ms(self, prefix: int, candidates: int) -> float:
        """Predicted device time of full inference."""
        return self.c0 + self.c1 * prefix + self.c2 * prefix * prefix + (self.c3 * prefix + self.c4) * candidates

    def pre_infer_ms(self, prefix: int) -> float:
        """Predicted device time of the prefix alone."""
        return self.full_ms(prefix, 0)


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """On `worker-status`, key = worker name: who owns which lanes, at what budgets, and how the worker fares."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    name: Id
    incarnation: int  # grows with each start of a worker of this name (start time in ns)
    host: str
    pid: int
    sent_ms: UnixMillis
    state: State
    lanes: tuple[LaneStatus, ...]
    costs: CostModel
    bytes_per_token: int
    alloc_bytes: int  # an entry's bytes are rounded up to a multiple of this
    queue_ms: float  # present delay of a ranking request before the device takes it
    model_version: str
    model_note: str = ""  # e.g. that the weights are random
    busy_share: float = 1.0  # of the device's time, lately, all work counted; whoever does not say has none to spare
    device: str = ""
    hbm_used_bytes: int = 0
    hbm_bytes: int = 0
    dram_used_bytes: int = 0
    dram_bytes: int = 0
    pre_infer_wait_ms: float = 0.0  # until the pre-inferences that wait now are done, ranking's share taken off
    computed_share: float = 1.0  # of the prefix tokens that signals ask for: those not found in the cache, lately
    counters: dict[str, float] = {}  # running totals since start, for live views
    handover: Annotated[str, Meta(max_length=300)] = ""  # HOST:PORT where prefix KV of its lost lanes can be fetched
    version: Label = ""  # of the package that runs
    lag: int = 0  # records of its lanes that it has not read

    def validate(self) -> None:
        """Every value of the right type is a valid status."""


Message = RequestEvent | PreInferSignal | RankingRequest | ScoreReply | WorkerStatus
M = TypeVar("M", RequestEvent, PreInferSignal, RankingRequest, ScoreReply, WorkerStatus)

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, VersionedDecoder[Any]] = {
    RequestEvent: VersionedDecoder(RequestEvent),
    RequestEventInPlace: VersionedDecoder(RequestEventInPlace),
    PreInferSignal: VersionedDecoder(PreInferSignal),
    RankingRequest: VersionedDecoder(RankingRequest, {"mode": OpenEnum(get_args(Mode), "auto")}),
    ScoreReply: VersionedDecoder(
        ScoreReply,
        {
            "status": OpenEnum(get_args(Status), "failed", note="detail"),
            "outcome": OpenEnum(get_args(Outcome), "full"),
        },
    ),
    # What lists lanes serves them, in whatever state: taken for anything else, it would leave them without an owner.
    # A status is read by every process of the fleet at once: one of a later version is for all, unless it says not.
    WorkerStatus: VersionedDecoder(WorkerStatus, {"state": OpenEnum(get_args(State), "serving")}, min_v=1),
}

#: Sizes from the topics' files bound messages on the broker; this bounds what we even try to decode.
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
#: Fields that we do not know may take so much of a message: room for what a later release adds, not for a sender to
#: fill our memory with.
MAX_UNKNOWN_BYTES: Final = 4096
#: The decoder quotes what it did not expect, however long it is; this shows the place and the beginning.
MAX_DETAIL: Final = 500


def tenant_key(tenant: str, of: str) -> str:
    """One text for an id under its tenant: `of` alone where the tenant is empty, else both with a NUL between them.

    No two pairs have the same key, since a tenant has no NUL.
    """
    return f"{tenant}\0{of}" if tenant or "\0" in of else of


def without_tenant(key: str) -> str:
    """The id in a tenant_key."""
    return key.partition("\0")[2] if "\0" in key else key


def encode(message: Message) -> bytes:
    """The message as MessagePack."""
    return _encoder.encode(message)


def decode(kind: type[M], data: bytes | None, max_bytes: int = MAX_MESSAGE_BYTES) -> M:
    """Decode and validate one message of the given kind.

    Raises DecodeError with reason `oversized` (as a whole, or in fields that we do not know), `malformed` (not
    MessagePack, or another shape), `unknown_version` (for readers of a later version) or `invalid` (well-formed but
    contradictory).
    """
    if data is None:
        raise DecodeError("malformed", "the message has no value")
    if len(data) > max_bytes:
        raise DecodeError("oversized", f"{len(data)} bytes, the limit is {max_bytes}")
    try:
        message: M = _decoders[kind].decode(data)
    except NOT_DECODED as error:
        raise DecodeError("malformed", str(error)[:MAX_DETAIL]) from error
    if len(data) > MAX_UNKNOWN_BYTES:
        _check_unknown(message, len(data))
    message.validate()
    return message


def validated(message: M) -> M:
    """The message, if every receiver takes its values: a Struct does not look at what it is made of.

    Raises DecodeError or a ValueError that names the field.
    """
    for array in (getattr(message, "prefix", None), getattr(message, "suffix", None)):
        if isinstance(array, Behaviours) and {type(part) for part in msgspec.structs.astuple(array)} != {bytes}:
            raise DecodeError("invalid", "behaviours are made of bytes; Behaviours.of packs arrays")
    msgspec.convert(msgspec.structs.asdict(message), type(message))
    message.validate()
    return message


def _check_unknown(message: Message, size: int) -> None:
    """What the message takes beyond what we read from it is fields unknown to us, or known ones stated twice."""
    arrays = message.prefix.nbytes() if isinstance(message, RequestEvent | PreInferSignal | RankingRequest) else 0
    if size - arrays <= MAX_UNKNOWN_BYTES:  # so most are: all but the arrays is small
        return
    unknown = size - len(encode(message))
    if unknown > MAX_UNKNOWN_BYTES:
        what = f"{unknown} of {size} bytes are in fields that this program does not know"
        raise DecodeError("oversized", f"{what}, the limit is {MAX_UNKNOWN_BYTES}")


class _Invalid(DecodeError):
    def __init__(self, detail: str) -> None:
        super().__init__("invalid", detail)
