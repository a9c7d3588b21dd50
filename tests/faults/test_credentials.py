"""A password that stops being right at run time: everybody waits, asks again, and goes on when it is right again."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from relaygr_stream.client import RelayClient
from relaygr_stream.errors import BrokerUnavailable, RelayError
from relaygr_stream.ops.brokers.distribution import kafka_home
from tests import needs
from tests.bus.secure_kafka import PASSWORD, USER, SecureKafka, secure_kafka
from tests.e2e.fleet import serving_fleet, traffic
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.kafka]

#: Brokers close connections this old, as they do when a certificate or a token ends: soon, for the test's sake.
REAUTHENTICATE_MS = 2000


async def _set_password(secure: SecureKafka, password: str) -> None:
    command = [
        *(str(kafka_home() / "bin" / "kafka-configs.sh"), "--bootstrap-server", f"127.0.0.1:{secure.inside_port}"),
        *("--alter", "--entity-type", "users", "--entity-name", USER),
        *("--add-config", f"SCRAM-SHA-512=[password={password}]"),
    ]
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, "LOG_DIR": str(secure.folder / "logs")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    needs.kafka_home()
    with secure_kafka(tmp_path_factory.mktemp("secure"), reauthenticate_ms=REAUTHENTICATE_MS) as broker:
        yield broker


async def test_a_password_is_wrong_for_a_while(secure: SecureKafka, tmp_path: Path) -> None:
    items = iter(traffic(seconds=60, rate=20))
    kafka = msgspec.structs.replace(secure.sasl(prefix=f"f-{uuid.uuid4().hex[:8]}."), session_timeout_ms=6000)
    async with serving_fleet(kafka, tmp_path, "w1") as fleet, RelayClient(settings=fleet.settings) as client:
        await client.rank(next(items).request, timeout=20)
        await _set_password(secure, "another")
        children = fleet.children.values()
        await until(lambda: not any(child.ready() for child in children), "readiness false")
        with pytest.raises(RelayError):
            await client.rank(next(items).request, timeout=2)
        await until(lambda: all(child.healthy() for child in children), "liveness")
        await _set_password(secure, PASSWORD)
        await until(lambda: all(child.ready() for child in children), "readiness true again")
        await fleet.lanes_settled("w1")

        async def answered() -> bool:
            try:
                await client.rank(next(items).request, timeout=20)
            except BrokerUnavailable:  # until the client's own look at the broker finds it back
                return False
            return True

        await until(answered, "an answer")
        assert {child.exit_code for child in children} == {None}
    for child in fleet.children.values():
        log = child.log.read_text()
        assert PASSWORD not in log
        assert log.count("\n") < 2000, "a line for each attempt"
