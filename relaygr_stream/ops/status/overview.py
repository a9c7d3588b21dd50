"""What runs: the newest that each trigger and each worker states, and since when we have not heard of it.

Reads `worker-status` beside the running processes; joins no group, writes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.fleet import FORGET_S
from relaygr_stream.wire.messages import WorkerStatus, kind_of
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.wire.trigger_status import KEY_PREFIX, TriggerStatus, read_trigger
from relaygr_stream.wire.worker_status import StatusReader, Tombstone

S = TypeVar("S", WorkerStatus, TriggerStatus)
#: Two statements of a trigger and several of a worker: what lives has spoken by then.
LISTEN_S: Final = 2.5


@dataclass
class Seen(Generic[S]):
    """One process. first, last: what it stated since we look on; both alike until it spoke again."""

    first: S
    last: S
    heard_s: float | None = None  # our monotonic clock; None: it has not spoken since we look on

    def lives(self, now_s: float, silence_ms: float) -> bool:
        """Whether it spoke lately, and did not say that it stops."""
        spoke = self.heard_s is not None and (now_s - self.heard_s) * 1e3 <= silence_ms
        return spoke and self.last.state not in ("stopped", "draining")


@dataclass
class Overview:
    """All of them by name, and how many records were not believed."""

    settings: Settings
    topics: TopicSet
    reader: StatusReader
    clock: Callable[[], float] = time.monotonic
    workers: dict[str, Seen[WorkerStatus]] = field(default_factory=dict)
    triggers: dict[str, Seen[TriggerStatus]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    live: bool = False  # what comes from now on was written just now

    def on_records(self, records: list[Record]) -> None:
        """Take records in the topic's order."""
        for record in records:
            try:
                self._take(record)
            except DecodeError as error:
                self.refused[error.reason] = self.refused.get(error.reason, 0) + 1

    def _take(self, record: Record) -> None:
        heard_s = self.clock() if self.live else None
        name = (record.key or b"").decode(errors="replace")
        if kind_of(record.headers):
            trigger = read_trigger(record, self.reader, fresh=self.live)
            if trigger is not None:
                _put(self.triggers, trigger, heard_s)
            elif record.value is None:
                self.triggers.pop(name.removeprefix(KEY_PREFIX), None)
            return
        found = self.reader.read(record, fresh=self.live)
        if isinstance(found, Tombstone):
            self.workers.pop(found.name, None)
        elif found is not None:
            _put(self.workers, found, heard_s)

    @property
    def silence_ms(self) -> float:
        """A process that said nothing for so long does not live."""
        return self.settings.trigger.silence_ms

    def living_workers(self) -> dict[str, WorkerStatus]:
        """The newest statuses of workers that live."""
        now = self.clock()
        return {name: seen.last for name, seen in self.workers.items() if seen.lives(now, self.silence_ms)}

    def living_triggers(self) -> dict[str, TriggerStatus]:
        """The newest statuses of triggers that live."""
        now = self.clock()
        return {name: seen.last for name, seen in self.triggers.items() if seen.lives(now, self.silence_ms)}

    def silent(self) -> list[str]:
        """Names that did not stop in order and say nothing, unless it is long ago."""
        now, now_ms = self.clock(), time.time() * 1e3

        def silent(seen: Seen[S]) -> bool:
            lately = now_ms - seen.last.sent_ms <= FORGET_S * 1e3
            return lately and seen.last.state != "stopped" and not seen.lives(now, self.silence_ms)

        workers = [name for name, worker in self.workers.items() if silent(worker)]
        return workers + [KEY_PREFIX + name for name, trigger in self.triggers.items() if silent(trigger)]


def _put(known: dict[str, Seen[S]], status: S, heard_s: float | None) -> None:
    before = known.get(status.name)
    if before is None or before.last.incarnation != status.incarnation:
        known[status.name] = Seen(status, status, heard_s)
    else:
        before.last, before.heard_s = status, heard_s
