"""RelayClient: announce requests and rank candidates over Kafka; arrays in, arrays out. One event loop, no thread.

The worker that owns the user's lane, or another one if that does not answer, answers on this client's partition of
`scores`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import UNSET, UnsetType

from relaygr_stream.client.answers import Ranking
from relaygr_stream.client.messages import MessageClient
from relaygr_stream.errors import BrokerError, LanesChanged, Rejected, RelayError
from relaygr_stream.history.store import HistoryStore, looked_up
from relaygr_stream.telemetry.tracing import Trace
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.features import FeatureTables, Table
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import Mode, RankingRequest, RequestEvent, candidate_fields, with_version

#: Behaviours, oldest first: packed, or three arrays (items, actions, Unix times in milliseconds) of one length n.
History = Behaviours | tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
#: A history; a reference to it; or the store that has it, which is asked for the reference.
HistoryOrReference = History | HistoryReference | HistoryStore
#: Name → values (rows, width), or (rows,) for width 1; those of the user without rows.
Features = Mapping[str, npt.ArrayLike]


class RelayClient(MessageClient):
    """A connection to the relay, as an async context.

        async with RelayClient("kafka:9092") as relay:
            async with relay.request(user_id, history, candidates=500) as request:
                candidates = await retrieve(user_id)
                ranking = await request.rank(candidates, suffix=recent, timeout=0.2)
                ranking.top(50, task="click")

    bootstrap: brokers, HOST:PORT[,HOST:PORT…]; replaces settings.kafka.bootstrap. settings: by default from the
    environment (RELAYGR_…). client_id: this client's name in brokers' logs and at workers; random by default.
    registry: takes the client's metrics; new by default. features: the schema of the model, where it reads features;
    messages are then checked against it before they are sent. tracer_provider: makes the spans of requests, instead of
    the one that telemetry.traces asks for; an OpenTelemetry TracerProvider, which stays the caller's.

    Raises ConfigError; entering it raises BrokerUnavailable, TopicError or CoPartitionError. Thousands of calls may run
    concurrently, on the event loop that entered the context.
    """

    def request(
        self,
        user_id: str,
        history: HistoryOrReference,
        *,
        candidates: int,
        rank_in: float = 0.0,
        request_id: str | None = None,
        tenant: str = "",
        scenario: str = "",
        features: Features | None = None,
    ) -> Request:
        """One request of a user: enter it when retrieval starts, rank when the candidates are known.

        history: the long prefix, oldest first: Behaviours, or three arrays (items within 0…2⁶³ − 1, actions uint8, Unix
        times in ms) of one length n. It is encoded here, once. Or a HistoryReference, or the HistoryStore that has it,
        which is asked once, on entering (HistoryError if it does not answer): messages then carry the reference, and
        the worker reads the history (history.store). candidates: expected number of candidates. rank_in: expected
        seconds until the ranking; 0: as usual for the relay. request_id: random by default. tenant: that of this user.
        scenario: the product surface whose workers rank it; "": that of the tenant by the sections [scenario.NAME] of
        the settings, or none. Entering and ranking raise UnknownScenario where no group of workers serves it.
        features: those of the user and of the history's behaviours, where the client was made with a schema.

        Raises Rejected if the history is neither, or for features that are not those of the schema.
        """
        store: HistoryStore | None = None
        reference: HistoryReference | UnsetType = UNSET
        prefix = Behaviours()
        if isinstance(history, HistoryReference):
            reference = history
        elif isinstance(history, Behaviours | tuple) or not isinstance(history, HistoryStore):  # that takes 20 µs
            prefix = behaviours_of(history, "history")
        else:
            store = history
        prefix, tables = self.packed(features, prefix, {"user": 1})
        event = RequestEvent(
            request_id=request_id or secrets.token_hex(8),
            user_id=user_id,
            prefix=prefix,
            columns=FeatureTables(self._features.digest, tables["user"]) if self._features else UNSET,
            candidates=builtin_number(candidates),
            rank_in_ms=builtin_number(rank_in) * 1000,
            tenant=tenant or self._settings.client.tenant,
            scenario=scenario or self.scenario_of(tenant) or UNSET,
            **with_version(reference, prefix),
        )
        return Request(self, event, store, self._settings.history.timeout_ms / 1000)

    def packed(
        self, features: Features | None, behaviours: Behaviours, rows: Mapping[Table, int]
    ) -> tuple[Behaviours, dict[Table, dict[str, bytes]]]:
        """The behaviours with their features, and the tables in `rows`. Raises Rejected, naming the column."""
        if self._features is None:
            if features:
                raise Rejected("features: make the client with the model's schema, RelayClient(…, features=…)")
            return behaviours, {}
        if behaviours.columns is UNSET:
            rows = {**rows, "behaviour": len(behaviours)}
        try:
            tables = self._features.pack(features or {}, rows)
        except ValueError as error:
            raise Rejected(f"features: {error}") from error
        if tables.get("behaviour"):
            behaviours = msgspec.structs.replace(behaviours, columns=tables["behaviour"])
        return behaviours, tables


class Request:
    """One request, made by `RelayClient.request`: entering it announces it; `rank` may be called repeatedly; leaving it
    without scores cancels it."""

    def __init__(
        self, relay: RelayClient, event: RequestEvent, store: HistoryStore | None = None, store_s: float = 0.0
    ) -> None:
        self._relay = relay
        self._event = event
        self._trace: Trace | None = None
        self._store = store  # to be asked for the reference
        self._store_s = store_s
        self._pinned = False  # as far as is known: announced, and not yet ranked
        self._group: str | None = None  # that of all its messages

    @property
    def request_id(self) -> str:
        """Its id, as in the logs of triggers and workers."""
        return self._event.request_id

    async def __aenter__(self) -> Self:
        scenario = self._event.scenario or ""
        self._trace = self._relay.begin("relaygr.request", self._event.request_id, scenario=scenario)
        try:
            await self._refer()
            self._group = self._relay.group_of(self._event.user_id, scenario)
            await self._relay.announce(self._event, within=self._trace, group=self._group)
            self._pinned = True
        except BaseException as error:
            # Counted; a lost event costs speed, not scores, and the ranking raises if the brokers are away.
            if not isinstance(error, BrokerError) or isinstance(error, LanesChanged):
                if self._trace is not None:
                    self._trace.fail(error)
                raise
        return self

    async def _refer(self) -> None:
        """Look the reference to the history up, unless that was done. Raises HistoryUnavailable."""
        if self._store is not None:
            reference = await looked_up(self._store, self._event.user_id, self._event.tenant, self._store_s)
            self._event = msgspec.structs.replace(self._event, **with_version(reference or UNSET, self._event.prefix))
            self._store = None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the request if no ranking of it was answered with scores: what it pins is released at once."""
        if self._pinned:
            self._pinned = False
            with suppress(RelayError):  # counted; without the cancel, the life window ends what is pinned
                await self._relay.cancel(
                    self._event.user_id, self.request_id, tenant=self._event.tenant, group=self._group
                )
        if self._trace is not None:
            if error is None:
                self._trace.end()
            else:
                self._trace.fail(error)

    async def rank(
        self,
        candidates: npt.ArrayLike,
        *,
        suffix: History | None = None,
        timeout: float | None = None,
        mode: Mode = "auto",
        features: Features | None = None,
    ) -> Ranking:
        """Score candidates (m item ids, m ≥ 1) after the history and the suffix.

        suffix: behaviours since the history, in the same form. timeout: seconds; None: client.timeout_ms. mode: "whole"
        is never cut to its newest behaviours (worker.truncate_to), "full" nor scored from prefix KV. features: those of
        candidates, of candidate × user, and of the suffix's behaviours.
        Raises as `RelayClient.rank` does; if the request was not entered, HistoryUnavailable, too.
        """
        await self._refer()
        event = self._event
        try:
            newer = Behaviours() if suffix is None else behaviours_of(suffix, "suffix")
            fields = candidate_fields(candidates, event.history, event.prefix, newer)
        except (TypeError, ValueError) as error:
            raise Rejected(str(error)) from error
        newer, tables = self._relay.packed(features, newer, {"candidate": len(candidates)})  # type: ignore[arg-type]
        request = RankingRequest(
            request_id=event.request_id,
            user_id=event.user_id,
            prefix=event.prefix,
            suffix=newer,
            columns=event.columns and msgspec.structs.replace(event.columns, candidate=tables["candidate"]),
            mode=mode,
            tenant=event.tenant,
            scenario=event.scenario,
            **fields,
        )
        ranking = await self._relay.rank(request, timeout=timeout, within=self._trace, group=self._group)
        self._pinned = False
        return ranking


N = TypeVar("N", int, float)


def builtin_number(number: N) -> N:
    """A number of numpy as Python's: what checks messages takes no other."""
    return number.item() if isinstance(number, np.generic) else number


def behaviours_of(history: History, what: str) -> Behaviours:
    """The history as Behaviours. Raises Rejected, naming `what`."""
    if isinstance(history, Behaviours):
        return history
    try:
        items, actions, times = history
        return Behaviours.from_arrays(items, actions, times)
    except (TypeError, ValueError) as error:
        raise Rejected(f"{what}: {error}; pass Behaviours, or three arrays (items, actions, times in ms)") from error
