"""docs/fleet-1280.png and docs/fleet-390.png: the fleet's page with made-up statuses of three workers, light and dark.

python docs/fleet.py     needs Debian's package chromium
"""

from __future__ import annotations

import asyncio
import math
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

from PIL import Image
from prometheus_client import CollectorRegistry

from relaygr_stream.ops.dashboard.board import Board
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import CostModel, LaneStatus, WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.trigger_status import PolicyStatus, TriggerStatus, encode_trigger
from relaygr_stream.wire.worker_status import StatusReader
from relaygr_stream.worker.metrics import WorkerMetrics

LANES, SECONDS, STEP_S = 48, 900, 2
HERE: Final = Path(__file__).parent
#: Width, height, dark or light.
SHOTS: Final = ((1280, 1010, 1), (390, 1240, 0))
SLOW: Final = 1  # the worker whose device is busy
SINCE: Final = 600  # when more traffic comes
POLICY: Final = PolicyStatus(stale_ms=1000.0, life_ms=2000.0, max_prefix_tokens=4096)


class Fleet:
    """Three workers and a trigger, and what they would state. now: Unix time."""

    def __init__(self, board: Board, now: float) -> None:
        self._board, self._now, self._chance = board, now, random.Random(7)
        self._metrics = [WorkerMetrics(CollectorRegistry(), 50.0) for _ in range(3)]
        self._offsets = [0] * LANES
        self._decisions = dict.fromkeys(("admitted", "too_long", "stale", "delegated"), 0.0)

    def state(self, second: int) -> None:
        """What all state at that second."""
        for number in range(3):
            busy = second > SINCE and number == SLOW
            self._serve(number, second, busy)
            self._put(self._worker(number, second, busy))
        for reason, most in zip(self._decisions, (40, 10 if second > SINCE else 1, 1, 6), strict=True):
            self._decisions[reason] += self._chance.randrange(most + 1)
        trigger = TriggerStatus(
            name="trigger-0", incarnation=1, host="h", pid=1, sent_ms=int((self._now + second) * 1e3), state="serving",
            group="relaygr.trigger", lanes=tuple(range(LANES)), policy=POLICY, decisions=dict(self._decisions),
        )  # fmt: skip
        headers = (("relaygr-kind", b"trigger"),)
        at_ms = trigger.sent_ms
        self._board.view.on_records([Record("s", 0, 0, at_ms, b"trigger/trigger-0", encode_trigger(trigger), headers)])

    def _serve(self, number: int, second: int, busy: bool) -> None:
        chance, metrics = self._chance, self._metrics[number]
        for _ in range(int(16 + 8 * math.sin(second / 140) + (10 if second > SINCE else 0) + chance.random() * 5)):
            outcome = chance.choices(("hbm", "dram", "joined", "full"), (60, 16, 4, 12 if not busy else 30))[0]
            mean, spread = (0.034, 0.007) if outcome == "full" else (0.011, 0.004)
            metrics.ranked(outcome, abs(chance.gauss(mean * (1.35 if busy else 1), spread)), 0.0)
        if busy and chance.random() < 0.4:
            metrics.answer(chance.choice(("overloaded", "overloaded", "deadline_exceeded")))

    def _worker(self, number: int, second: int, busy: bool) -> WorkerStatus:
        chance, metrics, mine = self._chance, self._metrics[number], range(number * 16, number * 16 + 16)
        for lane in mine:
            self._offsets[lane] += int(chance.random() * (9 if lane == 21 and busy else 3))
        used = min(1.0, 0.35 + second / SECONDS / 2)
        return WorkerStatus(
            name=f"worker-{number}", incarnation=1, host="h", pid=1, sent_ms=int((self._now + second) * 1e3),
            state="serving", costs=CostModel(c0=2, c1=0.02, c2=0, c3=0), bytes_per_token=16 << 10, alloc_bytes=1 << 20,
            lanes=tuple(
                LaneStatus(
                    lane=lane, budget_bytes=512 << 20, pinned_bytes=int(chance.random() * 256) << 20,
                    pre_infer_offset=self._offsets[lane],
                )
                for lane in mine
            ),
            queue_ms=(9 if busy else 2) + chance.random(), busy_share=0.96 if busy else 0.5 + 0.1 * chance.random(),
            model_version="m", counters=dict(metrics.answered) | {"signals": 1.0},
            latencies={outcome: tuple(counts) for outcome, counts in metrics.latencies.items()},
            hbm_bytes=24 << 30, hbm_used_bytes=int(used * (24 << 30)),
            dram_bytes=128 << 30, dram_used_bytes=int(used * 0.6 * (128 << 30)),
        )  # fmt: skip

    def _put(self, status: WorkerStatus) -> None:
        self._board.view.on_records([Record("s", 0, 0, status.sent_ms, status.name.encode(), encode(status), ())])


def main() -> None:
    """Draw both."""
    settings = Settings(kafka=Kafka(bootstrap="kafka:9092", partitions=LANES))
    links = '<a href="docs">API</a> <a href="metrics">metrics</a>'
    board = Board(settings, load_topics(settings.kafka), StatusReader(LANES), links)
    fleet = Fleet(board, time.time() - SECONDS)
    for second in range(0, SECONDS + 1, STEP_S):
        board.view.live = second > SECONDS - STEP_S
        fleet.state(second)
    page = asyncio.run(board.page())
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "page.html").write_bytes(page)
        for width, height, scheme in SHOTS:
            shot = HERE / f"fleet-{width}.png"
            look = (f"--window-size={width},{height}", f"--blink-settings=preferredColorScheme={scheme}")
            always = (
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={folder}",
            )
            subprocess.run(
                ["chromium", *always, *look, f"--screenshot={shot}", f"file://{folder}/page.html"],
                check=True,
                capture_output=True,
            )
            Image.open(shot).convert("RGB").quantize(96).save(shot, optimize=True)


if __name__ == "__main__":
    main()
