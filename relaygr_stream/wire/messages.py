"""The messages of the topics: one Struct each, and what its values must be.

A message is a MessagePack map with its schema version `v`. Arrays are little-endian bytes (behaviours.py). codec.py
encodes and decodes; versions.py defines how messages of later releases are read.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final, Literal, NoReturn, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Meta, UnsetType

from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.scenarios import MAX_SHARING
from relaygr_stream.settings.section import LABEL
from relaygr_stream.wire.behaviours import (
    ITEM_DTYPE,
    WIDE_ITEM_DTYPE,
    WIDE_VERSION,
    Behaviours,
    BehavioursInPlace,
    check_wide,
    pack_ids,
    rows_of,
)
from relaygr_stream.wire.features import FeatureTables, check_rows
from relaygr_stream.wire.history import HISTORY_VERSION, HistoryReference
from relaygr_stream.wire.latencies import Counts
from relaygr_stream.wire.versions import SCHEMA_VERSION

SCORE_DTYPE: Final = np.dtype("<f4")

Id = Annotated[str, Meta(min_length=1, max_length=256)]
Label = Annotated[str, LABEL]
#: The trigger's decision on a request.
AdmissionReason = Annotated[str, Meta(max_length=64)]
UnixMillis = Annotated[int, Meta(ge=0, lt=2**53)]
Millis = Annotated[float, Meta(ge=0, le=3.6e6)]
#: Neither infinite nor NaN: comparisons with NaN are false, so it fails both bounds.
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]

#: Where a ranking found the prefix KV: ready in HBM, in DRAM (or being reloaded), in a prefill job, nowhere (full).
#: truncated: nowhere, and it was ranked with the newest behaviours alone (worker.truncate_to). withheld: the
#: worker does not tell its clients (worker.withhold_outcomes).
Outcome = Literal["hbm", "dram", "joined", "full", "truncated", "withheld"]
#: What a worker knows of its rankings; of these, outcomes without prefix KV, and those with. WITHHELD is neither.
WITHHELD: Final[Outcome] = "withheld"
FOUND: Final[tuple[Outcome, ...]] = tuple(outcome for outcome in get_args(Outcome) if outcome != WITHHELD)
MISSES: Final[frozenset[str | None]] = frozenset({"full", "truncated"})
HITS: Final[tuple[Outcome, ...]] = tuple(outcome for outcome in FOUND if outcome not in MISSES)
Status = Literal["ok", "deadline_exceeded", "overloaded", "rejected", "failed"]
Mode = Literal["auto", "whole", "full"]
State = Literal["starting", "serving", "draining", "stopped"]
#: The type of candidates, by whether they are wide.
CANDIDATE_DTYPES: Final = (ITEM_DTYPE, WIDE_ITEM_DTYPE)
#: The least schema version whose readers understand the message; 0: only those of its own version.
LeastVersion = Annotated[int, Meta(ge=0)]


class RequestEvent(msgspec.Struct, frozen=True, kw_only=True):
    """On `retrieval`, key = user id: retrieval starts, and a ranking request will follow."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    request_id: Id
    user_id: Id
    prefix: Behaviours
    candidates: Annotated[int, Meta(ge=0, le=1_000_000)]  # expected number in the ranking request
    sent_ms: UnixMillis = 0  # the sender's clock when it published; 0: unknown, counts as just now
    rank_in_ms: Millis = 0.0  # the sender's estimate of the time until the ranking request; 0: unknown
    tenant: Label = ""  # the user's tenant: prefix KV are found by tenant and user id
    columns: FeatureTables | UnsetType = UNSET  # the user's features
    history: HistoryReference | UnsetType = UNSET  # in place of the prefix, which is then empty
    scenario: Label | UnsetType = UNSET  # whose group of workers it goes to; absent: `default`

    def validate(self) -> None:
        """Raise DecodeError for errors that the field types do not exclude."""
        _check_prefix(self)


class RequestEventInPlace(RequestEvent, frozen=True, kw_only=True):
    """A RequestEvent decoded without copying its arrays: for the trigger, which forwards or drops them."""

    prefix: BehavioursInPlace


class PreInferSignal(msgspec.Struct, frozen=True, kw_only=True):
    """On `pre-infer`, key = user id: an admitted request whose prefix KV is to be computed and pinned."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    request_id: Id
    user_id: Id
    prefix: Behaviours
    admitted_ms: UnixMillis  # the trigger's clock at admission
    life_ms: Millis  # the pin ends at the latest this long after the worker reads the signal
    rank_in_ms: Millis = 0.0
    tenant: Label = ""
    columns: FeatureTables | UnsetType = UNSET  # as in the request event
    delegate: Id | UnsetType = UNSET  # the worker on whose behalf another one computes the prefix KV
    history: HistoryReference | UnsetType = UNSET  # as in the request event
    scenario: Label | UnsetType = UNSET  # as in the request event

    def validate(self) -> None:
        """Raise DecodeError for errors that the field types do not exclude."""
        _check_prefix(self)
        if prefix_length(self) == 0:
            raise DecodeError("invalid", "a pre-infer signal needs a prefix of at least one behaviour")


class RankingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """On `ranking`, key = user id: score candidates. It includes the prefix, so that any worker can answer."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    request_id: Id
    user_id: Id
    prefix: Behaviours
    suffix: Behaviours = Behaviours()
    candidates: bytes  # m × uint32, from WIDE_VERSION on m × int64: item ids to score, m ≥ 1
    sent_ms: UnixMillis = 0  # the sender's clock when it published; 0: unknown, counts as just now
    timeout_ms: Millis = 0.0  # the answer's use ends so long after the log has it; 0: the worker's client.timeout_ms
    mode: Mode = "auto"  # "whole": never cut to the newest behaviours; "full": nor use cached prefix KV
    hops: Annotated[int, Meta(ge=0, le=2)] = 0  # times this request was forwarded to another lane
    tenant: Label = ""  # as in the request event
    client_id: Label = ""  # the client's name, not authenticated
    columns: FeatureTables | UnsetType = UNSET  # the user's features and the candidates'
    history: HistoryReference | UnsetType = UNSET  # in place of the prefix, which is then empty
    scenario: Label | UnsetType = UNSET  # as in the request event

    @property
    def candidate_dtype(self) -> np.dtype[Any]:
        """The type of the candidates' item ids: int64 where the message needs readers of WIDE_VERSION."""
        return CANDIDATE_DTYPES[(self.min_v or self.v) >= WIDE_VERSION]

    def validate(self) -> None:
        """Raise DecodeError for errors that the field types do not exclude."""
        _check_prefix(self)
        self.suffix.checked(_Invalid)
        dtype = self.candidate_dtype
        if not self.candidates or len(self.candidates) % dtype.itemsize:
            what = rows_of(self.candidates, dtype, "candidates")
            raise DecodeError("invalid", f"candidates must be m ≥ 1 {dtype.name}; got {what}")
        if dtype == WIDE_ITEM_DTYPE:
            check_wide(self.candidates, "candidates", _Invalid)
        elif len(self.suffix.items) > len(self.suffix) * dtype.itemsize:
            _refuse_wide("suffix")
        if self.columns:
            check_rows(self.columns.candidate, len(self.candidates) // dtype.itemsize, _Invalid)
        if self.prefix.times and self.suffix.times:
            last = int.from_bytes(self.prefix.times[-8:], "little", signed=True)
            first = int.from_bytes(self.suffix.times[:8], "little", signed=True)
            if first < last:
                raise DecodeError("invalid", f"the suffix starts at {first}, before the prefix ends at {last}")


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    """On `ranking`, header relaygr-kind = cancel, on the user's lane: no ranking of this request will follow."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    request_id: Id
    tenant: Label = ""  # as in the request event

    def validate(self) -> None:
        """Does nothing: every value of the right type is valid."""


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """A ranking's times on the worker, in milliseconds, and the tokens it computed."""

    inbound_ms: Finite = 0.0  # age when the worker read it: the sender's clock, corrected by the log's order
    queued_ms: Finite = 0.0  # from the worker's read to the start on the device
    device_ms: Finite = 0.0  # on the device, the joined part of a prefill job included
    worker_ms: Finite = 0.0  # from the worker's read to the end on the device, waits for other work included
    computed_tokens: int = 0  # prefix tokens computed for this answer at ranking time


class ScoreReply(msgspec.Struct, frozen=True, kw_only=True):
    """On `scores`, on the client's reply partition: the answer to a ranking request. Scores: m × tasks, row-major."""

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
    admission: AdmissionReason = ""  # the trigger's reason; empty: unknown to the worker
    truncated_to: Annotated[int, Meta(ge=0)] = 0  # newest behaviours that were ranked with; 0: with all

    def matrix(self) -> npt.NDArray[np.float32]:
        """Scores as (candidates, tasks)."""
        return np.frombuffer(self.scores, SCORE_DTYPE).reshape(-1, max(1, len(self.tasks)))

    def validate(self) -> None:
        """Raise DecodeError for errors that the field types do not exclude."""
        row = SCORE_DTYPE.itemsize * max(1, len(self.tasks))
        if len(self.scores) % row:
            raise DecodeError("invalid", f"scores have {len(self.scores)} bytes, not a multiple of a row of {row}")


class LaneStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One lane's budget, as its owner states it."""

    lane: int
    budget_bytes: int  # its part of what the worker's lanes may have pinned together
    pinned_bytes: int  # bytes that are pinned, all signals below pre_infer_offset included
    pre_infer_offset: int  # the next pre-infer offset that the owner reads
    device_ms_per_s: float = 1e6  # no bound; triggers of former releases ask for no more device time
    ranking_offset: int | UnsetType = UNSET  # the next ranking offset that the owner reads; for people


class CostModel(msgspec.Struct, frozen=True, kw_only=True):
    """T_full(n, m) = c0 + c1·n + c2·n² + c3·n·m + c4·m milliseconds for n prefix tokens and m candidates."""

    c0: float
    c1: float
    c2: float
    c3: float
    c4: float = 0.0

    def full_ms(self, prefix: int, candidates: int) -> float:
        """Predicted device time of full inference, in milliseconds."""
        return self.c0 + self.c1 * prefix + self.c2 * prefix * prefix + (self.c3 * prefix + self.c4) * candidates

    def pre_infer_ms(self, prefix: int) -> float:
        """Predicted device time of the prefix alone, in milliseconds."""
        return self.full_ms(prefix, 0)


class GivenUp(msgspec.Struct, frozen=True, kw_only=True):
    """The last move to another scenario that a worker gave up (wire/assignments.py)."""

    epoch: Annotated[int, Meta(ge=0, lt=2**53)]  # of the assignments that asked for it
    reason: Annotated[str, Meta(max_length=200)]  # for people


class ScenarioTotals(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario's part of the counters and latencies of a worker that serves several."""

    counters: dict[Label, Finite] = {}
    latencies: Annotated[dict[Label, Counts], Meta(max_length=16)] | UnsetType = UNSET


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """On `worker-status`, key = worker name: the worker's lanes, their budgets, its load and memory."""

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
    queue_ms: float  # current delay of a ranking request before it starts on the device
    model_version: str
    model_note: str = ""  # e.g. that the weights are random
    busy_share: float = 1.0  # recent share of device time in use, by all work; defaults to fully busy
    device: str = ""
    hbm_used_bytes: int = 0
    hbm_bytes: int = 0
    dram_used_bytes: int = 0
    dram_bytes: int = 0
    pre_infer_wait_ms: float = 0.0  # time until the queued pre-inferences complete, beside the rankings' share
    head_start_ms: float = 0.0  # from a signal to its ranking, about the median of the last; 0: unknown
    computed_share: float = 1.0  # of former releases, whose triggers bounded device time by it
    counters: dict[str, float] = {}  # running totals since start, for live views
    handover: Annotated[str, Meta(max_length=300)] = ""  # HOST:PORT that serves prefix KV of its lost lanes
    version: Label = ""  # of the package
    lag: int = 0  # unread records of its lanes
    delegated_bytes: int = 0  # room for prefix KV that it computes on other workers' behalf
    erased: Annotated[tuple[Id, ...], Meta(max_length=64)] | UnsetType = UNSET  # newest erasures carried out (erase.py)
    # Rankings with scores since its start, by outcome and by the time from reading the request to its reply.
    latencies: Annotated[dict[Label, Counts], Meta(max_length=16)] | UnsetType = UNSET
    scenario: Label | UnsetType = UNSET  # that its group serves; absent: `default`
    # Of each scenario, where its group serves several, its own included.
    scenarios: Annotated[dict[Label, ScenarioTotals], Meta(max_length=MAX_SHARING)] | UnsetType = UNSET
    assigned: Annotated[int, Meta(ge=0, lt=2**53)] | UnsetType = UNSET  # epoch of the assignments that it obeys
    given_up: GivenUp | UnsetType = UNSET

    def validate(self) -> None:
        """Does nothing: every value of the right type is a valid status."""


def prefix_length(message: RequestEvent | PreInferSignal | RankingRequest) -> int:
    """Behaviours of the prefix, which the message has, or refers to."""
    return message.history.length if message.history else len(message.prefix)


def prefix_tokens(message: RequestEvent | PreInferSignal) -> int:
    """Tokens of the prefix KV: the behaviours, and one before them if the user has features."""
    return int(bool(message.columns and message.columns.user)) + prefix_length(message)


def with_version(history: HistoryReference | UnsetType, *behaviours: Behaviours, wide: bool = False) -> dict[str, Any]:
    """The fields of a message with this reference, or with none, that say who reads it.

    behaviours: what else it has; wide: whether its candidates are. Wide item ids need later readers.
    """
    wide = wide or any(each.wide for each in behaviours)
    least = WIDE_VERSION if wide else HISTORY_VERSION if history else 0
    fields: dict[str, Any] = {"v": least, "min_v": least} if least else {}
    return {"history": history, **fields} if history else fields


def candidate_fields(
    values: npt.ArrayLike, history: HistoryReference | UnsetType, *behaviours: Behaviours
) -> dict[str, Any]:
    """The fields of a ranking request with these candidates, item ids within 0…2⁶³ − 1, and with a reference and
    behaviours as of `with_version`. Raises ValueError for anything else."""
    wide = any(each.wide for each in behaviours)
    packed = pack_ids(values, "candidates: item ids", wide=wide)
    wide = wide or len(packed) > ITEM_DTYPE.itemsize * len(values)  # type: ignore[arg-type] # it has one dimension
    return {"candidates": packed, **with_version(history, wide=wide)}


def _refuse_wide(what: str) -> NoReturn:
    raise DecodeError("invalid", f"the {what} has item ids of 8 bytes: the message must state min_v {WIDE_VERSION}")


def _check_prefix(message: RequestEvent | PreInferSignal | RankingRequest) -> None:
    if not message.history:
        message.prefix.checked(_Invalid)
        if len(message.prefix.items) > 4 * len(message.prefix) and (message.min_v or message.v) < WIDE_VERSION:
            _refuse_wide("prefix")
    elif len(message.prefix) or message.prefix.nbytes():
        raise DecodeError("invalid", "a message has a prefix or refers to a history, not both")
    elif (message.min_v or message.v) < HISTORY_VERSION:
        # A reader of an earlier version would take the user for one without a history.
        raise DecodeError("invalid", f"a message that refers to a history must state min_v {HISTORY_VERSION} or later")
    else:
        message.history.checked(_Invalid)


def tenant_key(tenant: str, of: str) -> str:
    """One key for an id and its tenant: `of` alone if the tenant is empty, else both with a NUL between them.

    Different pairs have different keys, since a tenant has no NUL.
    """
    return f"{tenant}\0{of}" if tenant or "\0" in of else of


def split_tenant_key(key: str) -> tuple[str, str]:
    """The tenant and the id of a tenant_key."""
    tenant, nul, of = key.partition("\0")
    return (tenant, of) if nul else ("", key)


class _Named(msgspec.Struct):
    scenario: str = ""


_named = msgspec.msgpack.Decoder(_Named)


def named_scenario(value: bytes | None) -> str:
    """The scenario that a message names, whatever else is wrong with it; "": none, or it is no message."""
    try:
        return _named.decode(value or b"").scenario
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return ""


class _Invalid(DecodeError):
    def __init__(self, detail: str) -> None:
        super().__init__("invalid", detail)
