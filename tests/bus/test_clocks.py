"""Senders whose clocks are far off, on each broker: times are the brokers', and a refusal is told in words."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiokafka.producer.message_accumulator import MessageBatch
from structlog.testing import capture_logs

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.contents import read_all
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.refused import COUNTS_S, RefusedTopics, refusals
from relaygr_stream.bus.topics import apply_topics, describe_topics, verify_topics
from relaygr_stream.errors import AccessDenied, BrokerError, BrokerUnavailable, TopicError
from relaygr_stream.settings.files import packaged_dir
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import load_topics
from tests.bus.test_topics_on_brokers import _create
from tests.conftest import AnyBroker

HOUR_MS = 3_600_000
AHEAD_MS = 2 * HOUR_MS


def stamp_ahead(patch: pytest.MonkeyPatch) -> None:
    """Producers stamp messages by a clock that is two hours ahead."""
    append = MessageBatch.append

    def stamped(self: Any, key: Any, value: Any, _: None, **options: Any) -> Any:
        return append(self, key, value, now_ms() + AHEAD_MS, **options)

    patch.setattr(MessageBatch, "append", stamped)


async def test_a_clock_two_hours_ahead_is_taken_and_the_time_is_the_brokers(
    kafka_settings: Kafka, broker: AnyBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp_ahead(monkeypatch)
    await apply_topics(kafka_settings)
    for topic in load_topics(kafka_settings).all:
        async with Producer(kafka_settings, client_id="test") as producer:
            await producer.send_and_wait(topic.name, b"x", key=b"k", partition=0)
            assert producer.trouble is None
        if broker.kind == "kafka":  # the embedded one keeps the sender's time, and refuses none
            (record,) = await read_all(kafka_settings, topic.name, [0])
            assert abs(record.timestamp_ms - now_ms()) < HOUR_MS, topic.name


async def test_existing_topics_get_the_brokers_times_without_being_asked_for_more(
    kafka_settings: Kafka, broker: AnyBroker, tmp_path: Path
) -> None:
    folder = tmp_path / "topics"
    shutil.copytree(packaged_dir("topics"), folder)
    for file in folder.glob("*.toml"):
        text = file.read_text(encoding="utf-8").replace(
            'timestamp_type = "LogAppendTime"', 'timestamp_type = "CreateTime"'
        )
        file.write_text(text.replace("segment_ms = 30_000", "segment_ms = 20_000"), encoding="utf-8")
    await apply_topics(msgspec.structs.replace(kafka_settings, topics_dir=str(folder)))
    with pytest.raises(TopicError, match=r"message\.timestamp\.type = CreateTime on the cluster, LogAppendTime in its"):
        await verify_topics(kafka_settings, strict=True)
    if broker.kind == "embedded":
        return  # it alters nothing
    with pytest.raises(TopicError, match=r"segment\.ms = 20000") as refused:
        await apply_topics(kafka_settings)
    assert "timestamp" not in str(refused.value)
    for row in await describe_topics(kafka_settings):
        assert row.found is not None
        assert row.found.configs["message.timestamp.type"] == "LogAppendTime"
        assert row.found.configs["segment.ms"] == str(row.topic.segment_ms).replace("30000", "20000"), "the rest stays"


async def test_a_refused_clock_is_told_in_words_until_a_send_is_taken(
    kafka_settings: Kafka, broker: AnyBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broker.kind == "embedded":
        pytest.skip("the embedded broker refuses no time")
    await _create(kafka_settings, "scores", 1)  # as Kafka makes topics: times are the senders'
    topic = f"{kafka_settings.prefix}scores"
    before = refusals[topic]
    async with Producer(kafka_settings, client_id="test") as producer:
        with capture_logs() as lines:
            with monkeypatch.context() as patch:
                stamp_ahead(patch)
                for _ in range(3):
                    with pytest.raises(BrokerError, match=r"clock .*NTP.*LogAppendTime"):
                        await producer.send_and_wait(topic, b"x", partition=0)
            assert "clock of this machine" in (producer.trouble or "")
            await producer.send_and_wait(topic, b"x", partition=0)
        assert producer.trouble is None
    assert refusals[topic] - before == 3
    assert [line["event"] for line in lines] == ["sends are refused", "sends are taken again"]


def test_what_a_retry_mends_and_what_is_told_elsewhere_is_no_refusal() -> None:
    refused = RefusedTopics()
    for error in (BrokerUnavailable("away"), TopicError("missing")):
        refused.failed("t", error, 0.0)
    assert refused.trouble(0.0) is None
    refused.failed("t", AccessDenied("no right"), 0.0)
    refused.failed("u", BrokerError("policy"), 0.0)
    refused.taken("t")
    assert refused.trouble(0.0) == "policy", "each topic counts"
    assert refused.trouble(COUNTS_S + 1) is None, "where nothing more is sent, nothing is known"
