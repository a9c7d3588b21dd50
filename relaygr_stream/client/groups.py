"""The client's connections to groups of workers beside its own, and the choice of a request's group (wire/routes.py).

routes ─► which groups there are: one Connection each
user, scenario, routes, which group serves ─► group of the request, for all its messages
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Final

import structlog

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.routes import RoutesTail
from relaygr_stream.client.connection import Connection
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.errors import BrokerUnavailable, RelayError, UnknownScenario
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.wire.messages import RankingRequest, ScoreReply
from relaygr_stream.wire.routes import OWN, POSITIONS, Routes, announced_lanes, group_settings, routes_topic
from relaygr_stream.wire.topic_files import TopicSet, load_topics
from relaygr_stream.wire.worker_status import StatusReader

log = structlog.get_logger(__name__)

#: A group that cannot be reached is tried again after this.
RETRY_S: Final = 5.0
#: Longest wait for the groups at the client's start; a request meanwhile goes to one that is reached.
OPEN_S: Final = 10.0
#: Whether a request's group still serves is looked at so often: a group that ends is known by its workers' statuses.
LOOK_S: Final = 0.25
#: Announced requests whose group is remembered for their rankings: six seconds of 10,000 a second.
MAX_BEGUN: Final = 65_536

#: Opens a connection with these settings, topics and owners; its failure is the background's.
Open = Callable[[Settings, TopicSet, OwnerDirectory, Background], AbstractAsyncContextManager[Connection]]


class Groups:
    """The groups of one client whose own settings are those of the group "".

    open_group: opens the connection to another one.
    """

    def __init__(self, settings: Settings, open_group: Open, metrics: ClientMetrics) -> None:
        self._settings = settings
        self._open_group = open_group
        self._metrics = metrics
        self._routes: Mapping[str, Routes] = {}  # by scenario
        self._others: dict[str, Connection] = {}
        self._begun: dict[tuple[str, str], str] = {}  # (tenant, request id) → group
        self._keeping: dict[str, asyncio.Task[object]] = {}  # by name
        self._lanes: Mapping[str, int] = {}  # as announced, by group
        self._topics: dict[str, TopicSet] = {}  # of the groups that are reached, and of the own one
        self._reached = asyncio.Event()
        self._background = Background()

    @asynccontextmanager
    async def following(
        self, topics: TopicSet, reader: StatusReader, producer: Producer, owner: Background
    ) -> AsyncIterator[None]:
        """Follow the routes, and keep a connection to each group that they name. topics, reader: of the own group.

        owner: fails with what ends this for good.
        """
        self._topics[OWN] = topics
        self._background = background = Background()
        owner.watch(background.failed)
        name = routes_topic(topics).name
        tail = RoutesTail(self._settings.kafka, name, reader, partial(producer.exists, name), self._on_routes)
        await tail.start()
        background.start(tail.run())
        await self._wait_until_reached()
        try:
            yield
        finally:
            await background.end()
            self._keeping.clear()
            self._routes = {}

    def group_of(
        self,
        own: Connection,
        user_id: str,
        tenant: str = "",
        request_id: str = "",
        stated: str | None = None,
        scenario: str = "",
    ) -> str:
        """The group of a request: the stated one, that of the announced request of this id, or the user's by routes.

        If no worker of it serves, the first group where one does: all users are answered when a whole group is gone.
        But only a group that the routes of its scenario name, since others have another model, and none on trial.
        Raises UnknownScenario, BrokerUnavailable where none of these is reached yet.
        """
        routes = self._routes.get(scenario)
        if routes is None and scenario:
            raise UnknownScenario(
                f"no group of workers serves scenario {scenario!r}: `relaygr status` shows those that are served; "
                f"`relaygr up --fleet FILE` starts what the file's sections [scenario.NAME] say"
            )
        if routes is None:
            return OWN
        wanted = stated
        if wanted is None:
            wanted = self._begun.get((tenant, request_id))
        if wanted is None:
            wanted = routes.group_of(user_id)
        named = routes.groups if scenario else (OWN, *routes.groups)
        reached = [group for group in named if group in self._others or group == OWN]
        if not reached:
            raise BrokerUnavailable(f"no group of scenario {scenario!r} is reached yet: {', '.join(routes.groups)}")
        if wanted in reached and self.connection(own, wanted).serves:
            return wanted
        serving = (group for group in reached if not routes.on_trial(group) and self.connection(own, group).serves)
        return next(serving, wanted if wanted in reached else reached[0])

    def serves(self, scenario: str) -> bool:
        """Whether a worker of a group serves that the scenario's routes name, the own group apart."""
        routes = self._routes.get(scenario)
        return routes is not None and any(
            group in self._others and self._others[group].serves for group in routes.groups
        )

    def begin(self, tenant: str, request_id: str, group: str) -> None:
        """Remember the group of an announced request."""
        if self._routes:
            if len(self._begun) >= MAX_BEGUN:
                del self._begun[next(iter(self._begun))]
            self._begun[tenant, request_id] = group

    def connection(self, own: Connection, group: str) -> Connection:
        """The connection to the group; the own one where that group is not reached."""
        return self._others.get(group, own)

    async def answer(
        self, own: Connection, group: str, request: RankingRequest, asking: Coroutine[Any, Any, ScoreReply]
    ) -> ScoreReply | None:
        """What `asking` returns, which asks the group; None: no worker of it serves any more, and one of another does.

        What is in the log of a group that has ended is answered by nobody.
        """
        if not self._others:
            return await asking
        asked, scenario = asyncio.ensure_future(asking), request.scenario or ""
        try:
            while not (await asyncio.wait({asked}, timeout=LOOK_S))[0]:
                ended = not self.connection(own, group).serves
                if ended and self.group_of(own, request.user_id, scenario=scenario) != group:
                    return None
            return asked.result()
        finally:
            asked.cancel()

    def _on_routes(self, routes: Mapping[str, Routes]) -> None:
        self._routes = routes
        self._metrics.route_share.clear()
        self._lanes = announced_lanes(routes)
        for group, count in self._lanes.items():
            known = self._topics.get(group)
            if known is None or count == known.lanes:
                continue
            grown = count % known.lanes == 0
            # At its start the own group has those of the cluster, which may be about to grow.
            if count % (known.stated or 1) == 0 and (grown or (group == OWN and known.lanes % count == 0)):
                known.follow(count)
                log.info("lanes were added" if grown else "not all lanes are announced yet", group=group, lanes=count)
            elif group in self._keeping:  # made anew, with fewer
                self._keeping.pop(group).cancel()
        for group in self._keeping.keys() - self._lanes.keys():
            self._keeping.pop(group).cancel()
        for group in self._lanes.keys() - self._keeping.keys() - {OWN}:
            self._keeping[group] = self._background.start(self._keep(group))
        for part in (part for each in routes.values() for part in each.parts):
            self._metrics.route_share.labels(part.group or "default").set(part.share / POSITIONS)

    async def _wait_until_reached(self) -> None:
        try:
            async with asyncio.timeout(OPEN_S):
                while len(self._others) < len(self._keeping):
                    self._reached.clear()
                    await self._reached.wait()
        except TimeoutError:
            groups = self._keeping.keys() - self._others.keys()
            log.warning("groups are not reached yet", groups=sorted(groups))

    async def _keep(self, group: str) -> None:
        while True:
            topics: TopicSet | None = None
            try:
                settings = group_settings(self._settings, group, self._lanes[group])
                self._topics[group] = topics = load_topics(settings.kafka)
                background = Background()
                reader = StatusReader.from_settings(settings, topics)
                await reader.prepare()
                owners = OwnerDirectory(settings.client.silence_ms, reader=reader)
                async with self._open_group(settings, topics, owners, background) as connection:
                    self._others[group] = connection
                    self._reached.set()
                    await background.until(asyncio.Event().wait())
            except RelayError as error:
                log.warning("a group cannot be reached", group=group, error=str(error))
            finally:
                if self._topics.get(group) is topics:  # else another one keeps it by now
                    self._others.pop(group, None)
                    self._topics.pop(group, None)
            await asyncio.sleep(RETRY_S)
