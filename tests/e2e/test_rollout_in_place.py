"""`relaygr rollout --in-place` with real processes and traffic: the workers that run serve the new model, one after the
other, and go back where it is worse."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relaygr_stream.bus.assignments import read_assignments
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.assignments import Assignments
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.routes import POSITIONS, group_settings
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader, worker_statuses
from tests.e2e.fleet import Fleet, serving_fleet
from tests.e2e.test_rollout import Command, changed_model, rollout, share, traffic
from tests.waiting import until

pytestmark = pytest.mark.stack
QUICK = ("--canary", "40%", "--steps", "100")
#: With three, users have a share of them that is on its way, and a killed one is waited for.
COUNTS = pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.long)])


class Next:
    """The workers of group next, by their newest statuses."""

    def __init__(self) -> None:
        self.statuses: dict[str, WorkerStatus] = {}

    def on_records(self, records: list[Record]) -> None:
        self.statuses.update({status.name: status for status in worker_statuses(records)})

    def serving(self) -> set[str]:
        return {name for name, status in self.statuses.items() if status.state == "serving" and status.lanes}


@asynccontextmanager
async def following(fleet: Fleet) -> AsyncIterator[Next]:
    group, found = group_settings(fleet.settings, "next", fleet.topics.lanes), Next()
    await apply_topics(group.kafka)
    async with TopicTail(group.kafka, load_topics(group.kafka).worker_status.name, [0], "latest", found.on_records):
        yield found


async def assigned(fleet: Fleet) -> Assignments:
    found = await read_assignments(fleet.settings.kafka, fleet.topics, StatusReader())
    assert found is not None
    return found


async def moving(command: Command) -> str:
    """The worker that is the first to move."""
    await command.said("moves to group next (1 of ")
    found = re.search(r"worker (\w+) moves to group next", command.text)
    assert found is not None, command.text
    return found[1]


def without_weights(checkpoint: str) -> str:
    next(Path(checkpoint).glob("*.safetensors")).unlink()
    return checkpoint


@COUNTS
async def test_the_workers_serve_the_new_model_one_after_the_other_and_after_a_restart(
    embedded_settings: Kafka, tmp_path: Path, count: int
) -> None:
    """Also one that is killed on its way, and one that has not moved, and started again as `relaygr up` does it. Nobody
    gets an error, or is served by the former model again."""
    workers = [f"w{number}" for number in range(count)]
    async with (
        serving_fleet(embedded_settings, tmp_path, *workers) as fleet,
        traffic(fleet) as asked,
        following(fleet) as there,
    ):
        good = changed_model(tmp_path, "good", 1.0001)
        version = fleet.statuses["w0"].model_version
        async with rollout(fleet, tmp_path, "--checkpoint", good, "--in-place", *QUICK, "--hold", "1s") as command:
            first = await moving(command)
            await until(lambda: fleet.statuses[first].state != "serving", "it leaves")
            fleet.children[first].kill()
            fleet.start("worker", first)
            await command.said("group next serves")
            assert there.serving() == {first}
            asked.hurry()
            await command.said("step 1 of 2")
            assert await share(fleet) == 4000
            asked.versions.clear()
            await until(lambda: len(asked.versions) == 2, "both versions answer")
            if count > 2:
                other = next(name for name in workers if name != first)
                fleet.children[other].kill()
                await command.said("waits for another worker that serves group default")
                fleet.start("worker", other)
                await command.said("moves to group next (2 of 3)")
                assert await share(fleet) == POSITIONS // 2
            await command.said("done: all users")
            assert await command.process.wait() == 0
        assert asked.most_changes() == 1
        assert await share(fleet) == POSITIONS
        assert there.serving() == set(workers)
        assert "no trigger has come" not in command.text
        found = await assigned(fleet)
        assert (found.workers, found.home, found.checkpoints) == ({}, "next", {"next": good})
        asked.versions.clear()
        await asked.more(100)
        assert version not in asked.versions
        last = there.statuses["w1"].incarnation
        fleet.children["w1"].kill()
        fleet.start("worker", "w1")
        await until(lambda: there.statuses["w1"].incarnation != last and "w1" in there.serving(), "in its new group")
        await asked.more(50)
        assert version not in asked.versions
        async with rollout(fleet, tmp_path, "--in-place", *QUICK, "--hold", "1s") as command:  # their own model again
            await command.said("done: all users")
            assert await command.process.wait() == 0
        await fleet.lanes_settled(*workers)
        found = await assigned(fleet)
        assert (found.workers, found.home, found.checkpoints) == ({}, "", {})
        asked.versions.clear()
        await asked.more(100)
        assert set(asked.versions) == {version}
        assert asked.errors == {}


@COUNTS
async def test_a_bad_model_goes_back_and_the_workers_serve_the_former_one(
    embedded_settings: Kafka, tmp_path: Path, count: int
) -> None:
    """One that cannot be loaded, too; then one that a command leaves half way, which is taken back by hand."""
    workers = [f"w{number}" for number in range(count)]
    async with serving_fleet(embedded_settings, tmp_path, *workers) as fleet, traffic(fleet) as asked, following(fleet):
        version = fleet.statuses["w0"].model_version
        empty = without_weights(changed_model(tmp_path, "empty", 1.0))
        scale = changed_model(tmp_path, "scale", 30.0)
        for checkpoint, why in ((empty, "gave up its move"), (scale, "another distribution")):
            arguments = ("--checkpoint", checkpoint, "--in-place", *QUICK, "--hold", "1h", "--cold")
            async with rollout(fleet, tmp_path, *arguments) as command:
                await moving(command)
                asked.hurry()
                assert await command.process.wait() == 1
            assert why in command.text
            await fleet.lanes_settled(*workers)
            assert (await assigned(fleet)).workers == {}
            asked.calm()
        good = changed_model(tmp_path, "good", 1.0001)
        most = ("--canary", f"{100 * (count - 1) // count}%", "--steps", "100")
        half = ("--checkpoint", good, "--in-place", *most, "--hold", "1h", "--cold", "--unlike")
        async with rollout(fleet, tmp_path, *half) as killed:
            await killed.said("step 1 of 2")
            assert f"({count - 1} of {count})" in killed.text
            killed.process.send_signal(signal.SIGKILL)
            await killed.process.wait()
        async with rollout(fleet, tmp_path, "--back") as back:
            assert await back.process.wait() == 0
        assert await share(fleet) == 0
        await fleet.lanes_settled(*workers)
        asked.versions.clear()
        await asked.more(100)
        assert set(asked.versions) == {version}
        assert asked.errors == {}
