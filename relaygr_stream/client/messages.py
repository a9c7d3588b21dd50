"""The client below its arrays: announce, rank and cancel with messages; its connection, limits, traces and metrics."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from copy import copy
from functools import partial
from typing import Any, Final, Self, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.producer import Outgoing
from relaygr_stream.bus.renewed import RenewalsCollector
from relaygr_stream.client.answers import Answers, Ranking, ranking_of
from relaygr_stream.client.connection import Beside, Connection, connected
from relaygr_stream.client.groups import Groups
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.errors import (
    BrokerError,
    ConfigError,
    DeadlineExceeded,
    DecodeError,
    Overloaded,
    Rejected,
    RelayError,
    RequestError,
)
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.otlp import tracing_of
from relaygr_stream.telemetry.tracing import OFF, Trace, Tracing
from relaygr_stream.telemetry.tracing import Headers as TraceContext
from relaygr_stream.wire.codec import check_features, encode, validated
from relaygr_stream.wire.features import FeatureSchema
from relaygr_stream.wire.messages import (
    Cancel,
    Id,
    RankingRequest,
    RequestEvent,
    ScoreReply,
    prefix_length,
)
from relaygr_stream.wire.routes import OWN
from relaygr_stream.wire.topic_files import Topic, TopicSet, lane_of, load_topics
from relaygr_stream.wire.worker_status import StatusReader

M = TypeVar("M", RequestEvent, RankingRequest)

#: Bytes of a message besides its value and key, as the broker counts: the record batch's header (61), the record's
#: varints (at most 35), our headers (about 60; those of a trace count apart), rounded up.
FRAME_BYTES: Final = 256
#: Announcements whose spans are remembered for their rankings, where `request` does not connect the two.
MAX_ANNOUNCED: Final = 4096


class MessageClient:
    """What RelayClient is, without `request`: an open connection, and the verbs with messages of the wire."""

    def __init__(
        self,
        bootstrap: str | None = None,
        *,
        settings: Settings | None = None,
        client_id: str | None = None,
        registry: CollectorRegistry | None = None,
        features: FeatureSchema | None = None,
        tracer_provider: Any = None,
    ) -> None:
        self._features = features
        self._announced: dict[str, Trace] = {}  # by request id, where tracing is on
        self._callers_tracing = OFF if tracer_provider is None else Tracing(tracer_provider)
        self._tracing = self._callers_tracing
        if settings is None:
            settings = load_settings(flags={"kafka.bootstrap": bootstrap}).settings
        elif bootstrap is not None:
            kafka = msgspec.structs.replace(settings.kafka, bootstrap=bootstrap)
            settings = msgspec.structs.replace(settings, kafka=kafka)
        self._settings = settings
        self._scenarios = {tenant: scenario.name for scenario in settings.scenarios for tenant in scenario.tenants}
        self._client_id = client_id or f"relaygr-client-{secrets.token_hex(4)}"
        self._topics = load_topics(settings.kafka)
        self.registry: Final = CollectorRegistry() if registry is None else registry
        self._metrics = ClientMetrics(self.registry)
        with suppress(ValueError):  # the registry of a process has one already
            self.registry.register(RenewalsCollector())
        relay = settings.relay
        if relay.accepted_answer_secret and not relay.answer_secret:
            raise ConfigError(
                "`relay.accepted_answer_secret` is set without `relay.answer_secret`: unsigned answers would be "
                "dropped; set the latter, or both while the secret is being changed"
            )
        self._answers = Answers(
            self._metrics,
            self._topics.scores.max_message_bytes,
            (relay.answer_secret, relay.accepted_answer_secret),
        )
        self._reader = StatusReader.from_settings(settings, self._topics)
        self._owners = OwnerDirectory(settings.client.silence_ms, reader=self._reader)
        self._groups = Groups(settings, self._open_group, self._metrics)
        self._connection: Connection | None = None
        self._stack = AsyncExitStack()
        self._ended: RelayError = RequestError("the client is not open: use `async with RelayClient(…) as relay`")

    @property
    def error(self) -> RelayError | None:
        """Why no call is possible: the client is not open, or its answers can no longer be read. None: it is open."""
        return self._ended if self._connection is None else self._connection.error

    @property
    def trouble(self) -> str | None:
        """Why brokers take nothing that this client sends, such as a clock that is wrong; None if they do."""
        return None if self._connection is None else self._connection.trouble

    @property
    def topics(self) -> TopicSet:
        """Those of its settings, with as many lanes as it goes by now; nobody else changes them."""
        return self._topics

    @property
    def in_flight(self) -> int:
        """Calls of rank() without an answer yet."""
        return len(self._answers)

    async def worker_serves(self, within: float, scenario: str = "") -> bool:
        """Whether some worker is serving, waiting at most `within` seconds for its status.

        scenario: of the requests; "": that of client.tenant, if any. Always True if client.hedge_ms is 0: the client
        then does not read statuses.
        """
        scenario = scenario or self.scenario_of("")
        give_up = time.monotonic() + within
        while self._settings.client.hedge_ms and time.monotonic() < give_up:
            own = not scenario and any(each.state == "serving" for each in self._owners.workers().values())
            if own or self._groups.serves(scenario):
                return True
            await asyncio.sleep(0.05)
        return not self._settings.client.hedge_ms

    async def __aenter__(self) -> Self:
        await self._reader.prepare()
        async with AsyncExitStack() as stack:
            tracing = self._callers_tracing  # what an earlier opening made has ended with it
            if not tracing.on:
                tracing = await stack.enter_async_context(tracing_of(self._settings.telemetry, "client", self.registry))
            background = Background()
            background.failed.add_done_callback(self._on_failed)
            beside = partial(self._groups.following, self._topics, self._reader)
            way = self._open_group(self._settings, self._topics, self._owners, background, beside)
            self._connection, self._tracing = await stack.enter_async_context(way), tracing
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Fail the calls in flight with RequestError, send what is buffered, disconnect."""
        self._end(RequestError("the client was closed"))
        await self._stack.aclose()

    def scenario_of(self, tenant: str) -> str:
        """The scenario of the tenant's requests, by the sections [scenario.NAME] of the settings; "": none."""
        return self._scenarios.get(tenant or self._settings.client.tenant, "")

    def group_of(self, user_id: str, scenario: str = "") -> str:
        """The group of workers for a new request of this user, by the newest routes; "": that of the settings.

        `request` passes it on to all messages of a request. scenario: the request's; "": none. Raises UnknownScenario.
        """
        return self._groups.group_of(self._opened(), user_id, scenario=scenario)

    async def announce(
        self, event: RequestEvent, *, within: Trace | TraceContext | None = None, group: str | None = None
    ) -> None:
        """Publish a request event when retrieval starts; sets its `sent_ms`. `request` does this for you.

        Returns once the event is buffered, without waiting for the broker: a lost event costs speed, not scores. The
        event is sent, together with others, within client.announce_linger_ms. within: the request's span, or headers
        with a trace context. group: as `group_of` gave it; None: this client asks, and remembers it for the ranking.
        A scenario that it does not name is that of its tenant (`scenario_of`).
        Raises Rejected (invalid or too large), BrokerUnavailable (no broker answers), LanesChanged (the cluster has
        another number of lanes than the settings), UnknownScenario.
        """
        own, tenant = self._opened(), event.tenant or self._settings.client.tenant
        scenario = event.scenario or self.scenario_of(tenant)
        event = msgspec.structs.replace(event, sent_ms=now_ms(), tenant=tenant, scenario=scenario or UNSET)
        name = "relaygr.announce"
        trace = within if isinstance(within, Trace) else self.begin(name, event.request_id, within, scenario)
        if trace is not None and trace is not within:
            trace.end()  # what follows from the event refers to it, its ranking included
            if len(self._announced) >= MAX_ANNOUNCED:
                del self._announced[next(iter(self._announced))]
            self._announced[event.request_id] = trace
        message = self._encoded(event, self._topics.retrieval, trace)
        stated, group = group, self._groups.group_of(own, event.user_id, stated=group, scenario=scenario)
        if stated is None:
            self._groups.begin(event.tenant, event.request_id, group)
        await self._open(group).announce(event.user_id, message)

    def begin(
        self, name: str, request_id: str, within: Trace | TraceContext | None = None, scenario: str = ""
    ) -> Trace | None:
        """Start a span of a request: inside another one, a context from elsewhere, or the caller's current span. None:
        tracing is off."""
        if not self._tracing.on:
            return None
        of = {"relaygr.scenario": scenario} if scenario else {}
        return self._tracing.begin(name, within, attributes={"relaygr.request_id": request_id, **of})

    async def rank(
        self,
        request: RankingRequest,
        *,
        timeout: float | None = None,
        within: Trace | TraceContext | None = None,
        group: str | None = None,
    ) -> Ranking:
        """Score the request's candidates; sets its `sent_ms` and `timeout_ms`. `Request.rank` does this for you.

        timeout: seconds; None: client.timeout_ms. within: the request's span. group: as of `announce`; None: that of
        the announced request, or by the routes. Raises DeadlineExceeded (no answer in time, or the worker answers that
        it is too late), Overloaded (the worker refuses, or too many calls
        are in flight), Rejected (invalid, too large, or beyond a limit, which it names), WorkerFailed,
        BrokerUnavailable or BrokerError (not sent), LanesChanged (the cluster has another number of lanes than the
        settings), TopicError (the partition that this client's answers came on exists no more), UnknownScenario,
        RequestError (the client was closed). A scenario that it does not name is that of its tenant.
        """
        timeout_s = self._settings.client.timeout_ms / 1000 if timeout is None else float(timeout)
        tenant = request.tenant or self._settings.client.tenant
        scenario = request.scenario or self.scenario_of(tenant)
        request = msgspec.structs.replace(
            request,
            tenant=tenant,
            scenario=scenario or UNSET,
            sent_ms=now_ms(),
            timeout_ms=timeout_s * 1000,
            client_id=request.client_id or self._client_id,
        )
        within = within or self._announced.pop(request.request_id, None)
        trace = self.begin("relaygr.rank", request.request_id, within, scenario)
        try:
            ranking = await self._rank(request, trace, group)
        except BaseException as error:
            if isinstance(error, RelayError):
                self._metrics.rankings.labels(type(error).__name__).inc()
            if trace is not None:
                trace.fail(error)
            raise
        if trace is not None:
            trace.end({"relaygr.outcome": ranking.outcome, "relaygr.worker": ranking.worker})
        self._metrics.rankings.labels(ranking.outcome).inc()
        self._metrics.rank_seconds.observe(ranking.latency_s)
        return ranking

    async def cancel(
        self, user: str | int, request_id: str, *, tenant: str = "", group: str | None = None, scenario: str = ""
    ) -> None:
        """Say that an announced request will not be ranked: its prefix KV are released at once, not only at the end of
        relay.life_window_ms. A ranking that follows nevertheless is answered. `request` does this for you.

        user: the user's id, or the number of the lane that it is on in its group. group: as of `rank`. scenario: the
        request's; "": its tenant's. Returns once the cancel is buffered. Raises Rejected (invalid), BrokerError (no
        broker takes it), LanesChanged, UnknownScenario.
        """
        own, tenant = self._opened(), tenant or self._settings.client.tenant
        try:
            cancel = validated(Cancel(request_id=request_id, tenant=tenant))
            user_id = msgspec.convert(user, Id) if isinstance(user, str) else ""
        except (DecodeError, ValueError) as error:
            raise Rejected(f"not a valid Cancel: {error}") from error
        if group is None:
            scenario = scenario or self.scenario_of(tenant)
            group = self._groups.group_of(own, user_id, tenant, request_id, scenario=scenario)
        connection = self._open(group)
        lanes = connection.topics.lanes
        lane = lane_of(user_id, lanes) if isinstance(user, str) else user
        if not 0 <= lane < lanes:
            raise Rejected(f"lane {lane}: this relay has lanes 0…{lanes - 1}")
        await connection.cancel(lane, encode(cancel))

    def lane(self, user_id: str, group: str = OWN) -> int:
        """The number of the user's lane in its group."""
        return lane_of(user_id, self._groups.connection(self._opened(), group).topics.lanes)

    async def _rank(self, request: RankingRequest, trace: Trace | None, group: str | None) -> Ranking:
        started, timeout_ms = time.perf_counter(), request.timeout_ms
        own = self._opened()
        if timeout_ms <= 0:
            raise DeadlineExceeded(f"the timeout is {timeout_ms / 1000:g} s: too late before it was sent")
        message = self._encoded(request, self._topics.ranking, trace)
        self._check_limits(request)
        most = self._settings.client.max_in_flight
        if len(self._answers) >= most:
            raise Overloaded(f"{most} calls are under way")
        about, scenario = (request.user_id, request.tenant, request.request_id), request.scenario or ""
        group = self._groups.group_of(own, *about, stated=group, scenario=scenario)
        while (
            reply := await self._groups.answer(own, group, request, self._ask(self._open(group), request, message))
        ) is None:  # its group has ended: another one has the time that is left
            self._metrics.hedges.labels("group").inc()
            left_ms = max(1.0, timeout_ms - (time.perf_counter() - started) * 1000)
            request = msgspec.structs.replace(request, sent_ms=now_ms(), timeout_ms=left_ms)
            message = self._encoded(request, self._topics.ranking, trace)
            group = self._groups.group_of(own, request.user_id, scenario=scenario)
        items = np.frombuffer(request.candidates, request.candidate_dtype)
        return ranking_of(reply, items, time.perf_counter() - started)

    async def _ask(self, connection: Connection, request: RankingRequest, message: Outgoing) -> ScoreReply:
        """The worker's answer; the laboratory asks other workers than the lane's owner."""
        return await connection.rank(request, message)

    def _opened(self) -> Connection:
        if self._connection is None:
            raise copy(self._ended)  # each caller gets its own traceback
        return self._connection

    def _open(self, group: str) -> Connection:
        connection = self._groups.connection(self._opened(), group)
        connection.check_lanes()
        return connection

    def _open_group(
        self,
        settings: Settings,
        topics: TopicSet,
        owners: OwnerDirectory,
        background: Background,
        beside: Beside | None = None,
    ) -> AbstractAsyncContextManager[Connection]:
        return connected(settings, topics, self._client_id, self._answers, owners, self._metrics, background, beside)

    def _on_failed(self, failed: asyncio.Future[None]) -> None:
        """The connection can serve no longer."""
        if not failed.cancelled() and (error := failed.exception()) is not None:
            self._end(error if isinstance(error, RelayError) else BrokerError(f"the client cannot go on: {error!r}"))

    def _end(self, error: RelayError) -> None:
        self._connection, self._ended = None, error
        self._answers.fail_all(error)

    def _encoded(self, message: M, topic: Topic, trace: Trace | None = None) -> Outgoing:
        """A message and its trace context. Raises Rejected if a receiver would refuse it."""
        try:
            value, key = encode(validated(message)), message.user_id.encode()
            if self._features is not None:
                check_features(message, self._features)
        except (DecodeError, TypeError, ValueError, OverflowError) as error:
            raise Rejected(f"not a valid {type(message).__name__}: {error}") from error
        headers = [] if trace is None else trace.headers
        size = len(value) + len(key) + sum(len(name) + len(text) for name, text in headers) + FRAME_BYTES
        if size > topic.max_message_bytes:
            raise Rejected(
                f"{size} bytes with headers, {topic.name} takes {topic.max_message_bytes}: shorten the history, or "
                f"raise max_message_bytes in the topic's file"
            )
        return Outgoing(key, value, headers)

    def _check_limits(self, request: RankingRequest) -> None:
        candidates = len(request.candidates) // request.candidate_dtype.itemsize
        beyond = self._settings.relay.beyond(
            prefix=prefix_length(request), suffix=len(request.suffix), candidates=candidates
        )
        if beyond:
            raise Rejected(beyond)
