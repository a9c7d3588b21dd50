"""An Apache Kafka distribution: where it is, the properties of a small private node, its formatted storage.

Knows nothing of processes nor of how many nodes there are.
"""

from __future__ import annotations

import base64
import os
import random
import socket
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from relaygr_stream.errors import BrokerUnavailable

# How a private Apache Kafka node runs, by what it serves: memory, compilers, threads. Knows nothing of processes.


#: Java's first compiler alone: the second one takes up to 30 % of a core for the first half minute under load.
QUICK_COMPILER: Final = "-XX:TieredStopAtLevel=1"
#: Both, as brokers that run for days have them: once compiled, a message takes the broker a third less time.
BOTH_COMPILERS: Final = "-XX:+TieredCompilation"
#: For a single relay. Java stands still for 15 to 60 ms to collect what short-lived objects left, on two busy cores:
#: every 5 s with 512 MiB in all at 60 requests/s, every 45 s with this. Touched at the start, so that no page is
#: missing later. The 128 MiB that are left are meant for the topics of one relay, not of a session of tests.
ONE_RELAY_HEAP: Final = "-Xms640m -Xmx640m -Xmn512m -XX:+AlwaysPreTouch"
ONE_RELAY_PROPERTIES: Final = {
    # 3 and 8 by default: on two cores each thread more is one more to be woken on a message's way.
    "num.network.threads": "1",
    "num.io.threads": "2",
    "log.cleaner.dedupe.buffer.size": "4194304",  # of 128 MiB of heap by default
}


@dataclass(frozen=True)
class NodePlan:
    """heap, compilers: options of Java. properties: over those that every private node has."""

    heap: str
    compilers: str = QUICK_COMPILER
    properties: Mapping[str, str] = field(default_factory=dict)


#: Serves whoever comes, such as tests with topics of their own each.
ANYBODY: Final = NodePlan("-Xms128m -Xmx512m")
#: Serves a single relay, whose messages are to be as quick as two cores allow, for a minute or for longer.
BRIEF_RELAY: Final = NodePlan(ONE_RELAY_HEAP, QUICK_COMPILER, ONE_RELAY_PROPERTIES)
LASTING_RELAY: Final = NodePlan(ONE_RELAY_HEAP, BOTH_COMPILERS, ONE_RELAY_PROPERTIES)


# Ports for private brokers, which may be stopped and started again. Taken from below those that the system hands out:
# nobody is given one by chance while its broker is down, not even a client that tries to reach that broker (TCP lets
# a socket connect to itself).


#: Above the ports that well-known servers use.
FIRST: Final = 10_000
#: Where a system that does not say (macOS) begins to hand out ports: RFC 6335.
HANDED_OUT_FROM: Final = 49_152
#: Fewer to choose from, and two programs would choose the same.
ENOUGH: Final = 1000


def free_ports(count: int, handed_out_from: int | None = None) -> list[int]:
    """Different loopback ports that nobody listens on just now.

    handed_out_from: the first port that the system gives to sockets which name none; None: as this system says.
    Raises OSError if there are not enough.
    """
    end = _handed_out_from() if handed_out_from is None else handed_out_from
    if end - FIRST < ENOUGH:  # a system that hands out nearly all: then by chance it must be
        return _handed_out(count)
    free: list[int] = []
    for port in random.SystemRandom().sample(range(FIRST, end), end - FIRST):
        if len(free) == count:
            break
        if nobody_listens(port):
            free.append(port)
    else:
        raise OSError(f"of the ports {FIRST} to {end - 1}, fewer than {count} are free")
    return free


def nobody_listens(port: int) -> bool:
    """Whether a server could take this loopback port."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _handed_out_from() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return HANDED_OUT_FROM


def _handed_out(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


#: Of every private node; what depends on the number of nodes is not among them.
SMALL_NODE: Final = {
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    "offsets.topic.num.partitions": "4",  # 50 by default: a second of every start
    "group.initial.rebalance.delay.ms": "0",
    # After a kill, a restarted broker is refused until its former session is over: 9 s by default.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    "num.recovery.threads.per.data.dir": "2",
    "group.min.session.timeout.ms": "1000",  # so that a crash is noticed sooner than Kafka's 6 s allow
}


def kafka_home() -> Path:
    """The Apache Kafka distribution that KAFKA_HOME names; BrokerUnavailable if there is none."""
    named = os.environ.get("KAFKA_HOME", "")
    if not named:
        raise BrokerUnavailable(
            "KAFKA_HOME is not set: unpack an Apache Kafka 4 archive (https://kafka.apache.org/downloads), install "
            "Java 17 or later, and set KAFKA_HOME to the folder with bin/ and config/"
        )
    home = Path(named)
    for needed in ("bin/kafka-storage.sh", "bin/kafka-server-start.sh", "config/server.properties"):
        if not (home / needed).is_file():
            raise BrokerUnavailable(f"KAFKA_HOME={named} has no {needed}: it must name an Apache Kafka 4 distribution")
    return home


def internal_replication(copies: int) -> dict[str, str]:
    """Copies of the topics that Kafka keeps for itself: offsets of groups above all."""
    in_sync = str(max(1, copies - 1))
    return {
        "offsets.topic.replication.factor": str(copies),
        "transaction.state.log.replication.factor": str(copies),
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": str(copies),
        "share.coordinator.state.topic.min.isr": in_sync,
    }


def node_properties(home: Path, ours: Mapping[str, str]) -> str:
    """A properties file: the distribution's own, with `ours` in place of what they name, too."""
    theirs = (home / "config" / "server.properties").read_text(encoding="utf-8").splitlines()
    kept = [line for line in theirs if line.split("=", 1)[0].strip() not in ours]
    return "\n".join([*kept, *(f"{key}={value}" for key, value in ours.items()), ""])


def new_cluster_id() -> str:
    """A cluster id as kafka-storage.sh takes it; never with a dash, which it reads as an option."""
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "0")


def format_storage(home: Path, properties: Path, cluster: str, role: Sequence[str], env: Mapping[str, str]) -> None:
    """Make a node's data folder. role: ("--standalone",) of the only controller, ("--no-initial-controllers",) else.

    Raises BrokerUnavailable with what Kafka says.
    """
    command = [str(home / "bin" / "kafka-storage.sh"), "format", *role, "-t", cluster, "-c", str(properties)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})
    if done.returncode:
        raise BrokerUnavailable(f"Kafka's storage could not be formatted:\n{done.stdout}{done.stderr}")


def environment(folder: Path, heap: str, compilers: str = QUICK_COMPILER) -> dict[str, str]:
    """What a node's scripts read; heap, compilers: options of Java. What the environment has of its own stays."""
    found = {"LOG_DIR": str(folder / "logs")}
    if "KAFKA_HEAP_OPTS" not in os.environ:
        found["KAFKA_HEAP_OPTS"] = heap
    if "KAFKA_OPTS" not in os.environ:
        found["KAFKA_OPTS"] = compilers
    return found
