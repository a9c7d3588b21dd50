"""What a change of the fleet costs its users: a worker killed, all workers restarted. Real processes, the broker at
hand (Kafka where KAFKA_HOME is set). --quick: fewer users. CHECK=1 judges and exits non-zero naming the targets missed.
"""

from __future__ import annotations

import argparse
import logging

import uvloop
from change_restart import memory_folder, restarts
from targets import end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer users (4 minutes)")
    given = parser.parse_args()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # topics made a moment ago have no leaders yet
    end(uvloop.run(restarts(memory_folder(), quick=given.quick)))


if __name__ == "__main__":
    main()
