"""One running relay of the bench: its own topics, a trigger, workers, a client, and the workers' statuses.

Modes with equal settings share a pipeline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, Self

import msgspec

from relaygr_lab.bench.dilation import Fleet
from relaygr_lab.bench.results import Memory
from relaygr_lab.bench.routing import RoutedClient
from relaygr_lab.emulate.process import BUSY_METRIC, LATE_METRIC, MODULE
from relaygr_lab.policies import Policy
from relaygr_lab.processes import check_running, start_relay, wait_for_lanes
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import RelayError
from relaygr_stream.ops.children import Child, stop_all
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.messages import CostModel, WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import worker_statuses

#: A trigger counts its decisions in this metric, by reason.
DECISIONS: Final = "relaygr_trigger_decisions_total"
#: A worker's status may take this long, at least, where the broker or this process stands still for a moment.
STATUS_S: Final = 30.0


class _SignalId(msgspec.Struct):
    """The one field that is decoded of a pre-infer signal, which is as long as its request."""

    request_id: str


_signal_id = msgspec.msgpack.Decoder(_SignalId)


class Pipeline:
    """An async context in which all processes are ready and the workers own all lanes; they are stopped at its end."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        workers: int,
        folder: Path,
        fleet: Fleet | None = None,
        policy: Policy = "relay",
    ) -> None:
        self.name = name
        self.fleet = fleet
        self._policy = policy
        kafka = msgspec.structs.replace(settings.kafka, prefix=f"{settings.kafka.prefix}{name}.")
        self.settings = msgspec.structs.replace(settings, kafka=kafka)
        self.topics = load_topics(kafka)
        self.client = RoutedClient(settings=self.settings, client_id=f"bench-{name}")
        self._admitted: set[str] = set()  # requests for which there was a pre-infer signal
        self._signals: TopicTail
        self.history: list[tuple[float, WorkerStatus]] = []  # (time of receipt, status), by the monotonic clock
        self._latest: dict[str, WorkerStatus] = {}
        self.workers = workers
        self._workers = [f"{name}-{number}" for number in range(1, workers + 1)]
        self._folder = folder
        self._children: list[Child] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await apply_topics(self.settings.kafka)
            how: tuple[str, tuple[str, ...]] | tuple[()] = ()
            if self.fleet is not None:
                how = (MODULE, ("--policy", self._policy, "--averaging", f"{self.fleet.factor!r}"))
            self._children = start_relay(self.settings, self._folder, f"{self.name}-trigger", self._workers, *how)
            stack.push_async_callback(self._stop_children)
            kafka, topics = self.settings.kafka, self.topics
            await asyncio.gather(*(child.wait_ready() for child in self._children))
            statuses = TopicTail(kafka, topics.worker_status.name, [0], "recent", self._on_statuses)
            await stack.enter_async_context(statuses)
            lanes = range(topics.lanes)
            self._signals = TopicTail(kafka, topics.pre_infer.name, lanes, "latest", self._on_signals, relaxed=True)
            await stack.enter_async_context(self._signals)
            await stack.enter_async_context(self.client)
            await wait_for_lanes(self._children, self._owned, topics.lanes)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def costs(self) -> CostModel:
        """The devices' costs: those of the cost file, or as the first worker fitted them."""
        if self.fleet is not None:
            return self.fleet.cost_model
        return self._latest[self._workers[0]].costs

    @property
    def bytes_per_token(self) -> int:
        """Prefix KV of a token, as the first worker states it."""
        return self._latest[self._workers[0]].bytes_per_token

    @property
    def note(self) -> str:
        """The model's note, for example that its weights are random."""
        return self._latest[self._workers[0]].model_note

    @property
    def device(self) -> str:
        """The workers' device."""
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

    async def device_ms(self) -> tuple[float, float]:
        """Running totals of the emulated devices: busy, and late; zeros where devices are real."""
        if self.fleet is None:
            return 0.0, 0.0
        stated = await asyncio.gather(*(asyncio.to_thread(child.samples) for child in self._children[1:]))
        every = [sample for samples in stated for sample in samples]
        busy, late = (sum(one.value for one in every if one.name == name) for name in (BUSY_METRIC, LATE_METRIC))
        return busy, late

    async def decisions(self) -> dict[str, float]:
        """Running totals of the trigger's decisions by reason."""
        samples = await asyncio.to_thread(self._children[0].samples)
        return {one.labels["reason"]: one.value for one in samples if one.name == DECISIONS}

    async def fresh_statuses(self) -> None:
        """Return when every worker has published another status. Raises RelayError if one does not."""
        before = dict(self._latest)
        deadline = time.monotonic() + max(STATUS_S, 10 * self.settings.worker.status_interval_ms / 1e3)
        while any(self._latest[name] is before[name] for name in self._workers):
            self.check_children()
            if time.monotonic() > deadline:
                raise RelayError(f"no new status of {', '.join(self._workers)}; check that the broker runs")
            await asyncio.sleep(0.02)

    def check_children(self) -> None:
        """Raise RelayError with the end of its log if a process has ended."""
        check_running(self._children)

    async def _stop_children(self) -> None:
        await stop_all(self._children)

    def _owned(self) -> list[int]:
        return [len(self._latest[name].lanes) if name in self._latest else 0 for name in self._workers]

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


def memory_over_time(pipeline: Pipeline, started_s: float) -> list[Memory]:
    """The sum over all workers, at each status of one; times are seconds since started_s (monotonic)."""
    found: list[Memory] = []
    latest: dict[str, tuple[int, int, int]] = {}
    for at, status in pipeline.history:
        pinned = sum(lane.pinned_bytes for lane in status.lanes)
        latest[status.name] = status.hbm_used_bytes, pinned, status.dram_used_bytes
        found.append(Memory(at - started_s, pipeline.name, *map(sum, zip(*latest.values(), strict=True))))
    return found
