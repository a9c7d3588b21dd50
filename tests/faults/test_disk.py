"""What the relay makes of brokers whose disks are full: three of Apache Kafka, their logs on small filesystems."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests import needs
from tests.faults.cluster import BROKERS, ThreeBrokers, relay_topics
from tests.faults.disk import HINT, SmallDisk, permitted, small_disk
from tests.faults.scene import Scene, relay_on, scene
from tests.waiting import until

pytestmark = pytest.mark.faults

#: A test writes some 20 MB of logs; their indexes are holes.
DISK_BYTES = 128 << 20
#: Kafka stops at the first write that fails; the next comes with the next request, or from the controller.
STOPS_S = 60.0
#: Of the requests while one of three brokers is away, so many get scores, the others end typed.
SERVED = 0.99
FULL_S = 8.0


@pytest.fixture(autouse=True)
def _may_mount() -> None:
    if not permitted():
        needs.without(HINT)


def test_a_small_disk_fills_and_keeps(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "before").write_text("before")
    with small_disk(folder, 1 << 20) as disk:
        assert (folder / "before").read_text() == "before"
        disk.fill()
        with pytest.raises(OSError, match="No space left"):
            (folder / "more").write_text("more")
        disk.free()
        (folder / "after").write_text("after")
    assert not os.path.ismount(folder)
    assert {file.name: file.read_text() for file in folder.iterdir() if file.stat().st_size} == {
        "before": "before",
        "after": "after",
    }


@asynccontextmanager
async def on_small_disks(cluster: ThreeBrokers, *brokers: int) -> AsyncIterator[list[SmallDisk]]:
    """These brokers' logs on disks of their own; every copy is in sync, and stays whatever was written."""
    async with AsyncExitStack() as stack:
        disks = []
        for number in brokers:
            broker = cluster.brokers[number]
            await broker.terminate()
            disks.append(stack.enter_context(small_disk(broker.data, DISK_BYTES)))
            stack.push_async_callback(broker.kill)
        await cluster.heal()
        yield disks


async def filled(cluster: ThreeBrokers, stage: Scene, disks: list[SmallDisk], *brokers: int) -> None:
    """Full for FULL_S after the last of these brokers has stopped; then there is room, and they are started again."""
    stage.begins()
    for number, disk in zip(brokers, disks, strict=True):
        cluster.brokers[number].goes()
        await asyncio.to_thread(disk.fill)  # the load is sent from here
    await until(lambda: not any(cluster.brokers[n].running for n in brokers), f"brokers {brokers} stopped", STOPS_S)
    print(f"\nstopped after {stage.since_fault():.1f} s")
    await asyncio.sleep(FULL_S)
    stage.ends()
    for disk in disks:
        await asyncio.to_thread(disk.free)
    await cluster.heal()
    await stage.calm()
    await stage.owned("w1", "w2", "w3")
    assert all(child.exit_code is None for child in stage.fleet.children.values()), "nobody had to be restarted"


@pytest.mark.kafka
@pytest.mark.timeout(800)
async def test_a_brokers_disk_is_full_then_all_are(cluster: ThreeBrokers, tmp_path: Path) -> None:
    """One stops, and the others go on: one copy of what lives for milliseconds, as the topic files say. Then all stop,
    and every request ends typed until there is room again."""
    async with on_small_disks(cluster, *BROKERS) as disks:
        kafka = relay_on(cluster, relay_topics(tmp_path / "topics"))
        async with scene(cluster, kafka, tmp_path, "w1", "w2", "w3") as stage:
            await filled(cluster, stage, disks[:1], *BROKERS[:1])
            cost = await stage.cost("a broker's disk full")
            assert cost.scored >= SERVED * cost.sent, cost

            await stage.another()
            await filled(cluster, stage, disks, *BROKERS)
            cost = await stage.cost("all brokers' disks full")
            assert cost.recovered(17.3), cost
            full = [note for note in stage.load.notes if stage.over_s - FULL_S + 1 < note.sent < stage.over_s - 1]
            assert full and all(note.result.error for note in full)
