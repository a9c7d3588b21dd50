"""`relaygr planner --mode act` with real workers: one moves, and when the leading planner dies, another leads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from relaygr_lab.emulate.process import MODULE

from relaygr_stream.bus.assignments import read_assignments
from relaygr_stream.ops.children import Child, write_settings
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader
from tests.e2e.test_moves import scene_on
from tests.waiting import until

pytestmark = pytest.mark.stack


def verified(planner: Child) -> float:
    """Moves that this planner has verified."""
    found = (each for each in planner.samples() if each.name == "relaygr_planner_moves_total")
    return sum(each.value for each in found if each.labels == {"result": "verified"})


async def test_a_scenario_without_workers_gets_one_and_the_next_planner_goes_on(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    async with scene_on(embedded_settings, tmp_path) as scene:
        planned = tuple(each for each in scene.settings.scenarios if each.name in ("feed", "search"))
        config = write_settings(tmp_path / "plan.toml", msgspec.structs.replace(scene.settings, scenarios=planned))
        # It damps by seconds, not by minutes.
        arguments = ["planner", "--pace", "120", "--period", "1", "--config", config]
        planners = {name: Child(name, arguments, tmp_path, MODULE) for name in ("one", "two")}
        scene.children |= planners
        for name in ("a", "b"):
            scene.start(name, "feed")
        await asyncio.gather(*(child.wait_ready() for child in scene.children.values()))
        await until(lambda: sum(map(verified, planners.values())) == 1, "a worker has moved")
        serving = {name: status.scenario for name, status in scene.statuses.items() if status.state == "serving"}
        assert sorted(map(str, serving.values())) == ["feed", "search"]
        (moved,) = [name for name, scenario in serving.items() if scenario == "search"]

        (leader,) = [name for name, planner in planners.items() if verified(planner)]
        planners.pop(leader).kill()
        (other,) = planners.values()
        topics, reader = (
            load_topics(scene.settings.kafka),
            StatusReader.from_settings(scene.settings, load_topics(Kafka())),
        )

        async def it_leads() -> bool:
            found = await read_assignments(scene.settings.kafka, topics, reader)
            leads = found is not None and found.planner.endswith(f"-{other.pid}")
            return leads and found is not None and scene.serves(moved, "search", found.epoch)

        await until(it_leads, "the other planner leads, and the worker stays where it is")
        assert verified(other) == 0
