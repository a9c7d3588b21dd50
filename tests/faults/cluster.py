"""Three brokers of Apache Kafka with a controller of their own, each of which can be stopped, killed, paused and begun
again.

The controller is a process apart: whatever happens to brokers, even to all of them, there is a quorum, so what is seen
is the broker's fault alone. Each broker has three listeners: INSIDE for the other brokers and for our questions,
CLIENTS, and LINKED, which is advertised at the port of a proxy (proxy.py) that a test opens between it and us.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from relaygr_stream.ops.brokers.distribution import (
    SMALL_NODE,
    environment,
    format_storage,
    free_ports,
    internal_replication,
    kafka_home,
    new_cluster_id,
    node_properties,
)
from relaygr_stream.ops.brokers.keeper import KeptProcess
from relaygr_stream.settings.files import packaged_dir
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import TopicSet

BROKERS: Final = (1, 2, 3)
CONTROLLER: Final = 100
COPIES, MIN_IN_SYNC = 3, 2
#: With 2 s, brokers on a crowded machine (load 20 on two cores) were taken for dead while they lived.
BROKER_SESSION_MS: Final = 3000
HEAP: Final = "-Xms128m -Xmx384m"
#: A node takes 4 s to start on a free machine and ten times that on a crowded one.
PATIENCE_S: Final = 150.0
#: Lost, these cost more than milliseconds: requests not announced, workers not known, dead letters.
REPLICATED_TOPICS: Final = ("retrieval", "worker-status", "dead-letter")


class Node:
    """One process of the cluster. Its data outlive `kill` and `terminate`; `start` goes on with them."""

    def __init__(self, node_id: int, home: Path, folder: Path, properties: dict[str, str]) -> None:
        self.node_id: Final = node_id
        self.log: Final = folder / "node.log"
        self.data: Final = folder / "data"
        self._home, self._folder = home, folder
        self._properties = folder / "node.properties"
        self._process: KeptProcess | None = None
        self._away_s: float | None = None  # since when nobody was served: Unix time
        folder.mkdir(parents=True)
        ours = {**properties, "node.id": str(node_id), "log.dirs": str(self.data)}
        self._properties.write_text(node_properties(home, ours), encoding="utf-8")

    @property
    def running(self) -> bool:
        """Started and not ended, though perhaps paused."""
        return self._process is not None and self._process.exit_code is None

    def format(self, cluster: str, role: str) -> None:
        """Make the data folder."""
        format_storage(self._home, self._properties, cluster, [role], environment(self._folder, HEAP))

    def start(self) -> None:
        """Start the process; does not wait until it serves. No effect while it runs."""
        if not self.running:
            self.end()  # lets go of one that ended by itself
            command = [str(self._home / "bin" / "kafka-server-start.sh"), str(self._properties)]
            self._process = KeptProcess(self._folder, command, environment(self._folder, HEAP), self.log)

    def end(self) -> None:
        """SIGKILL, also of a paused one. No effect if it is not running."""
        self.goes()
        if self._process is not None:
            self._process.kill()

    async def kill(self) -> None:
        """As `end`, in a thread: Java takes up to seconds to give its memory back, which is not the fault that the
        clients of this loop are to feel."""
        await asyncio.to_thread(self.end)

    async def terminate(self) -> None:
        """SIGTERM, and wait: leaders move first, then it ends."""
        self.goes()
        self._signal(signal.SIGTERM)
        assert self._process is not None
        try:
            await asyncio.to_thread(self._process.wait, PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(f"node {self.node_id} did not end:\n{self.log_tail()}") from None

    async def pause(self) -> None:
        """SIGSTOP: connections stand, nothing is answered."""
        self.goes()
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def goes(self) -> None:
        """From now on it may not serve: for a fault that comes from elsewhere."""
        self._away_s = time.time() if self._away_s is None else self._away_s

    def returned(self) -> float | None:
        """It serves again: since when it did not, Unix time; None if it was never away."""
        since, self._away_s = self._away_s, None
        return since

    def _signal(self, number: int) -> None:
        assert self._process is not None and self.running, f"node {self.node_id} is not running:\n{self.log_tail()}"
        (java,) = psutil.Process(self._process.keeper_pid).children()
        os.kill(java.pid, number)

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:]) if self.log.exists() else "(no log)"


@dataclass(frozen=True)
class Partition:
    """Who serves a partition; leader -1: nobody."""

    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


class ThreeBrokers:
    """The cluster; made by `three_brokers`. Holds no event loop, so that a session's tests can share it."""

    def __init__(self, folder: Path) -> None:
        home = kafka_home()
        controller, *ports = free_ports(1 + 4 * len(BROKERS))
        self._inside, self._clients, self._linked, self._proxies = (
            dict(zip(BROKERS, ports[i::4], strict=True)) for i in range(4)
        )
        quorum = {
            **SMALL_NODE,
            "broker.session.timeout.ms": str(BROKER_SESSION_MS),
            # Leaders move when a test moves them: an answer whose leader changes may be lost (acks=1), and the ledger
            # excuses that during a test's own faults only.
            "auto.leader.rebalance.enable": "false",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller}",
        }
        self.folder: Final = folder
        self.absences: Final[list[tuple[float, float]]] = []  # of single brokers, from when to when: Unix time
        self.controller: Final = Node(CONTROLLER, home, folder / "controller", _controller(quorum, controller))
        self.brokers: Final = {
            node: Node(node, home, folder / f"broker-{node}", self._broker(quorum, node)) for node in BROKERS
        }
        roles = dict.fromkeys(self.brokers.values(), "--no-initial-controllers") | {self.controller: "--standalone"}
        with ThreadPoolExecutor() as pool:  # a Java each
            list(pool.map(Node.format, roles, repeat(new_cluster_id()), roles.values()))

    def kafka_settings(self, base: Kafka, *, linked: bool = False, topics_dir: Path | None = None) -> Kafka:
        """`base`, pointed at this cluster: all topics on three brokers, or each as `topics_dir` says.

        linked: through the proxies, which the test must have opened: `links(cluster.links)`.
        """
        ports = self._proxies if linked else self._clients
        return msgspec.structs.replace(
            base,
            bootstrap=",".join(f"127.0.0.1:{port}" for port in ports.values()),
            replication=0 if topics_dir else COPIES,
            topics_dir=str(topics_dir or ""),
        )

    @property
    def links(self) -> dict[int, tuple[int, int]]:
        """Broker → the port that it advertises to linked clients, and the one where it listens."""
        return {node: (self._proxies[node], self._linked[node]) for node in BROKERS}

    async def start(self) -> None:
        """Start what does not run and return when all brokers serve."""
        self.controller.start()
        for broker in self.brokers.values():
            broker.start()
        await self.serving(*BROKERS)

    def stop(self) -> None:
        """End everything at once."""
        for node in (*self.brokers.values(), self.controller):
            node.end()

    async def heal(self) -> None:
        """Whatever was done: resume and start every node, and wait until every partition has all its copies."""
        for node in (self.controller, *self.brokers.values()):
            if node.running:
                node.resume()
        await self.start()
        await self._until(self._whole, "every copy in sync")
        for broker in self.brokers.values():
            if (since := broker.returned()) is not None:
                self.absences.append((since, time.time()))

    async def forget(self, topics: TopicSet) -> None:
        """Delete a test's topics: a killed broker looks through all its logs before it serves again."""

        async def deleted() -> bool:
            async with self._admin() as admin:
                there = {topic.name for topic in topics.all} & set(await admin.list_topics())
                if there:
                    await admin.delete_topics(list(there))
            return not there

        await self._until(deleted, f"{topics.ranking.name} and the others are deleted")

    async def serving(self, *brokers: int) -> None:
        """Until these brokers serve, and no others that are not running."""

        async def all_there() -> bool:
            async with self._admin() as admin:
                found = {broker["node_id"] for broker in (await admin.describe_cluster())["brokers"]}
            # The others name one that died for a while yet; and it may be named before it listens again.
            ports = [ports[node] for ports in (self._inside, self._clients, self._linked) for node in brokers]
            listening = all([await _listens(port) for port in ports])
            return found >= set(brokers) and listening and all(self.brokers[node].running for node in found)

        await self._until(all_there, f"brokers {brokers} serve")

    async def partitions(self, topic: str) -> dict[int, Partition]:
        """Partition → who serves it."""
        return (await self._describe([topic]))[topic]

    async def leader(self, topic: str, partition: int = 0) -> int:
        """The broker that serves this partition, once there is one."""
        found = -1

        async def known() -> bool:
            nonlocal found
            found = (await self.partitions(topic))[partition].leader
            return found >= 0

        await self._until(known, f"a leader of {topic}[{partition}]")
        return found

    async def coordinator(self, group: str) -> int:
        """The broker that leads this consumer group (its full name, prefix included), once there is one."""
        found = -1

        async def known() -> bool:
            nonlocal found
            async with self._admin() as admin:
                found = int(await admin.find_coordinator(group))
            return found >= 0

        await self._until(known, f"a coordinator of {group}")
        return found

    async def _whole(self) -> bool:
        async with self._admin() as admin:
            topics = await admin.list_topics()
        found = await self._describe(topics)
        return all(set(p.in_sync) == set(p.replicas) and p.leader >= 0 for t in found.values() for p in t.values())

    async def _describe(self, topics: Iterable[str]) -> dict[str, dict[int, Partition]]:
        async with self._admin() as admin:
            described = await admin.describe_topics(list(topics))
        return {
            topic["topic"]: {
                p["partition"]: Partition(p["leader"], tuple(p["replicas"]), tuple(p["isr"]))
                for p in topic["partitions"]
            }
            for topic in described
        }

    @asynccontextmanager
    async def _admin(self) -> AsyncIterator[Any]:
        running = [self._inside[node] for node, broker in self.brokers.items() if broker.running]
        listening = [f"127.0.0.1:{port}" for port in running if await _listens(port)]
        if not listening:  # ask only who listens: aiokafka complains of the others in the log
            raise ConnectionRefusedError("no broker listens")
        admin = AIOKafkaAdminClient(bootstrap_servers=listening, request_timeout_ms=5000)
        try:
            await admin.start()
            yield admin
        finally:
            await admin.close()

    async def _until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        last = ""
        while time.monotonic() < deadline:
            try:
                if await condition():
                    return
            except (KafkaError, OSError, KeyError) as error:
                last = repr(error)
            await asyncio.sleep(0.1)
        logs = "\n".join(f"-- {n.node_id}\n{n.log_tail()}" for n in (self.controller, *self.brokers.values()))
        raise AssertionError(f"not within {PATIENCE_S:.0f} s: {what}; {last}\n{logs}")

    def _broker(self, quorum: dict[str, str], node: int) -> dict[str, str]:
        listen = {"INSIDE": self._inside[node], "CLIENTS": self._clients[node], "LINKED": self._linked[node]}
        advertise = {**listen, "LINKED": self._proxies[node]}
        return {
            **quorum,
            **internal_replication(COPIES),
            "min.insync.replicas": str(MIN_IN_SYNC),  # of a topic with one copy, Kafka asks for that one
            "process.roles": "broker",
            "listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in listen.items()),
            "advertised.listeners": ",".join(f"{name}://127.0.0.1:{port}" for name, port in advertise.items()),
            "inter.broker.listener.name": "INSIDE",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,"
            + ",".join(f"{name}:PLAINTEXT" for name in listen),
        }


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def _controller(quorum: dict[str, str], port: int) -> dict[str, str]:
    return {
        **quorum,
        "process.roles": "controller",
        "listeners": f"CONTROLLER://127.0.0.1:{port}",
        "advertised.listeners": f"CONTROLLER://127.0.0.1:{port}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,INSIDE:PLAINTEXT",
        "inter.broker.listener.name": "INSIDE",
    }


@asynccontextmanager
async def three_brokers(folder: Path) -> AsyncIterator[ThreeBrokers]:
    """The cluster, serving, for the duration of the block; its data stay in `folder`. Needs KAFKA_HOME."""
    cluster = await asyncio.to_thread(ThreeBrokers, folder)
    try:
        await cluster.start()
        yield cluster
    finally:
        await asyncio.to_thread(cluster.stop)


def relay_topics(folder: Path, replicated: Iterable[str] = REPLICATED_TOPICS) -> Path:
    """Topic files with three copies of these topics and one of the others; for `kafka_settings(topics_dir=…)`."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in packaged_dir("topics").glob("*.toml"):
        copies = COPIES if file.stem in replicated else 1
        lines = file.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if not line.startswith("replication")]
        (folder / file.name).write_text("\n".join([*kept, f"replication = {copies}", ""]), encoding="utf-8")
    return folder
