"""What the cache bench compares with: LRU, S3-FIFO and Belady's optimum, and the seeded traces they all run on."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from sortedcontainers import SortedList

BYTES_PER_TOKEN = 4096
NEVER = 1 << 60


def cost_ms(tokens: int) -> float:
    """Device time of inferring a prefix: the worker's cost model with coefficients of a CPU."""
    return 0.5 + 0.01 * tokens + 2e-6 * tokens * tokens


def lengths(generator: np.random.Generator, count: int) -> list[int]:
    """Prefix lengths in tokens: log-normal, median 700, mean about 1050, 32 to 8192."""
    drawn = np.clip(generator.lognormal(math.log(700), 0.9, count), 32, 8192)
    return [int(length) for length in drawn]


@dataclass(frozen=True)
class Trace:
    """users: who requests, in order; tokens: prefix length by user."""

    name: str
    users: list[int]
    tokens: list[int]


def traces(count: int, population: int) -> list[Trace]:
    """Four kinds of users: stable Zipf popularity; the same among passers-by who never return; popularity that moves
    on; and visits of some requests each, minutes apart."""
    generator = np.random.default_rng(7)

    def zipf(exponent: float) -> list[int]:
        weights = np.arange(1, population + 1) ** -exponent
        drawn = generator.choice(population, count, p=weights / weights.sum())
        names = generator.permutation(population)
        return [int(names[rank]) for rank in drawn]

    tokens = lengths(generator, population + count)
    stable = zipf(0.9)
    passing = generator.random(count) < 0.3
    passers = [population + i if passing[i] else user for i, user in enumerate(zipf(0.9))]
    moving = [(user + i // (count // 20) * (population // 40)) % population for i, user in enumerate(zipf(0.9))]
    visits: list[tuple[float, int]] = []
    for start, user in enumerate(zipf(0.8)):
        at = float(start)
        for _ in range(generator.geometric(0.25)):
            heapq.heappush(visits, (at, user))
            at += generator.lognormal(math.log(300), 1.2)
    sessions = [heapq.heappop(visits)[1] for _ in range(count)]
    return [
        Trace("stable popularity", stable, tokens),
        Trace("passers-by", passers, tokens),
        Trace("moving popularity", moving, tokens),
        Trace("sessions", sessions, tokens),
    ]


class Cache(Protocol):
    """A cache of keys within a byte budget. Every request is admitted: a relay computes the prefix anyway."""

    def request(self, key: int, nbytes: int, cost: float) -> bool:
        """Whether the key was there; it is the newest entry afterwards."""
        ...


class LRU:
    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.nbytes = 0
        self.held: OrderedDict[int, int] = OrderedDict()

    def request(self, key: int, nbytes: int, cost: float) -> bool:  # noqa: ARG002 (a Cache)
        if key in self.held:
            self.held.move_to_end(key)
            return True
        self.held[key] = nbytes
        self.nbytes += nbytes
        while self.nbytes > self.budget:
            self.nbytes -= self.held.popitem(last=False)[1]
        return False


class Fifo:
    """A queue that knows its bytes."""

    def __init__(self) -> None:
        self.held: OrderedDict[int, int] = OrderedDict()
        self.nbytes = 0

    def push(self, key: int, nbytes: int) -> None:
        self.held[key] = nbytes
        self.nbytes += nbytes

    def pop(self) -> tuple[int, int]:
        key, nbytes = self.held.popitem(last=False)
        self.nbytes -= nbytes
        return key, nbytes

    def drop(self, key: int) -> bool:
        nbytes = self.held.pop(key, 0)
        self.nbytes -= nbytes
        return nbytes > 0


class S3Fifo:
    """Yang et al., SOSP 2023: a small queue for newcomers (10 %), a main queue, a ghost queue; sizes in bytes."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.small, self.main, self.ghost = Fifo(), Fifo(), Fifo()
        self.uses: dict[int, int] = {}

    def request(self, key: int, nbytes: int, cost: float) -> bool:  # noqa: ARG002 (a Cache)
        if key in self.uses:
            self.uses[key] = min(3, self.uses[key] + 1)
            return True
        (self.main if self.ghost.drop(key) else self.small).push(key, nbytes)
        self.uses[key] = 0
        while self.small.nbytes + self.main.nbytes > self.budget:
            self.evict()
        return False

    def evict(self) -> None:
        if self.small.nbytes > 0.1 * self.budget or not self.main.held:
            key, nbytes = self.small.pop()
            if self.uses[key]:
                self.uses[key] = 0
                self.main.push(key, nbytes)
                return
            self.ghost.push(key, nbytes)
            while self.ghost.nbytes > self.budget:
                self.ghost.pop()
        else:
            key, nbytes = self.main.pop()
            if self.uses[key]:
                self.uses[key] -= 1
                self.main.push(key, nbytes)
                return
        del self.uses[key]


class Belady:
    """Evicts what is used again last; knows the future. With equal sizes the optimum, here a strong bound."""

    def __init__(self, budget: float, users: list[int]) -> None:
        self.budget = budget
        self.nbytes = 0
        self.time = -1
        self.held: dict[int, tuple[int, int]] = {}  # key → next use, bytes
        self.order: SortedList[tuple[int, int]] = SortedList()  # (next use, key)
        self.next_use = [NEVER] * len(users)
        upcoming: dict[int, int] = {}
        for time in range(len(users) - 1, -1, -1):
            self.next_use[time] = upcoming.get(users[time], NEVER)
            upcoming[users[time]] = time

    def request(self, key: int, nbytes: int, cost: float) -> bool:  # noqa: ARG002 (a Cache)
        self.time += 1
        known = self.held.get(key)
        if known is not None:
            self.order.remove((known[0], key))
        else:
            self.nbytes += nbytes
        self.held[key] = (self.next_use[self.time], nbytes)
        self.order.add((self.next_use[self.time], key))
        while self.nbytes > self.budget:
            self.nbytes -= self.held.pop(self.order.pop()[1])[1]
        return known is not None
