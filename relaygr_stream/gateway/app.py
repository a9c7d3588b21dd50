"""The gateway's paths: who asks, within which bounds, and which status an outcome has.

POST   /v1/announce        202  {"request_id": …}
POST   /v1/rank            200  scores
DELETE /v1/requests/{id}   204  what the request pinned is released
GET    /  /metrics         the fleet, this process's metrics: with a token, where there are tokens
GET    /docs  /openapi.json  /healthz  /readyz
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from relaygr_stream.client import RelayClient
from relaygr_stream.errors import Rejected, RelayError
from relaygr_stream.gateway.bodies import longest_body
from relaygr_stream.gateway.details import Details
from relaygr_stream.gateway.http import (
    RETRY_AFTER_S,
    HttpRequest,
    answer,
    deadline,
    discarded,
    failure,
    most_dropped,
    read_body,
    reply_format,
    stated_length,
    trace_context,
    while_connected,
)
from relaygr_stream.gateway.messages import JSON, MSGPACK, Announce, Announced, Asking, Format, Problem, Rank, Ranked
from relaygr_stream.gateway.metrics import Metrics
from relaygr_stream.gateway.openapi import document
from relaygr_stream.gateway.rates import STRANGERS_PART, Rates
from relaygr_stream.gateway.tokens import RequestRefused, TenantTokens
from relaygr_stream.history.store import HistoryStore, looked_up
from relaygr_stream.ops.dashboard.board import HEADERS, Board
from relaygr_stream.telemetry.exposition import Exposition
from relaygr_stream.telemetry.listener import source_of
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.messages import with_version

REQUEST_ID_HEADER: Final = "x-request-id"
#: An id that a gateway made. It ends with the user's lane, by which any gateway finds it for a DELETE.
_ID: Final = re.compile(r"[0-9a-f]{16}-([0-9]{1,5})(?:-([a-z0-9-]{1,24}))?")  # lane and group: any gateway finds both
_TRACKED: Final = re.compile(r"[\x21-\x7e]{1,128}")
#: A stranger beyond its rate gets its answer after this: one that asks again at once takes little of the gateway.
STRANGERS_PAUSE_S: Final = 0.25
PAGE: Final = Path(__file__).with_name("docs.html")
#: Of DELETE; what follows is the request's id.
REQUESTS: Final = "/v1/requests/"
GET: Final = ("GET", "HEAD")

Endpoint = Callable[[HttpRequest], Awaitable[Response]]


class Asked(NamedTuple):
    """An authenticated request."""

    http: HttpRequest
    tenant: str
    deadline_s: float | None  # by the monotonic clock
    reply: Format


class Door:
    """The application. relay: open; board: of the fleet, kept up to date by the caller; store: of histories."""

    def __init__(
        self,
        context: ProcessContext,
        relay: RelayClient,
        board: Board,
        tokens: TenantTokens,
        store: HistoryStore | None = None,
    ) -> None:
        self._context = context
        self._settings, limits = context.settings, context.settings.gateway
        most = limits.max_body_bytes or longest_body(context.settings.relay)
        self._limits = msgspec.structs.replace(limits, max_body_bytes=most)
        self._store = store
        self._relay = relay
        self._board = board
        self._tokens = tokens
        self._open: Counter[str] = Counter()  # requests by tenant
        self.metrics = Metrics(context.registry)
        self._exposition = Exposition(context.registry)
        self._details = Details(context.settings.kafka.prefix)
        self._document = msgspec.json.encode(document())
        of_scenarios = {
            name: each.max_rate for each in self._settings.scenarios if each.max_rate for name in each.tenants
        }
        self._rates = Rates(self._limits.max_rate, of_scenarios)
        self._strangers_rates = Rates(self._limits.max_rate / STRANGERS_PART)
        self._endpoints: Final[dict[str, tuple[tuple[str, ...], Endpoint]]] = {
            "/v1/announce": (("POST",), self._api("/v1/announce", self._announce)),
            "/v1/rank": (("POST",), self._api("/v1/rank", self._rank)),
            REQUESTS: (("DELETE",), self._api(f"{REQUESTS}{{request_id:path}}", self._cancel)),
            "/": (GET, self._page(self._fleet, closed=True)),
            "/live": (GET, self._page(self._live, closed=True)),
            "/trace": (GET, self._page(self._trace, closed=True)),
            "/metrics": (GET, self._page(self._scraped, closed=True)),
            "/healthz": (GET, self._page(lambda _: self._check(context.why_not_live()))),
            "/readyz": (GET, self._page(lambda _: self._check(context.why_not_ready()))),
            "/openapi.json": (GET, self._page(lambda _: Response(self._document, media_type=JSON.media))),
            "/docs": (GET, self._page(lambda _: Response(PAGE.read_bytes(), media_type="text/html"))),
        }

    async def application(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI: strangers within their rate, and tenants, whose rate is that of their requests."""
        http = HttpRequest(scope, receive)
        response = None
        if self._tokens.known(http.authorization) is None:
            response = await self._stranger(http, source_of(scope["client"]) if scope.get("client") else "")
        if response is None:
            path = REQUESTS if http.path.startswith(REQUESTS) else http.path
            methods, endpoint = self._endpoints.get(path, (GET, None))
            if endpoint is None:
                response = Response("Not Found", 404, media_type="text/plain")
            elif http.method not in methods:
                response = Response("Method Not Allowed", 405, {"allow": ", ".join(methods)}, "text/plain")
            else:
                response = await endpoint(http)
        await response(scope, receive, send)

    async def _stranger(self, http: HttpRequest, address: str) -> Response | None:
        """The answer to a stranger beyond its rate."""
        if not (wait_s := self._strangers_rates.wait_s(address, time.monotonic())):
            return None
        await asyncio.sleep(STRANGERS_PAUSE_S)
        error = _beyond("this address, without a valid token,", self._limits.max_rate / STRANGERS_PART, wait_s)
        self.metrics.requests.labels("strangers", "429").inc()
        return answer(error.status, reply_format(http), Problem(error=error.error, detail=error.detail), error.headers)

    # ---- the relay's three verbs ----

    async def _announce(self, asked: Asked) -> Response:
        body = await read_body(asked.http, Announce, self._limits, self._settings.relay)
        request_id, group = self._request_id(body, asked.tenant)
        event = body.event(request_id, asked.tenant, await self._prefix(body, asked.tenant))
        await self._relay.announce(event, within=trace_context(asked.http), group=group)
        return answer(202, asked.reply, Announced(request_id=request_id))

    async def _rank(self, asked: Asked) -> Response:
        body = await read_body(asked.http, Rank, self._limits, self._settings.relay)
        request_id, group = self._request_id(body, asked.tenant)
        request = body.request(request_id, asked.tenant, await self._prefix(body, asked.tenant))
        left = None if asked.deadline_s is None else asked.deadline_s - time.monotonic()
        asking = self._relay.rank(request, timeout=left, within=trace_context(asked.http), group=group)
        ranking = await while_connected(asked.http, asking)
        return answer(200, asked.reply, Ranked.from_ranking(ranking, packed=asked.reply is MSGPACK))

    async def _cancel(self, asked: Asked) -> Response:
        request_id = asked.http.path.removeprefix(REQUESTS)
        user_id = asked.http.parameter("user_id")
        made = _ID.fullmatch(request_id)
        if not user_id and made is None:
            raise Rejected("this id was not made by a gateway: name the user, …/v1/requests/ID?user_id=USER")
        user = user_id or int(made[1])  # type: ignore[index]
        await self._relay.cancel(user, request_id, tenant=asked.tenant, group=_group_in(request_id))
        return Response(status_code=204)

    async def _prefix(self, body: Asking, tenant: str) -> dict[str, Any]:
        """The fields of a message that say what the history is. Raises Rejected, HistoryError."""
        reference = body.reference
        if body.history is not UNSET and reference is not UNSET:
            raise Rejected("a request has a history or refers to one, not both")
        if body.history is not UNSET:
            prefix = body.history.behaviours("history")
            return {"prefix": prefix, **with_version(UNSET, prefix)}
        if reference is UNSET:
            if self._store is None:
                raise Rejected("neither history nor reference, and this gateway has no history.store to ask")
            of = tenant or self._settings.client.tenant
            within_s = self._settings.history.timeout_ms / 1e3
            reference = await looked_up(self._store, body.user_id, of, within_s) or UNSET
        return {"prefix": Behaviours(), **with_version(reference)}

    def _request_id(self, body: Announce | Rank, tenant: str) -> tuple[str, str | None]:
        """The stated id, or a new one, and the group of workers in it."""
        if body.request_id is not UNSET:
            return body.request_id, _group_in(body.request_id)
        # The scenario is the token's tenant's: the client sets it in messages, and no body has a field for it.
        group = self._relay.group_of(body.user_id, self._relay.scenario_of(tenant))
        made = f"{secrets.token_hex(8)}-{self._relay.lane(body.user_id, group)}" + (f"-{group}" if group else "")
        return made, group

    # ---- the door ----

    def _api(self, path: str, verb: Callable[[Asked], Awaitable[Response]]) -> Endpoint:
        seconds = self.metrics.seconds.labels(path)

        async def endpoint(http: HttpRequest) -> Response:
            started = time.monotonic()
            reply, tenant = reply_format(http), None
            try:
                tenant = self._enter(http)
                response = await verb(Asked(http, tenant, deadline(http, started), reply))
            except RequestRefused as error:
                response = await self._refusal(http, error, reply)
                self._count_refused(http, tenant, error.status)
            except RelayError as error:
                if isinstance(error, Rejected):
                    self._count_refused(http, tenant, 400)
                response = failure(error, reply, http.path, self._details)
            except ClientDisconnect:
                response = Response(status_code=499)  # the client has left
            finally:
                if tenant is not None:
                    self._leave(tenant)
            stated = http.headers.get(REQUEST_ID_HEADER, "")
            tracked = stated if _TRACKED.fullmatch(stated) else secrets.token_hex(8)
            response.raw_headers.append((REQUEST_ID_HEADER.encode(), tracked.encode()))
            self.metrics.requests.labels(path, str(response.status_code)).inc()
            seconds.observe(time.monotonic() - started)
            return response

        return endpoint

    async def _refusal(self, http: HttpRequest, error: RequestRefused, reply: Format) -> Response:
        """The answer to a refused request. An honest client's connection, whose body can be read, stays open."""
        try:
            if "connection" in error.headers and error.status not in {401, 408} and await discarded(http, self._limits):
                error.headers.pop("connection")
        except ClientDisconnect:
            return Response(status_code=499)
        return answer(error.status, reply, Problem(error=error.error, detail=error.detail), error.headers)

    def _enter(self, http: HttpRequest) -> str:
        """The tenant, with a place taken that `_leave` gives back. Raises Refused."""
        tenant = self._tokens.tenant(http.authorization)
        self._within_rate(tenant)
        why_not = None
        if not http.known_as(tenant):
            why_not = "open connections of this tenant are too many for its gateway.max_requests"
        elif self._open[tenant] >= self._limits.max_requests:
            why_not = f"{self._limits.max_requests} requests of this tenant are under way (gateway.max_requests)"
        if why_not is not None:
            raise RequestRefused(429, "overloaded", why_not, {"retry-after": RETRY_AFTER_S})
        self._open[tenant] += 1
        self.metrics.in_flight.inc()
        return tenant

    def _within_rate(self, tenant: str) -> None:
        """Raise Refused for a tenant's request beyond its rate."""
        if wait_s := self._rates.wait_s(tenant, time.monotonic()):
            raise _beyond("this tenant", self._rates.most(tenant), wait_s)

    def _count_refused(self, http: HttpRequest, tenant: str | None, status: int) -> None:
        if tenant is not None and status != 429:
            stated = min(stated_length(http), most_dropped(self._limits))  # read or not: what is dropped costs as well
            size = max(stated, http.body_bytes)
            self._rates.refused(tenant, size, time.monotonic())

    def _leave(self, tenant: str) -> None:
        self._open[tenant] -= 1
        self.metrics.in_flight.dec()

    # ---- pages ----

    def _page(self, make: Callable[[HttpRequest], Response | Awaitable[Response]], *, closed: bool = False) -> Endpoint:
        async def endpoint(http: HttpRequest) -> Response:
            try:
                if closed:
                    self._within_rate(self._tokens.tenant(http.authorization, browser=True))
                made = make(http)
                response = made if isinstance(made, Response) else await made
            except RequestRefused as error:
                response = answer(error.status, JSON, Problem(error=error.error, detail=error.detail), error.headers)
            response.headers["cache-control"] = "no-store"
            return response

        return endpoint

    async def _fleet(self, http: HttpRequest) -> Response:
        """What `relaygr status` shows, as a page; as JSON where that is asked for."""
        if JSON.media in http.headers.get("accept", ""):
            return Response(self._board.json(), media_type=JSON.media)
        return Response(await self._board.page(), media_type="text/html", headers=HEADERS)

    async def _live(self, _: HttpRequest) -> Response:
        return Response(await self._board.live(), media_type="text/html", headers=HEADERS)

    async def _trace(self, http: HttpRequest) -> Response:
        """A request of the caller's own tenant."""
        tenant = self._tokens.tenant(http.authorization, browser=True) or self._settings.client.tenant
        made = _ID.fullmatch(http.parameter("id"))
        own = made is not None and not made[2] and int(made[1]) < self._board.view.topics.lanes
        lanes = [int(made[1])] if made and own else []
        return Response(await self._board.trace(http.query, lanes, tenant), media_type="text/html", headers=HEADERS)

    def _scraped(self, http: HttpRequest) -> Response:
        status, headers, body = self._exposition.page("", http.headers.get("accept", ""), "", time.monotonic())
        return Response(body, int(status[:3]), dict(headers))

    def _check(self, why_not: str | None) -> Response:
        found = {"status": "unavailable", "reason": self._details.public(why_not)} if why_not else {"status": "ok"}
        return Response(msgspec.json.encode(found), 503 if why_not else 200, media_type=JSON.media)


def _group_in(request_id: str) -> str | None:
    """The group of workers in an id that a gateway made; None for another id."""
    made = _ID.fullmatch(request_id)
    return None if made is None else made[2] or ""


def _beyond(whose: str, rate: float, wait_s: int) -> RequestRefused:
    detail = f"{whose} asks more often than {rate:g} times a second (gateway.max_rate, or its scenario's max_rate)"
    return RequestRefused(429, "overloaded", detail, {"retry-after": str(wait_s)})
