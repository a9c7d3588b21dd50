"""A client goes on when one of its parts does not: a refusal, an end inside aiokafka, no `worker-status`, one broker of
several away, or all of them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import structlog
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import TopicAuthorizationFailedError

from relaygr_stream.bus.producer import NO_LEADER, Outgoing, Producer, Settle
from relaygr_stream.bus.renewed import background_tasks
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.client.sender import SILENT_S, Sender
from relaygr_stream.errors import BrokerError, BrokerUnavailable, DeadlineExceeded, RelayError, TopicError
from relaygr_stream.ops.brokers.local import local_broker
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import load_topics
from tests.bus import insides
from tests.unit.client_peers import PATIENCE_S, client_on, event, request, responder_on
from tests.waiting import WITHIN_S, Clock, until


def tails_of(relay: RelayClient, topic: str) -> list[AIOKafkaConsumer]:
    """The readers of a topic that are open in this process; the responder has none of what a client reads."""
    return [each for each in insides.open_consumers() if {tp.topic for tp in each.assignment()} == {topic}]


def refuse(consumer: AIOKafkaConsumer, topic: str) -> asyncio.Event:
    """The next read is refused, once."""
    real, refused = consumer.getmany, asyncio.Event()

    async def getmany(*partitions: TopicPartition, **options: Any) -> Any:
        if refused.is_set():
            return await real(*partitions, **options)
        refused.set()
        raise TopicAuthorizationFailedError(topic)

    consumer.getmany = getmany
    return refused


@pytest.mark.parametrize("kind", ["scores", "worker_status"])
async def test_a_refusal_ends_no_client(embedded_settings: Kafka, kind: str) -> None:
    """One refusal on `worker-status`, which only hedges need, ended every later call."""
    topic = getattr(load_topics(embedded_settings), kind).name
    async with responder_on(embedded_settings), client_on(embedded_settings, timeout_ms=30_000.0) as relay:
        await relay.rank(request(0))
        (reader,) = tails_of(relay, topic)
        refused = refuse(reader, topic)
        await asyncio.wait_for(refused.wait(), WITHIN_S)
        for number in range(1, 4):
            assert (await relay.rank(request(number))).outcome == "hbm"
        await until(lambda: tails_of(relay, topic) not in ([], [reader]), "read on by another")


async def test_ends_inside_aiokafka_end_no_client(embedded_settings: Kafka) -> None:
    async with responder_on(embedded_settings), client_on(embedded_settings, "robust", timeout_ms=30_000.0) as relay:
        await relay.rank(request(0))
        (reader,) = tails_of(relay, load_topics(embedded_settings).scores.name)
        background_tasks(reader)["fetcher"].cancel()
        assert (await relay.rank(request(1))).outcome == "hbm"
        producer = insides.producer("robust")
        background_tasks(producer)["sender"].cancel()
        await until(lambda: insides.closed(producer), "given up for another")
        assert (await relay.rank(request(2))).outcome == "hbm"
        made_anew = relay.registry.get_sample_value("relaygr_parts_made_anew_total", {"part": "a producer"})
        assert made_anew is not None


async def test_without_worker_status_a_client_only_stops_hedging(embedded_settings: Kafka) -> None:
    topic = load_topics(embedded_settings).worker_status.name
    async with responder_on(embedded_settings):
        admin = AIOKafkaAdminClient(bootstrap_servers=embedded_settings.bootstrap)
        await admin.start()
        await admin.delete_topics([topic])
        await admin.close()
        with structlog.testing.capture_logs() as logs:
            async with client_on(embedded_settings) as relay:
                for number in range(3):
                    assert (await relay.rank(request(number), timeout=30.0)).outcome == "hbm"
        assert [entry["topic"] for entry in logs if "not hedged" in entry["event"]] == [topic]


class ThreeBrokers:
    """A producer whose partitions are led in turn by brokers 0, 1 and 2; some answer nothing."""

    def __init__(self, silent: Sequence[int]) -> None:
        self.silent = silent
        self.led = True
        self.throttled = 0.0
        self.asked_s: list[int] = []  # brokers of which it was asked how long they throttle

    def throttled_s(self, topic: str, partition: int) -> float:
        self.asked_s.append(partition % 3)
        return self.throttled

    def broker_of(self, topic: str, partition: int) -> int:
        return partition % 3 if self.led else NO_LEADER

    async def answers(self, broker: int, within_s: float) -> bool:
        return broker not in self.silent

    def send_now(
        self, topic: str, key: object, value: object, headers: object, partition: int, settled: Settle
    ) -> bool:
        if partition % 3 not in self.silent:
            asyncio.get_running_loop().call_soon(settled, 0)
        return True


async def test_a_throttled_broker_takes_what_leaves_in_time_and_is_not_away() -> None:
    producer, now = ThreeBrokers(silent=[0]), 0.0
    sender = Sender(producer, "brokers", lambda: now)  # type: ignore[arg-type]
    producer.throttled = 2.0
    with pytest.raises(BrokerUnavailable, match=r"broker 0 throttles this client by a quota.* another 2\.0 s"):
        sender.check("ranking", 0, patience_s=1.0)
    sender.check("ranking", 0, patience_s=4.1)
    now = 10.0
    assert sender.waits_s("ranking", [0])[0] == 0.0, "a copy would be throttled, too"
    producer.throttled = 0.05
    sender.check("retrieval", 0)
    producer.throttled = 0.2
    with pytest.raises(BrokerUnavailable, match="quota"):
        sender.check("retrieval", 0)  # nobody waits for an event


async def test_silence_of_one_broker_is_not_that_of_all() -> None:
    producer = ThreeBrokers(silent=[0])
    clock = Clock(100.0)
    sender = Sender(producer, "b0,b1,b2", clock)  # type: ignore[arg-type]
    errors: list[object] = []

    async def send(partition: int) -> None:
        sender.send("ranking", Outgoing(b"", b""), partition=partition, patience_s=1.0, settled=errors.append)

    for _ in range(3):
        await send(0)
        clock.now += 0.6
    assert clock.now - 100.0 > SILENT_S
    for partition in (1, 2, 1):
        await send(partition)
        await asyncio.sleep(0)
    assert errors == [None, None, None]
    with pytest.raises(BrokerUnavailable, match=r"broker 0 of b0,b1,b2 has .* nothing for 1\.8 s; 3 messages"):
        await send(0)
    producer.silent = []
    await sender.probe()
    await send(0)  # the one that finds out
    await asyncio.sleep(0)
    await send(0)


@pytest.mark.parametrize("pause_s", [0.5, SILENT_S, 3 * SILENT_S + 1, 60.0])
async def test_no_call_waits_out_its_timeout_for_a_broker_that_is_away(pause_s: float) -> None:
    """One call every SILENT_S passed as a probe, and every one where calls are rare: 504 after a second, not 503."""
    producer, clock, passed = ThreeBrokers(silent=[0]), Clock(100.0), 0
    sender = Sender(producer, "b0,b1,b2", clock)  # type: ignore[arg-type]
    for number in range(12):
        try:
            sender.check("retrieval" if number % 2 else "ranking", 0, patience_s=1.0)
            passed += 1
        except BrokerUnavailable:
            assert sender.waits_s("ranking", [0])[0] > SILENT_S
        await sender.probe()
        clock.now += pause_s
    assert passed == sum(number * pause_s <= SILENT_S for number in range(12))
    producer.silent = []
    await sender.probe()
    assert sender.waits_s("ranking", [0])[0] == 0
    sender.check("ranking", 0, patience_s=1.0)
    with pytest.raises(BrokerUnavailable):  # until the first is acknowledged
        sender.check("ranking", 0, patience_s=1.0)


async def test_a_broker_that_acknowledges_nothing_makes_all_of_its_lanes_wait() -> None:
    """Each lane waited for a send of its own, and hedges went to lanes of the same dead broker."""
    producer = ThreeBrokers(silent=[0])
    clock = Clock(100.0)
    sender = Sender(producer, "b0,b1,b2", clock)  # type: ignore[arg-type]

    async def send(partition: int) -> None:
        sender.send("ranking", Outgoing(b"", b""), partition=partition, patience_s=1.0, settled=lambda error: None)
        await asyncio.sleep(0)

    for partition in (0, 1, 2):
        await send(partition)
    assert not any(sender.waits_s("ranking", range(6)).values())
    clock.now += 0.5
    looked_at = len(producer.asked_s)
    assert list(sender.waits_s("ranking", range(6)).values()) == [0.5, 0.0, 0.0] * 2
    assert producer.asked_s[looked_at:] == [0, 1, 2], "each broker is looked at once"
    producer.silent = []
    await send(3)
    assert not sender.waits_s("ranking", [3])[3]
    clock.now += 60.0
    assert not sender.waits_s("ranking", [6])[6], "it is long ago that this broker was silent"
    producer.led = False
    assert sender.waits_s("ranking", [6])[6] == math.inf


async def test_a_defect_in_sending_is_told_at_once(embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    async with responder_on(embedded_settings), client_on(embedded_settings, timeout_ms=30_000.0) as relay:
        with monkeypatch.context() as broken:
            broken.setattr(Sender, "check", lambda *_: 1 / 0)
            with pytest.raises(BrokerError, match="ZeroDivisionError"):
                await relay.rank(request(0))
        with monkeypatch.context() as broken:  # where the buffer is full
            broken.setattr(Producer, "send_now", lambda *_: False)
            broken.setattr(Producer, "_send_later", lambda *_: 1 / 0)
            with pytest.raises(BrokerError, match="ZeroDivisionError"):
                await relay.rank(request(0))
        assert (await relay.rank(request(1))).outcome == "hbm"


# ---- no broker ----


def listening_on(port: int) -> psutil.Process:
    """The process below this one that listens on this port."""
    (found,) = (
        process
        for process in psutil.Process().children(recursive=True)
        for socket in process.net_connections("tcp")
        if socket.status == psutil.CONN_LISTEN and socket.laddr.port == port
    )
    return found


async def test_calls_with_more_patience_than_the_silence_wait_for_the_broker(tmp_path: Path) -> None:
    async with local_broker("embedded", folder=tmp_path) as broker:
        kafka = broker.kafka_settings(Kafka(prefix="paused.", partitions=2))
        async with responder_on(kafka), client_on(kafka) as relay:
            await relay.rank(request(), timeout=PATIENCE_S)
            process = listening_on(int(broker.bootstrap.rpartition(":")[2]))
            process.suspend()

            async def ask_in_vain() -> None:
                while True:
                    with suppress(DeadlineExceeded):
                        await relay.rank(request(), timeout=0.2)

            with pytest.raises(BrokerUnavailable, match="has acknowledged nothing for"):
                await ask_in_vain()
            patient = [asyncio.create_task(relay.rank(request(number), timeout=PATIENCE_S)) for number in range(5)]
            await asyncio.sleep(0.1)
            assert not any(call.done() for call in patient)
            process.resume()
            await asyncio.gather(*patient)


@pytest.mark.stack
async def test_while_the_broker_is_away_every_call_ends_typed_and_it_recovers_by_itself(tmp_path: Path) -> None:
    async with local_broker("embedded", folder=tmp_path) as broker:
        kafka = broker.kafka_settings(Kafka(prefix="away.", partitions=4, request_timeout_ms=3000))
        async with responder_on(kafka) as peer, client_on(kafka, timeout_ms=400, reply_partition=0) as relay:
            await relay.rank(request(), timeout=PATIENCE_S)
            broker.stop()
            errors: list[RelayError] = []
            took: list[float] = []
            stopped = time.monotonic()
            late: list[RelayError] = []

            async def try_once(number: int, timeout: float | None = None) -> None:
                started = time.monotonic()
                try:
                    await relay.announce(event(number))
                    await relay.rank(request(number), timeout=timeout)
                except RelayError as error:
                    errors.append(error)
                    if started - stopped > 2 * SILENT_S and isinstance(error, DeadlineExceeded):
                        late.append(error)
                took.append(time.monotonic() - started)

            for number in range(40):
                await asyncio.gather(*(try_once(number) for _ in range(5)))
                await asyncio.sleep(0.05)
            assert len(errors) == 200
            assert {type(error) for error in errors} <= {DeadlineExceeded, BrokerUnavailable}
            # One that waits takes its timeout of 0.4 s at least.
            at_once = [seconds for seconds in took if seconds < 0.4]
            assert len(at_once) > 100  # after the first ones have waited in vain
            assert not late, "a call waited for a broker that is known to be away"
            assert relay.in_flight == 0

            # The embedded broker forgets its topics. With empty logs: what fills them up to where the readers were is
            # lost, call by call.
            await broker.start()
            await apply_topics(kafka)
            deadline = time.monotonic() + 4 * PATIENCE_S  # each of the lost ones waits for its timeout
            heard = len(peer.requests)
            while errors:
                since = f"the responder has read {len(peer.requests) - heard} requests since"
                assert time.monotonic() < deadline, (errors, since)
                errors.clear()
                await try_once(1, timeout=1.0)
                await asyncio.sleep(0.05)


@pytest.mark.stack
async def test_a_client_whose_reply_partition_is_gone_says_so(tmp_path: Path) -> None:
    """`scores` was deleted and made with fewer partitions: calls waited for answers that nobody could send."""
    async with local_broker("embedded", folder=tmp_path) as broker:
        kafka = broker.kafka_settings(Kafka(prefix="gone.", partitions=4, request_timeout_ms=3000))
        async with responder_on(kafka), client_on(kafka, timeout_ms=400, reply_partition=9) as relay:
            await relay.rank(request(), timeout=PATIENCE_S)
            broker.stop()  # the embedded broker forgets its topics
            await broker.start()
            async with AsyncExitStack() as closing:
                admin = AIOKafkaAdminClient(bootstrap_servers=kafka.bootstrap)
                await admin.start()
                closing.push_async_callback(admin.close)
                await admin.create_topics([NewTopic(topic.name, 4, 1) for topic in load_topics(kafka).all])
            ended: list[RelayError] = []
            async with asyncio.timeout(2 * PATIENCE_S):
                while not (ended and isinstance(ended[-1], TopicError)):
                    try:
                        await relay.rank(request(1))
                    except RelayError as error:
                        ended.append(error)
            assert "has 4 partitions now" in str(ended[-1])
            assert isinstance(relay.error, TopicError), "a gateway ends by it, and its supervisor opens a new client"
            assert {type(error) for error in ended[:-1]} <= {DeadlineExceeded, BrokerUnavailable, BrokerError}
