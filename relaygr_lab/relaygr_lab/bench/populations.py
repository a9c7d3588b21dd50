"""The users of probes: one population for each length and revisit ratio of a pipeline.

Modes of a pipeline share populations, as they share the workers' caches. On several workers `cache` has its own, and
with a log's users each mode that announces nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar
from zlib import crc32

import msgspec
import numpy as np

from relaygr_lab.bench.capacity import most_rate
from relaygr_lab.bench.cells import World
from relaygr_lab.bench.model import BENCH_MODEL
from relaygr_lab.bench.modes import FULL, RELAY, Mode
from relaygr_lab.bench.options import SloOptions
from relaygr_lab.bench.pipeline import Pipeline
from relaygr_lab.processes import known_items
from relaygr_stream.client import RelayClient
from relaygr_stream.wire.messages import RankingRequest, RequestEvent
from relaygr_stream.wire.topic_files import lane_of
from relaygr_stream.workload.driver import drive
from relaygr_stream.workload.generator import Generator, GeneratorOptions
from relaygr_stream.workload.items import WorkItem
from relaygr_stream.workload.visits import Pace

#: Tokens of a user, to which the options' number of known users refers.
USERS_TOKENS: Final = 512
#: Requests of each kind before the first probe of a run.
WARM_UP_REQUESTS: Final = 20
#: Users are introduced at this share of the device's capacity, so that no queue grows.
FILL_SHARE: Final = 0.6
FILL_TIMEOUT_S: Final = 10.0
#: Then users return for a while, at this share of the device's capacity, before a probe: after many new users the
#: worker expects every event to be a new one, grants too little device time, and first visits are refused.
SETTLE_SHARE: Final = 0.3

M = TypeVar("M", RequestEvent, RankingRequest)


def known_users(known: int, length: int, revisit: float) -> int:
    """How many users of this length have as many tokens as `known` users of USERS_TOKENS; 0 where nobody returns."""
    return 0 if revisit == 0 else max(8, round(known * USERS_TOKENS / length))


class Hot(NamedTuple):
    """A hot lane: this share of the users is on the first one."""

    share: float
    lanes: int

    def user_name(self, user: str) -> str:
        """The user's name; of the share, one whose key Kafka's partitioner puts on the first lane."""
        if crc32(user.encode()) >= self.share * 2**32:
            return user
        return next(name for n in itertools.count() if lane_of(name := f"{user}.{n}", self.lanes) == 0)


class Population:
    """Users with histories, who live on from probe to probe, at whatever rate.

    The workers' caches live on, too, as in a long-running service: probes of returning users do not start with cold
    caches. Populations have no user in common. kind: those of one kind have the same arrivals, in whatever pipeline.
    """

    def __init__(self, name: str, options: GeneratorOptions, hot: Hot | None = None, kind: str = "") -> None:
        self.name = name
        self._hot = hot
        self.length = round(options.length)
        self.revisit = options.returns
        self.two_kinds = options.two_kinds
        seed = int(np.random.default_rng([options.seed, *kind.encode()]).integers(2**31))
        self._tide = options.tide
        self._requests = Generator(replace(options, seed=seed, run=f"{name}-")).paced()
        self._waiting: WorkItem | None = None

    def take(self, rate: float, *, count: int, since: float = 0.0, until: float = 0.0) -> list[WorkItem]:
        """The next requests, at `rate` per second from now on.

        At least `count` of them are due after `since`, and the last is due after `until` (seconds from now).
        """
        taken: list[WorkItem] = []
        counted = 0
        pace = Pace(rate, self._tide)
        while True:
            request = self._next()
            item = self._due(request, pace)
            if counted >= count and item.at >= until:
                self._waiting = request  # not sent yet: the next stream begins with it
                return taken
            taken.append(item)
            counted += item.at >= since

    def stream(self, rate: float, after: float = 0.0) -> Iterator[WorkItem]:
        """An endless stream of requests, made on demand; the first is due after `after`."""
        pace = Pace(rate, self._tide, start=after)
        while True:
            yield self._due(self._next(), pace)

    def _next(self) -> WorkItem:
        waiting, self._waiting = self._waiting, None
        return waiting or next(self._requests)

    def _due(self, item: WorkItem, pace: Pace) -> WorkItem:
        return replace(item, at=pace.after(item.at), event=self._own(item.event), request=self._own(item.request))

    def _own(self, message: M) -> M:
        user = f"{self.name}-{message.user_id}"
        return msgspec.structs.replace(message, user_id=user if self._hot is None else self._hot.user_name(user))


class Populations:
    """The populations of one pipeline. seed: of this repeat's traffic. tell(line): shows progress."""

    def __init__(self, options: SloOptions, pipeline: Pipeline, seed: int, tell: Callable[[str], object]) -> None:
        self._options = options
        self._pipeline = pipeline
        self._seed = seed
        self._tell = tell
        self._known: dict[tuple[int, float, str], Population] = {}

    async def get(self, length: int, revisit: float, mode: Mode, world: World) -> Population:
        """The population; if users return, the workers already know the number of users in the options."""
        log = self._options.arrivals
        if log is not None and log.users is not None:
            revisit = log.returns
        elif not mode.keeps:
            revisit = 0.0
        # Delegates hold prefix KV of a relay's users, where `cache` never looks: with several workers it has its own.
        # So has full inference with a log's users: what it ranks leaves nothing for their returns.
        alone = mode.name if revisit > 0 and not mode.announce and self._options.workers > 1 else ""
        key = length, revisit, alone
        if key not in self._known:
            self._known[key] = await self._make(length, revisit, world, alone)
        return self._known[key]

    async def _make(self, length: int, revisit: float, world: World, alone: str) -> Population:
        """alone: the one mode that plays it; empty: all others."""
        options = self._options
        known = known_users(options.known, length, revisit)
        shape = {**options.shape, "length": length}
        traffic = GeneratorOptions(
            **shape,
            rate=1.0,
            revisit=revisit,
            items=min(BENCH_MODEL.vocab, known_items(self._pipeline.settings.model)),
            max_prefix=self._pipeline.settings.relay.max_prefix_tokens,
            known=known,
            seed=self._seed,
        )
        kind = f"{length}.{round(100 * revisit)}"
        name = f"{self._pipeline.name}.{kind}{f'.{alone}' if alone else ''}"
        hot = Hot(options.hot, self._pipeline.settings.kafka.partitions) if options.hot else None
        population = Population(name, traffic, hot, kind)
        if known:
            self._tell(f"introducing {known} users with {length:,} tokens …")
            most, returning = (self._most_rate(world, length, ratio) for ratio in (0.0, revisit))
            await self._play(population, FILL_SHARE * most, count=known, announce=not alone)
            await self._play(population, SETTLE_SHARE * returning, until=options.settle_s, announce=not alone)
        return population

    @staticmethod
    def _most_rate(world: World, length: int, revisit: float) -> float:
        return most_rate(RELAY, world.cost(length, revisit), revisit, world.workers)

    async def _play(
        self, population: Population, rate: float, *, announce: bool, count: int = 0, until: float = 0.0
    ) -> None:
        items = population.take(rate, count=count, until=until)
        await drive(self._pipeline.client, items, announce=announce, timeout=FILL_TIMEOUT_S)


async def warm_up(client: RelayClient, population: Population, rate: float, tell: Callable[[str], object]) -> None:
    """A run's first requests, with full inference and with the relay: workers fit their costs from them.

    tell(line): shows progress.
    """
    for mode in (FULL, RELAY):
        tell(f"warming up: {mode.words} …")
        items = population.take(rate, count=WARM_UP_REQUESTS)
        await drive(client, items, mode=mode.request, announce=mode.announce, timeout=FILL_TIMEOUT_S)
