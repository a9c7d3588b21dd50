"""What the relay makes of workers that leave, crash, hang, come in numbers, or have another model or clock."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment
from prometheus_client.samples import Sample

from relaygr_stream.bus.aiokafka_compat import client_options
from relaygr_stream.client import exchange, messages
from relaygr_stream.models.loading import save_random
from relaygr_stream.ops.children import Child
from tests.e2e.fleet import Fleet
from tests.faults.cluster import ThreeBrokers, relay_topics
from tests.faults.load import Note
from tests.faults.scene import Scene, relay_on, scene
from tests.faults.truth import Truth
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.kafka, pytest.mark.timeout(800)]


async def test_a_worker_is_stopped_and_continued_then_others_get_sigkill_and_sigterm(
    cluster: ThreeBrokers, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    stopped_s: float = request.config.getoption("--stopped-seconds")
    async with scene(cluster, relay_on(cluster), tmp_path, "w1", "w2", "w3") as stage:
        worker = stage.fleet.children["w1"]
        stage.begins()
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            owned_s = await stage.owned("w2", "w3")
            await asyncio.sleep(max(0.0, stopped_s - stage.since_fault()))
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        stage.ends()
        await stage.owned("w1", "w2", "w3")  # it comes back by itself
        await stage.calm()
        assert worker.exit_code is None, worker.log_tail()
        cost = await stage.cost(f"worker stopped for {stopped_s:g} s, then continued", owned_s)
        assert cost.served, cost

        await stage.another()
        stage.begins()
        await asyncio.to_thread(stage.fleet.children.pop("w2").kill)
        owned_s = await stage.owned("w1", "w3")
        stage.ends()
        await stage.calm()
        cost = await stage.cost("worker SIGKILL", owned_s)
        assert cost.served, cost

        stage.fleet.start("worker", "w4")
        await stage.owned("w1", "w3", "w4")
        await stage.another()
        stage.begins()
        worker.terminate()
        owned_s = await stage.owned("w3", "w4")
        stage.ends()
        assert await stage.fleet.children.pop("w1").wait() == 0
        await stage.calm()
        cost = await stage.cost("worker SIGTERM", owned_s)
        assert cost.served, cost


async def test_joins_and_leaves(cluster: ThreeBrokers, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Spread over half a minute; of the kept lanes nobody notices, and few lanes move: an equal part, or all of a
    worker that leaves, which has more where it is faster."""
    times: int = request.config.getoption("--churn")
    async with scene(cluster, relay_on(cluster), tmp_path, "w1", "w2") as stage:
        watch = asyncio.create_task(_co_owned(stage.fleet))
        owners = _owners(stage)
        members, next_name = ["w1", "w2"], 3
        stage.begins()
        for turn in range(times):
            began = time.monotonic()
            if turn % 2:
                gone = members.pop(0)
                stage.fleet.children[gone].terminate()
                assert await stage.fleet.children.pop(gone).wait() == 0
                part = math.ceil(stage.fleet.topics.lanes / (len(members) + 1))
                most = max(part, list(owners.values()).count(gone))
            else:
                members.append(f"w{next_name}")
                next_name += 1
                stage.fleet.start("worker", members[-1])
                await stage.fleet.ready(members[-1])
                most = math.ceil(stage.fleet.topics.lanes / len(members))
            await stage.owned(*members)
            now = _owners(stage)
            moved = [lane for lane in now if now[lane] != owners[lane]]
            assert len(moved) <= most, f"{len(moved)} lanes moved, {owners} → {now}"
            owners = now
            await asyncio.sleep(max(0.0, 30 / times - (time.monotonic() - began)))
        stage.ends()
        minutes = stage.since_fault() / 60
        assert not watch.done(), watch.exception()
        watch.cancel()
        await stage.calm()
        cost = await stage.cost(f"{times} joins and leaves")
        print(f"{times} joins and leaves in {minutes:.1f} minutes")
        assert cost.served, cost


async def test_the_model_is_swapped(cluster: ThreeBrokers, tmp_path: Path) -> None:
    """Workers of a new model join, those of the old one leave: every answer is one model's, whole."""
    async with scene(cluster, relay_on(cluster), tmp_path, "w1", "w2", one_model=False) as stage:
        model = stage.fleet.settings.model
        old = Truth(stage.fleet.settings)
        other = save_random(msgspec.structs.replace(model, seed=8), tmp_path / "seed-8")
        stage.begins()
        for name in ("n1", "n2"):
            stage.fleet.start("worker", name, f"model.checkpoint={other.checkpoint}")
        await stage.fleet.ready("n1", "n2")
        await stage.owned("w1", "w2", "n1", "n2")
        await stage.load.answered(40)
        for name in ("w1", "w2"):
            stage.fleet.children[name].terminate()
        await stage.owned("n1", "n2")
        stage.ends()
        await stage.calm()
        cost = await stage.cost("model swapped under load")
        assert cost.served, cost
        new = Truth(msgspec.structs.replace(stage.fleet.settings, model=msgspec.structs.replace(model, seed=8)))
        answered = [note for note in stage.load.notes if note.scored]
        assert {_version(note) for note in answered} == {old.version, new.version}
        for note in answered:
            request, scores = note.result.item.request, note.result.scores
            assert scores is not None
            deviation = (new if _version(note) == new.version else old).deviation(request, scores)
            assert deviation <= 1e-5, f"{request.request_id} by {_version(note)}: {deviation}"
        for name in ("w1", "w2"):
            assert await stage.fleet.children.pop(name).wait() == 0


async def test_a_clients_clock_is_off(cluster: ThreeBrokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two workers: with one, an answer that is late on a crowded machine has no hedge.
    async with scene(cluster, relay_on(cluster), tmp_path, "w1", "w2") as stage:
        await _clock_off(stage, -300, monkeypatch)
        await stage.another()
        await _clock_off(stage, 300, monkeypatch)


async def _clock_off(stage: Scene, skew_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead or behind, the order of the log contradicts what the client states."""
    before = await _clamped(stage)
    stage.begins()
    with monkeypatch.context() as patch:
        for module in (messages, exchange):
            patch.setattr(module, "now_ms", lambda: int((time.time() + skew_s) * 1000))

        async def noticed() -> bool:
            now = await _clamped(stage)
            return now["workers"] >= before["workers"] + 50 and now["trigger"] >= before["trigger"] + 50

        await until(noticed, "fifty stated times taken for wrong by workers and trigger each")
        await stage.load.answered(100)
    stage.ends()
    cost = await stage.cost(f"a client's clock off by {skew_s:+d} s")
    assert cost.served, cost


async def test_while_dead_letters_cannot_be_sent_their_lane_waits(cluster: ThreeBrokers, tmp_path: Path) -> None:
    """Its broker dies with the only copy of the topic: the bad record's lane commits nothing beyond it, requests go on,
    and the letter is there once the broker is."""
    everything_but = ["retrieval", "pre-infer", "ranking", "scores", "worker-status"]
    kafka = relay_on(cluster, relay_topics(tmp_path / "topics", everything_but))
    async with scene(cluster, kafka, tmp_path, "w1", "w2") as stage:
        topics = stage.fleet.topics
        stage.begins()
        await cluster.brokers[await cluster.leader(topics.dead_letter.name)].kill()
        await stage.calm()
        await stage.witness.send_bad(topics.ranking.name, b"\xc1", "invalid", key=b"u", headers=[])  # nowhere to answer
        ((_, lane, offset),) = stage.witness.ledger.bad
        stage.ends()
        await stage.load.answered(100)
        assert (await _committed(stage, lane) or 0) <= offset, "passed over"
        await cluster.heal()  # that the letter is there in the end, and the lane committed to its end, the ledger says
        await stage.calm()
        cost = await stage.cost("dead-letter topic unavailable")
        assert cost.recovered(3.2), cost


async def _co_owned(fleet: Fleet) -> None:
    """Fail if a member of the workers' group owns a lane of one topic and not of the other."""
    kafka = fleet.settings.kafka
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    await admin.start()
    try:
        while True:
            answer = await admin.describe_consumer_groups([f"{kafka.prefix}workers"])
            for member in answer[0].groups[0][5]:
                assignment = ConsumerProtocolMemberAssignment.decode(member[4]) if member[4] else None
                lanes = {topic: sorted(partitions) for topic, partitions in assignment.assignment} if assignment else {}
                pre_infer, ranking = fleet.topics.pre_infer.name, fleet.topics.ranking.name
                assert lanes.get(pre_infer) == lanes.get(ranking), f"lanes not co-owned: {lanes}"
            await asyncio.sleep(0.2)
    finally:
        await admin.close()


def _owners(stage: Scene) -> dict[int, str]:
    return {
        lane.lane: status.name
        for status in stage.fleet.statuses.values()
        if status.state == "serving" and status.name in stage.fleet.children
        for lane in status.lanes
    }


async def _clamped(stage: Scene) -> dict[str, float]:
    """Times that workers and trigger took a stated time for wrong, so far."""
    fleet = stage.fleet.children
    of_workers = [await _sample(fleet[name], "relaygr_clock_clamped_total") for name in ("w1", "w2")]
    return {
        "workers": sum(of_workers),
        "trigger": await _sample(fleet["trigger"], "relaygr_trigger_ages_clamped_total"),
    }


async def _sample(child: Child, name: str) -> float:
    """A process's metric; asked again where it has no core to answer with."""
    stated: list[Sample] = []
    while not stated:  # a question takes up to PROBE_TIMEOUT_S
        stated = await asyncio.to_thread(child.samples)
    return sum(one.value for one in stated if one.name == name)


def _version(note: Note) -> str:
    assert note.result.ranking is not None
    return note.result.ranking.model_version


async def _committed(stage: Scene, lane: int) -> int | None:
    kafka = stage.fleet.settings.kafka
    consumer = AIOKafkaConsumer(
        **client_options(kafka, "looker"), group_id=f"{kafka.prefix}workers", enable_auto_commit=False
    )
    await consumer.start()
    try:
        found = await consumer.committed(TopicPartition(stage.fleet.topics.ranking.name, lane))
    finally:
        await consumer.stop()
    return None if found is None else int(found)
