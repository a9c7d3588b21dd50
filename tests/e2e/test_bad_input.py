"""Bad messages on a running relay: typed answers, dead letters, and nobody stops."""

from __future__ import annotations

from pathlib import Path

import msgpack
import msgspec
import pytest

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.client import RelayClient
from relaygr_stream.errors import Rejected
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import ScoreReply
from relaygr_stream.wire.records import (
    HEADER_CORRELATION,
    HEADER_ORIGIN_TOPIC,
    HEADER_REASON,
    HEADER_REPLY_PARTITION,
    Record,
)
from tests.e2e.fleet import serving_fleet, traffic
from tests.waiting import until

ROUTE = [(HEADER_CORRELATION, b"me-1"), (HEADER_REPLY_PARTITION, b"2")]


async def test_bad_messages_are_answered_and_dead_lettered(embedded_settings: Kafka, tmp_path: Path) -> None:
    dead: list[Record] = []
    replies: list[Record] = []

    def on_scores(records: list[Record]) -> None:
        # The client below may have chosen the same partition for its own.
        replies.extend(record for record in records if dict(record.headers)[HEADER_CORRELATION] == b"me-1")

    async with serving_fleet(embedded_settings, tmp_path, "w1") as fleet:
        topics = fleet.topics
        good = traffic(seconds=1, rate=5)[0]
        request = msgspec.to_builtins(good.request, builtin_types=(bytes,))
        bad_values = {
            "malformed": b"\xc1 not MessagePack",
            "unknown_version": msgpack.packb({**request, "v": 99}),
            "invalid": msgpack.packb({**request, "candidates": b"abc"}),
        }
        async with (
            TopicTail(embedded_settings, topics.dead_letter.name, [0], "latest", dead.extend),
            TopicTail(embedded_settings, topics.scores.name, [2], "latest", on_scores),
            Producer(embedded_settings, client_id="bad") as producer,
            RelayClient(settings=fleet.settings) as client,
        ):
            for value in bad_values.values():
                await producer.send_and_wait(topics.ranking.name, value, key=b"u", headers=ROUTE)
            await producer.send_and_wait(topics.ranking.name, msgpack.packb(request), key=b"u")  # nowhere to answer
            await producer.send_and_wait(topics.retrieval.name, b"\x80", key=b"u")
            await producer.send_and_wait(topics.pre_infer.name, b"\x80", key=b"u")
            await until(lambda: len(dead) == 6 and len(replies) == 3, f"dead letters {dead}, replies {replies}")
            # Too long for this worker's limits, and well-formed: no dead letter, a typed answer.
            with pytest.raises(Rejected, match="max_candidates"):
                await client.rank(msgspec.structs.replace(good.request, candidates=b"\1\0\0\0" * 1000), timeout=20)
            ranking = await client.rank(good.request, timeout=20)
            assert ranking.scores.shape == (20, 2)
    reasons = sorted((dict(record.headers)[HEADER_REASON].decode(), record.value) for record in dead[:])
    assert [reason for reason, _ in reasons] == [
        "invalid",
        "invalid",
        "malformed",
        "malformed",
        "malformed",
        "unknown_version",
    ]
    origins = {dict(record.headers)[HEADER_ORIGIN_TOPIC].decode() for record in dead}
    assert origins == {topics.ranking.name, topics.retrieval.name, topics.pre_infer.name}
    assert {decode(ScoreReply, record.value).status for record in replies} == {"rejected"}
