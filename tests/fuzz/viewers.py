"""Fuzzes what `relaygr status` and `relaygr explain` read."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from functools import partial
from typing import Any, Final

from relaygr_stream.errors import DecodeError
from relaygr_stream.ops.status.odd import oddities
from relaygr_stream.ops.status.overview import Overview
from relaygr_stream.ops.status.table import as_json as status_as_json
from relaygr_stream.ops.status.table import render
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import render_plain
from relaygr_stream.trigger.statement import stated_policy
from relaygr_stream.wire.erase import KIND as ERASE
from relaygr_stream.wire.erase import read_erase
from relaygr_stream.wire.messages import (
    WorkerStatus,
)
from relaygr_stream.wire.records import HEADER_KIND, Record
from relaygr_stream.wire.signature import Signer
from relaygr_stream.wire.trigger_status import KEY_PREFIX, KIND
from relaygr_stream.wire.worker_status import StatusReader, worker_statuses
from tests.fuzz.checks import (
    TOPICS,
    holds,
    no_constant,
    printable,
)
from tests.fuzz.corpus import (
    EPOCH_MS,
    plain,
    trigger,
)
from tests.fuzz.mutate import Mutator


def _key(fields: dict[str, Any]) -> bytes:
    """The key under which a status of these fields, as they came to be, is believed."""
    return str(fields.get("name")).encode(errors="replace")


def worker_record(mutator: Mutator, rng: random.Random, offset: int) -> Record:
    """A record of `worker-status` under its worker's name: a status, seldom a tombstone or another's."""
    fields = plain(WorkerStatus, rng)
    value = mutator.value(fields) if rng.random() < 0.97 else None
    key = _key(fields) if rng.random() < 0.95 else mutator.key()
    headers: Any = tuple(mutator.headers([])) if rng.random() < 0.1 else ()
    return Record("s", 0, offset, 0, key, value, headers)


class Viewer:
    """What `relaygr status` and `relaygr explain` read: of workers and of triggers, signed or not."""

    #: Records after which a view is looked at, and begun anew: looking takes milliseconds.
    FRESH: Final = 200
    SETTINGS: Final = Settings()
    SIGNER: Final = Signer("a secret of the fuzzed fleet")

    def __init__(self) -> None:
        self._count = 0
        self._views = self._fresh()

    def _fresh(self) -> list[Overview]:
        wall = partial(float, EPOCH_MS / 1e3)
        readers = [StatusReader(4), StatusReader(4, self.SIGNER, wall=wall)]
        return [Overview(self.SETTINGS, TOPICS, reader, live=True) for reader in readers]

    def __call__(self, rng: random.Random) -> None:
        mutator = Mutator(rng)
        self._count += 1
        record = worker_record(mutator, rng, self._count) if rng.random() < 0.6 else self._of_a_trigger(mutator, rng)
        signed: Any = self.SIGNER.sign(record.topic, record.key or b"", record.value, record.headers)
        if rng.random() < 0.2:
            signed = mutator.headers(signed)
        record = record._replace(headers=tuple(signed))
        for view in self._views:
            view.on_records([record])
            with suppress(DecodeError):
                if (erase := read_erase(record, view.reader)) is not None:
                    erase.names("u")
        for status in worker_statuses([record]):
            holds(len(status.name) <= 256, f"a name of {len(status.name)} characters")
        if self._count % self.FRESH == 0:
            for view in self._views:
                self.look(view)
            self._views = self._fresh()

    @staticmethod
    def _of_a_trigger(mutator: Mutator, rng: random.Random) -> Record:
        fields = trigger(rng)
        value = mutator.value(fields) if rng.random() < 0.97 else None
        key = KEY_PREFIX.encode() + _key(fields) if rng.random() < 0.9 else mutator.key()
        headers: Any = tuple(mutator.headers([(HEADER_KIND, rng.choice([KIND, KIND, ERASE]).encode())]))
        return Record("s", 0, 0, 0, key, value, headers)

    @staticmethod
    def look(view: Overview) -> None:
        for status in view.living_triggers().values():
            policy = stated_policy(status.policy)
            holds(math.isfinite(policy.stale_ms) and policy.max_prefix_tokens >= 0, f"{policy}")
        line = status_as_json(view)
        json.loads(line, parse_constant=no_constant)
        holds(printable(line), f"control characters in {line!r}")
        shown = render_plain(render(view), 80)
        holds(all(map(printable, shown.split("\n"))), f"control characters in {shown!r}")
        before = len(oddities(view))
        odd = [each for each in render_plain(render(view)).split("\n") if each.startswith("odd: ")]
        after = len(oddities(view))  # another number where a process has become silent meanwhile
        holds(min(before, after) <= len(odd) <= max(before, after), f"a forged line in {odd}")
