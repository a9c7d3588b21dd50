"""One running relay as the bench uses it: topics of its own, a trigger, workers, a client, and what they say.

Modes whose processes run with the same settings share a pipeline. Knows nothing of probes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics, load_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.errors import RelayError
from relaygr_stream.ops.children import Child, settings_as_toml, stop_all
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.messages import CostModel, WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.worker_status import worker_statuses

LANES_TIMEOUT_S: Final = 30.0
#: A trigger counts its decisions in this metric, by reason.
DECISIONS: Final = "relaygr_trigger_decisions"


class _SignalId(msgspec.Struct):
    """All that is read of a pre-infer signal: its prefix is as long as the request's."""

    request_id: str


_signal_id = msgspec.msgpack.Decoder(_SignalId)


class Pipeline:
    """As an async context: everything is started, ready and owns its lanes inside; stopped and removed after it."""

    def __init__(self, name: str, settings: Settings, workers: int, folder: Path) -> None:
        self.name = name
        kafka = msgspec.structs.replace(settings.kafka, prefix=f"{settings.kafka.prefix}{name}.")
        self.settings = msgspec.structs.replace(settings, kafka=kafka)
        self.topics = load_topics(kafka)
        self.client = RelayClient(settings=self.settings, client_id=f"bench-{name}")
        self._admitted: set[str] = set()  # requests for which there was a pre-infer signal
        self._signals: TopicTail
        self.history: list[tuple[float, WorkerStatus]] = []  # every status, with when it came on our monotonic clock
        self._latest: dict[str, WorkerStatus] = {}
        self._workers = [f"{name}-{number}" for number in range(1, workers + 1)]
        self._folder = folder
        self._children: list[Child] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await apply_topics(self.settings.kafka)
            self._start_children()
            stack.push_async_callback(self._stop_children)
            kafka, topics = self.settings.kafka, self.topics
            await asyncio.gather(*(child.wait_ready() for child in self._children))
            statuses = TopicTail(kafka, topics.worker_status.name, [0], "earliest", self._on_statuses)
            await stack.enter_async_context(statuses)
            lanes = range(topics.lanes)
            self._signals = TopicTail(kafka, topics.pre_infer.name, lanes, "latest", self._on_signals, relaxed=True)
            await stack.enter_async_context(self._signals)
            await stack.enter_async_context(self.client)
            await self._wait_for_lanes()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def costs(self) -> CostModel:
        """As the first worker fitted them so far."""
        return self._latest[self._workers[0]].costs

    @property
    def note(self) -> str:
        """What a reader should know of the model, such as that its weights are random."""
        return self._latest[self._workers[0]].model_note

    @property
    def device(self) -> str:
        """What the workers run on."""
        return self._latest[self._workers[0]].device

    def totals(self) -> dict[str, float]:
        """Running totals of all workers' counters, as last stated."""
        totals: dict[str, float] = {}
        for status in self._latest.values():
            for name, value in status.counters.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    async def admitted(self) -> frozenset[str]:
        """Requests for which there was a pre-infer signal up to now."""
        await self._signals.catch_up()
        return frozenset(self._admitted)

    async def decisions(self) -> dict[str, float]:
        """Running totals of the trigger's decisions by reason."""
        text = await asyncio.to_thread(self._children[0].metrics)
        return {
            sample.labels["reason"]: sample.value
            for family in text_string_to_metric_families(text)
            if family.name == DECISIONS
            for sample in family.samples
            if sample.name == f"{DECISIONS}_total"
        }

    async def fresh_statuses(self) -> None:
        """Return when every worker has stated itself once more."""
        before = dict(self._latest)
        deadline = time.monotonic() + 10 * self.settings.worker.status_ms / 1e3
        while any(self._latest[name] is before[name] for name in self._workers):
            self.check_children()
            if time.monotonic() > deadline:
                raise RelayError(f"no status of {', '.join(self._workers)} any more; is the broker there?")
            await asyncio.sleep(0.02)

    def check_children(self) -> None:
        """Raise RelayError with the end of its log if a process has ended."""
        for child in self._children:
            if child.exit_code is not None:
                raise RelayError(f"{child.name} ended with exit code {child.exit_code}:\n{child.log_tail()}")

    def _start_children(self) -> None:
        file = self._folder / f"{self.name}.toml"
        file.touch(mode=0o600)
        file.write_text(settings_as_toml(self.settings), encoding="utf-8")
        common = ("--config", str(file), "--set", "telemetry.log_format=console")
        self._children = [
            Child(f"{self.name}-trigger", ("trigger", *common), self._folder),
            *(
                Child(f"{name}-worker", ("worker", *common, "--set", f"worker.name={name}"), self._folder)
                for name in self._workers
            ),
        ]

    async def _stop_children(self) -> None:
        await stop_all(self._children)

    async def _wait_for_lanes(self) -> None:
        deadline = time.monotonic() + LANES_TIMEOUT_S
        while True:
            self.check_children()
            owned = [len(self._latest[name].lanes) if name in self._latest else 0 for name in self._workers]
            if sum(owned) == self.topics.lanes and min(owned) > 0:
                return
            if time.monotonic() > deadline:
                raise RelayError(f"the workers own {owned} of {self.topics.lanes} lanes after {LANES_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.05)

    def _on_statuses(self, records: Sequence[Record]) -> None:
        for status in worker_statuses(records):
            if status.name in self._workers:
                self._latest[status.name] = status
                self.history.append((time.monotonic(), status))

    def _on_signals(self, records: Sequence[Record]) -> None:
        for record in records:
            try:
                self._admitted.add(_signal_id.decode(record.value or b"").request_id)
            except msgspec.MsgspecError:
                continue  # the workers report it
