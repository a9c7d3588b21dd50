"""What others write on a client's reply partition never becomes an answer: it is dropped, counted, and the call waits
on for the true one."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import msgspec
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.client import RelayClient
from relaygr_stream.client.answers import Answers, Ranking
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.errors import ConfigError, Rejected, WorkerFailed
from relaygr_stream.settings.schema import Client, Kafka, Relay, Settings
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import RankingRequest, ScoreReply
from relaygr_stream.wire.records import (
    HEADER_CORRELATION,
    HEADER_KIND,
    HEADER_REPLY_PARTITION,
    HEADER_SIGNATURE,
    Record,
)
from relaygr_stream.wire.signature import answer_signature
from relaygr_stream.wire.topic_files import load_topics
from tests.unit.client_peers import Responder, client_on, count, request, responder_on, scored, scores_for
from tests.unit.worker.services import Peer, history, worker_on, worker_settings
from tests.waiting import until

PATIENCE_S = 20.0
SECRET = "sixteen characters and more"


async def send(peer: Responder, to: Record, value: bytes, *headers: tuple[str, bytes]) -> None:
    """Answer a request as anyone can who may read `ranking` and write `scores`."""
    route = dict(to.headers)
    await peer.producer.send_and_wait(
        peer.scores,
        value,
        partition=int(route[HEADER_REPLY_PARTITION]),
        headers=[(HEADER_CORRELATION, route[HEADER_CORRELATION]), *headers],
    )


async def unanswered(peer: Responder, relay: RelayClient) -> tuple[asyncio.Task[Ranking], Record, RankingRequest]:
    """A call, and the request that the peer holds back its answer to."""
    peer.hold = True
    ranking = asyncio.create_task(relay.rank(request(1), timeout=PATIENCE_S))
    await until(lambda: len(peer.held) == 1)
    return ranking, *peer.held[0]


def forged(request: RankingRequest, **changes: Any) -> ScoreReply:
    scores = np.full_like(scores_for(request), 666.0).tobytes()
    return msgspec.structs.replace(scored(request), scores=scores, worker="forger", **changes)


async def test_one_call_s_correlation_id_does_not_tell_the_next(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings) as peer, client_on(embedded_settings) as relay:
        for number in range(50):
            await relay.rank(request(number), timeout=PATIENCE_S)
        found = [dict(record.headers)[HEADER_CORRELATION] for record, _ in peer.requests]
        assert {each[16:] for each in found} == {b"\0"}  # the first copy
        for part in (slice(0, 8), slice(8, 16)):  # it was a nonce and a counter
            assert len({each[part] for each in found}) == 50


async def test_an_answer_to_another_request_is_dropped_and_the_call_waits_on(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings) as peer, client_on(embedded_settings) as relay:
        ranking, record, sent = await unanswered(peer, relay)
        await send(peer, record, encode(forged(sent, request_id="another")))
        await send(peer, record, encode(forged(sent, request_id="")))
        await send(peer, record, encode(ScoreReply(request_id="another", status="rejected")))
        await send(peer, record, encode(forged(sent)), (HEADER_KIND, b"progress"))
        await until(lambda: count(relay, "answers_dropped", reason="forged") == 3)
        await until(lambda: count(relay, "answers_dropped", reason="kind") == 1)
        assert not ranking.done()
        peer.release()
        assert (await ranking).worker == "peer"


async def test_an_answer_that_comes_as_its_call_ends_is_late_and_not_a_stranger_s() -> None:
    """The caller learns that its time is over one turn of the loop after the call did."""
    registry = CollectorRegistry()
    answers = Answers(ClientMetrics(registry), 1 << 20)
    call = answers.expect("r")
    call.fail(TimeoutError())
    answers.on_records([Record("scores", 0, 0, 0, b"", b"", ((HEADER_CORRELATION, call.correlation),))])
    dropped = "relaygr_client_answers_dropped_total"
    found = {reason: registry.get_sample_value(dropped, {"reason": reason}) for reason in ("late", "foreign")}
    assert found["late"] == 1 and not found["foreign"]


@pytest.mark.parametrize(("status", "error"), [("rejected", Rejected), ("failed", WorkerFailed)])
async def test_a_request_that_was_not_read_is_answered_without_its_id(
    embedded_settings: Kafka, status: Any, error: type[Exception]
) -> None:
    """`failed`: the workers that read it crashed, and none reads it again."""

    def unread(request: RankingRequest) -> list[ScoreReply | bytes]:
        return [ScoreReply(request_id="", status=status, detail="the reason")]

    async with responder_on(embedded_settings, unread), client_on(embedded_settings) as relay:
        with pytest.raises(error, match="the reason"):
            await relay.rank(request(), timeout=PATIENCE_S)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
async def test_scores_that_are_no_numbers_are_a_failure_of_the_worker(embedded_settings: Kafka, value: float) -> None:
    def spoiled(request: RankingRequest) -> list[ScoreReply | bytes]:
        scores = scores_for(request)
        scores[1, 0] = value
        return [msgspec.structs.replace(scored(request), scores=scores.tobytes(), worker="w9")]

    async with responder_on(embedded_settings, spoiled), client_on(embedded_settings) as relay:
        with pytest.raises(WorkerFailed, match="w9 answered scores that are NaN or infinite"):
            await relay.rank(request(), timeout=PATIENCE_S)


def client_with(kafka: Kafka, secret: str, accepted: str = "", **client: Any) -> RelayClient:
    relay = Relay(answer_secret=secret, accepted_answer_secret=accepted)
    return RelayClient(settings=Settings(kafka=kafka, relay=relay, client=Client(**client)))


async def test_with_a_secret_only_signed_answers_count(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings) as peer, client_with(embedded_settings, SECRET, hedge_ms=0.0) as relay:
        ranking, record, sent = await unanswered(peer, relay)
        correlation = dict(record.headers)[HEADER_CORRELATION]
        evil, true = encode(forged(sent)), encode(scored(sent))
        for signature in (
            None,
            b"",
            answer_signature("another secret of sixteen", correlation, evil),
            answer_signature(SECRET, b"another call", evil),
            answer_signature(SECRET, correlation, true),
            answer_signature(SECRET, correlation, evil)[:31],
        ):
            await send(peer, record, evil, *([] if signature is None else [(HEADER_SIGNATURE, signature)]))
        await send(peer, record, b"\xc1")
        await until(lambda: count(relay, "answers_dropped", reason="forged") == 7)
        assert not ranking.done()
        await send(peer, record, true, (HEADER_SIGNATURE, answer_signature(SECRET, correlation, true)))
        assert (await ranking).worker == "peer"


@pytest.mark.parametrize("by", [SECRET, "the next secret of sixteen"])
async def test_while_the_secret_is_changed_answers_by_either_count(embedded_settings: Kafka, by: str) -> None:
    client = client_with(embedded_settings, SECRET, "the next secret of sixteen", hedge_ms=0.0)
    async with responder_on(embedded_settings) as peer, client as relay:
        ranking, record, sent = await unanswered(peer, relay)
        correlation = dict(record.headers)[HEADER_CORRELATION]
        evil, true = encode(forged(sent)), encode(scored(sent))
        await send(peer, record, evil, (HEADER_SIGNATURE, answer_signature(by + "x", correlation, evil)))
        await send(peer, record, true, (HEADER_SIGNATURE, answer_signature(by, correlation, true)))
        assert (await ranking).worker == "peer"
        assert count(relay, "answers_dropped", reason="forged") == 1


def test_an_accepted_secret_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"`relay\.accepted_answer_secret` is set without `relay\.answer_secret`"):
        client_with(Kafka(), "", SECRET)


async def test_a_worker_signs_as_documented_and_its_clients_believe_it(embedded_settings: Kafka) -> None:
    settings = worker_settings(embedded_settings)
    settings = msgspec.structs.replace(settings, relay=msgspec.structs.replace(settings.relay, answer_secret=SECRET))
    answers: list[Record] = []
    topic = load_topics(embedded_settings).scores
    async with (
        Peer(embedded_settings),
        worker_on(settings),
        TopicTail(embedded_settings, topic.name, range(topic.partitions), "latest", answers.extend),
    ):
        asked = RankingRequest(request_id="r", user_id="u", prefix=history("u", 40), candidates=bytes(8))
        async with RelayClient(settings=settings) as relay:
            assert (await relay.rank(asked, timeout=PATIENCE_S)).scores.shape == (2, 2)
        await until(lambda: answers, "read by the other reader, too")
        (answer,) = answers
        headers = dict(answer.headers)
        parts = (b"answer", headers[HEADER_CORRELATION], answer.value or b"")
        framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        assert headers[HEADER_SIGNATURE] == hmac.new(SECRET.encode(), framed, "sha256").digest()
        async with client_with(embedded_settings, "another secret of sixteen", hedge_ms=0.0) as stranger:
            waiting = asyncio.create_task(stranger.rank(asked, timeout=60.0))
            await until(lambda: count(stranger, "answers_dropped", reason="forged") == 1)
            assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


def test_the_secret_is_shown_nowhere() -> None:
    assert SECRET not in repr(Relay(answer_secret=SECRET))
    assert SECRET not in str(Settings(relay=Relay(answer_secret=SECRET)))
