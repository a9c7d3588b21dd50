"""A broker dies at each step of a worker's move between scenarios, under load: the worker arrives, every lane has an
owner, and no ranking is lost, though the broker alone had it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from relaygr_stream.client import RelayClient
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.routes import routes_topic
from relaygr_stream.wire.topic_files import load_topics
from tests.e2e.test_moves import Scene, scene_on
from tests.faults.cluster import ThreeBrokers
from tests.faults.scene import relay_on
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.kafka, pytest.mark.timeout(800)]

LANES = 4
#: Longer than a broker is missed before others lead what it led, and a client that sends nothing else learns that.
TIMEOUT_S = 20.0


async def test_a_broker_is_killed_at_each_step_of_a_move(cluster: ThreeBrokers, tmp_path: Path) -> None:
    """The one that coordinates the group which the worker leaves, that of the group which it joins, and the one that
    has the assignments."""
    kafka = msgspec.structs.replace(relay_on(cluster), partitions=LANES)
    async with scene_on(kafka, tmp_path, broken=False) as scene:
        groups = {name: scene.settings.serving(name).kafka for name in ("feed", "search")}
        for name, scenario in (("feeder", "feed"), ("mover", "feed"), ("searcher", "search")):
            scene.start(name, scenario)
        await asyncio.gather(*(child.wait_ready() for child in scene.children.values()))
        steps = (
            ("draining", "feed", "search", partial(cluster.coordinator, f"{groups['feed'].prefix}workers")),
            ("stopped", "search", "feed", partial(cluster.coordinator, f"{groups['feed'].prefix}workers")),
            ("serving", "feed", "search", partial(cluster.leader, routes_topic(load_topics(kafka)).name)),
        )
        longest_s: list[float] = []
        async with RelayClient(settings=scene.settings) as relay, asyncio.TaskGroup() as group:
            load = [group.create_task(scene.ask(relay, scenario, TIMEOUT_S)) for scenario in groups]
            await answers_of(scene, groups)
            for state, source, target, chosen in steps:
                begun, victim = len(scene.answers), await chosen()
                reached = at_step(scene, state, target if state == "serving" else source)
                epoch = await scene.assign(mover=target)
                await reached.wait()
                await cluster.brokers[victim].kill()
                await until(partial(scene.serves, "mover", target, epoch), f"{state}: it serves {target}")
                await answers_of(scene, groups)
                await cluster.heal()
                await until(partial(all_owned, scene, groups), "every lane has one owner")
                await answers_of(scene, groups)
                longest_s.append(max(each[3] for each in scene.answers[begun:]))
            for each in load:
                each.cancel()
        print("longest wait for scores while a broker died at a step, seconds:", *(f"{each:.1f}" for each in longest_s))
    for group_kafka in (*groups.values(), kafka):
        await cluster.forget(load_topics(group_kafka))


async def answers_of(scene: Scene, scenarios: Iterable[str]) -> None:
    """Until each of these was answered once more."""
    since = len(scene.answers)
    await until(lambda: {each[0] for each in scene.answers[since:]} == set(scenarios), "answers of both")


def all_owned(scene: Scene, scenarios: Iterable[str]) -> bool:
    """Whether the newest statuses state each lane once."""
    return all(sorted(owned(scene, each)) == list(range(LANES)) for each in scenarios)


def at_step(scene: Scene, state: str, scenario: str) -> asyncio.Event:
    """Set when the mover states this."""
    reached = asyncio.Event()

    def look(status: WorkerStatus) -> None:
        if status.name == "mover" and (status.state, status.scenario) == (state, scenario):
            reached.set()

    scene.on_status = look
    return reached


def owned(scene: Scene, scenario: str) -> list[int]:
    """The lanes that serving workers state."""
    serving = [each for each in scene.statuses.values() if (each.state, each.scenario) == ("serving", scenario)]
    return [lane.lane for each in serving for lane in each.lanes]
