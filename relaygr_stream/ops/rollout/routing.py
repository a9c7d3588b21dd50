"""The routes and the assignments as they are on the cluster, and which group users move to, and from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.assignments import read_assignments, write_assignments
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.routes import read_routes, write_routes
from relaygr_stream.bus.topics import topic_exists, verified_topics
from relaygr_stream.errors import ConfigError, RelayError
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.assignments import ROLLOUT, Assignments
from relaygr_stream.wire.routes import OWN, POSITIONS, Routes, routes_topic
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader

#: The group that a rollout makes where none is named; back from it the users come to the group "".
OTHER: Final = "next"


class RoutesChanged(RelayError):
    """Another command has written routes meanwhile; these stay as they are."""

    def __init__(self, found: Routes) -> None:
        shares = ", ".join(f"{label(part.group)} {part.share / POSITIONS:.0%}" for part in found.parts)
        super().__init__(
            f"another command has changed the routes meanwhile, and they stay as it left them: users are in {shares}; "
            f"run one command at a time, and this one again if it is still to be done"
        )


class AssignmentsChanged(RelayError):
    """Another command has assigned workers meanwhile; they stay where it wants them."""

    def __init__(self) -> None:
        super().__init__(
            "another command has assigned the workers meanwhile, and they go where it says: run one at a time, and "
            "this one again if it is still to be done"
        )


class Bus:
    """The routes and assignments on the cluster, of a relay whose own settings are those of the group ""."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.topics = load_topics(settings.kafka)
        self._reader = StatusReader.from_settings(settings, self.topics)
        self._assigned: Assignments | None = None  # read or written last
        self._epochs: dict[str, int] = {}  # by scenario, of the routes that were read or written last

    async def read(self) -> Routes:
        """The newest routes; all users in the group "" where there are none. Raises BrokerError, TopicError."""
        self.topics = await verified_topics(self.settings.kafka)
        await self._reader.prepare()
        found = (await self._newest()).get("")
        return found or Routes.of_one(OWN, self.topics.stated or self.topics.lanes)

    async def scenarios_of(self, group: str) -> list[str]:
        """The scenarios whose requests the group serves. Raises BrokerError."""
        every = await self._newest()
        return [name for name, routes in every.items() if name and group in routes.groups]

    async def naming(self, group: str) -> dict[str, Routes]:
        """By scenario ("": none), the newest routes that name the group; without any, those of all users in the group
        "". Raises BrokerError, TopicError; ConfigError for a group that no routes name."""
        own = await self.read()
        every = {**await self._newest(), "": own}
        found = {name: routes for name, routes in every.items() if group in routes.groups}
        if not found:
            known = ", ".join(sorted({label(each) for routes in every.values() for each in routes.groups}))
            raise ConfigError(f"group {label(group)}: no routes name it, only {known}")
        return found

    async def write(self, producer: Producer, routes: Routes, scenario: str = "") -> None:
        """Write them, at this time. scenario: whose they are; "": of none.

        Raises BrokerError; RoutesChanged where another command has written some since they were read.
        """
        known = self._epochs.get(scenario, 0)
        found = (await read_routes(self.settings.kafka, self.topics, self._reader)).get(scenario)
        if found is not None and found.epoch not in (known, routes.epoch):  # the latter: written, though it seemed not
            raise RoutesChanged(found)
        routes = msgspec.structs.replace(routes, sent_ms=now_ms())
        await write_routes(producer, self.topics, self._reader, routes, scenario)
        self._epochs[scenario] = routes.epoch

    async def assignments(self) -> Assignments | None:
        """The newest; None: there are none. Raises BrokerError."""
        self._assigned = await read_assignments(self.settings.kafka, self.topics, self._reader)
        return self._assigned

    async def assign(
        self, producer: Producer, workers: Mapping[str, str], home: str, checkpoints: Mapping[str, str]
    ) -> int:
        """Write assignments; returns their epoch.

        Raises BrokerError; AssignmentsChanged where another command has written some since they were read.
        """
        known = self._assigned
        found = await read_assignments(self.settings.kafka, self.topics, self._reader)
        if found is not None and found != known and (known is None or found.epoch >= known.epoch):
            raise AssignmentsChanged
        self._assigned = Assignments.after(known, ROLLOUT, workers, now_ms(), home, checkpoints)
        await write_assignments(producer, self.topics, self._reader, self._assigned)
        return self._assigned.epoch

    async def _newest(self) -> Mapping[str, Routes]:
        """Those of all scenarios, which the next ones that are written change."""
        found = await read_routes(self.settings.kafka, self.topics, self._reader)
        self._epochs.update((scenario, routes.epoch) for scenario, routes in found.items())
        return found

    async def make_topic(self) -> bool:
        """Make `routes` if it is not there; returns whether it was."""
        topic = routes_topic(self.topics)
        return await topic_exists(self.settings.kafka, topic) or not await topic_exists(
            self.settings.kafka, topic, create=True
        )


def label(group: str) -> str:
    """The group's name for people and metrics."""
    return group or "default"


def next_group(routes: Routes | None) -> str:
    """Where a rollout goes that names no group: the other one of two."""
    return OWN if routes is not None and routes.share_of(OTHER) == POSITIONS else OTHER


def source_of(routes: Routes, to: str) -> str:
    """The group that users come from. Raises ConfigError if they would come from several, or from `to` itself."""
    beside = [part for part in routes.parts if part.group != to]
    if len(serving := [label(part.group) for part in beside if part.share]) > 1:
        raise ConfigError(f"groups {' and '.join(serving)} have users: finish that rollout, or take it --back, first")
    source = max(beside, key=lambda part: part.share).group if beside else OWN
    if source == to:
        raise ConfigError(f"all users are in group {label(to)} already, and routes name no other: name another group")
    return source
