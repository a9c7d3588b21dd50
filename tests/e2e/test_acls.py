"""The grants that docs/reference/security.md lists are enough for each process, and none of them is too much."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

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

from relaygr_stream.bus.dead_letter import dead_letter_headers
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics, topic_exists, uncompared, verify_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.errors import AccessDenied, BrokerError, DecodeError
from relaygr_stream.ops.brokers.distribution import free_ports
from relaygr_stream.ops.children import Child, write_settings
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.workload.driver import drive
from tests import needs
from tests.bus.secure_kafka import SecureKafka, secure_kafka
from tests.e2e.fleet import TEST_SETTINGS, Results, traffic
from tests.statuses import worker_status
from tests.waiting import WITHIN_S, until

pytestmark = pytest.mark.kafka

DOC = Path(__file__).parents[2] / "docs" / "reference" / "security.md"
PREFIX = "acl."
ROLES = ["client", "retrieval", "trigger", "worker", "operator", "admin"]


def bindings() -> Iterator[AclBinding]:
    """The documented table, as Kafka takes it."""
    header, _, *rows = re.findall(r"^\|.*\|$", DOC.read_text(encoding="utf-8").partition("## Grants")[2], re.M)
    assert [cell.strip() for cell in header.split("|")[2:-1]] == ROLES
    for row in rows[: next(i for i, row in enumerate(rows) if row.startswith("| cluster")) + 1]:
        resource, *cells = (cell.strip() for cell in row.split("|")[1:-1])
        kind, _, name = resource.replace("`", "").partition(" ")
        for user, cell in zip(ROLES, cells, strict=True):
            for operation in filter(None, (word.strip() for word in cell.split(","))):
                if kind == "cluster":
                    yield binding(user, operation, "BROKER", "kafka-cluster")
                else:
                    yield binding(user, operation, kind.upper(), f"{PREFIX}{name}")


def binding(user: str, operation: str, kind: str, name: str) -> AclBinding:
    literally = (ResourceType[kind], name, ResourcePatternType.LITERAL)
    return AclBinding(*literally, f"User:{user}", "*", AclOperation[operation], AclPermissionType.ALLOW)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureKafka]:
    needs.kafka_home()
    with secure_kafka(tmp_path_factory.mktemp("acls"), users=ROLES, authorize=True) as broker:
        grant(broker, list(bindings()))
        yield broker


def grant(secure: SecureKafka, acls: list[AclBinding]) -> None:
    kafka = AdminClient({"bootstrap.servers": f"127.0.0.1:{secure.inside_port}"})
    for created in kafka.create_acls(acls).values():
        created.result(timeout=WITHIN_S)


def as_user(secure: SecureKafka, user: str) -> Kafka:
    return secure.sasl(sasl_username=user, prefix=PREFIX)


def settings_of(secure: SecureKafka, user: str, path: Path) -> Path:
    settings = msgspec.structs.replace(TEST_SETTINGS, kafka=as_user(secure, user))
    write_settings(path, settings)
    return path


async def test_with_the_documented_grants_the_relay_serves_and_without_it_does_not(
    secure: SecureKafka, tmp_path: Path
) -> None:
    await apply_topics(as_user(secure, "admin"))
    children = []
    try:
        (port,) = free_ports(1)
        for name, user in (("trigger", "trigger"), ("worker", "worker"), ("gateway", "client")):
            config = settings_of(secure, user, tmp_path / f"{name}.toml")
            options = [f"--set=gateway.port={port}"] if name == "gateway" else []
            children.append(Child(name, [name, "--config", str(config), *options], tmp_path))
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
    assert codes == [0, 0, 0], [child.log_tail() for child in children]


async def test_an_operator_looks_and_removes_a_status_and_replays_a_dead_letter(
    secure: SecureKafka, tmp_path: Path
) -> None:
    await apply_topics(as_user(secure, "admin"))
    config = settings_of(secure, "operator", tmp_path / "operator.toml")
    bad = Record(f"{PREFIX}retrieval", 0, 0, 0, b"k", b"x", ())
    async with Producer(as_user(secure, "worker"), client_id="test") as producer:
        await producer.send_and_wait(f"{PREFIX}worker-status", encode(worker_status("gone")), key=b"gone")
        headers = dead_letter_headers(bad, DecodeError("malformed", "no map"))
        await producer.send_and_wait(f"{PREFIX}dead-letter", b"x", key=b"k", headers=headers)
    for arguments, said in (
        (["status", "--json"], '"workers":[]'),
        (["status", "--forget", "gone"], "removed the record of gone"),
        (["dead-letters", "list"], "malformed"),
        (["dead-letters", "replay", "--all"], "replayed"),
    ):
        code, out = await run(arguments, config)
        assert code == 0, out
        assert said in out


async def test_explain_and_erase_need_the_grants_below_the_table(secure: SecureKafka, tmp_path: Path) -> None:
    await apply_topics(as_user(secure, "admin"))
    config = settings_of(secure, "operator", tmp_path / "operator.toml")
    bad = Record(f"{PREFIX}retrieval", 0, 0, 0, b"ada", b"x", ())
    headers = dead_letter_headers(bad, DecodeError("malformed", "no map"))
    async with Producer(as_user(secure, "worker"), client_id="test") as producer:
        await producer.send_and_wait(f"{PREFIX}dead-letter", b"x", key=b"ada", headers=headers)
    explain, erase = ["explain", "--seconds", "1"], ["history", "erase", "ada", "--wait", "0"]
    _, out = await run(explain, config)
    assert "lacks an ACL" in out
    code, out = await run(erase, config)
    assert (code, "could not be removed" in out) == (1, True), out
    more = [*(("READ", topic) for topic in ("retrieval", "pre-infer", "scores")), ("DELETE", "dead-letter")]
    grant(secure, [binding("operator", operation, "TOPIC", f"{PREFIX}{topic}") for operation, topic in more])
    code, out = await run(explain, config)
    assert (code, "lacks an ACL" in out) == (0, False), out
    code, out = await run(erase, config)
    assert (code, "dead letters: 1 removed" in out) == (0, True), out


async def run(arguments: list[str], config: Path) -> tuple[int | None, str]:
    """A command's exit code, and what it says."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "relaygr_stream", *arguments, "--config", str(config)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out = (await process.communicate())[0].decode()
    return process.returncode, out


@pytest.mark.parametrize(
    ("user", "topic"),
    [
        ("client", "scores"),
        ("client", "worker-status"),
        ("client", "pre-infer"),
        ("retrieval", "ranking"),
        ("retrieval", "worker-status"),
        ("trigger", "scores"),
        ("worker", "pre-infer"),
        ("worker", "retrieval"),
        ("operator", "scores"),
        ("admin", "retrieval"),
    ],
)
async def test_a_write_that_is_not_granted_is_refused_by_name(secure: SecureKafka, user: str, topic: str) -> None:
    await apply_topics(as_user(secure, "admin"))
    async with Producer(as_user(secure, user), client_id="test") as producer:
        with pytest.raises(
            AccessDenied,
            match=rf"user '{user}' lacks an ACL, WRITE on topic {re.escape(PREFIX + topic)}; .*security\.md",
        ):
            await producer.send_and_wait(f"{PREFIX}{topic}", b"x", key=b"k")


async def test_who_only_announces_may_write_retrieval(secure: SecureKafka) -> None:
    await apply_topics(as_user(secure, "admin"))
    async with Producer(as_user(secure, "retrieval"), client_id="test") as producer:
        assert await producer.send_and_wait(f"{PREFIX}retrieval", b"x", key=b"k") >= 0


@pytest.mark.parametrize(
    ("user", "topic"),
    [("trigger", "scores"), ("operator", "ranking"), ("client", "pre-infer"), ("retrieval", "scores")],
)
async def test_a_read_that_is_not_granted_is_refused(secure: SecureKafka, user: str, topic: str) -> None:
    await apply_topics(as_user(secure, "admin"))
    said = ""
    try:
        async with TopicTail(as_user(secure, user), f"{PREFIX}{topic}", [0], "earliest", lambda records: None) as tail:
            # Who may describe the topic is refused by the first fetch; the tail tries on.
            await until(lambda: "lacks an ACL" in (tail.trouble or ""), "refused by the first fetch")
            said = tail.trouble or ""
    except BrokerError as error:
        said = str(error)
    assert f"user {user!r} lacks an ACL, READ on topic {PREFIX}{topic};" in said


async def test_a_topic_that_may_not_be_described_is_not_called_missing(secure: SecureKafka) -> None:
    await apply_topics(as_user(secure, "admin"))
    lacks = r"user 'retrieval' lacks an ACL, DESCRIBE on topic acl\.dead-letter, acl\.pre-infer, "
    for look in (verify_topics, apply_topics):
        with pytest.raises(AccessDenied, match=lacks):
            await look(as_user(secure, "retrieval"))


async def test_a_topic_that_is_hidden_is_not_called_absent(secure: SecureKafka) -> None:
    routes = f"{PREFIX}routes"
    async with Producer(as_user(secure, "client"), client_id="test") as producer:
        assert not await producer.exists(routes)
    async with Producer(as_user(secure, "retrieval"), client_id="test") as producer:
        with pytest.raises(AccessDenied, match=r"user 'retrieval' lacks an ACL, READ on topic acl\.routes;"):
            await producer.exists(routes)


async def test_a_topic_that_may_not_be_made_is_refused_by_name(secure: SecureKafka) -> None:
    operator = as_user(secure, "operator")
    made = msgspec.structs.replace(load_topics(operator).scores, name=f"{PREFIX}routes")
    with pytest.raises(AccessDenied, match=r"'operator' lacks an ACL, CREATE on .*topic acl\.routes"):
        await topic_exists(operator, made, create=True)


async def test_settings_that_are_not_compared_are_named(secure: SecureKafka) -> None:
    await apply_topics(as_user(secure, "admin"))
    anybody = Kafka(bootstrap=f"127.0.0.1:{secure.inside_port}", prefix=PREFIX, partitions=4, replication=1)
    told = uncompared(await verify_topics(as_user(secure, "admin"), strict=True))
    assert "DESCRIBE_CONFIGS" in told
    assert f"{PREFIX}scores" in told
    assert not uncompared(await verify_topics(anybody, strict=True))
