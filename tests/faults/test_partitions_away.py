"""Commands beside a broker that is away: they do what the others' partitions allow, name its partitions, and exit 4."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
from aiokafka.errors import KafkaError
from click.testing import CliRunner

from relaygr_stream.bus.dead_letter import dead_letter_headers
from relaygr_stream.bus.producer import NO_LEADER, Producer
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.cli.main import PARTLY, main
from relaygr_stream.errors import DecodeError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import TopicSet, lane_of, load_topics
from tests.faults.cluster import Node, ThreeBrokers, relay_topics
from tests.waiting import until

pytestmark = [
    pytest.mark.faults,
    pytest.mark.kafka,
    # The commands get a shorter request timeout by a former setting, which still takes effect.
    pytest.mark.filterwarnings("ignore:flag for kafka.request_timeout_ms:FutureWarning"),
]
LETTER_PARTITIONS: Final = 3
LETTERS: Final = 30
TIMEOUT_MS: Final = 2000
#: A bound against hanging; what is stated is a few request timeouts.
WITHIN_S: Final = 90.0


class Outage:
    """One broker of three, which alone holds some partitions of each topic but the only one of `worker-status`."""

    def __init__(self, cluster: ThreeBrokers, kafka: Kafka) -> None:
        self._cluster = cluster
        self.kafka = kafka
        self.topics: TopicSet = load_topics(kafka)
        self.victim = NO_LEADER
        self.led: dict[str, dict[int, int]] = {}  # topic → partition → broker

    async def prepare(self) -> None:
        """Topics with one copy each, and letters of users of every lane of `ranking`, in every partition."""
        await apply_topics(self.kafka)
        for topic in self.topics.all:
            found = await self._cluster.partitions(topic.name)
            self.led[topic.name] = {partition: each.leader for partition, each in found.items()}
        spared = self.led[self.topics.worker_status.name][0]
        self.victim = min(set(self._cluster.brokers) - {spared})
        async with Producer(self.kafka, client_id="test") as producer:
            for number in range(LETTERS):
                key = b"u%d" % number
                lane = lane_of(key.decode(), self.topics.lanes)
                record = Record(self.topics.ranking.name, lane, number, 0, key, b"\xc1", ())
                headers = dead_letter_headers(record, DecodeError("malformed", "for the test"))
                partition = number % LETTER_PARTITIONS
                name = self.topics.dead_letter.name
                await producer.send_and_wait(name, b"\xc1", key=key, partition=partition, headers=headers)

    async def fenced(self) -> bool:
        """Whether the brokers say that these partitions have no leader."""
        with suppress(KafkaError):  # asked of the one that is away
            partitions = await self._cluster.partitions(self.topics.dead_letter.name)
            return partitions[self.away("dead_letter")[0]].leader == NO_LEADER
        return False

    def away(self, topic: str) -> list[int]:
        """The partitions of the topic that are away."""
        led = self.led[getattr(self.topics, topic).name]
        return [partition for partition, broker in led.items() if broker == self.victim]

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        """A command's exit code, stdout and stderr; it ends in bounded time."""
        names = ("bootstrap", "prefix", "partitions", "replication", "topics_dir", "request_timeout_ms")
        flags = [f"--set=kafka.{name}={getattr(self.kafka, name)}" for name in names]
        began = time.monotonic()
        result = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, *flags])
        took_s = time.monotonic() - began
        print(f"{' '.join(arguments)}: {result.exit_code}, {took_s:.1f} s\n{result.output}")
        assert took_s < WITHIN_S, arguments
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    async def partly(self, *arguments: str, topic: str = "dead_letter") -> str:
        """The stdout of a command that names the topic's partitions that are away."""
        code, out, err = await self.run(*arguments)
        assert code == PARTLY, err
        name = getattr(self.topics, topic).name
        named = re.search(rf"{re.escape(name)} ([\d–, ]+) \(", err.splitlines()[-1])
        assert named and set(map(int, re.findall(r"\d+", named[1]))) <= set(self.away(topic)), err
        return out


@pytest.fixture(params=[Node.kill, Node.pause], ids=["killed", "paused"])
async def outage(cluster: ThreeBrokers, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Outage]:
    folder = relay_topics(tmp_path / "topics", replicated=())
    letters = folder / "dead-letter.toml"
    text = letters.read_text(encoding="utf-8").replace("partitions = 1", f"partitions = {LETTER_PARTITIONS}")
    letters.write_text(text, encoding="utf-8")
    base = Kafka(prefix=f"{request.node.callspec.id}.", partitions=6, request_timeout_ms=TIMEOUT_MS)
    outage = Outage(cluster, cluster.kafka_settings(base, topics_dir=folder))
    await outage.prepare()
    how: Callable[[Node], Coroutine[Any, Any, None]] = request.param
    await how(cluster.brokers[outage.victim])
    if how is Node.kill:
        await until(outage.fenced, "the dead broker leads nothing")
    yield outage
    await cluster.heal()
    await cluster.forget(outage.topics)


async def test_commands_do_what_the_other_partitions_allow(outage: Outage, cluster: ThreeBrokers) -> None:
    (gone,) = outage.away("dead_letter")
    listed = [json.loads(line) for line in (await outage.partly("dead-letters", "list", "--json")).splitlines()]
    assert len(listed) == LETTERS * 2 // 3
    assert {letter["address"].partition(":")[0] for letter in listed} == {"0", "1", "2"} - {str(gone)}
    there = listed[0]["address"]
    assert there in await outage.partly("dead-letters", "show", there, f"{gone}:0")
    code, _, err = await outage.run("dead-letters", "show", there, "0:999" if gone != 0 else "1:999")
    assert code == 1, "of a partition that was read"
    assert "no dead letter at" in err

    lines = (await outage.partly("dead-letters", "replay", "--all", topic="ranking")).splitlines()
    users = {f"u{number}" for number in range(LETTERS) if number % LETTER_PARTITIONS != gone}
    taken = {user for user in users if lane_of(user, outage.topics.lanes) not in outage.away("ranking")}
    assert sorted(lines[-1].split(", ")) == sorted([f"{len(taken)} replayed", f"{len(users - taken)} not taken"])

    for command in (["topics", "show"], ["topics", "verify"], ["topics", "apply"], ["status"], ["status", "--json"]):
        await until(outage.fenced, "the paused broker leads nothing")
        assert await outage.partly(*command, topic="ranking")
    assert "no requests" in await outage.partly("explain", "--seconds", "0.5", topic="pre_infer")
    erased = await outage.partly("history", "erase", min(taken), "--wait", "0")
    assert "dead letters: 2 removed" in erased, "the letter and the marker of its replay"

    await cluster.heal()
    code, out, err = await outage.run("dead-letters", "replay", "--all")
    assert code == 0, err
    assert f"{LETTERS - len(taken)} replayed" in out.splitlines()[-1].split(", "), "each once"

    # Last: a broker that is killed within a minute of an erasure forgets where its logs begin now.
    spared = outage.led[outage.topics.worker_status.name][0]
    await cluster.brokers[spared].kill()
    for command in (["status"], ["status", "--forget", "w1"], ["explain", "--seconds", "1"]):
        code, _, err = await outage.run(*command)
        assert code == PARTLY, err
        assert f"{outage.topics.worker_status.name} 0" in err, "a status topic without a leader is named"
