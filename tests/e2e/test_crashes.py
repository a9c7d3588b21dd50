"""A message that ends every worker which runs it ends as many as the limit says, and then no more."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import PreInferSignal, RankingRequest, ScoreReply
from relaygr_stream.wire.records import (
    HEADER_CORRELATION,
    HEADER_KIND,
    HEADER_ORIGIN_TOPIC,
    HEADER_REASON,
    HEADER_REPLY_PARTITION,
    KIND_DELEGATED,
    Record,
)
from tests.e2e.fleet import Fleet
from tests.e2e.gated import POISON, SETTINGS
from tests.unit.worker.services import history
from tests.waiting import until

LIMIT = 3


async def test_a_request_that_ends_each_worker_is_answered_failed_after_so_many(
    kafka_settings: Kafka, tmp_path: Path
) -> None:
    replies: dict[bytes, list[ScoreReply]] = {}
    dead: list[Record] = []

    def on_scores(records: list[Record]) -> None:
        for record in records:
            replies.setdefault(dict(record.headers)[HEADER_CORRELATION], []).append(decode(ScoreReply, record.value))

    def ranking(name: str, candidate: int) -> bytes:
        # All of one user, and so of one lane; so long a timeout that every worker in turn would run it.
        return encode(
            RankingRequest(
                request_id=name,
                user_id="u",
                prefix=history("u", 20),
                candidates=pack_items([1, candidate]),
                timeout_ms=3.6e6,
            )
        )

    async with Fleet(kafka_settings, tmp_path) as fleet:
        topics = fleet.topics
        async with (
            TopicTail(kafka_settings, topics.scores.name, [2], "latest", on_scores),
            TopicTail(kafka_settings, topics.dead_letter.name, [0], "latest", dead.extend),
            Producer(kafka_settings, client_id="client") as producer,
        ):

            async def send(name: str, candidate: int) -> None:
                headers = [(HEADER_CORRELATION, name.encode()), (HEADER_REPLY_PARTITION, b"2")]
                await producer.send_and_wait(topics.ranking.name, ranking(name, candidate), key=b"u", headers=headers)

            def start(number: int) -> None:
                fleet.start("worker", f"w{number}", "worker.max_timeout_ms=3600000", *SETTINGS)

            start(0)
            await fleet.ready("w0")
            await fleet.lanes_settled("w0")
            for name in ("before", "poison", "after"):
                await send(name, POISON if name == "poison" else 2)
            for number in range(LIMIT):
                child = fleet.children[f"w{number}"]
                await until(lambda: child.exit_code is not None, f"w{number} ended by the poison", 120)  # noqa: B023
                assert child.exit_code == 9
                start(number + 1)
            await until(lambda: {b"before", b"poison", b"after"} <= replies.keys(), f"answers {replies}")
            (answer,) = replies[b"poison"]
            assert answer.status == "failed"
            assert "3 workers ended while they worked at this request" in answer.detail
            assert {reply.status for name in (b"before", b"after") for reply in replies[name]} == {"ok"}
            await until(lambda: dead, "the dead letter")
            assert [dict(record.headers)[HEADER_REASON] for record in dead] == [b"crashed"]
            assert fleet.children[f"w{LIMIT}"].exit_code is None


@pytest.mark.parametrize("delegated", [False, True])
async def test_a_signal_that_ends_each_worker_is_dead_lettered_after_so_many(
    kafka_settings: Kafka, tmp_path: Path, delegated: bool
) -> None:
    dead: list[Record] = []
    user = history("u", 20)
    signal = PreInferSignal(
        request_id="poison",
        user_id="u",
        prefix=Behaviours.from_arrays(np.full(20, POISON), np.zeros(20, int), np.arange(20) * 1000),
        admitted_ms=now_ms(),
        life_ms=3.6e6,
        delegate="w9" if delegated else msgspec.UNSET,
    )
    after = msgspec.structs.replace(signal, request_id="after", prefix=user)
    async with Fleet(kafka_settings, tmp_path) as fleet:
        topics = fleet.topics
        topic = (topics.ranking if delegated else topics.pre_infer).name
        headers = [(HEADER_KIND, KIND_DELEGATED.encode())] if delegated else []
        async with (
            TopicTail(kafka_settings, topics.dead_letter.name, [0], "latest", dead.extend),
            Producer(kafka_settings, client_id="trigger") as producer,
        ):
            for number in range(LIMIT):
                fleet.start("worker", f"w{number}", "relay.life_window_ms=3600000", *SETTINGS)
                if number == 0:
                    await fleet.ready("w0")
                    await fleet.lanes_settled("w0")
                    for each in (signal, after):
                        await producer.send_and_wait(topic, encode(each), key=b"u", headers=headers)
                child = fleet.children[f"w{number}"]
                await until(lambda: child.exit_code is not None, f"w{number} ended by the poison", 120)  # noqa: B023
                assert child.exit_code == 9
            fleet.start("worker", "last", *SETTINGS)
            await until(lambda: dead, "the dead letter", 120)
            (letter,) = (dict(record.headers) for record in dead)
            assert (letter[HEADER_REASON], letter[HEADER_ORIGIN_TOPIC]) == (b"crashed", topic.encode())
            assert fleet.children["last"].exit_code is None
