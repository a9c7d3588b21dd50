"""Warm restart: returning users' hits after a kill of a worker and after a rolling restart, with and without a file.

Two workers of one fleet, random weights, half of the rankings by returning users, none announced. Each run plays one
event in one fleet, and counts until WINDOW_S after its end. kill: restarted at once. absence: killed, and restarted
when the other worker has all lanes. There are so many users that most return once in that time: a miss makes its user
known again.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
from handover import history_of
from relaygr_lab.bench.statistics import ratio_bounds
from relaygr_lab.cpu_times import CpuTimes, disturbance
from relaygr_lab.processes import wait_until
from relaygr_lab.verdicts import NotValid, some

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.errors import RelayError
from relaygr_stream.ops.brokers.local import broker_at_hand, local_broker
from relaygr_stream.ops.children import Child, stop_all, write_settings
from relaygr_stream.settings.schema import Client, Kafka, Relay, Settings
from relaygr_stream.settings.worker import Worker
from relaygr_stream.wire.behaviours import pack_items
from relaygr_stream.wire.messages import HITS, RankingRequest, WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import worker_statuses

MIB: Final = 1 << 20
LANES: Final = 16
TOKENS: Final = 512  # 2 MiB of float32 K and V with the built-in model's default shape
HALF_EACH: Final = {"w1": LANES // 2, "w2": LANES // 2}
CANDIDATES: Final = 50
#: Without a file half of the users miss once, so that two in five of their misses with one are surely less than all.
USERS: Final = 120
RATE: Final = 8.0
WINDOW_S: Final = 30.0
TIMEOUT_S: Final = 20.0
LANES_S: Final = 90.0
#: Of the misses without a file. What is left is of users who are ranked elsewhere while their worker is away.
MOST_MISSES: Final = 0.5

Event = Literal["kill", "absence", "rolling"]


@dataclass
class Run:
    """One event, as its users saw it. returns: the outcome of each ranking by a returning user."""

    away_s: float = 0.0  # from the event until the restarted workers own lanes again
    returns: list[str] = field(default_factory=list)
    failed: int = 0

    def __add__(self, other: Run) -> Run:
        """Both runs' rankings, and the longer absence."""
        return Run(max(self.away_s, other.away_s), self.returns + other.returns, self.failed + other.failed)

    @property
    def hits(self) -> float:
        """Share of hits among all rankings by returning users."""
        return 1 - self.misses / len(self.returns) if self.returns else math.nan

    @property
    def misses(self) -> int:
        """Rankings by returning users that were no hits."""
        return sum(outcome not in HITS for outcome in self.returns)


class Fleet:
    """Two workers that are restarted under load."""

    def __init__(self, kafka: Kafka, folder: Path, name: str, *, file: bool) -> None:
        worker = Worker(
            hbm_bytes=256 * MIB, dram_bytes=512 * MIB, audit_share=0.0, dram_path=str(folder) if file else ""
        )
        self.settings = Settings(
            kafka=msgspec.structs.replace(kafka, prefix=f"change-{name}.", partitions=LANES, replication=1),
            # Nothing is cut short or refused on a slow machine: what is judged is hits.
            relay=Relay(
                slo_ms=TIMEOUT_S * 1e3, max_prefix_tokens=TOKENS, max_suffix_tokens=16, max_candidates=CANDIDATES
            ),
            worker=worker,
            client=Client(hedge_ms=0.0),  # on a busy machine both workers would soon know every user
        )
        self._name, self._folder = name, folder
        self._statuses: dict[str, WorkerStatus] = {}
        self._children: dict[str, Child] = {}
        self._strangers = USERS
        self._since = float("inf")
        self.run = Run()

    async def play(self, event: Event) -> Run:
        """Warm up, play the event under load, watch the window."""
        await apply_topics(self.settings.kafka)
        topics = load_topics(self.settings.kafka)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(lambda: stop_all(list(self._children.values())))
            tail = TopicTail(self.settings.kafka, topics.worker_status.name, [0], "earliest", self._on_statuses)
            await stack.enter_async_context(tail)
            for name in ("w1", "w2"):
                await self._start(name)
            await self._settled()
            client = await stack.enter_async_context(RelayClient(settings=self.settings))
            for user in range(USERS):
                await self._rank(client, user)
            load = asyncio.create_task(self._load(client))
            stack.callback(load.cancel)
            await asyncio.sleep(2)
            at = self._since = time.monotonic()
            if event == "rolling":
                for name in ("w1", "w2"):
                    self._children[name].terminate()
                    await self._children[name].wait()
                    await self._again(name)
            else:
                self._children["w1"].kill()
                if event == "absence":
                    self._statuses.clear()
                    await self._settled({"w2": LANES})
                await self._again("w1")
            self.run.away_s = time.monotonic() - at
            await asyncio.sleep(WINDOW_S)
            load.cancel()
        return self.run

    async def _again(self, name: str) -> None:
        self._statuses.clear()
        await self._start(name)
        await self._settled()

    async def _start(self, name: str) -> None:
        config = write_settings(self._folder / f"{self._name}.toml", self.settings)
        arguments = ["worker", "--config", config, "--set", f"worker.name={name}"]
        self._children[name] = Child(f"{self._name}-{name}", arguments, self._folder)
        await self._children[name].wait_ready()

    async def _settled(self, lanes: Mapping[str, int] = HALF_EACH) -> None:
        """Until these workers have stated so many lanes."""

        def owned() -> dict[str, int]:
            return {name: len(each.lanes) for name, each in self._statuses.items()}

        running = [self._children[name] for name in lanes]
        await wait_until(
            lambda: lanes.items() <= owned().items(), running, LANES_S, lambda: f"the workers own {owned()} lanes"
        )

    async def _load(self, client: RelayClient) -> None:
        """Open loop: a returning user and a stranger in turns, at the rate, however slow the answers are."""
        start, number, rng = time.monotonic(), 0, np.random.default_rng(1)
        async with asyncio.TaskGroup() as group:
            while True:
                user = int(rng.integers(USERS))
                if number % 2:
                    user = self._strangers = self._strangers + 1
                group.create_task(self._rank(client, user))
                number += 1
                await asyncio.sleep(start + number / RATE - time.monotonic())

    async def _rank(self, client: RelayClient, user: int) -> None:
        at = time.monotonic()
        request = RankingRequest(
            request_id=f"{self._name}-{user}-{at}",
            user_id=f"user-{user}",
            prefix=history_of(user, TOKENS),
            candidates=pack_items(np.arange(CANDIDATES)),
        )
        try:
            ranking = await client.rank(request, timeout=TIMEOUT_S)
        except RelayError:
            self.run.failed += 1
            return
        if user < USERS and at >= self._since:
            self.run.returns.append(ranking.outcome)

    def _on_statuses(self, records: list[Record]) -> None:
        for status in worker_statuses(records):
            if status.state == "serving":
                self._statuses[status.name] = status


def memory_folder() -> str | None:
    """A folder in memory, if this system has one."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


async def restarts(parent: str | None, *, quick: bool) -> list[str]:
    """Play each event without and with a file, below this folder; prints the table and returns the bounds not kept."""
    kind, repeats = broker_at_hand(), 1 if quick else 2
    print(f"warm restart: {USERS} users of {TOKENS} tokens, {RATE:g} rankings a second, half by them; broker: {kind}")
    print(f"{'event':<10} {'file':<6} {'away s':>8} {'returns':>8} {'misses':>8} {'hits':>8} {'failed':>7}")
    broken, unsure = [], []
    events: tuple[Event, ...] = ("kill", "absence", "rolling")
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        async with local_broker(kind, folder=folder) as broker:
            for event in events:
                before = CpuTimes.now()
                runs = {False: Run(), True: Run()}
                for number in range(2 * repeats):
                    file = bool(number % 2)
                    fleet = Fleet(broker.kafka_settings(Kafka()), folder, f"{event}-{number}", file=file)
                    runs[file] += await fleet.play(event)
                for file, run in runs.items():
                    print(
                        f"{event:<10} {'yes' if file else 'no':<6} {run.away_s:>8.1f} {len(run.returns):>8} "
                        f"{run.misses:>8} {run.hits:>8.0%} {run.failed:>7}"
                    )
                try:
                    found = verdict(event, runs[True], runs[False])
                except NotValid as error:
                    unsure.append(str(error))
                    found = []
                if disturbed := disturbance(before, CpuTimes.now()):
                    unsure.append(f"{event}: {disturbed}")
                else:
                    broken += found
    if unsure:
        raise NotValid("; ".join([*unsure, *(f"bound not kept: {each}" for each in broken)]))
    return broken


def verdict(event: str, file: Run, none: Run) -> list[str]:
    """The bounds that this event surely does not keep. Raises NotValid where its misses do not tell."""
    for run in (file, none):
        some(run.returns, f"returns of users after {event}")
    low, high = ratio_bounds(len(file.returns), file.misses, len(none.returns), none.misses)
    told = f"{event}: with a file {file.misses} misses of {len(file.returns)}, without {none.misses} of "
    told += f"{len(none.returns)}: between {low:.2f} and {high:.2f} times the share, with 95 % confidence"
    print(told, flush=True)
    if low <= MOST_MISSES and high >= 1.0:
        raise NotValid(f"{told}; too few to tell {MOST_MISSES:g} from 1")
    broken = [f"{told}; bound: at most {MOST_MISSES:g}"] if low > MOST_MISSES else []
    if file.failed > none.failed:
        broken.append(f"{event}: {file.failed} rankings failed with a file; bound: {none.failed} without")
    return broken
