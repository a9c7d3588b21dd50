"""A worker serves another scenario without a new process: nothing is lost, and where it cannot, it goes back."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
from relaygr_lab.processes import servable

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.assignments import write_assignments
from relaygr_stream.bus.contents import read_all
from relaygr_stream.bus.embedded import EMBEDDED_SESSION_MS
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.client import RelayClient
from relaygr_stream.ops.children import Child, stop_all, write_settings
from relaygr_stream.ops.scenarios import make_groups
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.settings.schema import Client, Kafka, Settings
from relaygr_stream.settings.worker import Handover
from relaygr_stream.wire.assignments import Assignments
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader, worker_statuses
from tests.e2e.fleet import TEST_SETTINGS
from tests.waiting import until

SLO_MS = 60_000.0


class Ownerless:
    """Lanes that one worker no longer states, and another one not yet. longest_s: without an owner, by the statuses.

    pause_s: the longest time between two statuses of a worker, which is as late in a rebalance.
    """

    def __init__(self) -> None:
        self.longest_s = self.pause_s = 0.0
        self._owners: dict[tuple[str, int], str] = {}
        self._since_s: dict[tuple[str, int], float] = {}
        self._stated_s: dict[str, float] = {}

    def see(self, status: WorkerStatus) -> None:
        now, scenario = status.sent_ms / 1e3, status.scenario or ""
        self.pause_s = max(self.pause_s, now - self._stated_s.get(status.name, now))
        self._stated_s[status.name] = now
        stated = {(scenario, each.lane) for each in status.lanes}
        for lane in [each for each, owner in self._owners.items() if owner == status.name and each not in stated]:
            del self._owners[lane]
            self._since_s[lane] = now
        for lane in stated:
            self.longest_s = max(self.longest_s, now - self._since_s.pop(lane, now))
            self._owners[lane] = status.name


class Scene:
    """Two scenarios with models of their own, and perhaps a third whose model is not there."""

    def __init__(self, kafka: Kafka, folder: Path, *, broken: bool) -> None:
        base = msgspec.structs.replace(TEST_SETTINGS, kafka=kafka)
        smaller = msgspec.structs.replace(base, model=msgspec.structs.replace(base.model, layers=1))
        scenarios = (
            Scenario(name="broken", slo_ms=SLO_MS, model=str(folder / "nothing")),
            Scenario(name="feed", slo_ms=SLO_MS),
            Scenario(name="search", slo_ms=SLO_MS, model=servable(smaller, folder).model.checkpoint),
        )
        self.settings: Settings = msgspec.structs.replace(
            servable(base, folder),
            scenarios=scenarios if broken else scenarios[1:],
            handover=Handover(secret="a secret of this fleet"),
            client=Client(timeout_ms=60_000),
        )
        self.children: dict[str, Child] = {}
        self.statuses: dict[str, WorkerStatus] = {}  # the newest of each worker, of whatever group
        self.on_status: Callable[[WorkerStatus], None] = lambda _: None
        self.ownerless = Ownerless()
        self.answers: list[tuple[str, str, str, float]] = []  # scenario, worker, model version, seconds
        self._folder = folder
        self._epoch = now_ms()

    def start(self, name: str, scenario: str) -> None:
        config = write_settings(self._folder / "fleet.toml", self.settings)
        arguments = ["worker", "--config", config, "--scenario", scenario, "--set", f"worker.name={name}"]
        self.children[name] = Child(name, arguments, self._folder)

    async def assign(self, **workers: str) -> int:
        """Returns the epoch."""
        topics, self._epoch = load_topics(self.settings.kafka), max(self._epoch + 1, now_ms())
        assignments = Assignments(epoch=self._epoch, sent_ms=now_ms(), planner="test", workers=workers)
        async with Producer(self.settings.kafka, client_id="planner") as producer:
            await write_assignments(producer, topics, StatusReader.from_settings(self.settings, topics), assignments)
        return self._epoch

    async def own_statuses(self) -> dict[str, WorkerStatus]:
        """The newest of each worker on the fleet's own topic: of none but those that stand by."""
        topic, found = load_topics(self.settings.kafka).worker_status.name, dict[str, WorkerStatus]()
        for record in await read_all(self.settings.kafka, topic, [0]):
            found.pop((record.key or b"").decode(), None)
            found.update({status.name: status for status in worker_statuses([record])})
        return found

    def serves(self, name: str, scenario: str, epoch: int) -> bool:
        """Whether it states that it serves there, has lanes, and obeys the epoch."""
        status = self.statuses.get(name)
        stated = status is not None and (status.state, status.scenario, status.assigned) == ("serving", scenario, epoch)
        return bool(stated and status is not None and status.lanes)

    def on_statuses(self, records: list[Record]) -> None:
        for status in worker_statuses(records):
            self.statuses[status.name] = status
            self.ownerless.see(status)
            self.on_status(status)

    async def ask(self, relay: RelayClient, scenario: str, timeout_s: float | None = None) -> None:
        """One request after the other, each of which must be answered with scores. timeout_s: of one; None: the
        client's."""
        number = 0
        while True:
            number, began_s = number + 1, time.monotonic()
            history = Behaviours.from_arrays(list(range(1, 31)), [1] * 30, list(range(30)))
            async with relay.request(f"u{number % 20}", history, candidates=3, scenario=scenario) as request:
                ranking = await request.rank([1, 2, 3], timeout=timeout_s)
            self.answers.append((scenario, ranking.worker, ranking.model_version, time.monotonic() - began_s))
            await asyncio.sleep(0.05)  # the processor is for the workers that load


@asynccontextmanager
async def scene_on(kafka: Kafka, folder: Path, *, broken: bool = True) -> AsyncIterator[Scene]:
    scene = Scene(kafka, folder, broken=broken)
    await make_groups(scene.settings, lambda _: None)
    groups = [load_topics(scene.settings.serving(each.name).kafka) for each in scene.settings.scenarios]
    tails = [TopicTail(kafka, topics.worker_status.name, [0], "latest", scene.on_statuses) for topics in groups]
    try:
        for tail in tails:
            await tail.start()
        yield scene
    finally:
        await stop_all(list(scene.children.values()))
        for tail in tails:
            await tail.stop()
        print(*(child.log_tail() for child in scene.children.values()), sep="\n\n")  # what a failed test shows


@pytest.mark.stack
async def test_a_worker_moves_there_and_back_under_load_and_stays_where_the_other_model_cannot_be_loaded(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    async with scene_on(embedded_settings, tmp_path) as scene:
        first = await scene.assign(mover="search")
        for name, scenario in (("feeder", "feed"), ("mover", "feed"), ("searcher", "search")):
            scene.start(name, scenario)
        await asyncio.gather(*(child.wait_ready() for child in scene.children.values()))
        await until(lambda: scene.serves("mover", "search", first), "the assigned scenario from the start")
        mover, pid = scene.children["mover"], scene.statuses["mover"].pid

        async with RelayClient(settings=scene.settings) as relay, asyncio.TaskGroup() as group:
            load = [group.create_task(scene.ask(relay, scenario)) for scenario in ("feed", "search")]
            await until(lambda: ("search", "mover") in {answer[:2] for answer in scene.answers}, "its answers there")

            back = await scene.assign()  # where it is not named: what it was started for
            await until(lambda: scene.serves("mover", "feed", back), "back")
            await until(lambda: ("feed", "mover") in {answer[:2] for answer in scene.answers}, "its answers here")

            failing = await scene.assign(mover="broken")
            await until(lambda: given_up(scene, failing) and scene.serves("mover", "feed", back), "given up")
            assert "nothing" in given_up(scene, failing)
            await until(mover.ready, "ready again")

            again = await scene.assign(mover="search")
            await until(lambda: scene.serves("mover", "search", again), "there again")
            for each in load:
                each.cancel()
        build = next(each for each in mover.samples() if each.name == "relaygr_build_info")
        assert build.labels["scenario"] == "search"
        assert os.getpgid(mover.pid) and scene.statuses["mover"].pid == pid, "one process"
        versions = {(scenario, version) for scenario, _, version, _ in scene.answers}
        assert len(versions) == 2, "each scenario is scored by its own model alone"
        # A rebalance takes half a session here (bus/embedded.py), and a whole one more where a member leaves unsaid.
        lanes = scene.ownerless
        assert 0 < lanes.longest_s < EMBEDDED_SESSION_MS / 1e3 + lanes.pause_s, (lanes.longest_s, lanes.pause_s)


@pytest.mark.stack
async def test_a_worker_that_dies_at_a_step_of_its_move_serves_there_once_it_is_back_and_nothing_is_lost(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    """While it drains, once it has left, and once it serves there; it is started again as `relaygr up` does it."""
    async with scene_on(embedded_settings, tmp_path) as scene:
        for name, scenario in (("feeder", "feed"), ("mover", "feed"), ("searcher", "search")):
            scene.start(name, scenario)
        await asyncio.gather(*(child.wait_ready() for child in scene.children.values()))
        async with RelayClient(settings=scene.settings) as relay, asyncio.TaskGroup() as group:
            load = [group.create_task(scene.ask(relay, scenario)) for scenario in ("feed", "search")]
            for step in (("draining", "feed"), ("stopped", "feed"), ("serving", "search")):
                back = await scene.assign()
                await until(partial(scene.serves, "mover", "feed", back), "in its own scenario")
                died = asyncio.Event()

                def kill_at(status: WorkerStatus, step: tuple[str, str] = step, died: asyncio.Event = died) -> None:
                    if status.name == "mover" and (status.state, status.scenario) == step and not died.is_set():
                        scene.children["mover"].kill()
                        died.set()

                scene.on_status = kill_at
                there = await scene.assign(mover="search")
                await until(died.is_set, f"{step[0]} for {step[1]}")
                scene.start("mover", "feed")
                await until(partial(scene.serves, "mover", "search", there), "there")
            answered = len(scene.answers)
            await until(lambda: {each[0] for each in scene.answers[answered:]} == {"feed", "search"}, "answers of both")
            for each in load:
                each.cancel()


def given_up(scene: Scene, epoch: int) -> str:
    """Why the mover gave up this epoch; "": it has not."""
    found = scene.statuses["mover"].given_up
    return found.reason if found and found.epoch == epoch else ""
