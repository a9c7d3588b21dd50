"""An Apache Kafka distribution: its folder, the properties of a small private node, its storage, free ports."""

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
from relaygr_stream.settings.inputs import read_text

# Plans of a private node: memory, compilers, threads.

#: Java's first compiler only: the second one takes up to 30 % of a core during the first half minute under load.
QUICK_COMPILER: Final = "-XX:TieredStopAtLevel=1"
#: Both compilers, as in a broker that runs for days: after compilation, a message takes a third less time.
BOTH_COMPILERS: Final = "-XX:+TieredCompilation"
#: Java's counters stay in memory, not in a file in /tmp: to write it may stop Java for as long as the disk is busy.
NO_COUNTER_FILE: Final = "-XX:+PerfDisableSharedMem"
#: For a single relay. A collection of short-lived objects stops Java for 15 to 60 ms on two busy cores: every 5 s with
#: a heap of 512 MiB at 60 requests/s, every 45 s with this one. Pages are touched at the start, so that there is no
#: page fault later. The remaining 128 MiB suffice for the topics of one relay, not for those of a test session.
ONE_RELAY_HEAP: Final = "-Xms640m -Xmx640m -Xmn512m -XX:+AlwaysPreTouch"
ONE_RELAY_PROPERTIES: Final = {
    # 3 and 8 by default: on two cores each further thread is one more to wake for a message.
    "num.network.threads": "1",
    "num.io.threads": "2",
    "log.cleaner.dedupe.buffer.size": "4194304",  # of 128 MiB of heap by default
}


@dataclass(frozen=True)
class NodePlan:
    """How a private node runs. heap, compilers: Java's options. properties: override those of every private node."""

    heap: str
    compilers: str = QUICK_COMPILER
    properties: Mapping[str, str] = field(default_factory=dict)


#: For any use, such as tests that each have their own topics.
DEFAULT_NODE: Final = NodePlan("-Xms128m -Xmx512m")
#: For a single relay with the lowest latency on two cores: for about a minute, or for longer.
BRIEF_RELAY: Final = NodePlan(ONE_RELAY_HEAP, QUICK_COMPILER, ONE_RELAY_PROPERTIES)
LASTING_RELAY: Final = NodePlan(ONE_RELAY_HEAP, BOTH_COMPILERS, ONE_RELAY_PROPERTIES)


# Ports of private brokers, which may be stopped and restarted. They are below the system's ephemeral ports: otherwise
# the system could give one to another socket while its broker is down, even to a client that tries to reach that broker
# (TCP allows a socket to connect to itself).

#: Above the ports of well-known servers.
FIRST_PORT: Final = 10_000
#: First ephemeral port of a system that does not state it (macOS): RFC 6335.
DEFAULT_EPHEMERAL_FROM: Final = 49_152
#: With fewer ports to choose from, two programs may choose the same one.
MIN_PORTS: Final = 1000


def free_ports(count: int, ephemeral_from: int | None = None) -> list[int]:
    """Different free loopback ports, below the ephemeral ones.

    ephemeral_from: the first ephemeral port; None: this system's. Raises OSError if there are not enough.
    """
    end = _first_ephemeral() if ephemeral_from is None else ephemeral_from
    if end - FIRST_PORT < MIN_PORTS:  # nearly all ports are ephemeral on this system
        return _ephemeral_ports(count)
    free: list[int] = []
    for port in random.SystemRandom().sample(range(FIRST_PORT, end), end - FIRST_PORT):
        if len(free) == count:
            break
        if is_free(port):
            free.append(port)
    else:
        raise OSError(f"of the ports {FIRST_PORT} to {end - 1}, fewer than {count} are free")
    return free


def is_free(port: int) -> bool:
    """Whether a server can listen on this loopback port."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_EPHEMERAL_FROM


def _ephemeral_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


#: Properties of every private node, whatever the number of nodes.
SMALL_NODE: Final = {
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    "offsets.topic.num.partitions": "4",  # 50 by default: a second of every start
    "group.initial.rebalance.delay.ms": "0",
    # After a kill, a restarted broker is refused until its former session ends: 9 s by default.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    "num.recovery.threads.per.data.dir": "2",
    "group.min.session.timeout.ms": "1000",  # 6 s by default: lower, so that a crash is noticed sooner
}


def kafka_home() -> Path:
    """The folder of the Apache Kafka distribution in KAFKA_HOME. Raises BrokerUnavailable if there is none."""
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
    """Properties for the copies of Kafka's internal topics, such as groups' offsets."""
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
    theirs = read_text(home / "config" / "server.properties").splitlines()
    kept = [_ascii(line) for line in theirs if line.split("=", 1)[0].strip() not in ours]
    return "\n".join([*kept, *(f"{key}={_property(value)}" for key, value in ours.items()), ""])


def _property(value: str) -> str:
    """A value as java.util.Properties reads it: a backslash begins an escape, and leading blanks are dropped."""
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")
    return _ascii(f"\\{escaped}" if escaped.startswith(" ") else escaped)


def _ascii(text: str) -> str:
    r"""The text with \uXXXX, UTF-16's units, for what is not ASCII: Java reads properties as Latin-1."""
    units = text.encode("utf-16-be", "surrogatepass")
    codes = [int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2)]
    return "".join(chr(code) if code < 0x80 else f"\\u{code:04x}" for code in codes)


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
    """Environment variables of a node's scripts; those already set stay. heap, compilers: Java's options."""
    found = {"LOG_DIR": str(folder / "logs")}
    if "KAFKA_HEAP_OPTS" not in os.environ:
        found["KAFKA_HEAP_OPTS"] = heap
    if "KAFKA_OPTS" not in os.environ:
        found["KAFKA_OPTS"] = f"{compilers} {NO_COUNTER_FILE}"
    return found
