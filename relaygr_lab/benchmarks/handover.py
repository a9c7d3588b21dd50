"""What hand-over gains and costs at a planned scale-out: one worker serves returning users, a second one joins and
takes half of the lanes; the same with hand-over and without. Real processes, the broker at hand (Kafka where KAFKA_HOME
is set), random weights. CHECK=1 judges and exits non-zero, naming the bounds not kept."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import uvloop
from judge import judge
from relaygr_lab.processes import wait_until
from relaygr_lab.verdicts import some

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.errors import RelayError
from relaygr_stream.ops.brokers.local import broker_at_hand, local_broker
from relaygr_stream.ops.children import Child, stop_all, write_settings
from relaygr_stream.settings.schema import Client, Kafka, Relay, Settings
from relaygr_stream.settings.worker import Handover, Worker
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.messages import HITS, RankingRequest, WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.wire.worker_status import worker_statuses
from relaygr_stream.workload.quantiles import nearest_rank

MIB: Final = 1 << 20
LANES: Final = 16
#: 4 MiB of float32 K and V each with the built-in model's default shape (4 layers, 4 heads of 32 + 32): 320 MiB.
USERS: Final = 80
TOKENS: Final = 1024
CANDIDATES: Final = 100
#: Users come one after the other, so that each returns after USERS / RATE = 8 s.
RATE: Final = 10.0
BEFORE_S: Final = 4.0
AFTER_S: Final = 10.0
MIB_PER_S: Final = 64.0
#: Of the first returns of moved users, the hit rate with hand-over must exceed that without (none) by so much: half of
#: the 160 MiB move within 1.25 s at the bound, in which a sixth of the users return; half of them hit even at a
#: third of that speed.
LEAST_GAIN: Final = 0.5
#: Bandwidth may exceed its bound by the burst and the clock's grain.
TOLERANCE: Final = 1.1
#: P99 of the kept lanes while copies are sent, against the run without: more than this would mean that copies hold up
#: the loop or the device. Beside other programs P99 of 70 requests is the worst one and scatters by as much.
MOST_SLOWER: Final = 2.0
TIMEOUT_S: Final = 20.0
LANES_S: Final = 60.0


@dataclass(frozen=True)
class Asked:
    """One ranking: when it was sent, whose, where its prefix was, what that took."""

    at: float
    user: int
    outcome: str
    computed: int
    ms: float


@dataclass
class Run:
    """One scale-out, as seen from outside."""

    moved_at: float = 0.0
    moved: frozenset[int] = frozenset()  # lanes
    asked: list[Asked] = field(default_factory=list)
    failed: int = 0
    sent_mib: float = 0.0
    sending_s: float = 0.0
    entries: int = 0

    def after(self, moved: bool) -> list[Asked]:
        """Rankings after the move, of users whose lanes moved or of the others."""
        return [a for a in self.asked if a.at >= self.moved_at and (_lane(a.user) in self.moved) == moved]

    def first_returns(self) -> list[Asked]:
        """The first ranking of each moved user after the move."""
        first: dict[int, Asked] = {}
        for asked in self.after(moved=True):
            first.setdefault(asked.user, asked)
        return list(first.values())


def _lane(user: int) -> int:
    return lane_of(f"user-{user}", LANES)


class ScaleOut:
    """Two workers of one fleet, the second one started when told."""

    def __init__(self, kafka: Kafka, folder: Path, *, handover: bool) -> None:
        name = "with" if handover else "without"
        self.settings = Settings(
            kafka=msgspec.structs.replace(kafka, prefix=f"handover-{name}.", partitions=LANES, replication=1),
            relay=Relay(
                slo_ms=TIMEOUT_S * 1e3, max_prefix_tokens=TOKENS, max_suffix_tokens=16, max_candidates=CANDIDATES
            ),
            worker=Worker(hbm_bytes=512 * MIB, dram_bytes=512 * MIB, audit_share=0.0),
            # A hedge would ask the old owner, who still has the prefix: what is measured is the new one.
            client=Client(hedge_ms=0.0, silence_ms=60_000.0),
            handover=Handover(secret="of this benchmark only" if handover else "", mib_per_s=MIB_PER_S),
        )
        self._name = name
        self._folder = folder
        self._statuses: dict[str, WorkerStatus] = {}
        self._children: list[Child] = []
        self._behaviours = [history_of(user, TOKENS) for user in range(USERS)]
        self.run = Run()

    async def play(self) -> Run:
        await apply_topics(self.settings.kafka)
        topics = load_topics(self.settings.kafka)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(lambda: stop_all(self._children))
            tail = TopicTail(self.settings.kafka, topics.worker_status.name, [0], "earliest", self._on_statuses)
            await stack.enter_async_context(tail)
            self._start("w1")
            await self._children[0].wait_ready()
            await self._lanes("w1", LANES)
            client = await stack.enter_async_context(RelayClient(settings=self.settings))
            for user in range(USERS):
                await self._rank(client, user)
            self.run.asked.clear()
            load = asyncio.create_task(self._load(client))
            stack.callback(load.cancel)
            await asyncio.sleep(BEFORE_S)
            self._start("w2")
            self.run.moved = frozenset(lane.lane for lane in (await self._lanes("w2", LANES // 2)).lanes)
            self.run.moved_at = time.monotonic()
            await asyncio.sleep(AFTER_S)
            load.cancel()
            self._read_metrics()
        return self.run

    def _start(self, name: str) -> None:
        config = write_settings(self._folder / f"{self._name}.toml", self.settings)
        arguments = ["worker", "--config", config, "--set", f"worker.name={name}"]
        self._children.append(Child(f"{self._name}-{name}", arguments, self._folder))

    async def _lanes(self, name: str, count: int) -> WorkerStatus:
        """The first status in which the worker owns so many lanes."""

        def owned() -> int:
            return len(self._statuses[name].lanes) if name in self._statuses else 0

        await wait_until(lambda: owned() >= count, self._children, LANES_S, lambda: f"{name} owns {owned()} of {count}")
        return self._statuses[name]

    async def _load(self, client: RelayClient) -> None:
        """Open loop: one user after the other, at the rate, however slow the answers are."""
        start, number = time.monotonic(), 0
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._rank(client, number % USERS))
                number += 1
                await asyncio.sleep(start + number / RATE - time.monotonic())

    async def _rank(self, client: RelayClient, user: int) -> None:
        at = time.monotonic()
        request = RankingRequest(
            request_id=f"{self._name}-{user}-{at}",
            user_id=f"user-{user}",
            prefix=self._behaviours[user],
            candidates=pack_items(np.arange(CANDIDATES)),
        )
        try:
            ranking = await client.rank(request, timeout=TIMEOUT_S)
        except RelayError:
            self.run.failed += 1
            return
        ms = (time.monotonic() - at) * 1e3
        self.run.asked.append(Asked(at, user, ranking.outcome, ranking.timings.computed_tokens, ms))

    def _read_metrics(self) -> None:
        given = {one.name: one.value for one in self._children[0].samples() if one.labels.get("way") == "given"}
        self.run.sent_mib = given.get("relaygr_handover_bytes_total", 0.0) / MIB
        self.run.sending_s = given.get("relaygr_handover_seconds_total", 0.0)
        self.run.entries = int(given.get("relaygr_handover_entries_total", 0.0))

    def _on_statuses(self, records: list[Record]) -> None:
        for status in worker_statuses(records):
            if status.state == "serving":
                self._statuses[status.name] = status


def history_of(user: int, tokens: int) -> Behaviours:
    """The user's behaviours, the same in every run."""
    rng = np.random.default_rng(user)
    times = np.cumsum(rng.integers(1, 10**6, tokens))
    return Behaviours.from_arrays(rng.integers(0, 50_000, tokens), rng.integers(1, 4, tokens), times)


async def measure() -> dict[bool, Run]:
    """A scale-out without hand-over, and one with it."""
    runs = {}
    kind = broker_at_hand()
    with tempfile.TemporaryDirectory() as folder:
        async with local_broker(kind, folder=Path(folder)) as broker:
            print(f"{USERS} users of {TOKENS} tokens, {RATE:g} rankings a second, broker: {kind}; 1 → 2 workers\n")
            for handover in (False, True):
                runs[handover] = await ScaleOut(broker.kafka_settings(Kafka()), Path(folder), handover=handover).play()
    return runs


def report(runs: dict[bool, Run]) -> list[str]:
    """The table on standard output; the bounds not kept."""
    first = {kind: some(run.first_returns(), "returns of users whose lanes moved") for kind, run in runs.items()}
    hits = {kind: float(np.mean([a.outcome in HITS for a in asked])) for kind, asked in first.items()}
    kept = {kind: _quantiles(run.after(moved=False)) for kind, run in runs.items()}
    moved = {kind: _quantiles(asked) for kind, asked in first.items()}
    rows = [
        ("users moved, that returned", [f"{len(first[kind])}" for kind in runs]),
        ("found their prefix KV there", [f"{hits[kind]:.0%}" for kind in runs]),
        ("prefix tokens computed for each", [f"{np.mean([a.computed for a in first[kind]]):.0f}" for kind in runs]),
        ("their ranking, P50 / P99 ms", [_pair(moved[kind]) for kind in runs]),
        ("others' ranking, P50 / P99 ms", [_pair(kept[kind]) for kind in runs]),
        ("rankings that failed", [f"{run.failed}" for run in runs.values()]),
        ("entries sent", [f"{run.entries}" for run in runs.values()]),
        ("MiB sent", [f"{run.sent_mib:.0f}" for run in runs.values()]),
        ("seconds", [f"{run.sending_s:.2f}" for run in runs.values()]),
        ("MiB/s", [f"{_speed(run):.1f}" for run in runs.values()]),
    ]
    print(f"{f'in the {AFTER_S:g} s after the move':<34} {'without':>16} {'with hand-over':>16}")
    for name, values in rows:
        print(f"{name:<34} {values[0]:>16} {values[1]:>16}")
    print(f"\nbound: {MIB_PER_S:g} MiB/s")
    broken = []
    if hits[True] < hits[False] + LEAST_GAIN:
        broken.append(
            f"hits of first returns: {hits[True]:.0%} with; bound: {LEAST_GAIN:.0%} above {hits[False]:.0%} without it"
        )
    if _speed(runs[True]) > TOLERANCE * MIB_PER_S:
        broken.append(f"sent {_speed(runs[True]):.1f} MiB/s; bound: {MIB_PER_S:g}")
    if kept[True][1] > MOST_SLOWER * kept[False][1]:
        broken.append(
            f"P99 of others: {kept[True][1]:.0f} ms with; bound: {MOST_SLOWER:g} × {kept[False][1]:.0f} without"
        )
    if any(run.failed for run in runs.values()):
        broken.append("rankings failed")
    return broken


def _quantiles(asked: list[Asked]) -> tuple[float, float]:
    ms = [one.ms for one in some(asked, "rankings after the move")]
    return nearest_rank(ms, 0.5), nearest_rank(ms, 0.99)


def _pair(quantiles: tuple[float, float]) -> str:
    return f"{quantiles[0]:.1f} / {quantiles[1]:.1f}"


def _speed(run: Run) -> float:
    return run.sent_mib / run.sending_s if run.sending_s else 0.0


def main() -> None:
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # topics made a moment ago have no leaders yet
    judge(lambda: report(uvloop.run(measure())))


if __name__ == "__main__":
    main()
