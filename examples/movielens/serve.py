"""Serves a checkpoint through Kafka, with the relay and with full inference, and compares both with offline scores.

A private embedded broker, a trigger and one worker run for the comparison. Users, histories and candidates are those of
the offline evaluation: the whole catalogue.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from msgspec.structs import replace
from relaygr_lab.bench.pipeline import Pipeline

from examples.movielens.data import History, Ints
from examples.movielens.evaluate import TEST, Quality, behaviours_of, quality, rank_of, split
from relaygr_stream.client import RelayClient
from relaygr_stream.client.answers import Ranking
from relaygr_stream.ops.brokers.distribution import BRIEF_RELAY
from relaygr_stream.ops.brokers.local import local_broker
from relaygr_stream.settings.schema import Client, Relay, Settings
from relaygr_stream.settings.worker import Model, Worker
from relaygr_stream.wire.messages import HITS, Mode
from relaygr_stream.workload.report import LiveLine

#: The two ways of serving, by the mode of the request.
WAYS: Final[dict[Mode, str]] = {"auto": "served with the relay", "full": "served, full inference"}
#: Seconds from announcement to ranking, as retrieval and pre-processing take them.
STAGE_S: Final = 0.1
#: Users under way at once. The comparison is about scores; `latencies` sends one request at a time.
TOGETHER: Final = 2
#: Seconds that a request may take: nothing is refused for being late.
TIMEOUT_S: Final = 30.0
#: Each length's latencies start after so many requests: a worker's first calls of a size are slower.
WARM_UP: Final = 5


@dataclass
class Served:
    """How one way of serving ranked the users. ranks (users,): -1 where there was no answer."""

    mode: Mode
    ranks: Ints
    outcomes: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)  # announced, but no hit: the trigger's decision
    errors: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def same(self, offline: Ints) -> float:
        """The share of users with the offline rank."""
        return float((self.ranks == offline).mean())

    @property
    def quality(self) -> Quality:
        """As offline; a user without an answer counts as ranked last."""
        return quality(np.where(self.ranks < 0, np.iinfo(np.int64).max - 2, self.ranks))

    @property
    def hits(self) -> int:
        """Rankings that found prefix KV."""
        return sum(self.outcomes[name] for name in HITS)


@dataclass(frozen=True)
class Latency:
    """Milliseconds at the client of rankings behind `length` behaviours, P50 and P99. hits: of the relay's requests."""

    length: int
    requests: int
    hits: int
    full: tuple[float, float]
    relay: tuple[float, float]  # of the hits; NaN without any


def settings_for(checkpoint: Path, items: int, longest: int, threads: int) -> Settings:
    """Settings under which every request is admitted and none is refused for being late."""
    return Settings(
        relay=Relay(max_prefix_tokens=longest, max_candidates=items, max_suffix_tokens=0, life_window_ms=2_000.0),
        worker=Worker(dtype="float32", audit_share=0.0, threads=threads),
        model=Model(checkpoint=str(checkpoint.resolve())),
        client=Client(timeout_ms=TIMEOUT_S * 1000, hedge_ms=0.0),
    )


@asynccontextmanager
async def running(settings: Settings, folder: Path) -> AsyncIterator[Pipeline]:
    """An embedded broker with a trigger and a worker, their logs in the existing `folder`. Raises RelayError."""
    async with local_broker("embedded", folder=folder, node=BRIEF_RELAY) as broker:
        reachable = replace(settings, kafka=broker.kafka_settings(settings.kafka))
        async with Pipeline("movielens", reachable, 1, folder) as pipeline:
            yield pipeline


async def rank_all(client: RelayClient, users: Sequence[History], items: int, longest: int, mode: Mode) -> Served:
    """Rank every user's test item among all items. mode: "auto" announces first; "full" does not."""
    served = Served(mode, np.full(len(users), -1, np.int64))
    candidates = np.arange(items)
    slots = asyncio.Semaphore(TOGETHER)
    started, line = time.monotonic(), LiveLine()

    async def one(index: int, user: History) -> None:
        history, target, seen = split(user, TEST, longest)
        async with slots:
            try:
                ranking = await ask(client, f"user-{index}", history, candidates, mode)
            except Exception as error:  # counted: an answer that is missing is a result here
                served.errors[type(error).__name__] += 1
                return
        served.outcomes[ranking.outcome] += 1
        if mode == "auto" and ranking.outcome == "full":
            served.missed[ranking.admission or "unknown"] += 1
        served.ranks[index] = rank_of(ranking.scores[:, 0], target, seen)
        if line.due():
            line.show(f"{WAYS[mode]}: {served.outcomes.total():,} of {len(users):,} users, {served.hits:,} hits")

    await asyncio.gather(*(one(index, user) for index, user in enumerate(users)))
    line.close()
    served.seconds = time.monotonic() - started
    return served


async def ask(client: RelayClient, user: str, history: History, candidates: Ints, mode: Mode) -> Ranking:
    """Announce (unless in full), wait for the stage, rank. Raises RelayError."""
    request = client.request(user, behaviours_of(history), candidates=len(candidates), rank_in=STAGE_S)
    if mode == "full":
        return await request.rank(candidates, mode="full")
    async with request:
        await asyncio.sleep(STAGE_S)
        return await request.rank(candidates)


async def latencies(
    client: RelayClient, users: Sequence[History], lengths: Sequence[int], candidates: Ints, requests: int
) -> list[Latency]:
    """Latencies at the client, one request at a time, both ways in turns, for each length.

    Users must have that many behaviours before their test item. A length without any such user is left out.
    """
    found: list[Latency] = []
    for length in lengths:
        able = [user for user in users if len(user) - TEST >= length]
        if not able:
            continue
        times: dict[str, list[float]] = {"full": [], "relay": []}
        hits = 0
        for number in range(requests + WARM_UP):
            history, _, _ = split(able[number % len(able)], TEST, length)
            # A name of its own, so that no earlier prefix KV is found.
            name = f"{length}-{number}"
            full = await ask(client, name, history, candidates, "full")
            relay = await ask(client, name, history, candidates, "auto")
            if number >= WARM_UP:
                times["full"].append(full.latency_s * 1000)
                if relay.outcome in HITS:
                    hits += 1
                    times["relay"].append(relay.latency_s * 1000)
        found.append(Latency(length, requests, hits, _quantiles(times["full"]), _quantiles(times["relay"])))
    return found


def _quantiles(values: list[float]) -> tuple[float, float]:
    if not values:
        return float("nan"), float("nan")
    middle, high = np.percentile(values, [50, 99])
    return float(middle), float(high)
