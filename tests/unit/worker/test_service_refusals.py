"""What a worker process cannot serve, on a real broker: refused or dead-lettered. What must fit which topic."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from relaygr_stream.bus import dead_letter
from relaygr_stream.bus.dead_letter import HEADER_DIGEST, check_dead_letters_fit
from relaygr_stream.bus.producer import Producer
from relaygr_stream.errors import BrokerError, ConfigError
from relaygr_stream.models.api import RankingModel
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import RankingRequest
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_ORIGIN_TOPIC, HEADER_REASON, HEADER_REPLY_PARTITION
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.worker.replies import check_answers_fit
from tests.unit.worker.services import MIB, REPLY_PARTITION, Peer, committed, owned, worker_on, worker_settings
from tests.waiting import until


async def test_no_client_makes_a_worker_wait_longer_than_its_setting(embedded_settings: Kafka) -> None:
    settings = worker_settings(embedded_settings, max_timeout_ms=500.0)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        w.model.hang = True
        await peer.signal("first", "u", 100)
        await until(lambda: w.model.hung, "the device hangs")
        late = await peer.rank("late", "v", 20, timeout_ms=3_600_000.0)
        await until(lambda: any(time.monotonic() > rank.task.deadline for rank in w.worker.core.in_flight.values()))
        w.model.hang = False
        assert (await peer.reply(late)).status == "deadline_exceeded"


async def test_messages_that_would_end_a_worker_do_not(embedded_settings: Kafka) -> None:
    """Null headers, times that overflow, a dead letter near the size limit: each once ended or stuck a worker."""
    ends = [
        Behaviours(bytes(4), bytes(1), at.to_bytes(8, "little", signed=True)) for at in (1 - (1 << 63), (1 << 63) - 1)
    ]
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


async def test_a_ranking_of_many_headers_is_refused_and_told_why(embedded_settings: Kafka) -> None:
    """An empty header has two bytes in Kafka and a hundred here: 460,000 in a record were 45 MB, counted as none."""
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        address = [(HEADER_CORRELATION, b"flood"), (HEADER_REPLY_PARTITION, str(REPLY_PARTITION).encode())]
        await peer.send_ranking(b"x" * 1000, headers=[*address, *[("", b"")] * 200_000])
        reply = await peer.reply(b"flood")
        assert (reply.status, "200002 headers" in reply.detail) == ("rejected", True)
        await until(lambda: len(peer.dead) == 1)
        assert len(peer.dead[0].headers) < 12
        assert (await peer.reply(await peer.rank("fine", "u", 20))).status == "ok"
        assert w.worker.requests.held_bytes == 0


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


@pytest.mark.stack
async def test_a_worker_that_cannot_dead_letter_any_more_reads_no_more_until_it_can(
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
        await until(lambda: len(peer.dead) >= 3, "those that were read again dead-lettered again")


@pytest.mark.parametrize("name", ["ranking", "pre_infer", "retrieval"])
def test_dead_letters_must_fit_their_topic(name: str) -> None:
    topics = load_topics(Kafka())
    check_dead_letters_fit(topics)
    topic = msgspec.structs.replace(getattr(topics, name), max_message_bytes=2_097_000)
    with pytest.raises(
        ConfigError, match=rf"{re.escape(topic.name)} takes messages of 2097000 bytes, .*dead-letter of 2097152"
    ):
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
