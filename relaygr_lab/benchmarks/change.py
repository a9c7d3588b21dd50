"""What a change of the fleet costs its users: a worker killed, all workers restarted, a new model rolled out, prefix KV
handed over, lanes that move by load. Real processes, the broker at hand (Kafka where KAFKA_HOME is set). --quick: fewer
users, fewer repeats. CHECK=1 judges and exits non-zero, naming the bounds not kept.
"""

from __future__ import annotations

import argparse
import logging

import uvloop
from change_blocks import blocks
from change_lanes import lanes
from change_restart import memory_folder, restarts
from change_rollout import rollouts
from change_wire import wire
from judge import judge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer users, fewer repeats (21 minutes)")
    parser.add_argument(
        "--only", action="append", choices=("blocks", "wire", "restarts", "rollouts", "lanes"), help="not all parts"
    )
    given = parser.parse_args()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # topics made a moment ago have no leaders yet
    parts = {
        "blocks": lambda: blocks(quick=given.quick),
        "wire": lambda: uvloop.run(wire(quick=given.quick)),
        "restarts": lambda: uvloop.run(restarts(memory_folder(), quick=given.quick)),
        "rollouts": lambda: uvloop.run(rollouts(quick=given.quick)),
        "lanes": lambda: uvloop.run(lanes(quick=given.quick)),
    }
    judge(*(parts[name] for name in given.only or parts))


if __name__ == "__main__":
    main()
