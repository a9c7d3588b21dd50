"""The users of probes: one population for each length and revisit ratio of a pipeline.

Modes of a pipeline share populations, as they share the workers' caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from relaygr_stream.lab.bench.capacity import most_rate
from relaygr_stream.lab.bench.cells import World
from relaygr_stream.lab.bench.modes import RELAY, Mode
from relaygr_stream.lab.bench.options import SloOptions
from relaygr_stream.lab.bench.pipeline import Pipeline
from relaygr_stream.lab.bench.traffic import Population, TrafficOptions
from relaygr_stream.lab.workload.driver import drive

#: Tokens of a user, to which the options' number of users refers.
USERS_TOKENS: Final = 512
#: Users are introduced at this share of the device's capacity, so that no queue grows.
FILL_SHARE: Final = 0.6
FILL_TIMEOUT_S: Final = 10.0
#: Then users return for a while, at this share of the device's capacity, before a probe: after many new users the
#: worker expects every event to be a new one, grants too little device time, and first visits are refused.
SETTLE_SHARE: Final = 0.3


class Populations:
    """The populations of one pipeline. seed: of this repeat's traffic. tell(line): shows progress."""

    def __init__(self, options: SloOptions, pipeline: Pipeline, seed: int, tell: Callable[[str], object]) -> None:
        self._options = options
        self._pipeline = pipeline
        self._seed = seed
        self._tell = tell
        self._known: dict[tuple[int, float], Population] = {}

    async def get(self, length: int, revisit: float, mode: Mode, world: World) -> Population:
        """The population; if users return, the workers already know the number of users in the options."""
        if not mode.keeps:
            revisit = 0.0
        if (length, revisit) not in self._known:
            self._known[length, revisit] = await self._make(length, revisit, world)
        return self._known[length, revisit]

    async def _make(self, length: int, revisit: float, world: World) -> Population:
        options = self._options
        # The same number of tokens in all, whatever the length.
        strangers = 0 if revisit == 0 else max(8, round(options.users * USERS_TOKENS / length))
        traffic = TrafficOptions(
            items=self._pipeline.settings.model.vocab,
            suffix=options.suffix,
            candidates=options.candidates,
            growth=options.growth,
            recent=options.recent,
            strangers=strangers,
            sigma=options.sigma,
            max_prefix=self._pipeline.settings.relay.max_prefix_tokens,
            delay=options.delay,
            seed=self._seed,
        )
        name = f"{self._pipeline.name}.{length}.{round(100 * revisit)}"
        population = Population(name, length, revisit, traffic)
        if strangers:
            self._tell(f"introducing {strangers} users with {length:,} tokens …")
            await self._play(population, FILL_SHARE * self._most_rate(world, length, 0.0), count=strangers)
            await self._play(population, SETTLE_SHARE * self._most_rate(world, length, revisit), until=options.settle_s)
        return population

    @staticmethod
    def _most_rate(world: World, length: int, revisit: float) -> float:
        return most_rate(RELAY, world.cost(length, revisit), revisit, world.workers)

    async def _play(self, population: Population, rate: float, *, count: int = 0, until: float = 0.0) -> None:
        items = population.take(rate, count=count, until=until)
        await drive(self._pipeline.client, items, timeout=FILL_TIMEOUT_S)
