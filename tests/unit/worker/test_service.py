"""The worker process as a whole, on a real broker: what it answers, states, refuses, survives, and how it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from relaygr_stream.bus import dead_letter
from relaygr_stream.bus.dead_letter import HEADER_DIGEST, check_dead_letters_fit
from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics, load_topics
from relaygr_stream.errors import BrokerError, ConfigError, DeviceError, Superseded
from relaygr_stream.models.api import RankingModel
from relaygr_stream.ops.brokers.local import local_broker
from relaygr_stream.ops.children import Child, settings_as_toml
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.settings.worker import Handover
from relaygr_stream.telemetry.process import START_END_S
from relaygr_stream.trigger.ledger import LaneLedger
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import Cancel, CostModel, RankingRequest, WorkerStatus
from relaygr_stream.wire.records import (
    HEADER_CORRELATION,
    HEADER_KIND,
    HEADER_ORIGIN_TOPIC,
    HEADER_REASON,
    HEADER_REPLY_PARTITION,
    KIND_CANCEL,
    Record,
)
from relaygr_stream.wire.refusals import Refusal, encode_refusals
from relaygr_stream.wire.worker_status import StatusReader, Tombstone
from relaygr_stream.worker.commands import Query
from relaygr_stream.worker.process import CLOSE_S
from relaygr_stream.worker.replies import Outbox, check_answers_fit
from relaygr_stream.worker.status import ANNOUNCE_S, gives_way_to
from relaygr_stream.worker.watch import WATCH_S
from tests.unit.worker.services import MIB, Peer, committed, owned, worker_on, worker_settings
from tests.waiting import until


async def test_signals_are_pinned_rankings_answered_and_both_committed(kafka_settings: Kafka) -> None:
    async with Peer(kafka_settings) as peer, worker_on(worker_settings(kafka_settings)) as w:
        for number in range(6):
            await peer.signal(f"r{number}", f"u{number}", 50 + number)
        await until(lambda: peer.statuses and peer.statuses[-1].counters.get("signal_computed") == 6)
        sent = {number: await peer.rank(f"r{number}", f"u{number}", 50 + number) for number in range(6)}
        for number, correlation in sent.items():
            reply = await peer.reply(correlation)
            assert (reply.request_id, reply.status, reply.worker) == (f"r{number}", "ok", "w1")
            assert reply.outcome in ("hbm", "joined")
            assert reply.matrix().shape == (5, 2)
        await w.end()
        await until(lambda: peer.statuses[-1].state == "stopped")
        assert peer.statuses[-1].lanes == ()
        for topic in (peer.topics.pre_infer, peer.topics.ranking):
            assert await committed(kafka_settings, topic.name) == 6


@pytest.mark.timeout(300)
async def test_what_a_status_states_bounds_what_is_pinned(embedded_settings: Kafka) -> None:
    """The trigger's arithmetic, with a real ledger: outstanding never falls short of what the worker holds."""
    settings = worker_settings(embedded_settings, status_interval_ms=5)
    share = int(settings.worker.pinned_share * settings.worker.hbm_bytes)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        user = "u-ledger"
        lane = peer.lane(user)
        ledger = LaneLedger(log_end=0, keep_s=60.0, now_s=time.monotonic())
        seen = 0
        for number in range(60):
            # Growing and replaced sequences of one user: computed, extended, waiters behind each other.
            length = 20 + (7 * number) % 230
            pending = ledger.admit(w.runtime.cache.nbytes(length))
            ledger.acknowledged(pending, await peer.signal(f"r{number}", user, length), time.monotonic())
            for status in peer.statuses[seen:]:
                assert sum(each.budget_bytes for each in status.lanes) <= share
                stated = next((each for each in status.lanes if each.lane == lane), None)
                if stated is not None:
                    ledger.observe(stated)
            seen = len(peer.statuses)
            if number % 3 == 2:
                await peer.rank(f"r{number - 1}", user, 20 + (7 * (number - 1)) % 230)
            # Counted before the worker is asked: what it takes in between is on its way in the ledger's eyes.
            bound = ledger.outstanding
            assert (await w.ask(Query((lane,)))).lane_bytes[lane] <= bound
        await until(lambda: peer.statuses[-1].lanes and position(peer, lane) == 60)


def position(peer: Peer, lane: int) -> int:
    return next(each.pre_infer_offset for each in peer.statuses[-1].lanes if each.lane == lane)


async def test_an_offset_is_stated_only_once_its_signals_are_in_the_books(embedded_settings: Kafka) -> None:
    """Positions are taken before the question to the device thread; afterwards they would claim too much."""
    async with (
        Peer(embedded_settings) as peer,
        worker_on(worker_settings(embedded_settings, status_interval_ms=2)) as w,
    ):
        users = [f"u{number}" for number in range(24)]
        begun = len(peer.statuses)
        expected: dict[int, list[int]] = {}
        for number, user in enumerate(users):
            await peer.signal(f"r{number}", user, 100)
            expected.setdefault(peer.lane(user), []).append(w.runtime.cache.nbytes(100))
        await until(lambda: peer.statuses[-1].counters["signals"] == len(users))
        for status in peer.statuses[begun:]:
            for stated in status.lanes:
                pinned = sum(expected.get(stated.lane, [])[: stated.pre_infer_offset])
                assert stated.pinned_bytes >= pinned, "stated as read, and not pinned"


# ---- what cannot be served ----


async def test_messages_that_would_end_a_worker_do_not(embedded_settings: Kafka) -> None:
    """Null headers, times that overflow, a dead letter near the size limit: each once ended or stuck a worker."""
    ends = Behaviours.of([1], [0], [-(1 << 63) + 1]), Behaviours.of([1], [0], [(1 << 63) - 1])
    large = b"\xc1" * (MIB - 2048)
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        with capture_logs() as lines:
            await peer.send_ranking(b"x", headers=[(HEADER_CORRELATION, None), (HEADER_REPLY_PARTITION, None)])
            overflow = await peer.send_ranking(
                msgspec.msgpack.encode(
                    {
                        "v": 1,
                        "request_id": "r",
                        "user_id": "u",
                        "prefix": ends[0],
                        "suffix": ends[1],
                        "candidates": b"1234",
                    }
                )
            )
            oversized = await peer.send_ranking(large, key=b"user-7")
            for correlation in (overflow, oversized):
                assert (await peer.reply(correlation)).status == "rejected"
            await until(lambda: len(peer.dead) == 3)
            much = await peer.rank("too-much", "user-8", 300)
            reply = await peer.reply(much)
            assert (reply.status, reply.request_id) == ("rejected", "too-much")
            assert "relay.max_prefix_tokens" in reply.detail
        digests = [value for record in peer.dead for name, value in record.headers if name == HEADER_DIGEST]
        assert any(hashlib.sha256(large).hexdigest().encode() in digest for digest in digests)
        assert {dict(record.headers)[HEADER_ORIGIN_TOPIC] for record in peer.dead} == {
            peer.topics.ranking.name.encode()
        }
        assert {dict(record.headers)[HEADER_REASON] for record in peer.dead} == {b"malformed", b"invalid"}
        assert (await peer.reply(await peer.rank("fine", "u", 20))).status == "ok"
        assert not w.task.done()
    about_requests = [line for line in lines if line["event"] in ("refused", "dead letter")]
    assert len(about_requests) == 4
    for line in about_requests:
        assert {"request_id", "user_id", "lane", "outcome"} <= line.keys()
    assert {line["user_id"] for line in about_requests} == {"u", "user-7", "user-8"}
    assert [line["request_id"] for line in about_requests if line["event"] == "refused"] == ["too-much"]


async def test_what_is_larger_than_dead_letters_may_be_holds_up_no_lane(embedded_settings: Kafka) -> None:
    """Brokers may take more than the files say; the letter was then refused for ever, and the lane never committed."""
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)):
        before = await committed(embedded_settings, peer.topics.ranking.name)
        async with Producer(embedded_settings, client_id="large", max_bytes=4 * MIB) as producer:
            for topic in (peer.topics.ranking.name, peer.topics.pre_infer.name):
                await producer.send_and_wait(topic, bytes(3 * MIB), key=b"u")
        await until(lambda: len(peer.dead) == 2)
        assert all(b"value 3145728 bytes" in dict(letter.headers)[HEADER_DIGEST] for letter in peer.dead)
        assert (await peer.reply(await peer.rank("fine", "u", 20))).status == "ok"
    assert await committed(embedded_settings, peer.topics.ranking.name) == before + 2


async def test_a_worker_that_cannot_bury_any_more_reads_no_more_until_it_can(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else bad messages pile up in its memory for as long as the dead letters' topic is away."""
    monkeypatch.setattr(dead_letter, "WAITING_LIMIT", 3)
    settings = worker_settings(msgspec.structs.replace(embedded_settings, max_poll_interval_ms=1000))
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        send = Producer.send_and_wait

        async def refuse_letters(producer: Producer, topic: str, *arguments: Any, **options: Any) -> int:
            if topic == peer.topics.dead_letter.name:
                raise BrokerError(f"cannot send to {topic}")
            return await send(producer, topic, *arguments, **options)

        with monkeypatch.context() as away:
            away.setattr(Producer, "send_and_wait", refuse_letters)
            for _ in range(3):
                await peer.send_ranking(b"\xc1")
            await until(lambda: owned(w) == 0, "lanes given up")
        waiting = w.context.registry.get_sample_value
        await until(
            lambda: waiting("relaygr_dead_letters_waiting") == 0 and owned(w) == 8, "dead-lettered, and the lanes back"
        )
        assert (await peer.reply(await peer.rank("fine", "u", 20))).status == "ok"
        await until(lambda: len(peer.dead) >= 3, "those that were read again buried again")


@pytest.mark.parametrize("name", ["ranking", "pre_infer", "retrieval"])
def test_dead_letters_must_fit_their_topic(name: str) -> None:
    topics = load_topics(Kafka())
    check_dead_letters_fit(topics)
    topic = msgspec.structs.replace(getattr(topics, name), max_message_bytes=2_097_000)
    with pytest.raises(ConfigError, match=rf"dead-letter takes 2097152 bytes, {re.escape(topic.name)} 2097000"):
        check_dead_letters_fit(dataclasses.replace(topics, **{name: topic}))


def test_the_largest_answer_must_fit_its_topic() -> None:
    topics = load_topics(Kafka())
    check_answers_fit(topics, 2048, model_with(100))
    with pytest.raises(ConfigError, match=r"scores takes 1048576 bytes, the scores of 2048 candidates .* 140 columns"):
        check_answers_fit(topics, 2048, model_with(140))


def model_with(columns: int) -> RankingModel:
    tasks = tuple(f"task-{number}" for number in range(columns))
    return SimpleNamespace(tasks=tasks, version="m")


async def test_an_answer_may_be_as_large_as_its_topic_says(embedded_settings: Kafka, tmp_path: Path) -> None:
    many = 150_000  # candidates, of two scores each: 1.2 MB
    for file in (Path(__file__).parents[3] / "topics").glob("*.toml"):
        text = file.read_text(encoding="utf-8")
        if file.stem == "scores":
            text = re.sub(r"max_message_bytes = \S+", "max_message_bytes = 2_000_000", text)
        (tmp_path / file.name).write_text(text, encoding="utf-8")
    kafka = msgspec.structs.replace(embedded_settings, topics_dir=str(tmp_path))
    settings = worker_settings(kafka)
    settings = msgspec.structs.replace(settings, relay=msgspec.structs.replace(settings.relay, max_candidates=many))
    async with Peer(kafka) as peer, worker_on(settings):
        request = RankingRequest(
            request_id="r", user_id="u", prefix=Behaviours(), candidates=pack_items(range(many)), timeout_ms=60_000.0
        )
        reply = await peer.reply(await peer.send_ranking(encode(request)))
    assert (reply.status, len(reply.matrix())) == ("ok", many)


async def test_a_worker_whose_clock_is_ahead_expires_nothing(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)):
        await asyncio.sleep(0.6)  # until the lanes' ends are known
        real = time.time
        monkeypatch.setattr("relaygr_stream.worker.intake.time.time", lambda: real() + 300.0)
        correlations = [await peer.rank(f"r{number}", f"u{number}", 20, timeout_ms=5000.0) for number in range(5)]
        assert {(await peer.reply(each)).status for each in correlations} == {"ok"}


# ---- ends ----


async def test_a_device_that_always_fails_ends_the_worker_with_answers(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        flush = Outbox.flush

        async def slowly(outbox: Outbox, timeout_s: float) -> None:
            await flush(outbox, timeout_s)
            await asyncio.sleep(2 * WATCH_S)  # what watches it looks again, and must not find it ready

        monkeypatch.setattr(Outbox, "flush", slowly)
        w.model.fail_prefill = 10**6
        correlations = [await peer.rank(f"r{number}", f"u{number}", 60) for number in range(8)]
        with pytest.raises(DeviceError, match="8 times in a row, at last with RuntimeError: the device is on fire"):
            await asyncio.wait_for(w.task, 20)
        assert {(await peer.reply(each)).status for each in correlations} == {"failed"}
        assert not w.ready
        w.model.fail_prefill = 0


async def test_a_device_that_hangs_ends_the_worker_with_answers(embedded_settings: Kafka) -> None:
    settings = worker_settings(msgspec.structs.replace(embedded_settings, max_poll_interval_ms=1500), drain_ms=500)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        model = w.model
        model.hang = True
        correlations = [await peer.rank(f"r{number}", f"u{number}", 60) for number in range(3)]
        with pytest.raises(DeviceError, match="the device hangs"):
            await asyncio.wait_for(w.task, 30)
        replies = [await peer.reply(each) for each in correlations]
        assert {reply.status for reply in replies} == {"failed"}
        assert all("has not moved" in reply.detail for reply in replies)
        assert not w.ready
        model.hang = False  # its thread comes back, and finds everything answered
        await asyncio.sleep(0.2)
        assert all(len(given) == 1 for given in peer.replies.values())


async def test_a_defect_ends_the_worker_and_its_request_is_not_read_again(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that trips over a bug must not bring down one owner of its lane after the other."""
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        monkeypatch.setattr(w.runtime.scheduler.rankings, "_place", lambda task, found: 1 / 0)
        correlation = await peer.rank("poison", "u", 60)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(w.task, 20)
        assert (await peer.reply(correlation)).status == "failed"
        assert await committed(embedded_settings, peer.topics.ranking.name) == 1


async def test_stopping_finishes_what_was_accepted(embedded_settings: Kafka) -> None:
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
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


async def test_the_later_of_one_name_serves_even_if_its_clock_is_behind(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = worker_settings(embedded_settings)
    async with Peer(embedded_settings) as peer, worker_on(settings) as first:
        await until(lambda: peer.statuses)
        real = time.time_ns
        monkeypatch.setattr("relaygr_stream.worker.status.time.time_ns", lambda: real() - 300 * 10**9)
        async with worker_on(settings) as second:
            with pytest.raises(Superseded, match="another worker named 'w1' started later"):
                await asyncio.wait_for(first.task, 5)
            assert not second.task.done()
            assert (await peer.reply(await peer.rank("r", "u", 20))).status == "ok"


async def test_a_later_one_of_the_name_that_never_serves_ends_nobody(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = worker_settings(embedded_settings)
    async with Peer(embedded_settings) as peer, worker_on(settings) as first:

        async def refused(_: LaneConsumer) -> None:
            """Not before the first one has heard of the second, as it starts."""
            await until(lambda: len({status.incarnation for status in peer.statuses}) == 2)
            heard = len(peer.statuses)
            await until(lambda: len(peer.statuses) >= heard + 10)
            raise ConfigError("kafka.session_timeout_ms: the broker refuses it")

        monkeypatch.setattr(LaneConsumer, "start", refused)
        with pytest.raises(ConfigError):
            async with worker_on(settings):
                pass
        assert not first.task.done()
        assert (await peer.reply(await peer.rank("r", "u", 20))).status == "ok"


async def test_a_forged_status_ends_no_name_for_good_and_a_signed_fleet_believes_none(
    embedded_settings: Kafka,
) -> None:
    """Of a name that a forger made end, the next start serves; where a secret is set it does not even end."""
    secret = Handover(secret="a secret of the fleet")
    plain = worker_settings(embedded_settings)
    signed = msgspec.structs.replace(plain, handover=secret)
    topic = load_topics(embedded_settings).worker_status.name
    async with Peer(embedded_settings) as peer, Producer(embedded_settings, client_id="forger") as forger:
        for settings, ends in ((plain, True), (signed, False)):
            for most in (time.time_ns() + 86_000 * 10**9, 2**64 - 1):
                async with worker_on(settings) as w:
                    await until(lambda: peer.statuses and peer.statuses[-1].state == "serving")
                    forged = msgspec.structs.replace(peer.statuses[-1], incarnation=most, host="evil", lanes=())
                    await forger.send_and_wait(topic, encode(forged), key=b"w1")
                    if ends and most < 2**63:
                        with pytest.raises(Superseded):
                            await w.task
                        continue
                    heard = len(peer.statuses)
                    await until(lambda heard=heard: len(peer.statuses) >= heard + 10)  # type: ignore[misc]
                    assert (await peer.reply(await peer.rank("r", "u", 20))).status == "ok"
                    refused = "statuses_unreadable" if settings is plain else "statuses_unsigned"
                    assert w.context.registry.get_sample_value(f"relaygr_{refused}_total")


async def test_an_answer_carries_what_the_trigger_decided(embedded_settings: Kafka) -> None:
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)):
        signalled = await peer.signal("r-in", "u1", 40)
        async with Producer(embedded_settings, client_id="trigger") as trigger:
            refused = encode_refusals([Refusal("r-out", "not_at_risk"), Refusal("r-full", "over_load")])
            topic, headers = peer.topics.pre_infer.name, [("relaygr-kind", b"refusals")]
            for value in (refused, b"\xc1"):
                await trigger.send_and_wait(topic, value, partition=peer.lane("u1"), headers=headers)
        await until(lambda: peer.statuses[-1].lanes and position(peer, peer.lane("u1")) == signalled + 3)
        for request, admission in (("r-in", "admitted"), ("r-out", "not_at_risk"), ("r-full", "over_load"), ("r", "")):
            reply = await peer.reply(await peer.rank(request, "u1", 40))
            assert (reply.status, reply.admission) == ("ok", admission)
        assert not peer.dead


async def test_a_worker_that_stops_in_order_leaves_a_tombstone(embedded_settings: Kafka) -> None:
    topic = load_topics(embedded_settings).worker_status.name
    seen: list[Record] = []
    async with Peer(embedded_settings), worker_on(worker_settings(embedded_settings)) as w:
        await w.end()
    async with TopicTail(embedded_settings, topic, [0], "earliest", seen.extend):
        pass
    last = [record for record in seen if record.key == b"w1"][-1]
    assert last.value is None
    assert StatusReader().read(last) == Tombstone("w1", decode(WorkerStatus, seen[0].value).incarnation)


def test_two_that_start_at_once_agree_on_who_goes() -> None:
    def later(than: tuple[int, str, int], other: tuple[int, str, int]) -> bool:
        status = WorkerStatus(
            name="w",
            incarnation=other[0],
            host=other[1],
            pid=other[2],
            sent_ms=0,
            state="serving",
            lanes=(),
            costs=CostModel(c0=0, c1=0, c2=0, c3=0),
            bytes_per_token=1,
            alloc_bytes=1,
            queue_ms=0,
            model_version="m",
        )
        return gives_way_to(status, *than)

    ours = (5, "host-b", 7)
    assert not later(ours, ours)  # our own status, read back
    for other in ((6, "host-a", 1), (5, "host-c", 1), (5, "host-b", 8)):
        assert later(ours, other)
        assert not later(other, ours)


@pytest.mark.parametrize("process", ["worker", "trigger"])
async def test_a_process_that_is_stopped_while_it_starts_ends_at_once(tmp_path: Path, process: str) -> None:
    """Somebody takes connections and never says a word: a request to such a broker takes its whole timeout."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        kafka = Kafka(bootstrap=f"127.0.0.1:{server.getsockname()[1]}", request_timeout_ms=120_000)
        config = tmp_path / "settings.toml"
        config.write_text(settings_as_toml(worker_settings(kafka)), encoding="utf-8")
        child = Child(process, [process, "--config", str(config)], tmp_path)
        try:
            await until(child.healthy, child.log_tail())
            await asyncio.sleep(0.3)  # it is asking for topics by now
            child.terminate()
            await until(lambda: child.exit_code is not None, "ended", START_END_S + 10)
            assert child.exit_code == 0, child.log_tail()
        finally:
            child.kill()


async def test_stopping_without_a_broker_takes_bounded_time(tmp_path: Path) -> None:
    """In a process of its own: what its end leaves open goes with it."""
    async with local_broker("embedded", folder=tmp_path) as broker:
        kafka = broker.kafka_settings(Kafka(prefix="gone.", partitions=8, replication=1, session_timeout_ms=3000))
        await apply_topics(kafka)
        config = tmp_path / "settings.toml"
        config.write_text(settings_as_toml(worker_settings(kafka, drain_ms=1000)), encoding="utf-8")
        worker = Child("worker", ["worker", "--config", str(config)], tmp_path)
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


async def test_a_cancel_releases_in_its_order_and_a_broken_one_is_buried(embedded_settings: Kafka) -> None:
    kind = [(HEADER_KIND, KIND_CANCEL.encode())]
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        before = await committed(embedded_settings, peer.topics.ranking.name)
        await peer.signal("r", "u", 100)
        await until(lambda: any(lane.pinned_bytes for status in peer.statuses for lane in status.lanes), "pinned")
        await peer.send_ranking(b"\xc1", headers=kind)
        await peer.send_ranking(encode(Cancel(request_id="r")), headers=kind)
        await until(lambda: not any(lane.pinned_bytes for lane in peer.statuses[-1].lanes), "released")
        assert w.total("signals") == 2  # computed, cancelled
        assert w.total("records_skipped") == 0
        assert (await peer.reply(await peer.rank("r", "u", 100))).outcome == "hbm"
        await until(lambda: len(peer.dead) == 1, "buried")
    assert await committed(embedded_settings, peer.topics.ranking.name) == before + 3
