"""SASL and TLS against an Apache Kafka that insists on them; and what is said where they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import trustme
import uvloop
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.fetch import FetchRequest

from relaygr_stream.bus.aiokafka_compat import client_options
from relaygr_stream.bus.probe import check_connection
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics, verify_topics
from relaygr_stream.errors import AccessDenied, BrokerUnavailable
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import load_topics
from tests import needs
from tests.bus.members import Member
from tests.bus.secure_kafka import PASSWORD, SecureKafka, secure_kafka
from tests.waiting import until

pytestmark = pytest.mark.kafka

#: For so long event loops wait for the end of TLS from the other side.
SHUTDOWN_S = 30.0


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    needs.kafka_home()
    with secure_kafka(tmp_path_factory.mktemp("secure")) as broker:
        yield broker


async def check_every_client(kafka: Kafka) -> None:
    """Every kind of client: admin, producer, tail, and the two consumers of a worker."""
    await apply_topics(kafka)
    topics = load_topics(kafka)
    read: list[Record] = []
    async with (
        Producer(kafka, client_id="test") as producer,
        TopicTail(kafka, topics.worker_status.name, [0], "latest", read.extend),
        Member(kafka, topics, "w") as member,
    ):
        await until(lambda: len(member.lanes) == topics.lanes, "the lanes owned")
        await producer.send_and_wait(topics.worker_status.name, b"hello", key=b"w")
        await producer.send_and_wait(topics.ranking.name, b"rank", partition=1)
        await until(lambda: bool(read) and bool(member.values), "both read")
    assert [record.value for record in read] == [b"hello"]
    assert member.values == [b"rank"]


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
async def test_every_client_is_let_in_by_password(secure: SecureKafka, mechanism: str) -> None:
    await check_every_client(secure.sasl(sasl_mechanism=mechanism, prefix=f"{mechanism}."))


async def test_every_client_is_let_in_by_certificate(secure: SecureKafka) -> None:
    await check_every_client(secure.tls(prefix="tls."))


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
async def test_a_wrong_password_is_said_and_not_shown(secure: SecureKafka, mechanism: str) -> None:
    wrong = secure.sasl(sasl_password="not that one", sasl_mechanism=mechanism)
    with pytest.raises(AccessDenied, match=r"refused user 'relay' by") as raised:
        await verify_topics(wrong)
    assert "not that one" not in str(raised.value)
    assert PASSWORD not in str(raised.value)


async def test_a_refused_connection_is_closed_by_the_time_that_the_refusal_is_told(secure: SecureKafka) -> None:
    def open_ones() -> int:
        ours = psutil.Process().net_connections("tcp")
        return sum(one.raddr != () and one.raddr.port == secure.sasl_port for one in ours)

    before = open_ones()
    for password, refused in (("not that one", True), (PASSWORD, False)):
        with pytest.raises(AccessDenied) if refused else nullcontext():
            await check_connection(secure.sasl(sasl_password=password))
        assert open_ones() <= before  # a connection of the test before may end meanwhile


def test_a_connection_with_requests_under_way_ends_without_waiting_for_the_broker(secure: SecureKafka) -> None:
    kafka = secure.tls()
    topic = load_topics(kafka).scores.name

    async def ended() -> None:
        client = AIOKafkaClient(**client_options(kafka, "test"))
        await client.bootstrap()
        await client._wait_on_metadata(topic)
        leader = client.cluster.leader_for_partition(TopicPartition(topic, 0))
        fetches = [FetchRequest(50, 1, 1 << 20, 0, [(topic, [(0, 0, 1 << 20)])]) for _ in range(2)]
        asked = [asyncio.create_task(client.send(leader, fetch)) for fetch in fetches]
        await until(lambda: any(len(one._requests) == 2 for one in client._conns.values()), "both sent")
        async with asyncio.timeout(SHUTDOWN_S / 2):
            await client.close()
        for refused in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(refused, KafkaConnectionError)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as processes have it
        runner.run(apply_topics(kafka))
        for _ in range(5):
            runner.run(ended())


async def test_a_broker_of_another_authority_is_refused(secure: SecureKafka) -> None:
    with pytest.raises(AccessDenied, match=r"certificate was not accepted.*`tls\.ca`"):
        await check_connection(secure.sasl(tls_ca=str(secure.other_ca)))


async def test_a_broker_whose_certificate_is_made_out_to_another_host_is_refused(secure: SecureKafka) -> None:
    with pytest.raises(AccessDenied, match=r"made out to that host"):
        await check_connection(secure.sasl(bootstrap=f"127.0.0.1:{secure.sasl_port}"))


async def test_without_a_client_certificate_nobody_gets_in(secure: SecureKafka) -> None:
    with pytest.raises((AccessDenied, BrokerUnavailable), match="certificate"):
        await verify_topics(secure.tls(tls_certificate=""))


async def test_a_client_certificate_that_is_not_accepted_is_named_with_its_dates(
    secure: SecureKafka, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger.pem"
    trustme.CA().issue_cert("client@relay.test").private_key_and_cert_chain_pem.write_to_path(stranger)
    said = r"Does it accept `tls\.certificate` = .*stranger\.pem, by .*, valid until"
    with pytest.raises(BrokerUnavailable, match=said):
        await verify_topics(secure.tls(tls_certificate=str(stranger)))


async def test_a_listener_of_another_kind_is_named(secure: SecureKafka) -> None:
    plain = Kafka(bootstrap=f"localhost:{secure.sasl_port}", request_timeout_ms=2000)
    with pytest.raises(BrokerUnavailable, match=r"listener one for PLAINTEXT"):
        await check_connection(plain)
