"""Fuzzes records on the topic `routes`, and those of a planner."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry

from relaygr_stream.cli.planner import _table as plan_table
from relaygr_stream.client.groups import Groups
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.errors import BrokerUnavailable, ConfigError, DecodeError, UnknownScenario
from relaygr_stream.groups.moves import GroupMoves
from relaygr_stream.ops.rollout.routing import next_group, source_of
from relaygr_stream.ops.status.overview import Overview
from relaygr_stream.settings.schema import MAX_LANES, Kafka, Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.printable import render_plain
from relaygr_stream.wire.assignments import KEY as ASSIGNMENTS_KEY
from relaygr_stream.wire.assignments import KIND as ASSIGNMENTS
from relaygr_stream.wire.assignments import Assignments, newer_assignments
from relaygr_stream.wire.planner_status import KIND as PLANNER
from relaygr_stream.wire.planner_status import read_planner
from relaygr_stream.wire.records import HEADER_KIND, Record
from relaygr_stream.wire.routes import KEY, OWN, POSITIONS, Routes, encode_routes, with_newer
from relaygr_stream.wire.routes import KIND as SCENARIO
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader
from tests.fuzz.checks import (
    holds,
    printable,
)
from tests.fuzz.corpus import (
    assignments,
    planner,
    routes,
)
from tests.fuzz.mutate import Mutator
from tests.fuzz.viewers import Viewer


class Routing:
    """What clients, workers, viewers and the command of a rollout make of records on `routes`, and of a planner's."""

    #: Records after which everybody begins anew: the highest epoch counts, and a spoiled one may be high.
    FRESH: Final = 50

    def __init__(self, stack: ExitStack) -> None:
        self._loop = asyncio.new_event_loop()
        stack.callback(self._loop.close)
        self._count = 0

    def __call__(self, rng: random.Random) -> None:
        if self._count % self.FRESH == 0:
            self._readers = [StatusReader(4), StatusReader(4, Viewer.SIGNER)]
            self._view = Overview(Settings(), load_topics(Kafka()), self._readers[0], live=True)
            self._known: dict[int, Mapping[str, Routes]] = {0: {}, 1: {}}
            self._moves = GroupMoves("w1", "feed", ["next"])
            self._assignments: Assignments | None = None
        self._count += 1
        mutator = Mutator(rng)
        make, key, kind = rng.choice(
            [
                (routes, KEY, ""),
                (routes, rng.choice([b"feed", b"ads", b"s%d" % rng.randrange(400)]), SCENARIO),
                (assignments, ASSIGNMENTS_KEY, ASSIGNMENTS),
                (planner, b"planner/p%d" % rng.randrange(3), PLANNER),
            ]
        )
        fields = make(rng)
        value = msgspec.msgpack.encode(fields) if rng.random() < 0.3 else mutator.value(fields)
        headers: Any = [(HEADER_KIND, kind.encode())] if kind else []
        if rng.random() < 0.1:
            key, headers = mutator.key() or b"", mutator.headers(headers)
        headers = Viewer.SIGNER.sign("routes", key, value, headers)
        record = Record("routes", 0, self._count, 0, key, value, tuple(headers))
        for number, reader in enumerate(self._readers):
            with suppress(DecodeError):
                before = self._known[number]
                self._known[number] = with_newer(record, reader, before)
                if self._known[number] is not before and not number:
                    self._routed(rng)
            with suppress(DecodeError):
                if (found := newer_assignments(record, reader, self._assignments)) is not self._assignments:
                    self._assignments = found
                    self._moves.take(found)
                    target = self._moves.target
                    known = target.group in ("", "feed", "next") or target.checkpoint.startswith("/")
                    holds(known and "\0" not in target.checkpoint, f"goes to {target!r}")
            with suppress(DecodeError):
                if (status := read_planner(record, reader)) is not None:
                    shown = render_plain(plan_table(status.plan), 80)
                    holds(all(map(printable, shown.split("\n"))), f"control characters in {shown!r}")

    def _routed(self, rng: random.Random) -> None:
        known = self._known[0]
        self._view.take_routes(known)
        Viewer.look(self._view)
        for routed in known.values():
            of = routed
            holds(of.group_of(f"u{rng.randrange(1000)}") in of.groups, "a group that the routes do not name")
            with suppress(ConfigError):
                to = next_group(of)
                source_of(of, to)
                moved = of.moved(to, 16, rng.randrange(POSITIONS + 1))
                msgspec.msgpack.decode(encode_routes(moved), type=Routes)
                of = moved
            holds(sum(part.share for part in of.parts) == POSITIONS, f"not all users, or some twice: {of}")
            holds(len(set(of.groups)) == len(of.parts), f"a group twice: {of}")
        self._loop.run_until_complete(self._followed(rng, known))

    @staticmethod
    async def _followed(rng: random.Random, known: Mapping[str, Routes]) -> None:
        """By a client."""
        own: Any = SimpleNamespace(serves=rng.random() < 0.9)

        @asynccontextmanager
        async def opened(*_: object) -> AsyncIterator[Any]:
            if rng.random() < 0.2:
                raise BrokerUnavailable("away")
            yield SimpleNamespace(serves=rng.random() < 0.9)

        groups, topics = Groups(Settings(), opened, ClientMetrics(CollectorRegistry())), load_topics(Kafka())
        owner = Background()
        groups._topics[""] = topics
        groups._background = owner
        try:
            groups._on_routes(known)
            for _ in range(3):
                await asyncio.sleep(0)
            for scenario in known:
                with suppress(UnknownScenario, BrokerUnavailable):
                    group = groups.group_of(own, f"u{rng.randrange(100)}", scenario=scenario)
                    holds(group in (OWN, *known[scenario].groups), f"{group!r} is none of {scenario!r}")
            holds(not owner.failed.done(), "a client ends")
            holds(0 < topics.lanes <= MAX_LANES, f"{topics.lanes} lanes")
        finally:
            await owner.end()
