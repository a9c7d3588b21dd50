"""The grants that docs/operations.md lists are enough for each process, and none of them is too much."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.children import Child, settings_as_toml
from relaygr_stream.client import RelayClient
from relaygr_stream.dead_letters.read import read_letters
from relaygr_stream.errors import BrokerError
from relaygr_stream.settings import Kafka, Settings
from relaygr_stream.topics import apply_topics
from relaygr_stream.workload.driver import drive
from tests.bus.secure_kafka import SecureKafka, secure_kafka
from tests.conftest import KAFKA_HINT
from tests.e2e.fleet import TEST_SETTINGS, Results, traffic

pytestmark = pytest.mark.kafka

DOC = Path(__file__).parents[2] / "docs" / "operations.md"
PREFIX = "acl."
USERS = {
    "`relaygr trigger`": "trigger",
    "`relaygr worker`": "worker",
    "`RelayClient`, `relaygr publish`": "client",
    "`relaygr dead-letters`, `relaygr status`": "operator",
    "`relaygr topics apply`": "admin",
}


class Grants(NamedTuple):
    read: list[str]
    write: list[str]
    describe: list[str]
    group: list[str]


def documented() -> dict[str, Grants]:
    """User → grants, from the table."""
    table = DOC.read_text(encoding="utf-8").partition("| group to READ |")[2]
    rows = re.findall(r"^\| (`.*?) \|(.*)\|(.*)\|(.*)\|(.*)\|$", table.partition("\n\n")[0], re.M)
    split = {name: Grants(*([word.strip() for word in cell.split(",") if word.strip()] for cell in cells))
             for name, *cells in rows}  # fmt: skip
    assert set(split) == set(USERS)
    return {USERS[name]: grants for name, grants in split.items()}


def bindings() -> Iterator[AclBinding]:
    """The same as Kafka takes them."""
    for user, grants in documented().items():
        for operation, names in (("READ", grants.read), ("WRITE", grants.write), ("DESCRIBE", grants.describe)):
            yield from (binding(user, operation, "TOPIC", f"{PREFIX}{name}") for name in names)
        yield from (binding(user, "READ", "GROUP", f"{PREFIX}{group}") for group in grants.group)
    yield binding("admin", "CREATE", "BROKER", "kafka-cluster")


def binding(user: str, operation: str, kind: str, name: str) -> AclBinding:
    literally = (ResourceType[kind], name, ResourcePatternType.LITERAL)
    return AclBinding(*literally, f"User:{user}", "*", AclOperation[operation], AclPermissionType.ALLOW)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    if not os.environ.get("KAFKA_HOME"):
        pytest.skip(KAFKA_HINT)
    with secure_kafka(tmp_path_factory.mktemp("acls"), users=list(USERS.values()), authorize=True) as broker:
        kafka = AdminClient({"bootstrap.servers": f"127.0.0.1:{broker.inside_port}"})
        for created in kafka.create_acls(list(bindings())).values():
            created.result(timeout=60)
        yield broker


def as_user(secure: SecureKafka, user: str) -> Kafka:
    return secure.sasl(sasl_username=user, prefix=PREFIX)


@pytest.mark.timeout(240)
async def test_with_the_documented_grants_the_relay_serves_and_without_it_does_not(
    secure: SecureKafka, tmp_path: Path
) -> None:
    await apply_topics(as_user(secure, "admin"))
    children = []
    try:
        for name in ("trigger", "worker"):
            settings = msgspec.structs.replace(TEST_SETTINGS, kafka=as_user(secure, name))
            (tmp_path / f"{name}.toml").write_text(settings_as_toml(settings), encoding="utf-8")
            children.append(Child(name, [name, "--config", str(tmp_path / f"{name}.toml")], tmp_path))
        await asyncio.gather(*(child.wait_ready() for child in children))
        results = Results()
        settings = Settings(kafka=as_user(secure, "client"), relay=TEST_SETTINGS.relay)
        async with RelayClient(settings=settings) as client:
            await drive(client, traffic(seconds=3, rate=10), timeout=30.0, on_result=results)
        assert results.by_id
        assert not results.errors()
        hits = [result for result in results.by_id.values() if result.outcome in ("hbm", "joined", "dram")]
        assert hits, "the trigger admitted nothing, or the worker did not hear of it"
    finally:
        for child in children:
            child.terminate()
        codes = [await child.wait() for child in children]
    assert codes == [0, 0], [child.log_tail() for child in children]
    assert await read_letters(as_user(secure, "operator")) == []
    for user, topic in (("trigger", "scores"), ("operator", "scores"), ("client", "pre-infer")):
        kafka = as_user(secure, user)
        with pytest.raises(BrokerError, match="Authorization"):
            async with TopicTail(kafka, f"{PREFIX}{topic}", [0], "earliest", lambda records: None) as tail:
                await asyncio.wait_for(tail.failed, 30)
