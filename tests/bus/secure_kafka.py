"""An Apache Kafka with encrypted listeners: SASL_SSL (PLAIN and SCRAM), and SSL that asks for client certificates."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from relaygr_stream.bus.probe import check_connection
from relaygr_stream.errors import BrokerError
from relaygr_stream.ops.brokers.distribution import environment as of_a_node
from relaygr_stream.ops.brokers.distribution import free_ports, kafka_home
from relaygr_stream.settings.schema import Kafka

USER, PASSWORD = "relay", "correct horse"
CLUSTER = "MkU3OEVBNTcwNTJENDM2Qg"
AUTHORIZER = """
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
"""


@dataclass(frozen=True)
class SecureKafka:
    """Where it listens, and what a client needs to be let in."""

    folder: Path
    sasl_port: int
    tls_port: int
    inside_port: int  # plain, for the broker itself and for administrators
    ca: Path
    other_ca: Path  # which signed nobody there
    client: Path  # certificate and key

    def sasl(self, **changes: object) -> Kafka:
        """Settings that are let in by password."""
        settings = Kafka(
            bootstrap=f"localhost:{self.sasl_port}",
            security_protocol="SASL_SSL",
            sasl_username=USER,
            sasl_password=PASSWORD,
            tls_ca=str(self.ca),
            partitions=4,
            replication=1,
        )
        return msgspec.structs.replace(settings, **changes)

    def tls(self, **changes: object) -> Kafka:
        """Settings that are let in by certificate."""
        settings = Kafka(
            bootstrap=f"localhost:{self.tls_port}",
            security_protocol="SSL",
            tls_ca=str(self.ca),
            tls_certificate=str(self.client),
            partitions=4,
            replication=1,
        )
        return msgspec.structs.replace(settings, **changes)


@contextmanager
def secure_kafka(
    folder: Path, *, users: Sequence[str] = (USER,), authorize: bool = False, reauthenticate_ms: int = 0
) -> Iterator[SecureKafka]:
    """Runs for the duration of the block, with these users, all of one password. Needs KAFKA_HOME.

    authorize: what nobody granted is refused, but to who comes by the plain listener inside. reauthenticate_ms: a
    connection is closed after this long; 0: never.
    """
    sasl_port, tls_port, inside, controller = free_ports(4)
    ca, other = trustme.CA(), trustme.CA()
    paths = {name: folder / f"{name}.pem" for name in ("ca", "other_ca", "client", "server")}
    ca.cert_pem.write_to_path(paths["ca"])
    other.cert_pem.write_to_path(paths["other_ca"])
    ca.issue_cert("client@relay.test").private_key_and_cert_chain_pem.write_to_path(paths["client"])
    paths["server"].write_bytes(_for_java(ca.issue_cert("localhost")))
    secure = SecureKafka(folder, sasl_port, tls_port, inside, paths["ca"], paths["other_ca"], paths["client"])
    properties = folder / "server.properties"
    properties.write_text(_properties(secure, paths["server"], controller), encoding="utf-8")
    with properties.open("a", encoding="utf-8") as file:
        file.write(f"connections.max.reauth.ms={reauthenticate_ms}\n")
        if authorize:
            file.write(AUTHORIZER)
    environment = os.environ | of_a_node(folder, "-Xms128m -Xmx512m")
    home = kafka_home()
    scram = [
        f"--add-scram={mechanism}=[name={user},password={PASSWORD}]"
        for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512")
        for user in users
    ]
    storage = [str(home / "bin" / "kafka-storage.sh"), "format", "--standalone", "-t", CLUSTER, "-c", str(properties)]
    subprocess.run([*storage, *scram], env=environment, check=True, capture_output=True)
    with (folder / "broker.log").open("wb") as log:
        server = [str(home / "bin" / "kafka-server-start.sh"), str(properties)]
        process = subprocess.Popen(server, env=environment, stdout=log, stderr=log)
    try:
        asyncio.run(_until_ready(secure, process, users[0]))
        yield secure
    finally:
        process.kill()
        process.wait()


def _for_java(certificate: trustme.LeafCert) -> bytes:
    """Key and chain; Java reads keys in PKCS #8 only."""
    key = load_pem_private_key(certificate.private_key_pem.bytes(), None)
    pkcs8 = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return b"".join([pkcs8, *(blob.bytes() for blob in certificate.cert_chain_pems)])


async def _until_ready(secure: SecureKafka, process: subprocess.Popen[bytes], user: str) -> None:
    deadline = time.monotonic() + 180
    said = ""
    while process.poll() is None and time.monotonic() < deadline:
        try:
            await check_connection(secure.sasl(sasl_username=user))
        except BrokerError as error:
            said = str(error)
            await asyncio.sleep(0.2)
        else:
            return
    pytest.fail(f"the broker does not serve: {said}\n{(secure.folder / 'broker.log').read_text()[-3000:]}")


def _properties(secure: SecureKafka, server: Path, controller: int) -> str:
    listeners = {
        "SASL_SSL": f"localhost:{secure.sasl_port}",
        "SSL": f"localhost:{secure.tls_port}",
        "PLAINTEXT": f"127.0.0.1:{secure.inside_port}",
    }
    advertised = ",".join(f"{name}://{address}" for name, address in listeners.items())
    plain = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
    login = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    return f"""
process.roles=broker,controller
node.id=1
listeners={advertised},CONTROLLER://127.0.0.1:{controller}
advertised.listeners={advertised}
controller.quorum.bootstrap.servers=127.0.0.1:{controller}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=SASL_SSL:SASL_SSL,SSL:SSL,PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={secure.folder / "data"}
auto.create.topics.enable=false
offsets.topic.num.partitions=4
offsets.topic.replication.factor=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
ssl.keystore.type=PEM
ssl.keystore.location={server}
ssl.truststore.type=PEM
ssl.truststore.location={secure.ca}
listener.name.ssl.ssl.client.auth=required
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256,SCRAM-SHA-512
listener.name.sasl_ssl.plain.sasl.jaas.config={plain}
listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config={login}
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config={login}
"""
