"""Real `relaygr` processes over a real broker, with a model small enough for a test."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

import msgspec
from relaygr_lab.processes import servable

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topic_check import topics_with
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import DecodeError
from relaygr_stream.models.api import relative_deviation
from relaygr_stream.ops.children import Child, stop_all, write_settings
from relaygr_stream.settings.schema import Kafka, Relay, Settings, Trigger
from relaygr_stream.settings.worker import Model, Worker
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import PreInferSignal, WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import worker_statuses
from relaygr_stream.workload.driver import Result
from relaygr_stream.workload.generator import Generator, GeneratorOptions
from relaygr_stream.workload.items import WorkItem
from tests.waiting import until

MIB = 1 << 20
#: The SLO is as long as callers wait: a busy machine keeps it as well, and what is late for it may be refused.
#: No ranking is cut: tests compare scores with those of whole histories.
TEST_SETTINGS = Settings(
    relay=Relay(slo_ms=60_000.0, life_window_ms=3000, max_prefix_tokens=512, max_suffix_tokens=16, max_candidates=64),
    trigger=Trigger(max_event_age_ms=3000, max_status_age_ms=3000),
    worker=Worker(hbm_bytes=24 * MIB, dram_bytes=48 * MIB, audit_share=0.1, drain_ms=8000, truncate_to=0),
    model=Model(layers=2, dim=64, heads=2, dqk=16, dv=16, vocab=5000),
)

#: Requests live for a minute, so that none ends while a test waits for something else.
LONG_LIVED = msgspec.structs.replace(TEST_SETTINGS.relay, life_window_ms=60_000)


class Fleet:
    """A trigger and workers as children, and what they say of themselves."""

    def __init__(self, kafka: Kafka, folder: Path) -> None:
        self.settings = msgspec.structs.replace(TEST_SETTINGS, kafka=kafka)
        self.topics = load_topics(kafka)
        self.children: dict[str, Child] = {}
        self.statuses: dict[str, WorkerStatus] = {}
        self.admitted: set[str] = set()
        self._folder = folder
        self._config = folder / "settings.toml"
        self._tails: list[TopicTail] = []

    async def __aenter__(self) -> Self:
        kafka = self.settings.kafka
        self.topics = topics = topics_with(kafka, (await apply_topics(kafka)).rows)
        self.use(self.settings)
        self._tails = [
            TopicTail(kafka, topics.worker_status.name, [0], "earliest", self._on_statuses),
            TopicTail(kafka, topics.pre_infer.name, range(topics.lanes), "latest", self._on_signals),
        ]
        for tail in self._tails:
            await tail.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await stop_all(list(self.children.values()))
        for tail in self._tails:
            await tail.stop()

    def use(self, settings: Settings) -> None:
        """What processes started from now on run with."""
        self.settings = settings
        write_settings(self._config, servable(settings, self._folder))

    def start(self, command: str, name: str, *changes: str, worker_name: str | None = None) -> Child:
        """Start a process without waiting for it. changes: KEY=VALUE, settings that differ from the fleet's."""
        arguments = [command, "--config", str(self._config), *(f"--set={change}" for change in changes)]
        if command == "worker":
            arguments += ["--set", f"worker.name={worker_name or name}"]
        child = self.children[name] = Child(name, arguments, self._folder)
        return child

    async def ready(self, *names: str) -> None:
        await asyncio.gather(*(self.children[name].wait_ready() for name in names))

    async def lanes_settled(self, *workers: str) -> None:
        """Until these workers, and no others, own all lanes, and each has some: how many, follows from their loads."""

        def settled() -> bool:
            serving = {name: s for name, s in self.statuses.items() if s.state == "serving" and name in workers}
            lanes = [lane.lane for status in serving.values() for lane in status.lanes]
            shared = len(serving) == len(workers) and all(status.lanes for status in serving.values())
            return shared and sorted(lanes) == list(range(self.topics.lanes))

        await until(settled, f"lanes of {workers}: {self.statuses}")

    async def owners_known(self) -> None:
        """Until the trigger has heard the status of every lane's owner: what it decides before is `no_owner`."""
        metrics = self.children["trigger"].metrics

        def known() -> bool:
            owned = re.search(r"^relaygr_trigger_lanes_with_owner (\S+)", metrics(), re.M)
            return owned is not None and float(owned[1]) == self.topics.lanes

        await until(known, "the trigger knows the lanes' owners")

    def pinned(self) -> int:
        """Bytes that the workers' lanes hold for announced requests, by their last statuses."""
        return sum(lane.pinned_bytes for status in self.statuses.values() for lane in status.lanes)

    async def announced(self, request_id: str) -> None:
        """Until a worker has taken the request's signal: one on the log may still be overtaken by its ranking."""
        await until(lambda: request_id in self.admitted and self.pinned() > 0, f"{request_id} pinned")

    def _on_statuses(self, records: list[Record]) -> None:
        for status in worker_statuses(records):
            self.statuses[status.name] = status

    def _on_signals(self, records: list[Record]) -> None:
        for record in records:
            with suppress(DecodeError):  # a test's bad message
                self.admitted.add(decode(PreInferSignal, record.value).request_id)


@asynccontextmanager
async def serving_fleet(
    kafka: Kafka,
    folder: Path,
    *workers: str,
    model: Model = TEST_SETTINGS.model,
    relay: Relay = TEST_SETTINGS.relay,
    **trigger: float,
) -> AsyncIterator[Fleet]:
    """A trigger and these workers, all ready, all lanes owned. trigger: its settings that differ from TEST_SETTINGS."""
    async with Fleet(kafka, folder) as fleet:
        changed = msgspec.structs.replace(fleet.settings.trigger, **trigger)
        fleet.use(msgspec.structs.replace(fleet.settings, model=model, relay=relay, trigger=changed))
        fleet.start("trigger", "trigger")
        for name in workers:
            fleet.start("worker", name)
        await fleet.ready("trigger", *workers)
        await fleet.lanes_settled(*workers)
        await fleet.owners_known()
        yield fleet


def traffic(seconds: float, rate: float, *, seed: int = 1, run: str = "t") -> list[WorkItem]:
    """Requests for so many seconds; revisits and growing histories included."""
    options = GeneratorOptions(
        seed=seed,
        rate=rate,
        users=40,
        items=5000,
        length=150.0,
        revisit=0.5,
        candidates=20,
        suffix=4,
        max_prefix=400,
        run=run,
    )
    items = []
    for item in Generator(options):
        if item.at > seconds:
            break
        items.append(item)
    return items


def hurried(items: Sequence[WorkItem], times: float) -> list[WorkItem]:
    """The same requests, so many times as fast."""
    return [dataclasses.replace(item, at=item.at / times) for item in items]


class Results:
    """Results by request id, one each."""

    def __init__(self) -> None:
        self.by_id: dict[str, Result] = {}

    def __call__(self, result: Result) -> None:
        request = result.item.request.request_id
        assert request not in self.by_id, f"two results for {request}"
        self.by_id[request] = result

    def errors(self) -> dict[str, str]:
        return {key: f"{r.error}: {r.detail}" for key, r in self.by_id.items() if r.error}


def check_relayed(fleet: Fleet, relayed: Results, full: Results) -> None:
    """No errors, the scores of full inference, and hits among what was admitted."""
    assert relayed.errors() == {}
    assert full.errors() == {}
    for request, result in relayed.by_id.items():
        truth = full.by_id[request].scores
        assert result.scores is not None
        assert truth is not None
        assert relative_deviation(result.scores, truth) <= 1e-5
    hits = [key for key, result in relayed.by_id.items() if key in fleet.admitted and result.outcome != "full"]
    assert hits, "no admitted request was served from a prefix hit"
