"""The processes of a fleet: each trigger's and each worker's newest status, and its age.

Reads `worker-status` beside the running processes; joins no group, writes nothing. Ages are by the time of receipt, or
by the brokers' clock, never by a sender's: one clock that is hours off hides nobody.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from relaygr_stream.bus.tail import STATUS_PAUSE_S, TopicTail
from relaygr_stream.errors import DecodeError
from relaygr_stream.fleet import DROP_AFTER_S
from relaygr_stream.settings.scenarios import RESERVE
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.clocks import Clock
from relaygr_stream.wire.assignments import Assignments
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.records import Record, kind_of
from relaygr_stream.wire.routes import OWN, Routes, announced_lanes
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.wire.trigger_status import KEY_PREFIX, KIND, TriggerStatus, read_trigger
from relaygr_stream.wire.worker_status import StatusReader, Tombstone

S = TypeVar("S", WorkerStatus, TriggerStatus)
#: Seconds to listen: within them a live trigger publishes two statuses, a live worker several.
LISTEN_S: Final = 2.5
#: Rates and latencies are those of the last so many seconds, or up to twice as many.
LATELY_S: Final = 10.0


@dataclass
class Seen(Generic[S]):
    """One process. first, last: its oldest and newest status of one incarnation that this viewer has read.

    since: one that is LATELY_S to twice that older than `last`, or the first: what happened lately is between these.
    """

    first: S
    last: S
    since: S
    mark: S  # the next `since`
    received_s: float | None = None  # when `last` was received, by the monotonic clock; None: written before the start
    written_ms: int = 0  # when `last` was written, by the broker's clock: Unix time

    @property
    def ahead_ms(self) -> int:
        """By how much the process's clock is ahead of the broker's."""
        return self.last.sent_ms - self.written_ms

    def is_recent(self, now_s: float, silence_ms: float) -> bool:
        """Whether its newest status is."""
        return self.received_s is not None and (now_s - self.received_s) * 1e3 <= silence_ms

    def is_alive(self, now_s: float, silence_ms: float) -> bool:
        """Whether its newest status is recent and does not announce a stop."""
        return self.is_recent(now_s, silence_ms) and self.last.state not in ("stopped", "draining")


class Follower(Protocol):
    """Takes statuses as they are read."""

    def add(self, status: WorkerStatus | TriggerStatus, at_s: float) -> None:
        """Take one that was written at that Unix time."""


class OfScenario(NamedTuple):
    """What is seen of one group of a scenario."""

    scenario: str
    group: str
    view: Overview


@dataclass
class Overview:
    """All processes by name, and the number of refused records by reason, since it is live.

    scenario: the one to look at where the group serves several; "": all. follower: also takes each status that is read.
    routes: the newest of requests of no scenario; assignments: of workers; if the caller follows them.
    """

    settings: Settings
    topics: TopicSet
    reader: StatusReader
    clock: Clock = time.monotonic
    scenario: str = ""
    follower: Follower | None = None
    workers: dict[str, Seen[WorkerStatus]] = field(default_factory=dict)
    reserve: dict[str, Seen[WorkerStatus]] = field(default_factory=dict)  # workers that stand by
    triggers: dict[str, Seen[TriggerStatus]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    routes: Routes | None = None
    assignments: Assignments | None = None
    scenarios: list[OfScenario] = field(
        default_factory=list
    )  # a view of each group of each, if the caller follows them
    live: bool = False  # whether records from now on are written just now; False while old records are read

    def _follow(self, status: WorkerStatus | TriggerStatus, written_s: float) -> None:
        if self.follower is not None:
            self.follower.add(status, written_s)

    def __post_init__(self) -> None:
        self._dropped_s = self.clock()
        self._newest_ms = 0  # when the newest record was written
        self._heard_s: float | None = None  # when it was received; None: written before the start

    def on_records(self, records: list[Record]) -> None:
        """Apply records in the topic's order."""
        for record in records:
            self._newest_ms, self._heard_s = record.timestamp_ms, self.clock() if self.live else None
            try:
                self._apply(record)
            except DecodeError as error:
                if not self.live:
                    continue  # its sender may have gone long ago
                self.refused[error.reason] = self.refused.get(error.reason, 0) + 1
        if self.clock() - self._dropped_s > DROP_AFTER_S:
            self._dropped_s = self.clock()
            _drop_silent(self.workers, self._dropped_s)
            _drop_silent(self.reserve, self._dropped_s)
            _drop_silent(self.triggers, self._dropped_s)

    def _apply(self, record: Record) -> None:
        received_s = self.clock() if self.live else None
        written_s = time.time() if self.live else record.timestamp_ms / 1e3
        name = (record.key or b"").decode(errors="replace")
        if kind := kind_of(record.headers):
            trigger = read_trigger(record, self.reader, fresh=self.live)
            if trigger is not None:
                _put(self.triggers, trigger, received_s, record.timestamp_ms, self.reader.most_names)
                self._follow(trigger, written_s)
            elif record.value is None and kind == KIND:
                self.reader.verify(record)
                self.triggers.pop(name.removeprefix(KEY_PREFIX), None)
            return
        found = self.reader.read(record, fresh=self.live)
        if isinstance(found, Tombstone):
            for known in (self.workers, self.reserve):
                seen = known.get(found.name)
                if seen is not None and self.reader.removes(found, seen.last):
                    del known[found.name]
        elif found is not None and found.scenario == RESERVE:
            _put(self.reserve, found, received_s, record.timestamp_ms, self.reader.most_names)
        elif found is not None:
            _put(self.workers, found, received_s, record.timestamp_ms, self.reader.most_names)
            self._follow(found, written_s)

    def take_routes(self, routes: Mapping[str, Routes]) -> None:
        """These are the newest, by scenario. Lanes that were added count once they are announced."""
        self.routes = routes.get("")
        lanes = announced_lanes(routes)
        self.topics.grow(lanes.get(OWN, 0))
        for each in self.scenarios:
            each.view.topics.grow(lanes.get(each.group, 0))

    @property
    def groups(self) -> list[OfScenario]:
        """Of `scenarios` each group once, under its own scenario's name if it serves others, too."""
        names = {each.scenario for each in self.scenarios}
        return [each for each in self.scenarios if each.group == each.scenario or each.group not in names]

    def snapshot(self) -> Overview:
        """What is known now, for another thread to read: nothing changes it any more."""
        kept = copy(self)
        kept.workers = {name: copy(seen) for name, seen in self.workers.items()}
        kept.reserve = {name: copy(seen) for name, seen in self.reserve.items()}
        kept.triggers = {name: copy(seen) for name, seen in self.triggers.items()}
        kept.refused = dict(self.refused)
        kept.scenarios = [each._replace(view=each.view.snapshot()) for each in self.scenarios]
        return kept

    @property
    def silence_ms(self) -> float:
        """A process that has stated nothing for longer is not alive."""
        return self.settings.trigger.max_status_age_ms

    @property
    def slo_in_words(self) -> str:
        """Of the rankings that are looked at."""
        scenario = self.settings.sharing.get(self.scenario)
        return self.settings.slo_in_words if scenario is None else f"{scenario.slo_ms:g} ms"

    @property
    def slo_key(self) -> str:
        """Where it stands."""
        return "slo_ms" if self.settings.sharing else "relay.slo_ms"

    def living_workers(self) -> dict[str, WorkerStatus]:
        """The newest statuses of live workers, by name."""
        now = self.clock()
        return {name: seen.last for name, seen in self.workers.items() if seen.is_alive(now, self.silence_ms)}

    def living_reserve(self) -> dict[str, WorkerStatus]:
        """The newest statuses of live workers that stand by, by name."""
        now = self.clock()
        return {name: seen.last for name, seen in self.reserve.items() if seen.is_alive(now, self.silence_ms)}

    def living_triggers(self) -> dict[str, TriggerStatus]:
        """The newest statuses of live triggers, by name."""
        now = self.clock()
        return {name: seen.last for name, seen in self.triggers.items() if seen.is_alive(now, self.silence_ms)}

    def silent(self) -> list[str]:
        """Names of processes that did not stop in order and state nothing, unless they ended long ago."""
        now, now_ms = self.clock(), self.now_ms()

        def silent(seen: Seen[S]) -> bool:
            lately = now_ms - seen.written_ms <= DROP_AFTER_S * 1e3
            return lately and seen.last.state != "stopped" and not seen.is_recent(now, self.silence_ms)

        workers = [name for name, worker in self.workers.items() if silent(worker)]
        return workers + [KEY_PREFIX + name for name, trigger in self.triggers.items() if silent(trigger)]

    def now_ms(self) -> float:
        """The time by the broker's clock; where nothing was heard since this viewer's start, by ours, or later."""
        if self._heard_s is None:
            return max(time.time() * 1e3, self._newest_ms)
        return self._newest_ms + (self.clock() - self._heard_s) * 1e3


@asynccontextmanager
async def listening(settings: Settings, topics: TopicSet) -> AsyncIterator[tuple[Overview, TopicTail]]:
    """An overview that follows `worker-status`, and its tail.

    Raises BrokerUnavailable, BrokerError.
    """
    reader = StatusReader.from_settings(settings, topics)
    await reader.prepare()
    view, name = Overview(settings, topics, reader), topics.worker_status.name
    async with TopicTail(settings.kafka, name, [0], "recent", view.on_records, pause_s=STATUS_PAUSE_S) as tail:
        view.live = True
        yield view, tail


def _drop_silent(known: dict[str, Seen[S]], now_s: float) -> None:
    """Drop what has stated nothing for DROP_AFTER_S, as OwnerDirectory does, or since before this viewer's start."""
    for name, seen in list(known.items()):
        if seen.received_s is None or now_s - seen.received_s > DROP_AFTER_S:
            del known[name]


def _put(known: dict[str, Seen[S]], status: S, received_s: float | None, written_ms: int, most: int) -> None:
    before = known.get(status.name)
    if before is None and len(known) >= most:
        del known[min(known, key=lambda name: known[name].received_s or 0.0)]
    if before is None or before.last.incarnation != status.incarnation:
        known[status.name] = Seen(status, status, status, status, received_s, written_ms)
        return
    if status.sent_ms - before.mark.sent_ms >= LATELY_S * 1e3:
        before.since, before.mark = before.mark, status
    before.last, before.received_s, before.written_ms = status, received_s, written_ms
