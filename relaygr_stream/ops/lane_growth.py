"""`relaygr lanes grow`: more lanes while everything serves. What is on the cluster is the state: run again, it goes on.

partitions are added ─► workers and triggers own them, and go on with the others ─► the number is announced on `routes`

Clients hash users over the announced number; a client that has not heard of it, over the one before. Either finds an
owner, since no lane goes away, and mostly the same one (bus/balance.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Final, Protocol

from relaygr_stream.bus.away import ranges
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import add_partitions, verified_topics, verify_topics
from relaygr_stream.errors import ConfigError, RelayError
from relaygr_stream.ops.rollout.routing import Bus, label
from relaygr_stream.ops.status.overview import Overview, listening
from relaygr_stream.settings.schema import MAX_LANES, Settings
from relaygr_stream.telemetry.printable import Say
from relaygr_stream.wire.routes import group_settings

#: Owners are looked for so often, and told of when they change.
LOOK_S: Final = 0.5
#: Processes learn of partitions within 15 s, and a group rebalances within a session timeout.
OWNED_S: Final = 120.0


class GrowingCluster(Protocol):
    """A fleet, as its growth sees and changes it. Each call may fail with RelayError, and be made again."""

    async def counts(self) -> dict[str, int]:
        """The partitions of each topic that shares lanes."""

    async def add(self, counts: Mapping[str, int]) -> None:
        """Have so many partitions of these topics."""

    def unowned(self, lanes: int) -> dict[str, list[int]]:
        """The lanes that no live worker, and no live trigger, states; by "worker" and "trigger"."""

    async def announced(self) -> int:
        """The number of lanes that clients go by; 0: nothing says it, and each goes by what it found."""

    async def announce(self, lanes: int) -> None:
        """Have clients go by so many."""


async def grow(fleet: GrowingCluster, lanes: int, say: Say, owned_s: float = OWNED_S) -> None:
    """Grow to so many lanes. Raises ConfigError if that cannot be, RelayError if lanes get no owner in owned_s."""
    counts, told = await fleet.counts(), await fleet.announced()
    before = told or min(counts.values())
    check_number(lanes, counts, before)
    if few := {name: lanes for name, count in counts.items() if count < lanes}:
        if not told:  # a client that starts now would count those that have no owner yet
            await fleet.announce(before)
        await fleet.add(few)
        say(f"{', '.join(few)}: {lanes} partitions")
    began, last = time.monotonic(), ""
    while unowned := {kind: free for kind, free in fleet.unowned(lanes).items() if free}:
        line = "; ".join(f"no {kind} has {len(free)} of {lanes} lanes yet" for kind, free in unowned.items())
        if line != last:
            say(last := line)
        if time.monotonic() - began > owned_s:
            kind, free = next(iter(unowned.items()))
            raise RelayError(
                f"no {kind} has lanes {ranges(free)} after {owned_s:g} s, and users stay on {before} lanes: look at "
                f"its log, then run this again"
            )
        await asyncio.sleep(LOOK_S)
    say(f"every lane of {lanes} has a worker and a trigger")
    if (told := await fleet.announced()) == lanes:
        say(f"clients go by {lanes} lanes already")
        return
    if told > lanes:
        raise ConfigError(f"{lanes} lanes: {told} were announced meanwhile, by another command; clients go by those")
    await fleet.announce(lanes)
    say(f"announced: clients go by {lanes} lanes, {before} before")


def check_number(lanes: int, counts: Mapping[str, int], announced: int) -> None:
    """Raise ConfigError if a fleet with these partitions cannot grow to so many lanes."""
    most = max(*counts.values(), announced)
    if lanes < most:
        raise ConfigError(f"{lanes} lanes: there are {most}, and Kafka takes no partitions away")
    if lanes > MAX_LANES:
        raise ConfigError(f"{lanes} lanes: {MAX_LANES} at most")
    if lanes % announced or any(lanes % count for count in counts.values()):
        raise ConfigError(
            f"{lanes} lanes: write a multiple of {most}, such as {2 * most}: then users stay with their workers"
        )


class LiveFleet:
    """The fleet of one group on a cluster."""

    def __init__(self, bus: Bus, group: str, settings: Settings, view: Overview) -> None:
        self._bus, self._group, self._settings, self._view = bus, group, settings, view

    async def counts(self) -> dict[str, int]:
        """The partitions of each topic that shares lanes."""
        rows = await verify_topics(self._settings.kafka)
        return {row.topic.name: row.found.partitions for row in rows if row.topic.lanes and row.found is not None}

    async def add(self, counts: Mapping[str, int]) -> None:
        """Have so many partitions of these topics. Raises BrokerError, also for a broker that adds none."""
        await add_partitions(self._settings.kafka, counts)

    def unowned(self, lanes: int) -> dict[str, list[int]]:
        """The lanes that nobody states."""
        workers = {lane.lane for each in self._view.living_workers().values() for lane in each.lanes}
        triggers = {lane for each in self._view.living_triggers().values() for lane in each.lanes}
        return {
            "worker": sorted(set(range(lanes)) - workers),
            "trigger": sorted(set(range(lanes)) - triggers),
        }

    async def announced(self) -> int:
        """The number of lanes that clients go by, or 0."""
        found = (await self._bus.naming(self._group)).values()
        return min(routes.lanes_of(self._group) if routes.epoch else 0 for routes in found)

    async def announce(self, lanes: int) -> None:
        """Have clients go by so many."""
        await self._bus.make_topic()
        async with Producer(self._settings.kafka, client_id="relaygr-lanes") as producer:
            for scenario, routes in (await self._bus.naming(self._group)).items():
                await self._bus.write(producer, routes.grown(self._group, lanes), scenario)


async def grow_lanes(settings: Settings, group: str, lanes: int, say: Say) -> None:
    """Grow the lanes of a group. Raises RelayError."""
    bus = Bus(settings)
    stated = min(routes.lanes_of(group) for routes in (await bus.naming(group)).values())
    of_group = group_settings(settings, group, stated)
    topics = await verified_topics(of_group.kafka)
    async with AsyncExitStack() as stack:
        view, _ = await stack.enter_async_context(listening(of_group, topics))
        say(f"group {label(group)}: {topics.lanes} lanes")
        await grow(LiveFleet(bus, group, of_group, view), lanes, say)
