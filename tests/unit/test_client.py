"""RelayClient on real topics, with a peer that answers: scores find their calls, and every call ends typed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from aiokafka import TopicPartition
from opentelemetry.sdk.trace import TracerProvider

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.client import Ranking, RelayClient
from relaygr_stream.client import messages as client_messages
from relaygr_stream.client.exchange import Exchange
from relaygr_stream.client.sender import Sender
from relaygr_stream.errors import (
    BrokerUnavailable,
    ConfigError,
    DeadlineExceeded,
    Overloaded,
    Rejected,
    RequestError,
    TopicError,
    WorkerFailed,
)
from relaygr_stream.settings.schema import Kafka, Relay, Settings
from relaygr_stream.telemetry.tracing import Tracing
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import RankingRequest, RequestEvent, ScoreReply, Timings
from relaygr_stream.wire.records import HEADER_CORRELATION
from relaygr_stream.wire.topic_files import lane_of, load_topics
from tests.bus import insides
from tests.unit.client_peers import (
    PATIENCE_S,
    TASKS,
    Answers,
    client_on,
    count,
    event,
    request,
    responder_on,
    scored,
    scores_for,
)
from tests.unit.trigger.parts import worker_status
from tests.waiting import until


def nothing(request: RankingRequest) -> list[ScoreReply | bytes]:
    return []


async def test_a_ranking_request_gets_its_scores(kafka_settings: Kafka) -> None:
    async with responder_on(kafka_settings) as peer, client_on(kafka_settings, reply_partition=3) as relay:
        before = int(time.time() * 1000)
        ranking = await relay.rank(request(candidates=[5, 2**32 - 1]), timeout=PATIENCE_S)
        assert isinstance(ranking, Ranking)
        assert ranking.request_id == "r-0"
        assert ranking.scores.dtype == np.float32
        assert ranking.scores.tolist() == [[5.0, -5.0], [2.0**32, -(2.0**32)]]
        assert (ranking.tasks, ranking.outcome, ranking.truncated_to) == (TASKS, "hbm", 0)
        assert (ranking.worker, ranking.model_version) == ("peer", "m-1")
        assert ranking.timings == Timings(queued_ms=1.5, device_ms=2.5, computed_tokens=3)
        assert 0 < ranking.latency_s < PATIENCE_S
        ((record, sent),) = peer.requests
        assert record.key == b"u"
        assert record.lane == lane_of("u", 8)
        assert dict(record.headers)["relaygr-reply-partition"] == b"3"
        assert 1 <= len(dict(record.headers)[HEADER_CORRELATION]) <= 64
        assert before <= sent.sent_ms <= int(time.time() * 1000)
        assert sent.timeout_ms == PATIENCE_S * 1000
        assert count(relay, "rankings", outcome="hbm") == 1


async def test_a_client_that_is_opened_again_traces_anew(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on with spans of the former opening, whose exporter had ended."""
    opened: list[Tracing] = []

    @asynccontextmanager
    async def traced(*_: object) -> AsyncIterator[Tracing]:
        opened.append(Tracing(TracerProvider(shutdown_on_exit=False)))
        yield opened[-1]

    monkeypatch.setattr(client_messages, "tracing_of", traced)
    await apply_topics(embedded_settings)
    relay = RelayClient(settings=Settings(kafka=embedded_settings))
    for openings in (1, 2):
        async with relay:
            assert len(opened) == openings


async def test_a_truncated_ranking_says_with_how_many_behaviours(embedded_settings: Kafka) -> None:
    def cut(request: RankingRequest) -> list[ScoreReply | bytes]:
        return [msgspec.structs.replace(scored(request), outcome="truncated", truncated_to=256)]

    async with responder_on(embedded_settings, cut), client_on(embedded_settings) as relay:
        ranking = await relay.rank(request(), timeout=PATIENCE_S)
        assert (ranking.outcome, ranking.truncated_to) == ("truncated", 256)
        assert count(relay, "rankings", outcome="truncated") == 1


async def test_an_announced_event_reaches_retrieval_on_its_users_lane(kafka_settings: Kafka) -> None:
    async with responder_on(kafka_settings) as peer, client_on(kafka_settings) as relay:
        before = int(time.time() * 1000)
        for number in range(20):
            await relay.announce(event(number, f"user-{number}"))
        await until(lambda: len(peer.events) == 20)
        for record in peer.events:
            got = decode(RequestEvent, record.value)
            assert record.key == got.user_id.encode()
            assert record.lane == lane_of(got.user_id, 8)
            assert before <= got.sent_ms <= int(time.time() * 1000)
            assert msgspec.structs.replace(got, sent_ms=0) == event(int(got.request_id[2:]), got.user_id)
        await until(lambda: count(relay, "announcements", outcome="sent") == 20)


async def test_hundreds_of_concurrent_calls_each_get_their_own_scores(kafka_settings: Kafka) -> None:
    calls = 200
    async with responder_on(kafka_settings) as peer, client_on(kafka_settings) as relay:
        peer.hold = True
        requests = [request(number, [number, number + 1], f"user-{number}") for number in range(calls)]
        ranking = asyncio.gather(*(relay.rank(each, timeout=60) for each in requests))
        await until(lambda: len(peer.held) == calls)
        random.Random(7).shuffle(peer.held)
        peer.release()
        for each, got in zip(requests, await ranking, strict=True):
            assert got.request_id == each.request_id
            np.testing.assert_array_equal(got.scores, scores_for(each))
        assert relay.in_flight == 0


async def test_clients_of_one_reply_partition_do_not_disturb_each_other(kafka_settings: Kafka) -> None:
    async with (
        responder_on(kafka_settings),
        client_on(kafka_settings, reply_partition=0) as one,
        client_on(kafka_settings, reply_partition=0) as other,
    ):
        first, second = await asyncio.gather(
            one.rank(request(1, [1]), timeout=PATIENCE_S), other.rank(request(2, [2]), timeout=PATIENCE_S)
        )
        assert (first.scores[0, 0], second.scores[0, 0]) == (1.0, 2.0)
        await until(lambda: count(one, "answers_dropped", reason="foreign") == 1)
        await until(lambda: count(other, "answers_dropped", reason="foreign") == 1)


async def test_records_of_a_reply_partition_that_are_no_answers_are_dropped(embedded_settings: Kafka) -> None:
    """Null for a header's value is allowed by Kafka; it once ended the reading of answers, and so every call."""
    async with responder_on(embedded_settings), client_on(embedded_settings, reply_partition=0) as relay:
        scores = load_topics(embedded_settings).scores.name
        async with Producer(embedded_settings, client_id="stranger") as stranger:
            null: Any = [(HEADER_CORRELATION, None)]
            await stranger.send_and_wait(scores, b"\xc1", partition=0, headers=null)
            await stranger.send_and_wait(scores, b"\xc1", partition=0)
        await until(lambda: count(relay, "answers_dropped", reason="foreign") == 2)
        assert (await relay.rank(request(1, [1]), timeout=PATIENCE_S)).scores.shape == (1, 2)


async def test_without_an_answer_the_deadline_is_typed_and_a_late_answer_is_dropped(kafka_settings: Kafka) -> None:
    async with responder_on(kafka_settings) as peer, client_on(kafka_settings, timeout_ms=300) as relay:
        peer.hold = True
        with pytest.raises(DeadlineExceeded, match="no answer within 300 ms"):
            await relay.rank(request(1))
        with pytest.raises(DeadlineExceeded, match="no answer within 100 ms"):
            await relay.rank(request(2), timeout=0.1)
        with pytest.raises(DeadlineExceeded, match="too late before it was sent"):
            await relay.rank(request(3), timeout=0)
        assert relay.in_flight == 0
        await until(lambda: len(peer.held) == 2)
        peer.release()
        await until(lambda: count(relay, "answers_dropped", reason="late") == 2)
        assert count(relay, "rankings", outcome="DeadlineExceeded") == 3


async def test_a_client_that_is_open_is_connected_to_the_brokers_of_its_lanes(
    kafka_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first requests wait for metadata and connections, and take that for the brokers' silence."""
    connected, answers = set[int](), Producer.answers

    async def noted(producer: Producer, broker: int, within_s: float) -> bool:
        connected.update([broker] if await answers(producer, broker, within_s) else [])
        return True

    monkeypatch.setattr(Producer, "answers", noted)
    async with responder_on(kafka_settings), client_on(kafka_settings, "just-opened"):
        cluster, topics = insides.producer("just-opened").client.cluster, load_topics(kafka_settings)
        lanes = [TopicPartition(topics.ranking.name, lane) for lane in range(topics.lanes)]
        assert connected == {cluster.leader_for_partition(lane) for lane in lanes}


async def test_what_comes_with_the_deadline_on_a_busy_loop_is_told(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(_: Exchange) -> None:
        time.sleep(0.1)

    def away(*_: object, **__: object) -> None:
        raise BrokerUnavailable("broker 3 is away")

    async with responder_on(embedded_settings), client_on(embedded_settings) as relay:
        with monkeypatch.context() as broken:
            broken.setattr(Exchange, "_rearm", busy)
            broken.setattr(Sender, "check", away)
            with pytest.raises(BrokerUnavailable, match="broker 3 is away"):
                await relay.rank(request(0), timeout=0.05)


async def test_a_ranking_that_never_left_says_so(embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    async with responder_on(embedded_settings), client_on(embedded_settings) as relay:
        with monkeypatch.context() as busy:
            busy.setattr(Producer, "send_now", lambda *_: False)
            busy.setattr(Producer, "send_together", never)
            with pytest.raises(DeadlineExceeded, match="not sent within 100 ms"):
                await relay.rank(request(0), timeout=0.1)
        assert (await relay.rank(request(1), timeout=PATIENCE_S)).outcome == "hbm"


async def test_the_first_of_two_answers_counts(embedded_settings: Kafka) -> None:
    def twice(request: RankingRequest) -> list[ScoreReply | bytes]:
        return [scored(request), msgspec.structs.replace(scored(request), worker="second"), b"\xc1"]

    async with responder_on(embedded_settings, twice) as peer, client_on(embedded_settings) as relay:
        assert (await relay.rank(request(), timeout=PATIENCE_S)).worker == "peer"
        await until(lambda: count(relay, "answers_dropped", reason="duplicate") == 2)
        assert len(peer.requests) == 1


def refusing(status: Any, detail: str = "") -> Answers:
    return lambda request: [ScoreReply(request_id=request.request_id, status=status, detail=detail, worker="w7")]


REFUSALS: list[tuple[Answers, type[RequestError], str]] = [
    (refusing("deadline_exceeded", "late by 3 ms"), DeadlineExceeded, "late by 3 ms"),
    (refusing("overloaded"), Overloaded, "worker w7 answered overloaded"),
    (refusing("rejected", "too many candidates"), Rejected, "too many candidates"),
    (refusing("failed"), WorkerFailed, "worker w7 answered failed"),
    (lambda _: [b"\xc1"], WorkerFailed, "the worker's answer cannot be read: malformed"),
    (lambda _: [b""], WorkerFailed, "cannot be read"),
    (refusing("ok"), WorkerFailed, "answered 0 rows for 3 candidates"),
    (
        lambda request: [msgspec.structs.replace(scored(request), scores=bytes(16))],
        WorkerFailed,
        "worker peer answered 2 rows for 3 candidates, outcome hbm",
    ),
    (lambda request: [msgspec.structs.replace(scored(request), outcome=None)], WorkerFailed, "outcome None"),
]


async def test_an_answer_without_scores_is_a_typed_error(embedded_settings: Kafka, subtests: pytest.Subtests) -> None:
    ended: Counter[str] = Counter()
    async with responder_on(embedded_settings) as peer, client_on(embedded_settings) as relay:
        for number, (answers, error, message) in enumerate(REFUSALS):
            with subtests.test(message):
                peer.answers = answers
                with pytest.raises(error, match=message):
                    await relay.rank(request(number), timeout=PATIENCE_S)
                ended[error.__name__] += 1
                assert count(relay, "rankings", outcome=error.__name__) == ended[error.__name__]
                assert relay.in_flight == 0


async def test_a_cancelled_call_leaves_nothing_behind(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings) as peer, client_on(embedded_settings) as relay:
        peer.hold = True
        calls = [asyncio.create_task(relay.rank(request(number), timeout=PATIENCE_S)) for number in range(50)]
        await until(lambda: len(peer.held) == 50)
        assert relay.in_flight == 50
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        assert relay.in_flight == 0
        peer.release()
        await until(lambda: count(relay, "answers_dropped", reason="late") == 50)


async def test_closing_fails_the_calls_under_way_and_every_later_one(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings, nothing) as peer:
        relay = client_on(embedded_settings)
        with pytest.raises(RequestError, match="the client is not open"):
            await relay.rank(request())
        async with relay:
            calls = [asyncio.create_task(relay.rank(request(number), timeout=PATIENCE_S)) for number in range(50)]
            await until(lambda: len(peer.requests) == 50)
            started = time.monotonic()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert time.monotonic() - started < PATIENCE_S / 2
        assert all(type(error) is RequestError and "the client was closed" in str(error) for error in ended)
        for late in (relay.rank(request()), relay.announce(event())):
            with pytest.raises(RequestError, match="the client was closed"):
                await late


def behaviours(count: int) -> Behaviours:
    return Behaviours.from_arrays(np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64))


def at(time_ms: int) -> Behaviours:
    return Behaviours(bytes(4), bytes(1), time_ms.to_bytes(8, "little", signed=True))


def long_event(count: int) -> RequestEvent:
    return msgspec.structs.replace(event(), prefix=behaviours(count), sent_ms=2**52)  # stamped with as many bytes


LIMITS = Relay(max_prefix_tokens=200_000, max_suffix_tokens=5, max_candidates=10)


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"candidates": b""}, "candidates must be m ≥ 1 uint32"),
    ({"candidates": b"abc"}, "candidates must be m ≥ 1 uint32"),
    ({"candidates": pack_items(list(range(11)))}, r"11 candidates, the limit is 10 \(relay.max_candidates\)"),
    (
        {"suffix": msgspec.structs.replace(behaviours(6), times=np.full(6, 1 << 61).tobytes())},
        r"6 suffix behaviours, .*relay.max_suffix_tokens",
    ),
    ({"prefix": behaviours(200_001)}, "ranking takes 1048576"),
    ({"prefix": behaviours(90_000)}, "ranking takes 1048576"),
    ({"prefix": Behaviours(items=b"abcd")}, "parallel arrays"),
    ({"prefix": at(1 << 62)}, "times must be Unix milliseconds; the behaviours are from 4611686018427387904"),
    ({"suffix": at(-(1 << 62))}, "times must be Unix milliseconds"),
    ({"user_id": ""}, "Expected `str` of length >= 1"),
    ({"user_id": "\ud800"}, "not a valid RankingRequest"),
    ({"user_id": 7}, "Expected `str`, got `int`"),
    ({"candidates": np.arange(3)}, "not a valid RankingRequest"),
    ({"hops": 3}, "not a valid RankingRequest"),
]


async def test_an_invalid_request_is_rejected_before_it_is_sent(
    embedded_settings: Kafka, subtests: pytest.Subtests
) -> None:
    async with responder_on(embedded_settings) as peer:
        async with RelayClient(settings=Settings(kafka=embedded_settings, relay=LIMITS)) as relay:
            for changes, message in INVALID:
                with subtests.test(message):
                    bad = request()
                    for name, value in changes.items():
                        bad = msgspec.structs.replace(bad, **{name: value})
                    with pytest.raises(Rejected, match=message):
                        await relay.rank(bad, timeout=1)
                    assert relay.in_flight == 0
        assert peer.requests == []


async def test_a_message_up_to_the_topics_limit_arrives_and_one_beyond_it_is_rejected(kafka_settings: Kafka) -> None:
    settings = Settings(kafka=kafka_settings, relay=LIMITS)
    async with responder_on(kafka_settings) as peer, RelayClient(settings=settings) as relay:
        fits = long_event((1_048_576 - 600) // 13)
        await relay.announce(fits)
        await until(lambda: peer.events)
        ranked = msgspec.structs.replace(request(), prefix=fits.prefix)
        assert (await relay.rank(ranked, timeout=PATIENCE_S)).outcome == "hbm"
        # As a value it fits by itself, but not with what Kafka adds.
        count = next(n for n in range(80_659, 0, -1) if len(encode(long_event(n))) <= 1_048_576)
        with pytest.raises(Rejected, match=r"\d+ bytes with headers, .*retrieval takes 1048576"):
            await relay.announce(long_event(count))


async def test_more_calls_than_allowed_are_overload(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings) as peer, client_on(embedded_settings, max_in_flight=5) as relay:
        peer.hold = True
        calls = [asyncio.create_task(relay.rank(request(number), timeout=PATIENCE_S)) for number in range(5)]
        await until(lambda: len(peer.held) == 5)
        with pytest.raises(Overloaded, match=r"5 calls are under way"):
            await relay.rank(request(6))
        peer.release()
        await asyncio.gather(*calls)
        peer.hold = False
        await relay.rank(request(7), timeout=PATIENCE_S)


async def test_a_client_checks_broker_topics_and_settings_at_its_start(
    embedded_settings: Kafka, unused_tcp_port: int
) -> None:
    with pytest.raises(TopicError, match="missing on the cluster"):
        await client_on(embedded_settings).__aenter__()
    with pytest.raises(BrokerUnavailable, match="no Kafka broker answers"):
        await RelayClient(f"127.0.0.1:{unused_tcp_port}", settings=Settings(kafka=embedded_settings)).__aenter__()
    await apply_topics(embedded_settings)
    with pytest.raises(ConfigError, match=r"`client.reply_partition` = 16: .*scores has partitions 0…15"):
        await client_on(embedded_settings, reply_partition=16).__aenter__()


async def test_settings_come_from_the_environment_unless_given(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    await apply_topics(embedded_settings)
    monkeypatch.setenv("RELAYGR_KAFKA_PREFIX", embedded_settings.prefix)
    monkeypatch.setenv("RELAYGR_KAFKA_PARTITIONS", "8")
    async with RelayClient(embedded_settings.bootstrap) as relay:
        await relay.announce(event())
        await until(lambda: count(relay, "announcements", outcome="sent") == 1, "sent")
        assert relay.lane("u") == lane_of("u", 8)


async def test_a_client_knows_whether_a_worker_serves(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings), client_on(embedded_settings, silence_ms=60_000.0) as relay:
        assert not await relay.worker_serves(0.2)
        async with Producer(embedded_settings, client_id="w") as producer:
            topic = load_topics(embedded_settings).worker_status.name
            waiting = asyncio.create_task(relay.worker_serves(60.0))
            for state in ("starting", "serving"):
                status = worker_status(name="w")
                status = msgspec.structs.replace(status, state=state)
                await producer.send_and_wait(topic, encode(status), key=b"w")
            assert await waiting
