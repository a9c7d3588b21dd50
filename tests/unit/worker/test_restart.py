"""Whether a worker that comes back may take its file: every erasure since its last process must be known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiokafka.producer.message_accumulator import MessageBatch

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.contents import read_all
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topic_check import FoundTopic, TopicRow
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.cache.tier_file import Until
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.erase import AWAY_MS, CLOCK_MS, KEPT_MS, KEY_PREFIX, KIND, Erase, encode_erase
from relaygr_stream.wire.messages import tenant_key
from relaygr_stream.wire.records import HEADER_KIND, HEADER_UNREADABLE
from relaygr_stream.wire.signature import Signer
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.wire.worker_status import StatusReader
from relaygr_stream.worker.restart import LAG, _why_too_late, erased_since, warm_lanes
from tests.unit.cache.worlds import file_of

TOPIC = load_topics(Kafka()).worker_status


@pytest.mark.parametrize(
    ("away_ms", "configs", "why"),
    [
        (0, {}, ""),
        (AWAY_MS - 60_000, {LAG: str(KEPT_MS)}, ""),
        (AWAY_MS + 60_000, {}, "11 minutes ago"),
        (60_000 - CLOCK_MS, {}, ""),
        (-60_000 - CLOCK_MS, {}, "ends in 6 minutes: a clock is wrong"),
        (0, {LAG: "0"}, "topics apply --alter"),
        (0, {LAG: str(KEPT_MS - 1)}, "erased unseen"),
        (None, {}, "before it served"),
    ],
)
def test_what_may_be_taken(tmp_path: Path, away_ms: int | None, configs: dict[str, str], why: str) -> None:
    file = file_of(tmp_path / "f", 40)
    if away_ms is not None:
        file.until = Until(0, now_ms() - away_ms)
    row = TopicRow(TOPIC, FoundTopic(1, 1, configs, frozenset(configs), {0: 1}))
    found = _why_too_late(file.until, row)
    assert found == why or (why and why in found)


def test_the_topic_keeps_requests_long_enough_by_its_own_file() -> None:
    assert TOPIC.min_compaction_lag_ms == KEPT_MS >= AWAY_MS + 2 * CLOCK_MS


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The times of the records sent, the newest last: the embedded broker takes the sender's."""
    append, given = MessageBatch.append, [now_ms()]

    def stamped(self: Any, key: Any, value: Any, _: None, **options: Any) -> Any:
        return append(self, key, value, given[-1], **options)

    monkeypatch.setattr(MessageBatch, "append", stamped)
    return given


async def test_requests_are_found_by_offset_whatever_the_brokers_clock_says(
    embedded_settings: Kafka, times: list[int]
) -> None:
    await apply_topics(embedded_settings)
    topics = load_topics(embedded_settings)
    name, reader = topics.worker_status.name, StatusReader(topics.lanes)
    before, after = (Erase.request(f"{number}" * 16, "u", now_ms(), reader) for number in (1, 2))
    async with Producer(embedded_settings, client_id="test") as producer:

        async def ask(erase: Erase) -> None:
            key, headers = f"{KEY_PREFIX}{erase.id}".encode(), [(HEADER_KIND, KIND.encode())]
            await producer.send_and_wait(name, encode_erase(erase), key=key, headers=headers)

        await ask(before)
        await producer.send_and_wait(name, b"a status", key=b"w1")
        last = (await read_all(embedded_settings, name, [0]))[-1]
        times.append(times[0] - 4 * 60_000)
        await ask(after)
    until = Until(last.offset, last.timestamp_ms)
    assert until.ms == times[0]
    assert await erased_since(embedded_settings, name, until, reader) == ([after], "")
    for other in (Until(until.offset + 2, until.ms), Until(until.offset, until.ms + 1)):
        found, why = await erased_since(embedded_settings, name, other, reader)
        assert not found
        assert "made anew" in why


@pytest.mark.parametrize("asker", [None, Signer("the secret before the change")])
async def test_a_request_that_is_not_believed_may_name_anybody(embedded_settings: Kafka, asker: Signer | None) -> None:
    await apply_topics(embedded_settings)
    name, asking = load_topics(embedded_settings).worker_status.name, StatusReader(signer=asker)
    erase = Erase.request("1" * 32, "u", now_ms(), asking)
    key, value, kind = f"{KEY_PREFIX}{erase.id}".encode(), encode_erase(erase), [(HEADER_KIND, KIND.encode())]
    async with Producer(embedded_settings, client_id="test") as producer:
        await producer.send_and_wait(name, b"an unsigned status", key=b"w1")
        last = (await read_all(embedded_settings, name, [0]))[-1]
        until, reader = Until(last.offset, last.timestamp_ms), StatusReader(signer=Signer("the secret after it"))
        assert await erased_since(embedded_settings, name, until, reader) == ([], "")
        await producer.send_and_wait(name, value, key=key, headers=asking.signed(name, key, value, kind))
    found, why = await erased_since(embedded_settings, name, until, reader)
    assert not found
    assert f"offset {until.offset + 1}" in why and "erased unseen" in why


async def test_what_cannot_be_read_may_have_been_a_request(embedded_settings: Kafka) -> None:
    await apply_topics(embedded_settings)
    name = load_topics(embedded_settings).worker_status.name
    async with Producer(embedded_settings, client_id="test") as producer:
        await producer.send_and_wait(name, b"a status", key=b"w1")
        last = (await read_all(embedded_settings, name, [0]))[-1]
        stand_in = [(HEADER_UNREADABLE, b"the checksum is wrong")]
        await producer.send_and_wait(name, b"", key=None, headers=stand_in)
    until = Until(last.offset, last.timestamp_ms)
    found, why = await erased_since(embedded_settings, name, until, StatusReader())
    assert not found
    assert f"offset {until.offset + 1}" in why and "the checksum is wrong" in why


@pytest.mark.parametrize("tenant", ["", "shop"])
def test_the_lanes_it_asks_for_are_those_of_whom_it_serves_and_not_of_guests(tenant: str) -> None:
    lanes, owned = 16, {0, 3, 11}
    users = [f"user-{number}" for number in range(1000)]
    own = [user for user in users if lane_of(user, lanes) in owned]
    guests = [user for user in users if lane_of(user, lanes) not in owned][:40]
    found = warm_lanes([tenant_key(tenant, user) for user in own + guests], lanes)
    assert set(found) == owned
    counts = [sum(lane_of(user, lanes) == lane for user in own) for lane in found]
    assert counts == sorted(counts, reverse=True)
    assert warm_lanes([], lanes) == []
