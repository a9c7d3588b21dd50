"""An Apache Kafka distribution: where it is, the properties of a small private node, its formatted storage.

Knows nothing of processes nor of how many nodes there are.
"""

from __future__ import annotations

import base64
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from relaygr_stream.bus.nodes import QUICK_COMPILER
from relaygr_stream.errors import BrokerUnavailable

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
