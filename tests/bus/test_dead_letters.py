"""`relaygr dead-letters` on each broker: what was refused is read, sent again with its key, and never twice."""

from __future__ import annotations

import asyncio
import json

import pytest
from click.testing import CliRunner

from relaygr_stream.bus.contents import read_all
from relaygr_stream.bus.dead_letter import dead_letter_headers
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.cli.main import main
from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import HEADER_REPLAYS, Record
from relaygr_stream.wire.topic_files import TopicSet, lane_of, load_topics


async def dead_letter(kafka: Kafka, record: Record, reason: str = "malformed") -> None:
    """As a trigger or a worker does."""
    topic = load_topics(kafka).dead_letter.name
    headers = dead_letter_headers(record, DecodeError(reason, "for the test"))
    async with Producer(kafka, client_id="test") as producer:
        await producer.send_and_wait(topic, record.value or b"", key=record.key, headers=headers)


async def there(kafka: Kafka, topic: str) -> list[Record]:
    return await read_all(kafka, topic, range(load_topics(kafka).lanes))


@pytest.fixture
async def letters(kafka_settings: Kafka) -> TopicSet:
    """Two letters: one from `ranking` with a key and a header, one from `retrieval` without a key."""
    await apply_topics(kafka_settings)
    topics = load_topics(kafka_settings)
    await dead_letter(kafka_settings, Record(topics.ranking.name, 0, 7, 0, b"user-1", b"\xc1bad", (("trace", b"t1"),)))
    await dead_letter(kafka_settings, Record(topics.retrieval.name, 2, 9, 0, None, b"worse", ()), reason="invalid")
    return topics


def relaygr(kafka: Kafka, *arguments: str) -> tuple[int, str]:
    """The command, in a process's place; a loop of its own, as in one."""
    settings = [f"--set=kafka.{name}={getattr(kafka, name)}" for name in ("bootstrap", "prefix", "partitions")]
    result = CliRunner().invoke(main, ["dead-letters", arguments[0], *settings, *arguments[1:]])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


async def call(kafka: Kafka, *arguments: str) -> tuple[int, str]:
    return await asyncio.to_thread(relaygr, kafka, *arguments)


async def test_list_and_show(kafka_settings: Kafka, letters: TopicSet) -> None:
    code, out = await call(kafka_settings, "list", "--json")
    assert code == 0
    first, second = (json.loads(line) for line in out.splitlines())
    assert (first["reason"], first["key"], first["origin"]["topic"]) == ("malformed", "user-1", letters.ranking.name)
    assert (second["reason"], second["key"], second["headers"]) == ("invalid", None, {})
    code, out = await call(kafka_settings, "list", "--reason", "invalid")
    assert code == 0
    assert "1 dead letter: 1 invalid" in out
    code, out = await call(kafka_settings, "list", "--reason", "luck")
    assert code == 1
    assert "--reason luck: no such reason" in out
    code, out = await call(kafka_settings, "show", first["address"])
    assert code == 0
    assert "not MessagePack" in out
    code, out = await call(kafka_settings, "show", "0:999")
    assert code == 1
    assert "no dead letter at 0:999" in out


async def test_replay_goes_home_once(kafka_settings: Kafka, letters: TopicSet) -> None:
    code, out = await call(kafka_settings, "replay", "--all", "--dry-run")
    assert (code, out.splitlines()[-1]) == (0, "2 would replay")
    assert await there(kafka_settings, letters.ranking.name) == []

    code, out = await call(kafka_settings, "replay", "--all")
    assert (code, out.splitlines()[-1]) == (0, "2 replayed")
    (ranking,) = await there(kafka_settings, letters.ranking.name)
    assert (ranking.key, ranking.value, ranking.lane) == (b"user-1", b"\xc1bad", lane_of("user-1", letters.lanes))
    assert ranking.headers == (("trace", b"t1"), (HEADER_REPLAYS, b"1"))
    (retrieval,) = await there(kafka_settings, letters.retrieval.name)
    assert (retrieval.key, retrieval.value, retrieval.lane) == (None, b"worse", 2)

    # It fails again, as it must: what came back stays, and so does what was sent.
    await dead_letter(kafka_settings, ranking)
    code, out = await call(kafka_settings, "replay", "--all")
    assert (code, out.splitlines()[-1]) == (0, "2 replayed before, 1 came back")
    assert len(await there(kafka_settings, letters.ranking.name)) == 1
    code, out = await call(kafka_settings, "replay", "--from", "ranking", "--again", "--dry-run")
    assert (code, out.splitlines()[-1]) == (0, "2 would replay")


async def test_nothing_is_replayed_by_accident_or_silently_refused(kafka_settings: Kafka, letters: TopicSet) -> None:
    code, out = await call(kafka_settings, "replay")
    assert code == 2
    assert "--all" in out
    await dead_letter(kafka_settings, Record("somebody.elses", 0, 1, 0, b"k", b"v", ()))
    code, out = await call(kafka_settings, "replay", "--from", "somebody.elses")
    assert (code, out.splitlines()[-1]) == (0, "1 no origin")
