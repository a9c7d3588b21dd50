"""What warm-up gains and wastes: a real worker's inside (model, tiers, core) on a clock that the bench moves, users who
come back after about the same time, memory for a part of them."""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from relaygr_stream.models.api import Tokens
from relaygr_stream.settings.schema import Relay, Settings, Worker
from relaygr_stream.worker.build import build
from relaygr_stream.worker.commands import Rank, RankTask

USERS: Final = 60
TOKENS: Final = 1024
CANDIDATES: Final = 64
VISITS: Final = 900
#: Half of the visits are counted: first the predictor has to meet everyone a few times.
COUNTED: Final = 450
#: Mean gaps of users, log-uniform, in seconds; idle time is stepped through four times a second, as a worker does.
GAPS: Final = (4.0, 60.0)
IDLE_STEP_S: Final = 0.25


@dataclass(frozen=True)
class Outcome:
    """Shares of counted rankings by where the prefix was, the milliseconds a ranking took, and the counters."""

    hbm: float
    mean_ms: float
    p95_ms: float
    started: int
    hit: int
    wasted: int


def run(warm_up: bool, spread: float) -> Outcome:
    """spread: standard deviation of the logarithm of a user's gaps; 0: like clockwork."""
    settings = Settings(
        relay=Relay(max_prefix_tokens=TOKENS, max_suffix_tokens=0),
        worker=Worker(
            hbm_bytes=20 * TOKENS * 4096, dram_bytes=2 * USERS * TOKENS * 4096, audit_share=0, warm_up=warm_up
        ),
    )
    scheduler = build(settings, lambda *_: False, lambda: None).scheduler
    rng = random.Random(5)
    generator = np.random.default_rng(5)
    histories = [Tokens(np.stack([generator.integers(0, 1000, TOKENS), np.zeros(TOKENS, np.int64), np.arange(TOKENS)]))
                 for _ in range(USERS)]  # fmt: skip
    gaps = [GAPS[0] * (GAPS[1] / GAPS[0]) ** rng.random() for _ in range(USERS)]
    visits = [(gap * rng.random(), user) for user, gap in enumerate(gaps)]
    heapq.heapify(visits)
    now, taken, hits = 0.0, [], 0
    candidates = np.arange(CANDIDATES, dtype=np.int64)
    nothing = Tokens(np.zeros((3, 0), np.int64))
    for number in range(VISITS):
        at, user = heapq.heappop(visits)
        while now < at:  # idle time, in which copies end
            if not scheduler.step(now):
                if scheduler.copying:
                    time.sleep(0.0005)
                else:
                    now = min(at, now + IDLE_STEP_S)
        task = RankTask(
            str(number), f"u{user}", 0, histories[user], nothing, candidates, arrived=now, deadline=now + 10, full=False
        )
        start = time.perf_counter()
        scheduler.handle(Rank(task), now)
        while not task.answered:
            scheduler.step(now)
        if number >= VISITS - COUNTED:
            taken.append((time.perf_counter() - start) * 1e3)
            hits += task.outcome == "hbm"
        heapq.heappush(visits, (at + gaps[user] * rng.lognormvariate(0, spread), user))
    counters = scheduler.warm_up.counters
    scheduler.close()
    return Outcome(
        hits / COUNTED, float(np.mean(taken)), float(np.percentile(taken, 95)),
        counters.started, counters.hit, counters.wasted,
    )  # fmt: skip


def table() -> None:
    print(
        f"Warm-up: {USERS} users of {TOKENS} tokens, HBM for 19 of them beside the scratch region, DRAM for all; "
        f"each comes back after about his own time ({GAPS[0]:g}–{GAPS[1]:g} s), {COUNTED} rankings counted\n"
    )
    print(
        f"{'spread':>6} {'warm-up':>8} {'in HBM':>7} {'mean ms':>8} {'P95 ms':>7}"
        f" {'started':>8} {'used':>5} {'wasted':>6}"
    )
    for spread in (0.1, 0.5):
        for warm_up in (False, True):
            got = run(warm_up, spread)
            print(
                f"{spread:6} {'on' if warm_up else 'off':>8} {got.hbm:7.1%} {got.mean_ms:8.2f} {got.p95_ms:7.2f} "
                f"{got.started:8} {got.hit:5} {got.wasted:6}"
            )
    print()
