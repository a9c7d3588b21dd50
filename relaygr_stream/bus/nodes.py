"""How a private Apache Kafka node runs, by what it serves: memory, compilers, threads. Knows nothing of processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

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
