"""Bodies of the gateway's requests and answers, in JSON and in MessagePack.

One type serves both: an array is a list of numbers, or packed as in docs/reference/protocol.md (`bin` in MessagePack,
base64 in JSON). openapi.py describes these types.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from relaygr_stream.client.answers import Ranking
from relaygr_stream.errors import Rejected
from relaygr_stream.wire.behaviours import ITEM_DTYPE, Behaviours
from relaygr_stream.wire.features import FeatureTables
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import (
    CANDIDATE_DTYPES,
    Id,
    Millis,
    Mode,
    Outcome,
    RankingRequest,
    RequestEvent,
    Timings,
    candidate_fields,
)

#: A list of numbers, or their little-endian bytes.
Packed = bytes | list[int]


class History(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user's behaviours, oldest first: three arrays of one length."""

    items: Annotated[
        Packed, Meta(description="item ids, 0 to 2^63 - 1; packed: uint32, or int64 with item_bytes 8")
    ] = b""
    actions: Annotated[Packed, Meta(description="what the user did: uint8, as the model was trained")] = b""
    times: Annotated[Packed, Meta(description="Unix times in ms: int64; they do not go back")] = b""
    columns: (
        Annotated[dict[str, bytes], Meta(description="features: NAME:TYPE to packed values, a row each")] | UnsetType
    ) = UNSET

    def behaviours(self, what: str) -> Behaviours:
        """As they travel; the arrays are packed (bodies.py). Raises Rejected, naming `what`."""
        assert isinstance(self.items, bytes) and isinstance(self.actions, bytes) and isinstance(self.times, bytes)
        try:
            return Behaviours(self.items, self.actions, self.times, self.columns).checked(ValueError)
        except ValueError as error:
            raise Rejected(f"{what}: {error}") from error


class Asking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose request it is, and the history: as it is, by reference, or as the gateway's store has it."""

    user_id: Id
    history: Annotated[History, Meta(description="absent: the reference")] | UnsetType = UNSET
    reference: (
        Annotated[HistoryReference, Meta(description="in place of the history; absent: what history.store says")]
        | UnsetType
    ) = UNSET
    item_bytes: Annotated[Literal[4, 8], Meta(description="of a packed item id: 4 of uint32, 8 of int64")] = 4


class Announce(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Retrieval starts: a ranking of this user will follow."""

    candidates: Annotated[int, Meta(ge=0, le=1_000_000, description="expected number in the ranking")]
    rank_in_ms: Annotated[Millis, Meta(description="expected time until the ranking; 0: as it usually is")] = 0.0
    request_id: Annotated[Id, Meta(description="absent: the gateway makes one")] | UnsetType = UNSET
    columns: Annotated[FeatureTables, Meta(description="the user's features")] | UnsetType = UNSET

    def event(self, request_id: str, tenant: str, prefix: dict[str, Any]) -> RequestEvent:
        """As it travels. prefix: the fields that say what the history is."""
        return RequestEvent(
            request_id=request_id,
            user_id=self.user_id,
            candidates=self.candidates,
            rank_in_ms=self.rank_in_ms,
            tenant=tenant,
            columns=self.columns,
            **prefix,
        )


class Rank(Asking, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Score candidates against the history and what came since."""

    candidates: Annotated[Packed, Meta(description="item ids to score, at least one; 0 to 2^63 - 1")]
    suffix: Annotated[History, Meta(description="behaviours since the history")] | UnsetType = UNSET
    request_id: Annotated[Id, Meta(description="that of the announcement; absent: not announced")] | UnsetType = UNSET
    mode: Annotated[
        Mode, Meta(description="whole: never rank with the newest behaviours alone; full: nor with cached prefix KV")
    ] = "auto"
    columns: Annotated[FeatureTables, Meta(description="features of the user and the candidates")] | UnsetType = UNSET

    def request(self, request_id: str, tenant: str, prefix: dict[str, Any]) -> RankingRequest:
        """As it travels; arrays are packed (bodies.py). prefix: the fields that say what the history is."""
        assert isinstance(self.candidates, bytes)
        suffix = Behaviours() if self.suffix is UNSET else self.suffix.behaviours("suffix")
        candidates = np.frombuffer(self.candidates, CANDIDATE_DTYPES[self.item_bytes > ITEM_DTYPE.itemsize])
        fields = candidate_fields(candidates, prefix.get("history", UNSET), prefix["prefix"], suffix)
        return RankingRequest(
            request_id=request_id,
            user_id=self.user_id,
            suffix=suffix,
            mode=self.mode,
            tenant=tenant,
            client_id=tenant,  # so that workers are fair among tenants, not among gateways
            columns=self.columns,
            **{**prefix, **fields},
        )


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """The request is on its way to a trigger."""

    request_id: str


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """Scores of the candidates, in their order."""

    request_id: str
    tasks: Annotated[tuple[str, ...], Meta(description="names of the score columns")]
    scores: Annotated[
        bytes | list[list[float]],
        Meta(description="a row for each candidate, a column for each task; in MessagePack packed float32, row by row"),
    ]
    outcome: Annotated[Outcome, Meta(description="where the prefix KV was found")]
    admission: Annotated[str, Meta(description="the trigger's decision; empty: unknown")]
    truncated_to: Annotated[int, Meta(description="newest behaviours that were ranked with; 0: all")]
    worker: str
    model_version: str
    latency_ms: Annotated[float, Meta(description="from the gateway over the relay and back")]
    timings: Annotated[Timings, Meta(description="on the worker, in milliseconds")]

    @classmethod
    def from_ranking(cls, ranking: Ranking, *, packed: bool) -> Ranked:
        """The answer to a ranking; packed: as for MessagePack."""
        return cls(
            request_id=ranking.request_id,
            tasks=ranking.tasks,
            scores=ranking.scores.tobytes() if packed else ranking.scores.tolist(),
            outcome=ranking.outcome,
            admission=ranking.admission,
            truncated_to=ranking.truncated_to,
            worker=ranking.worker,
            model_version=ranking.model_version,
            latency_ms=round(ranking.latency_s * 1e3, 3),
            timings=ranking.timings,
        )


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why there is no answer."""

    error: Annotated[str, Meta(description="overloaded, deadline_exceeded, rejected, …")]
    detail: Annotated[str, Meta(description="for a person: what, where, what to do")]


class Format:
    """One of the two forms of bodies. codec: msgspec.json or msgspec.msgpack."""

    def __init__(self, media: str, codec: Any) -> None:
        self.media: Final = media
        self.codec: Final = codec
        self.encode = codec.Encoder().encode


JSON: Final = Format("application/json", msgspec.json)
MSGPACK: Final = Format("application/msgpack", msgspec.msgpack)
#: Media types by which clients name the two.
FORMATS: Final = {
    "application/json": JSON,
    "application/msgpack": MSGPACK,
    "application/vnd.msgpack": MSGPACK,
    "application/x-msgpack": MSGPACK,
}
