"""How a worker process ends, on a real broker: every accepted request is answered, and nothing waits without bound."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relaygr_stream.bus.ages import LogEnds
from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import DeviceError
from relaygr_stream.models.loading import save_checkpoint
from relaygr_stream.models.map_items import map_items
from relaygr_stream.models.mapped import shard_name
from relaygr_stream.ops.brokers.local import local_broker
from relaygr_stream.ops.children import START_TIMEOUT_S, Child, write_settings
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.settings.worker import Handover
from relaygr_stream.telemetry.listener import Listener
from relaygr_stream.telemetry.process import START_END_S
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader, Tombstone
from relaygr_stream.worker.intake import Intake
from relaygr_stream.worker.process import CLOSE_S
from relaygr_stream.worker.requests import Requests
from relaygr_stream.worker.statement import Statements
from relaygr_stream.worker.status import ANNOUNCE_S
from relaygr_stream.worker.watch import WATCH_S
from tests.unit.models.small_models import small_model
from tests.unit.worker.services import Peer, committed, worker_on, worker_settings
from tests.waiting import WITHIN_S, until


async def test_a_device_that_always_fails_ends_the_worker_with_answers(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        flush = Requests.flush

        async def slowly(requests: Requests, timeout_s: float) -> None:
            await flush(requests, timeout_s)
            await asyncio.sleep(2 * WATCH_S)  # what watches it looks again, and must not find it ready

        monkeypatch.setattr(Requests, "flush", slowly)
        w.model.fail_prefill = 10**6
        correlations = [await peer.rank(f"r{number}", f"u{number}", 60) for number in range(8)]
        with pytest.raises(DeviceError, match="8 times in a row, at last with RuntimeError: the device is on fire"):
            await asyncio.wait_for(w.task, WITHIN_S)
        assert {(await peer.reply(each)).status for each in correlations} == {"failed"}
        assert not w.ready
        w.model.fail_prefill = 0


async def test_a_mapped_item_table_that_is_shortened_ends_the_worker_with_answers(
    embedded_settings: Kafka, tmp_path: Path
) -> None:
    save_checkpoint(small_model(), tmp_path / "plain")
    map_items(tmp_path / "plain", tmp_path / "mapped", "float32", 1 << 20)
    settings = worker_settings(embedded_settings)
    model = msgspec.structs.replace(settings.model, factory="", checkpoint=str(tmp_path / "mapped"))
    settings = msgspec.structs.replace(settings, model=model)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        assert (await peer.reply(await peer.rank("r", "u", 60))).status == "ok"
        os.truncate(tmp_path / "mapped" / shard_name(0, 1), 4096)
        for number in range(8):  # one after another: those of a batch are one failure
            assert (await peer.reply(await peer.rank(f"r{number}", "u", 60))).status == "failed"
        with pytest.raises(DeviceError, match="was changed while it is mapped: 4096 bytes"):
            await asyncio.wait_for(w.task, WITHIN_S)


async def test_a_device_that_hangs_ends_the_worker_with_answers(embedded_settings: Kafka) -> None:
    settings = worker_settings(msgspec.structs.replace(embedded_settings, max_poll_interval_ms=1500), drain_ms=500)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        model = w.model
        model.hang = True
        await asyncio.gather(*(peer.rank(f"r{number}", f"u{number}", 60) for number in range(3)))
        with pytest.raises(DeviceError, match="the device hangs"):
            await asyncio.wait_for(w.task, WITHIN_S)
        read = w.total("rankings_read")  # a stuck worker leaves later ones to the lanes' next owners
        assert read
        await until(lambda: len(peer.replies) == read, "all read are answered")
        replies = [reply for given in peer.replies.values() for reply in given]
        assert {reply.status for reply in replies} == {"failed"}
        assert all("has not moved" in reply.detail for reply in replies)
        assert not w.ready
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        model.fail_prefill = 1  # which ends the ranking that it hangs in, with an answer
        model.hang = False  # its thread comes back, and finds everything answered
        assert await w.worker.device.stop(30)
        await asyncio.sleep(0)
        assert (told, w.total("answers")) == ([], read)


async def test_a_defect_ends_the_worker_and_its_request_is_not_read_again(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that trips over a bug must not bring down one owner of its lane after the other."""
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        monkeypatch.setattr(w.runtime.cache, "find", lambda user_id, tokens: 1 / 0)
        correlation = await peer.rank("poison", "u", 60)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(w.task, WITHIN_S)
        assert (await peer.reply(correlation)).status == "failed"
        assert await committed(embedded_settings, peer.topics.ranking.name) == 1


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each consumer that stopped, whether it did in order."""
    stop, in_order = LaneConsumer.stop, list[bool]()

    async def note(consumer: LaneConsumer, **how: bool) -> None:
        in_order.append(how["in_order"])
        await stop(consumer, **how)

    monkeypatch.setattr(LaneConsumer, "stop", note)
    return in_order


async def test_a_defect_before_the_device_counts_as_a_crash(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch, in_order: list[bool]
) -> None:
    """Its record is read again, and would end one owner of its lane after the other."""
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        monkeypatch.setattr(Intake, "ranking", lambda *_: 1 / 0)
        await peer.rank("poison", "u", 60)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(w.task, WITHIN_S)
        assert await committed(embedded_settings, peer.topics.ranking.name) == 0
    assert in_order == [False]


@pytest.mark.parametrize(("part", "name"), [(Statements, "status"), (LogEnds, "ask")])
async def test_a_defect_in_what_runs_beside_the_requests_ends_the_worker(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch, part: type, name: str
) -> None:
    async with Peer(embedded_settings), worker_on(worker_settings(embedded_settings)) as w:
        with monkeypatch.context() as broken:
            broken.setattr(part, name, lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(w.task, WITHIN_S)


async def test_a_hand_over_that_can_listen_no_more_ends_the_worker(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    listens, serving = Listener.run, asyncio.Event()

    async def run(listener: Listener) -> None:
        task = asyncio.current_task()
        if task is None or task.get_name() != "hand-over serves":
            return await listens(listener)  # that of the metrics
        await serving.wait()
        listener.close()
        raise OSError("the socket is gone")

    monkeypatch.setattr(Listener, "run", run)
    settings = msgspec.structs.replace(worker_settings(embedded_settings), handover=Handover(secret="of a whole fleet"))
    async with Peer(embedded_settings), worker_on(settings) as w:
        serving.set()
        with pytest.raises(OSError, match="the socket is gone"):
            await asyncio.wait_for(w.task, WITHIN_S)


async def test_stopping_finishes_what_was_accepted(embedded_settings: Kafka) -> None:
    settings = worker_settings(embedded_settings, drain_ms=60_000)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        w.model.hang = True
        correlations = [await peer.rank(f"r{number}", f"u{number}", 200, mode="full") for number in range(12)]
        await until(lambda: w.total("rankings_read"), "one read")
        ending = asyncio.create_task(w.end())
        await until(lambda: not w.ready, "told to stop")
        w.model.hang = False
        await ending
        assert w.total("answers") == w.total("rankings_read")
        await until(lambda: peer.statuses[-1].state == "stopped")
        assert "draining" in [status.state for status in peer.statuses]
        # What had not been read is left to the lanes' next owners, and nothing else is.
        accepted = await committed(embedded_settings, peer.topics.ranking.name)
        assert accepted
        await until(lambda: sum(each in peer.replies for each in correlations) >= accepted, "all accepted answered")
        assert sum(each in peer.replies for each in correlations) == accepted


async def test_what_it_accepted_is_answered_though_the_group_takes_its_lanes_meanwhile(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a host's workers stop together: a rebalance takes all lanes and records from a member that drains."""

    async def nothing_undone(consumer: LaneConsumer, timeout_s: float) -> bool:
        return True

    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings, drain_ms=60_000)) as w:
        monkeypatch.setattr(LaneConsumer, "drain", nothing_undone)
        monkeypatch.setattr("relaygr_stream.worker.status.ANNOUNCE_S", 0.2)  # the device that hangs states nothing
        w.model.hang = True
        accepted = [await peer.rank(f"r{number}", f"u{number}", 200, mode="full") for number in range(4)]
        await until(lambda: w.total("rankings_read") == len(accepted), "all read")
        ending = asyncio.create_task(w.end())
        await until(lambda: not w.ready, "told to stop")
        await asyncio.sleep(2.0)  # if it left without them it would by now, mostly
        assert not ending.done()
        w.model.hang = False
        await ending
        await until(lambda: all(peer.replies.get(each) for each in accepted), "all answered")


async def test_a_worker_that_stops_in_order_leaves_a_tombstone(embedded_settings: Kafka, in_order: list[bool]) -> None:
    topic = load_topics(embedded_settings).worker_status.name
    seen: list[Record] = []
    async with Peer(embedded_settings), worker_on(worker_settings(embedded_settings)) as w:
        await w.end()
    assert in_order == [True]
    async with TopicTail(embedded_settings, topic, [0], "earliest", seen.extend):
        pass
    last = [record for record in seen if record.key == b"w1"][-1]
    assert last.value is None
    assert StatusReader().read(last) == Tombstone("w1", decode(WorkerStatus, seen[0].value).incarnation)


@pytest.mark.stack
@pytest.mark.parametrize("process", ["worker", "trigger"])
async def test_a_process_that_is_stopped_while_it_starts_ends_at_once(tmp_path: Path, process: str) -> None:
    """Somebody takes connections and never says a word: a request to such a broker takes its whole timeout."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as accepted:
        server.setblocking(False)
        kafka = Kafka(bootstrap=f"127.0.0.1:{server.getsockname()[1]}", request_timeout_ms=120_000)
        config = write_settings(tmp_path / "settings.toml", worker_settings(kafka))
        child = Child(process, [process, "--config", config], tmp_path)
        try:
            await until(child.healthy, child.log_tail())
            async with asyncio.timeout(START_TIMEOUT_S):
                connection = accepted.enter_context((await loop.sock_accept(server))[0])
                assert await loop.sock_recv(connection, 4), "it asks for nothing"
            child.terminate()
            await until(lambda: child.exit_code is not None, "ended", START_END_S + 10)
            assert child.exit_code == 0, child.log_tail()
        finally:
            child.kill()


@pytest.mark.stack
async def test_stopping_without_a_broker_takes_bounded_time(tmp_path: Path) -> None:
    """In a process of its own: what its end leaves open goes with it."""
    async with local_broker("embedded", folder=tmp_path) as broker:
        kafka = broker.kafka_settings(Kafka(prefix="gone.", partitions=8, replication=1, session_timeout_ms=3000))
        await apply_topics(kafka)
        config = write_settings(tmp_path / "settings.toml", worker_settings(kafka, drain_ms=1000))
        worker = Child("worker", ["worker", "--config", config], tmp_path)
        try:
            await worker.wait_ready()
            broker.stop()
            worker.terminate()
            # Two last words, the drain, the consumer, and what is closed last, each as long as it may take.
            bound = 2 * ANNOUNCE_S + 1.0 + (1.5 + CLOSE_S) + 4 * CLOSE_S + 10
            await until(lambda: worker.exit_code is not None, "ended", bound)
            assert worker.exit_code in (0, 1), worker.log_tail()
        finally:
            worker.kill()
