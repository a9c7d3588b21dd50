"""A fleet under load while its model changes: by a rollout between two groups of workers, or by plain restarts.

Users return at random, unannounced: whether a ranking hits is whether their prefix KV are kept. The benches
(`make bench-change`) and the demo (`relaygr demo --rollout`) play it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from prometheus_client import CollectorRegistry

from relaygr_lab.processes import check_running, servable, start_relay, wait_until
from relaygr_lab.verdicts import above_0, some
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.errors import RelayError
from relaygr_stream.ops.children import Child, stop_all, write_settings
from relaygr_stream.ops.rollout.process import RolloutRequest, run_rollout
from relaygr_stream.ops.rollout.run import Plan
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.messages import HITS, RankingRequest
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.routes import group_settings
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import worker_statuses
from relaygr_stream.workload.quantiles import quantile

NEXT: Final = "next"
#: Rankings at once while the users are made known.
AT_ONCE: Final = 8
LANES_S: Final = 120.0
#: Hits are averaged over so many rankings in a row: the mean of so many is known within 0.06.
WINDOW: Final = 200
#: Hits this much of those before count as recovered.
RECOVERED: Final = 0.9


@dataclass(frozen=True)
class Traffic:
    """users return at random, `rate` rankings a second together; each has `tokens` behaviours of `items` items.

    skew: of Zipf's law, by which some return more often; 0: all alike.
    """

    users: int
    rate: float
    tokens: int
    candidates: int = 50
    items: int = 20_000
    timeout_s: float = 20.0
    skew: float = 0.0


@dataclass(frozen=True)
class Sample:
    """One ranking of the load. at_s: when it was sent, by the monotonic clock. latency_ms: NaN without scores. refused:
    a worker answered that it cannot be in time, or it was too late to send it."""

    at_s: float
    hit: bool
    latency_ms: float
    refused: bool = False
    user: int = -1

    @property
    def lost(self) -> bool:
        """It got no answer."""
        return bool(np.isnan(self.latency_ms)) and not self.refused


@dataclass(frozen=True)
class Change:
    """What users saw of a change. Shares are of the hits before. below_s: from its start until hits stay recovered."""

    name: str
    before: float
    least: float
    below_s: float
    p99_before_ms: float
    p99_ms: float
    rankings: int
    lost: int


class ChangingFleet:
    """An async context: a trigger and workers with these settings, users who are known to them, and the load.

    module: what runs, `relaygr_stream` or the one with emulated devices. options: of each worker, beside the settings.
    Raises RelayError.
    """

    def __init__(
        self,
        settings: Settings,
        folder: Path,
        traffic: Traffic,
        module: str,
        say: Callable[[str], object],
        options: Sequence[Sequence[str]] = ((), ()),
    ) -> None:
        self.settings = settings
        self.samples: list[Sample] = []
        self.marks: list[tuple[float, str]] = []  # what happened when, by the monotonic clock
        self._folder, self._traffic, self._module, self._say = folder, traffic, module, say
        self._options = options
        self._children: dict[str, list[Child]] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Start it, make the users known, and send the load until the end."""
        try:
            await self.start("")
            async with RelayClient(settings=self.settings) as client:
                await self._introduce(client)
                load = asyncio.create_task(self._load(client))
                try:
                    yield
                finally:
                    load.cancel()
                    await asyncio.wait({load})
        finally:
            await stop_all([child for children in self._children.values() for child in children])

    async def start(self, group: str) -> None:
        """Start the group's processes, and wait until they own all lanes."""
        settings = self._of(group)
        await apply_topics(settings.kafka)
        first = group or "first"
        workers = {f"{first}-{number}": options for number, options in enumerate(self._options, 1)}
        self._children[group] = start_relay(settings, self._folder, f"{first}-trigger", workers, self._module)
        await asyncio.gather(*(child.wait_ready() for child in self._children[group]))
        await self._owned(group)

    async def stop(self, group: str) -> None:
        """Stop the group's processes."""
        await stop_all(self._children.pop(group))

    async def roll_out(self, to: str, plan: Plan, *, warm: bool = True, in_place: bool = False) -> None:
        """Move all users to the group, whose processes run, or to which those of the users' group move in place.

        Raises RelayError where they come back.
        """
        context = ProcessContext(self.settings, asyncio.Event(), CollectorRegistry())
        self.mark("rollout begins")

        def say(line: str) -> None:
            if line.startswith("step"):
                self.mark(line.split(": ")[1].split(" are ", maxsplit=1)[0])
            self._say(line)

        up, model = None, None
        if in_place:
            settings = servable(self.settings, self._folder)
            up, model = (
                ("--config", write_settings(self._folder / "in-place.toml", settings)),
                settings.model.checkpoint,
            )
        await run_rollout(context, RolloutRequest(plan, to, up=up, warm=warm, in_place=model), say)
        self.mark("done")

    async def restart(self, group: str) -> None:
        """Restart the group's workers, one after the other."""
        children = self._children[group]
        config = write_settings(self._folder / "again.toml", servable(self._of(group), self._folder))
        for number, old in list(enumerate(children))[1:]:
            self.mark(f"{old.name} restarts")
            old.terminate()
            await old.wait()
            own = ("--set", f"worker.name={old.name}", *self._options[number - 1])
            arguments = ("worker", "--config", config, *own)
            children[number] = Child(old.name, arguments, self._folder, self._module)
            await children[number].wait_ready()
            await self._owned(group)
        self.mark("done")

    def check_running(self) -> None:
        """Raise RelayError if a process has ended."""
        check_running([child for children in self._children.values() for child in children])

    def mark(self, what: str) -> None:
        """Note what happens now."""
        self.marks.append((time.monotonic(), what))

    def change(self, name: str, began_s: float, before_s: float) -> Change:
        """What users saw since then, against the time since before_s."""
        return changed(name, self.samples, began_s, before_s)

    def _of(self, group: str) -> Settings:
        return group_settings(self.settings, group, load_topics(self.settings.kafka).lanes)

    async def _owned(self, group: str) -> None:
        """Until the group's workers state all its lanes."""
        topics = load_topics(self._of(group).kafka)
        lanes: dict[str, int] = {}

        def on_statuses(records: list[Record]) -> None:
            for status in worker_statuses(records):
                lanes[status.name] = len(status.lanes) if status.state == "serving" else 0

        tail = TopicTail(self.settings.kafka, topics.worker_status.name, [0], "latest", on_statuses)

        def whole() -> bool:
            return len(lanes) >= len(self._options) and sum(lanes.values()) == topics.lanes and all(lanes.values())

        async with tail:
            await wait_until(
                whole, self._children[group], LANES_S, lambda: f"the workers own {lanes} of {topics.lanes} lanes"
            )

    async def _introduce(self, client: RelayClient) -> None:
        """Rank each user once."""
        users = iter(range(self._traffic.users))

        async def some() -> None:
            for user in users:
                with suppress(RelayError):  # one that is refused is known with its first ranking of the load
                    await client.rank(self._request(user, 0), timeout=self._traffic.timeout_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(some())

    async def _load(self, client: RelayClient) -> None:
        """Open loop: at the rate, however slow the answers are."""
        start, number, rng = time.monotonic(), 0, np.random.default_rng(1)
        weights = np.arange(1.0, self._traffic.users + 1.0) ** -self._traffic.skew
        ends = np.cumsum(weights / weights.sum())
        async with asyncio.TaskGroup() as group:
            while True:
                number += 1
                user = min(self._traffic.users - 1, int(np.searchsorted(ends, rng.random(), "right")))
                group.create_task(self._rank(client, user, number))
                await asyncio.sleep(start + number / self._traffic.rate - time.monotonic())

    async def _rank(self, client: RelayClient, user: int, number: int) -> None:
        at_s = time.monotonic()
        try:
            ranking = await client.rank(self._request(user, number), timeout=self._traffic.timeout_s)
        except RelayError:
            self.samples.append(Sample(at_s, hit=False, latency_ms=float("nan"), user=user))
        else:
            self.samples.append(Sample(at_s, ranking.outcome in HITS, ranking.latency_s * 1e3, user=user))

    def _request(self, user: int, number: int) -> RankingRequest:
        traffic, rng = self._traffic, np.random.default_rng(user)
        times = np.cumsum(rng.integers(1, 10**6, traffic.tokens))
        items = rng.integers(0, traffic.items, traffic.tokens)
        return RankingRequest(
            request_id=f"{user}-{number}",
            user_id=f"user-{user}",
            prefix=Behaviours.from_arrays(items, rng.integers(1, 4, traffic.tokens), times),
            candidates=pack_items(rng.integers(0, traffic.items, traffic.candidates)),
        )


def changed(name: str, samples: Sequence[Sample], began_s: float, before_s: float) -> Change:
    """What users saw of a change that began then; before_s: since when it was as ever."""
    ordered = sorted(samples, key=lambda sample: sample.at_s)
    before = [sample for sample in ordered if before_s <= sample.at_s < began_s]
    since = [sample for sample in ordered if sample.at_s >= began_s]
    share = np.mean([sample.hit for sample in some(before, f"rankings before the {name}")])
    usual = above_0(float(share), f"the share of hits before the {name}")
    hits = np.asarray([sample.hit for sample in since], float)
    means = np.convolve(hits, np.full(WINDOW, 1 / WINDOW), "valid") / usual if len(hits) >= WINDOW else np.ones(1)
    low = np.flatnonzero(means < RECOVERED)
    return Change(
        name,
        usual,
        float(means.min()),
        since[low[-1] + WINDOW - 1].at_s - began_s if len(low) else 0.0,
        quantile([sample.latency_ms for sample in before if not sample.lost], 0.99) or float("nan"),
        quantile([sample.latency_ms for sample in since if not sample.lost], 0.99) or float("nan"),
        len(since),
        sum(sample.lost for sample in since),
    )
