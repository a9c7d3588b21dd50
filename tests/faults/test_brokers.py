"""What the relay makes of brokers that die, hang, and come back: three of Apache Kafka, real processes, steady load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from relaygr_stream.client.sender import SILENT_S
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.ops.children import Child
from tests.faults.cluster import Node, ThreeBrokers, relay_topics
from tests.faults.growth import grows_through_kills
from tests.faults.load import TIMEOUT_S
from tests.faults.proxy import links
from tests.faults.scene import LANES, Scene, relay_on, scene

pytestmark = [pytest.mark.faults, pytest.mark.kafka, pytest.mark.timeout(800)]

#: A process may take this much more while the brokers are away: buffers of aiokafka, and what was under way.
GROWTH_BYTES = 64 << 20
DEAD_S = 8.0


def nobody_restarted(stage: Scene) -> None:
    ended = {name: child.exit_code for name, child in stage.fleet.children.items() if child.exit_code is not None}
    assert not ended, f"ended: {ended}"


@pytest.mark.parametrize("copies", [1, 3])
async def test_a_lanes_leader_is_killed(cluster: ThreeBrokers, tmp_path: Path, copies: int) -> None:
    """One copy of what lives for milliseconds: its lanes stand still until the broker is back, and hedges serve their
    users. Three copies: every lane stands still until the dead broker is fenced."""
    kafka = relay_on(cluster, relay_topics(tmp_path / "topics") if copies == 1 else None)
    async with scene(cluster, kafka, tmp_path, "w1", "w2", "w3") as stage:
        victim = await cluster.leader(stage.fleet.topics.ranking.name, 0)
        stage.begins()
        await cluster.brokers[victim].kill()
        await asyncio.sleep(DEAD_S)
        stage.ends()
        await cluster.heal()
        await stage.calm()
        await stage.owned("w1", "w2", "w3")
        nobody_restarted(stage)
        cost = await stage.cost(f"leader of lanes killed, {copies} of each ranking")
        # With three, all lanes wait for the fencing, which takes as long as the requests' timeout.
        assert cost.served if copies == 1 else cost.recovered(3.0), cost


async def test_the_coordinator_is_killed_then_lanes_grow_through_kills(cluster: ThreeBrokers, tmp_path: Path) -> None:
    kafka = relay_on(cluster, relay_topics(tmp_path / "topics"))
    async with scene(cluster, kafka, tmp_path, "w1", "w2", "w3") as stage:
        victim = await cluster.coordinator(f"{kafka.prefix}workers")
        stage.begins()
        await cluster.brokers[victim].kill()
        await asyncio.sleep(DEAD_S)
        stage.ends()
        # With another coordinator the group works on: one joins now, and gets lanes; those that the dead broker leads
        # have nowhere to be read from until it is back.
        stage.fleet.start("worker", "w4")
        await stage.fleet.ready("w4")
        await cluster.heal()
        await stage.owned("w1", "w2", "w3", "w4")
        await stage.calm()
        nobody_restarted(stage)
        cost = await stage.cost("group coordinator killed")
        assert cost.served, cost

        await stage.another()
        await grows_through_kills(cluster, stage, tmp_path, 2 * LANES, "w2")
        await stage.calm()
        cost = await stage.cost("lanes grow while the command, a worker and a broker are killed")
        assert cost.recovered(10.6), cost


async def test_brokers_are_restarted_one_by_one(cluster: ThreeBrokers, tmp_path: Path) -> None:
    """As an upgrade does it; every topic has three copies."""
    async with scene(cluster, relay_on(cluster), tmp_path, "w1", "w2") as stage:
        stage.begins()
        for broker in cluster.brokers.values():
            await broker.terminate()
            await cluster.heal()
        stage.ends()
        await stage.calm()
        nobody_restarted(stage)
        cost = await stage.cost("rolling restart of all brokers")
        assert cost.served, cost


async def test_all_brokers_are_away(cluster: ThreeBrokers, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    away_s: float = request.config.getoption("--away-seconds")
    async with scene(cluster, relay_on(cluster), tmp_path, "w1", "w2") as stage:
        await away(cluster, stage, Node.pause, "paused", away_s)
        await stage.another()
        await away(cluster, stage, Node.kill, "killed", away_s)


async def away(
    cluster: ThreeBrokers, stage: Scene, how: Callable[[Node], Coroutine[Any, Any, None]], named: str, away_s: float
) -> None:
    """All brokers, for so long: who asks fails at once; processes keep their memory, live, and recover."""
    children = stage.fleet.children.values()
    before = {child.name: psutil.Process(child.pid).memory_info().rss for child in children}
    stage.begins()
    await asyncio.gather(*map(how, cluster.brokers.values()))
    gone_s = asyncio.get_running_loop().time()
    await stage.until_ready(False, away_s)
    await asyncio.sleep(max(0.0, away_s - stage.since_fault()))
    # Asked again, because one that has no core for a moment does not answer.
    healthy = [all(await stage.asked(Child.healthy)) for _ in range(3)]
    assert any(healthy), "liveness must not fail for the brokers' sake"
    after = {child.name: psutil.Process(child.pid).memory_info().rss for child in children}
    assert all(after[name] - before[name] < GROWTH_BYTES for name in before), (before, after)
    await cluster.heal()
    stage.ends()
    await stage.calm()
    await stage.until_ready(True)
    await stage.owned("w1", "w2")
    nobody_restarted(stage)
    cost = await stage.cost(f"all brokers {named} for {away_s:g} s")
    assert cost.recovered(away_s + (6.9 if how is Node.kill else 1.6)), cost
    # One in a while is let through to find out whether the brokers are back; the others fail at once.
    silent_s, back_s = gone_s + TIMEOUT_S + SILENT_S, stage.fault_s + away_s
    meanwhile = [note for note in stage.load.notes if silent_s < note.sent and note.ended < back_s]
    assert all(note.result.error for note in meanwhile)
    # Two seconds for this process to come to it; without a deadline it would be kafka.request_timeout_ms, 10 s.
    assert all(note.took_s <= TIMEOUT_S + 2.0 for note in meanwhile), "a request outlived its deadline"
    at_once = [note for note in meanwhile if note.result.error == BrokerUnavailable.__name__]
    assert len(at_once) > 0.8 * len(meanwhile), "not failed fast"


async def test_a_workers_network(cluster: ThreeBrokers, tmp_path: Path) -> None:
    """One worker's connections to all brokers stand still, break, or take 100 ms longer in each direction."""
    kafka = relay_on(cluster)
    async with links(cluster.links) as opened, scene(cluster, kafka, tmp_path, "w1", "w2") as stage:
        through = cluster.kafka_settings(kafka, linked=True).bootstrap
        stage.fleet.start("worker", "w3", f"kafka.bootstrap={through}")
        await stage.fleet.ready("w3")
        await stage.fleet.lanes_settled("w1", "w2", "w3")
        await stage.load.answered(60)
        for fault in ("stalled", "cut", "slow"):
            if fault != "stalled":
                await stage.another()
            stage.begins()
            for link in opened.values():
                if fault == "slow":
                    link.delay_s = 0.1
                else:
                    link.stall() if fault == "stalled" else link.cut()
            owned_s = None if fault == "slow" else await stage.owned("w1", "w2")
            await asyncio.sleep(DEAD_S if fault == "slow" else 1.0)
            stage.ends()
            for link in opened.values():
                link.mend()
            await stage.owned("w1", "w2", "w3")
            await stage.calm()
            nobody_restarted(stage)
            cost = await stage.cost(f"a worker's connections {fault}", owned_s)
            assert cost.served, cost
