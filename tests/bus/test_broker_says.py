"""What a broker says, and aiokafka does not pass on: addresses that nobody reaches, codes without a name, quotas."""

from __future__ import annotations

import asyncio
import os
import re
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiokafka.errors
import numpy as np
import pytest

from relaygr_stream.bus.broker_errors import FIRST_UNKNOWN
from relaygr_stream.bus.producer import Outgoing, Producer
from relaygr_stream.bus.throttling import throttled_s
from relaygr_stream.bus.topics import apply_topics, describe_topics
from relaygr_stream.client.sender import Sender
from relaygr_stream.errors import BrokerError, BrokerUnavailable
from relaygr_stream.ops.brokers.distribution import DEFAULT_NODE, NodePlan, free_ports
from relaygr_stream.ops.brokers.local import LocalBroker, local_broker
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import load_topics
from tests.bus.members import Member
from tests.waiting import until

QUOTA = 20_000  # bytes a second


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalBroker, int]]:
    """A broker whose groups take one member, and the port of a listener that it advertises under a wrong name."""
    port, controller, outer = free_ports(3)
    plan = NodePlan(
        DEFAULT_NODE.heap,
        properties={
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller},OUTER://127.0.0.1:{outer}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port},OUTER://kafka-0.example.invalid:9092",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,OUTER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller}",
            "group.max.size": "1",
        },
    )
    runner = asyncio.Runner()
    context = local_broker("kafka", folder=tmp_path_factory.mktemp("odd"), node=plan, port=port)
    yield runner.run(context.__aenter__()), outer
    runner.run(context.__aexit__(None, None, None))
    runner.close()


def settings_on(broker: LocalBroker) -> Kafka:
    return broker.kafka_settings(Kafka(prefix=f"test-{uuid.uuid4().hex[:10]}.", partitions=2, session_timeout_ms=6000))


@pytest.mark.kafka
async def test_a_listener_that_cannot_be_reached_is_named(
    odd: tuple[LocalBroker, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaygr_stream.bus.topics.FENCING_S", 0.0)
    with pytest.raises(BrokerUnavailable) as raised:
        await describe_topics(Kafka(bootstrap=f"127.0.0.1:{odd[1]}"))
    told = str(raised.value)
    assert re.search(r"broker \d+ advertises kafka-0\.example\.invalid:9092", told), told
    assert "advertised.listeners" in told


@pytest.mark.kafka
async def test_a_full_group_is_named_by_kafkas_words(odd: tuple[LocalBroker, int]) -> None:
    kafka = settings_on(odd[0])
    await apply_topics(kafka)
    async with Member(kafka, load_topics(kafka), "one") as one:
        await until(lambda: one.lanes, "lanes")
        with pytest.raises(BrokerError, match=r"GROUP_MAX_SIZE_REACHED \(code 81\)"):
            await Member(kafka, load_topics(kafka), "two").consumer.start()


@pytest.mark.parametrize(
    ("code", "name"), [(81, "GROUP_MAX_SIZE_REACHED"), (133, "SHARE_SESSION_LIMIT_REACHED"), (140, "no name is known")]
)
def test_codes_that_aiokafka_does_not_know_have_kafkas_name(code: int, name: str) -> None:
    error = aiokafka.errors.for_code(code)
    assert error.errno == code
    assert name in str(error())
    assert f"code {code}" in repr(error())


def test_codes_that_aiokafka_knows_stay() -> None:
    assert aiokafka.errors.for_code(0) is aiokafka.errors.NoError
    assert aiokafka.errors.for_code(-1) is aiokafka.errors.UnknownError
    assert aiokafka.errors.for_code(79) is aiokafka.errors.MemberIdRequired
    assert aiokafka.errors.for_code(FIRST_UNKNOWN).errno == FIRST_UNKNOWN


async def _limit(broker: LocalBroker, client_id: str) -> None:
    script = Path(os.environ["KAFKA_HOME"]) / "bin" / "kafka-configs.sh"
    command = ("--bootstrap-server", broker.bootstrap, "--alter", "--entity-type", "clients", "--entity-name")
    quota = (client_id, "--add-config", f"producer_byte_rate={QUOTA}")
    process = await asyncio.create_subprocess_exec(script, *command, *quota, stdout=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0


@pytest.mark.kafka
async def test_of_twice_the_quota_about_half_leaves_in_time_and_the_rest_is_refused_at_once(
    odd: tuple[LocalBroker, int],
) -> None:
    """Each message is waited for one second; without the quota being read, all came later than that."""
    kafka, client = settings_on(odd[0]), f"limited-{uuid.uuid4().hex[:6]}"
    await apply_topics(kafka)
    topic = load_topics(kafka).ranking.name
    await _limit(odd[0], client)
    value, patience_s, loop = np.random.default_rng(1).bytes(4000), 1.0, asyncio.get_running_loop()
    outcomes: list[str] = []
    async with Producer(kafka, client_id=client, acks=1) as producer:
        sender = Sender(producer, kafka.bootstrap)

        async def one(number: int) -> None:
            began = loop.time()
            settled: asyncio.Future[BrokerError | None] = loop.create_future()
            try:
                rest = sender.send(
                    topic,
                    Outgoing(None, value),
                    partition=number % 2,
                    patience_s=patience_s,
                    settled=settled.set_result,
                )
                if rest is not None:
                    await rest
            except BrokerUnavailable as error:
                at_once = loop.time() - began < patience_s / 2
                outcomes.append("refused" if at_once and "quota" in str(error) else f"failed: {error}")
                return
            failed = await settled
            outcomes.append("late" if failed or loop.time() - began > patience_s else "sent")

        rate = 2 * QUOTA / len(value)
        for number in range(int(14 * rate)):  # the quota's window of 11 s has credit at first
            await one(number)
        outcomes.clear()
        sending = []
        for number in range(int(20 * rate)):
            sending.append(asyncio.create_task(one(number)))
            await asyncio.sleep(1 / rate)
        await asyncio.gather(*sending)
    counts = Counter(outcomes)
    assert counts["sent"] > 0.35 * len(outcomes), counts
    assert counts["refused"] > 0.25 * len(outcomes), counts
    assert counts["late"] < 0.15 * len(outcomes), counts
    assert throttled_s[client] > 1
