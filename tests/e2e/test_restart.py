"""A worker that comes back finds its prefix KV again, in the file of its DRAM tier, but for users erased meanwhile."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from relaygr_stream.cache.tier_file import SlotState
from relaygr_stream.client import Ranking, RelayClient
from relaygr_stream.ops.children import Child
from relaygr_stream.ops.erase import erase_from_fleet
from relaygr_stream.settings.schema import Client, Kafka
from relaygr_stream.telemetry.process import EXIT_SETTINGS
from tests import needs
from tests.e2e.fleet import Fleet, traffic
from tests.faults.disk import HINT, drop_pages, failing_disk, permitted, read_only, small_disk
from tests.waiting import until

VALID = SlotState.VALID.to_bytes(8, "little")
PREFIX = traffic(seconds=9, rate=1)[0].request.prefix


async def exit_code(child: Child) -> int | None:
    """Its, once it has ended."""
    await until(lambda: child.exit_code is not None, f"{child.name} ended")
    return child.exit_code


def _may_mount() -> None:
    if not permitted():
        needs.without(HINT)


class Restarted(Fleet):
    """A trigger, and a worker whose DRAM tier is in a file, in this folder or another one."""

    def __init__(self, kafka: Kafka, folder: Path, disk: Path | None = None) -> None:
        super().__init__(kafka, folder)
        self.disk = disk or folder

    @property
    def file(self) -> Path:
        return self.disk / f"relaygr-{self.settings.kafka.prefix}+w1.dram"

    async def worker(self, name: str = "w1") -> None:
        self.start("worker", name, f"worker.dram_path={self.disk}", worker_name="w1")
        await self.ready(name)
        await self.lanes_settled("w1")

    def lanes(self, name: str) -> set[int]:
        """The lanes that the worker states."""
        return {status.lane for status in self.statuses[name].lanes}

    async def asked(self, user: str) -> str:
        """The outcome of a ranking of the user."""
        return (await self.ranked(user)).outcome

    async def ranked(self, user: str) -> Ranking:
        """A ranking of the user that was not announced. No hedges: a copy would leave an entry with another worker,
        too."""
        unhedged = msgspec.structs.replace(self.settings, client=Client(hedge_ms=0.0))
        async with RelayClient(settings=unhedged) as client:
            return await client.request(user, PREFIX, candidates=2).rank([1, 2], timeout=30)

    async def worker_with(self, user: str) -> None:
        """Start w1 and have this user's prefix KV written to its file."""
        await self.worker()
        await self.asked(user)
        await self.written(1)

    async def written(self, entries: int) -> None:
        await until(lambda: self.file.read_bytes().count(VALID) == entries, f"{entries} entries written down")


async def test_killed_it_serves_returning_users_from_dram_but_not_those_erased(
    kafka_settings: Kafka, tmp_path: Path
) -> None:
    ann, bob = "ann, who is erased", "bob, who is erased"  # longer than what prefix KV have by chance
    async with Restarted(kafka_settings, tmp_path) as fleet:
        await fleet.worker()
        assert [await fleet.asked(user) for user in (ann, bob, "eve")] == ["full"] * 3
        await fleet.written(3)
        done = await erase_from_fleet(fleet.settings, ann, "", 20.0)
        assert done.confirmed == ["w1"]
        assert ann.encode() not in fleet.file.read_bytes()
        fleet.children["w1"].kill()
        await erase_from_fleet(fleet.settings, bob, "", 0.0)  # the worker is away, the request gone from the topic
        await fleet.worker()
        assert bob.encode() not in fleet.file.read_bytes()
        log = fleet.children["w1"].log.read_text()
        assert '"found":1,"dropped":{"erased":1}' in log, log
        assert [await fleet.asked(user) for user in (ann, bob, "eve")] == ["full", "full", "dram"]


@pytest.mark.stack
async def test_a_worker_that_stops_in_order_writes_down_what_is_idle(embedded_settings: Kafka, tmp_path: Path) -> None:
    async with Restarted(embedded_settings, tmp_path) as fleet:
        await fleet.worker()
        await fleet.asked("eve")
        fleet.children["w1"].terminate()
        assert await fleet.children["w1"].wait() == 0
        await fleet.worker()
        assert await fleet.asked("eve") == "dram"


@pytest.mark.stack
async def test_a_file_that_is_shortened_while_it_serves_ends_the_worker_with_the_reason(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    async with Restarted(embedded_settings, tmp_path) as fleet:
        await fleet.worker_with("eve")
        ended = fleet.children.pop("w1")
        os.truncate(fleet.file, 0)
        assert await exit_code(ended) == 1
        assert "was shortened to 0 of its" in ended.log.read_text()
        await fleet.worker()
        assert await fleet.asked("eve") == "full"


@pytest.mark.stack
async def test_on_a_disk_that_loses_what_is_written_the_worker_ends_with_the_reason(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    _may_mount()
    with failing_disk(tmp_path / "disk", 128 << 20) as disk:
        async with Restarted(embedded_settings, tmp_path, tmp_path / "disk") as fleet:
            await fleet.worker()
            with fleet.file.open("rb") as file:
                os.fsync(file.fileno())  # what is written from now on Linux leaves in memory for half a minute
            before = (await fleet.ranked("eve")).scores
            await fleet.written(1)
            disk.refuse_writes()
            ended = fleet.children.pop("w1")
            asking = asyncio.create_task(fleet.ranked("bob"))  # whose copy is written down: the disk is asked then
            assert await exit_code(ended) == 1
            asking.cancel()
            await asyncio.wait([asking])
            assert "did not take what was written" in ended.log.read_text()
            disk.accept_writes()
            drop_pages(fleet.file)
            await fleet.worker()
            assert (await fleet.ranked("eve")).scores == pytest.approx(before, rel=1e-4)  # from the file, or in full


@pytest.mark.stack
async def test_a_folder_that_can_have_no_file_ends_the_start_with_one_line(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    _may_mount()
    for name in ("small", "read-only"):
        (tmp_path / name).mkdir()
    with small_disk(tmp_path / "small", 1 << 20), read_only(tmp_path / "read-only"):
        async with Fleet(embedded_settings, tmp_path) as fleet:
            for name, why in (
                ("absent", f"there is no folder {tmp_path / 'absent'}; make it"),
                ("small", "No space left on device; make room"),
                ("read-only", "Read-only file system; name a folder"),
            ):
                child = fleet.start("worker", name, f"worker.dram_path={tmp_path / name}")
                assert await exit_code(child) == EXIT_SETTINGS, name
                said = [line for line in child.log.read_text().splitlines() if "error" in line]
                assert len(said) == 1, said
                assert why in said[0]
                fleet.children.pop(name)


@pytest.mark.stack
async def test_the_later_of_two_workers_of_one_file_serves_from_memory(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    async with Restarted(embedded_settings, tmp_path) as fleet:
        await fleet.worker_with("eve")
        fleet.start("worker", "again", f"worker.dram_path={tmp_path}", worker_name="w1")
        first = fleet.children.pop("w1")
        assert await exit_code(first) == 3
        await fleet.ready("again")
        assert "another process has the DRAM tier's file" in fleet.children["again"].log.read_text()
        assert await fleet.asked("eve") == "full"


@pytest.mark.stack
async def test_killed_and_away_for_longer_than_its_session_it_serves_its_own_users_again(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    async with Restarted(embedded_settings, tmp_path) as fleet:
        await fleet.worker("w1")
        fleet.start("worker", "w2")
        await fleet.ready("w2")
        await fleet.lanes_settled("w1", "w2")
        users = [f"user-{number}" for number in range(12)]
        assert {await fleet.asked(user) for user in users} == {"full"}
        own = [user for user in users if fleet.topics.lane_of(user) in fleet.lanes("w1")]
        await fleet.written(len(own))
        fleet.children["w1"].kill()
        await fleet.lanes_settled("w2")
        del fleet.statuses["w1"]
        fleet.start("worker", "w1", f"worker.dram_path={tmp_path}")
        await fleet.ready("w1")
        await fleet.lanes_settled("w1", "w2")
        assert own
        assert {await fleet.asked(user) for user in own} == {"dram"}
