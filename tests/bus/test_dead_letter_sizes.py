"""A dead letter that does not fit is sent as a digest; one that cannot be delivered holds up no lane, and is told."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import tracemalloc
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge

from relaygr_stream.bus import dead_letter
from relaygr_stream.bus.dead_letter import (
    HEADER_DIGEST,
    DeadLetters,
    check_dead_letters_fit,
    digest_dead_letter,
    fits,
    whole_dead_letter,
)
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topic_check import DEAD_LETTER_HEADERS_BYTES
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import AccessDenied, BrokerError, BrokerUnavailable, DecodeError, MessageTooLarge
from relaygr_stream.ops.dead_letters.letter import letters_of
from relaygr_stream.ops.dead_letters.replay import verdict_before, why
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.telemetry.background import Background
from relaygr_stream.wire.records import HEADER_REASON, Record
from relaygr_stream.wire.topic_files import load_topics
from tests.done import DoneRecords
from tests.waiting import until

MIB = 1 << 20
RANKING = load_topics(Kafka()).ranking.name
ERROR = DecodeError("oversized", "for the test")


def record(
    value: bytes, key: bytes | None = b"user", headers: tuple[tuple[str, Any], ...] = (), topic: str = RANKING
) -> Record:
    return Record(topic, 3, 17, 0, key, value, headers)


#: Names and values of up to 3,000 characters.
headers = st.lists(
    st.builds(
        lambda name, value, times: (name * times, value and value * times),
        st.text(max_size=30), st.none() | st.binary(max_size=30), st.integers(1, 100),
    ),
    max_size=5,
).map(tuple)  # fmt: skip


@given(st.binary(max_size=200) | st.none(), st.integers(0, 5000), headers)
def test_a_digest_always_fits(key: bytes | None, repeat: int, headers: Any) -> None:
    one = record(b"v" * repeat, None if key is None else key * repeat, headers)
    kept_key, value, kept = digest_dead_letter(one, ERROR)
    size = sum(len(name.encode()) + len(content or b"") + 10 for name, content in kept)
    assert len(kept_key or b"") + len(value) + size <= DEAD_LETTER_HEADERS_BYTES
    if fits(one, 4 * MIB):
        _, value, kept = whole_dead_letter(one, ERROR)
        size = sum(len(name.encode()) + len(content or b"") + 10 for name, content in kept)
        assert len(one.key or b"") + len(value) + size <= 4 * MIB


async def test_a_message_is_kept_only_where_the_setting_says_so(embedded_settings: Kafka) -> None:
    await apply_topics(embedded_settings)
    topics = load_topics(embedded_settings)
    found: list[Record] = []
    done = DoneRecords()
    secret = record(b"bought: a ring" * 10, topic=topics.ranking.name)
    async with (
        TopicTail(embedded_settings, topics.dead_letter.name, [0], "latest", found.extend),
        Producer(embedded_settings, client_id="test") as producer,
    ):
        for keep_values in (False, True):
            letters = DeadLetters(producer, topics.dead_letter, done, gauge(), Background(), keep_values=keep_values)
            letters.send(secret, ERROR)
            await until(lambda: letters.waiting == 0, "dead-lettered")  # noqa: B023
        await until(lambda: len(found) == 2, "read")
    digest, whole = letters_of(found)
    assert (digest.value, whole.value) == (b"", secret.value)
    assert hashlib.sha256(secret.value or b"").hexdigest() in digest.digest
    assert verdict_before(digest, topics, again=True) == "no value"
    assert "kafka.dead_letter_values" in why("no value")


async def test_what_does_not_fit_is_there_as_a_digest(kafka_settings: Kafka) -> None:
    await apply_topics(kafka_settings)
    topics = load_topics(kafka_settings)
    done = DoneRecords()
    found: list[Record] = []
    takes = topics.dead_letter.max_message_bytes
    large = record(b"x" * (3 * MIB), headers=(("trace", b"t1"),), topic=topics.ranking.name)
    fitting = record(b"y" * MIB)
    long_key, many = record(b"z", key=b"k" * 3 * MIB), record(b"z", headers=(("h", b"v" * 3 * MIB),))
    async with (
        TopicTail(kafka_settings, topics.dead_letter.name, [0], "latest", found.extend),
        Producer(kafka_settings, client_id="test", max_bytes=takes) as producer,
    ):
        letters = DeadLetters(producer, topics.dead_letter, done, gauge(), Background(), keep_values=True)
        for one in (large, fitting, long_key, many):
            letters.send(one, ERROR)
        await until(lambda: len(found) == 4 and letters.waiting == 0, "dead-lettered")
    assert len(done) == 4
    by_digest = {letter.digest.split(" sha256")[0]: letter for letter in letters_of(found)}
    assert by_digest.keys() == {"", f"value {3 * MIB} bytes", "value 1 bytes"}
    letter = by_digest[f"value {3 * MIB} bytes"]
    assert hashlib.sha256(large.value or b"").hexdigest() in letter.digest
    assert (letter.key, letter.value, letter.headers) == (b"user", b"", (("trace", b"t1"),))
    assert (letter.reason, letter.origin_partition, letter.origin_offset) == ("oversized", 3, 17)
    assert verdict_before(letter, topics, again=True) == "no value"
    assert by_digest[""].value == fitting.value


def gauge() -> Gauge:
    return Gauge("waiting", "", registry=CollectorRegistry())


class Refusing:
    """A producer in whose place letters fail."""

    def __init__(self, *errors: BrokerError) -> None:
        self.errors = list(errors)
        self.sent: list[dict[str, Any]] = []

    async def send_and_wait(self, topic: str, value: bytes, *, key: bytes | None, headers: list[Any]) -> int:
        if self.errors:
            raise self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
        self.sent.append({"value": value, "headers": dict(headers)})
        return 0


async def _sent_after_all_but_one_error(producer: Refusing) -> None:
    """Send a dead letter that keeps its message; its last error is withdrawn."""
    done = DoneRecords()
    letters = DeadLetters(
        cast(Producer, producer), load_topics(Kafka()).dead_letter, done, gauge(), Background(), keep_values=True
    )
    letters.send(record(b"value"), ERROR)
    await until(lambda: len(producer.errors) == 1)
    producer.errors.clear()
    await until(lambda: len(done) == 1)


async def test_a_cluster_that_takes_less_than_the_file_says_gets_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letter, "RETRY_S", (0.0,))
    producer = Refusing(BrokerUnavailable("away"), MessageTooLarge("MESSAGE_TOO_LARGE"), BrokerError("…"))
    await _sent_after_all_but_one_error(producer)
    ((letter),) = producer.sent
    assert letter["value"] == b""
    assert letter["headers"][HEADER_DIGEST].startswith(b"value 5 bytes sha256 ")
    assert letter["headers"][HEADER_REASON] == b"oversized"


@pytest.mark.parametrize("error", [BrokerUnavailable("no leader"), AccessDenied("no WRITE"), BrokerError("…")])
async def test_a_message_that_is_refused_for_another_cause_is_kept_whole(
    monkeypatch: pytest.MonkeyPatch, error: BrokerError
) -> None:
    monkeypatch.setattr(dead_letter, "RETRY_S", (0.0,))
    producer = Refusing(error, BrokerUnavailable("away"))
    await _sent_after_all_but_one_error(producer)
    assert [letter["value"] for letter in producer.sent] == [b"value"]


def level(waiting: Gauge) -> float:
    (family,) = waiting.collect()
    return family.samples[0].value


async def test_what_cannot_be_delivered_is_told_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RETRY_S", (0.0,)), ("FAILING_S", 0.0), ("WAITING_LIMIT", 2)):
        monkeypatch.setattr(dead_letter, name, value)
    producer, waiting = Refusing(BrokerError("TOPIC_AUTHORIZATION_FAILED")), gauge()
    done = DoneRecords()
    letters = DeadLetters(
        cast(Producer, producer), load_topics(Kafka()).dead_letter, done, waiting, Background(), keep_values=True
    )
    assert letters.why_not_taken() is None
    for _ in range(2):
        letters.send(record(b"value"), ERROR)
    await until(lambda: "TOPIC_AUTHORIZATION_FAILED" in (letters.why_not_taken() or ""))
    assert (letters.full, len(done), level(waiting)) == (True, 0, 2)
    producer.errors.clear()
    await until(lambda: len(done) == 2)
    assert (letters.full, letters.why_not_taken(), level(waiting)) == (False, None, 0)


@pytest.mark.parametrize("keep_values", [False, True])
async def test_what_waits_is_what_will_be_sent(keep_values: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest's record may have a megabyte, and an error's traceback all that was read with it."""
    monkeypatch.setattr(dead_letter, "RETRY_S", (60.0,))
    producer, topic = Refusing(BrokerUnavailable("away")), load_topics(Kafka()).dead_letter
    letters = DeadLetters(
        cast(Producer, producer), topic, DoneRecords(), gauge(), Background(), keep_values=keep_values
    )

    def read(number: int) -> None:
        value = bytes(MIB - 5000)
        try:
            raise DecodeError("invalid", f"no. {number} of {len(value)} bytes")
        except DecodeError as error:
            letters.send(record(value if number % 2 else value[:10]), error)

    tracemalloc.start()
    try:
        for number in range(20):
            read(number)
        await asyncio.sleep(0)  # each has been tried once, and waits
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        letters.close()
    assert letters.waiting == 20
    assert held < (11 if keep_values else 1) * MIB


def test_the_packaged_topics_fit() -> None:
    check_dead_letters_fit(load_topics(Kafka()))
