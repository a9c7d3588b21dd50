"""A worker of the reserve: it stands by without lanes and without a model, and a planner takes it before another's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from relaygr_lab.emulate.process import MODULE

from relaygr_stream.client import RelayClient
from relaygr_stream.ops.children import Child, write_settings
from relaygr_stream.settings.scenarios import RESERVE
from relaygr_stream.settings.schema import Kafka
from tests.e2e.test_moves import scene_on
from tests.e2e.test_planner_acts import verified
from tests.waiting import until

pytestmark = pytest.mark.stack


async def test_a_scenario_that_lacks_a_worker_gets_that_of_the_reserve(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    async with scene_on(embedded_settings, tmp_path) as scene:
        planned = tuple(each for each in scene.settings.scenarios if each.name in ("feed", "search"))
        config = write_settings(tmp_path / "plan.toml", msgspec.structs.replace(scene.settings, scenarios=planned))
        for name in ("a", "b"):
            scene.start(name, "feed")
        spare = ["worker", "--config", config, "--reserve", "--set", "worker.name=spare"]
        scene.children["spare"] = Child("spare", spare, tmp_path)
        await asyncio.gather(*(child.wait_ready() for child in scene.children.values()))
        status = (await scene.own_statuses())["spare"]
        assert (status.scenario, status.state, status.lanes, status.model_version) == (RESERVE, "starting", (), "")
        arguments = ["planner", "--pace", "120", "--period", "1", "--config", config]  # it damps by seconds
        planner = scene.children["planner"] = Child("planner", arguments, tmp_path, MODULE)
        await until(lambda: planner.ready() and verified(planner) == 1, "the worker has moved")
        serving = {name: status.scenario for name, status in scene.statuses.items() if status.state == "serving"}
        assert serving == {"a": "feed", "b": "feed", "spare": "search"}
        assert "spare" not in await scene.own_statuses()
        async with RelayClient(settings=scene.settings) as relay, asyncio.TaskGroup() as group:
            asking = group.create_task(scene.ask(relay, "search"))
            await until(lambda: ("search", "spare") in {answer[:2] for answer in scene.answers}, "its answers")
            asking.cancel()
        planner.kill()
        back = await scene.assign(spare=RESERVE)

        async def stands_by() -> bool:
            status = (await scene.own_statuses()).get("spare")
            return status is not None and status.assigned == back

        await until(stands_by, "it is back")
        assert scene.children["spare"].ready()
