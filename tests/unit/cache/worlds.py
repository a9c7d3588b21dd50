"""Caches at toy size: sequences, contents that say whose they are, copies made when told, slow or not at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from relaygr_stream.cache.copy import Before, CopyEngine, CopyTicket
from relaygr_stream.cache.entry import Entry
from relaygr_stream.cache.entry_table import EntryTable
from relaygr_stream.cache.fading import CostAwarePolicy
from relaygr_stream.cache.kept import kept_bytes
from relaygr_stream.cache.memory import ALIGNMENT, TierMemory
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.tier_file import FileShape, TierFile
from relaygr_stream.cache.tier_file_open import open_tier_file
from relaygr_stream.cache.tiers import GRANULE_TOKENS, MakePolicy
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.kv import KVLayout, KVRegion
from tests.waiting import WITHIN_S

CPU = torch.device("cpu")
LAYOUT = KVLayout(layers=2, heads=2, dqk=4, dv=4, dtype=torch.float32)
#: The same bytes for a granule: half of them are a state that does not grow.
WITH_STATE = KVLayout(layers=1, heads=2, dqk=4, dv=4, dtype=torch.float32, state=1024)
GRANULE_BYTES = GRANULE_TOKENS * LAYOUT.bytes_per_token  # 8 KiB: two pages
TOKEN_BYTES = 24
MOST = 3 * GRANULE_TOKENS  # the longest sequence


def sequence(user: int, version: int, length: int) -> Tokens:
    """A longer sequence of the same user and version continues a shorter one."""
    items = np.arange(length, dtype=np.int64) + 10_000 * user + 1_000 * version
    return Tokens(np.stack([items, np.zeros_like(items), np.ones_like(items)]))


def contents(tokens: Tokens, layer: int, head: int) -> torch.Tensor:
    """K (and −V) of tokens as a stand-in for a model has them: the item id, layer and head in digits (n, 4).

    All are integers and the largest is 127.
    """
    items = torch.from_numpy(tokens.array[0])
    who = items // 10_000 + 20 * (LAYOUT.heads * layer + head)
    return torch.stack([torch.full_like(items, 127), items % 100, items // 100 % 100, who], 1).float()


def write(region: KVRegion, tokens: Tokens) -> None:
    """Stand-in for a model's `prefill` up to the end of `tokens`. A state says how many, and which one is the last."""
    start, stop = region.length, len(tokens)
    for layer in range(region.layout.layers):
        for part, sign in zip(region.layer(layer), (1, -1), strict=True):
            for head in range(region.layout.heads):
                part[head, start:stop] = sign * contents(tokens.slice(start, stop), layer, head)
    region.state.copy_(state_of(region.layout, tokens))
    region.length = stop


def state_of(layout: KVLayout, tokens: Tokens) -> torch.Tensor:
    """The state of these tokens (layout.state)."""
    newest = int(tokens.array[0, -1]) if len(tokens) else 0
    return torch.arange(layout.state, dtype=layout.dtype) * len(tokens) + newest


def holds(region: KVRegion, tokens: Tokens) -> bool:
    """Whether the region's first tokens are those of the sequence."""
    n, layout = min(region.length, len(tokens)), region.layout
    expected = [
        sign * contents(tokens.slice(0, n), layer, head)
        for layer in range(layout.layers)
        for sign in (1, -1)
        for head in range(layout.heads)
    ]
    found = [
        part[head, :n] for layer in range(layout.layers) for part in region.layer(layer) for head in range(layout.heads)
    ]
    state = n == 0 or torch.equal(region.state, state_of(layout, tokens.slice(0, n)))
    return state and torch.equal(torch.stack(found), torch.stack(expected))


class HookedCopy(CopyTicket):
    """A copy before which the thread that makes it calls before(); if that raises, the copy fails half way."""

    def __init__(self, dst: torch.Tensor, src: torch.Tensor, before: Callable[[], None]) -> None:
        super().__init__(dst, src)
        self._hook = before

    def run(self, stream: torch.Stream | None) -> None:
        try:
            self._hook()
        except Exception as error:
            assert self._dst is not None
            self._dst.view(torch.uint8).fill_(255)  # NaN of every type
            self.finish(error)
        else:
            super().run(stream)


def nothing() -> None:
    """A hook of copies that succeed."""


def broken() -> None:
    """A hook of copies that fail."""
    raise RuntimeError("the bus is broken")


class Copies(CopyEngine):
    """A copy engine of a test: the next `fail_next` copies fail; `settle` makes the oldest ones come to their end."""

    def __init__(self, wake: Callable[[], None] = lambda: None) -> None:
        super().__init__(CPU, wake)
        self.fail_next = 0
        self.waiting: list[CopyTicket] = []

    def settle(self, most: int = 100) -> None:
        """Have so many of the oldest copies made."""
        raise NotImplementedError

    def _next_hook(self) -> Callable[[], None]:
        if not self.fail_next:
            return nothing
        self.fail_next -= 1
        return broken


class Flaky(Copies):
    """Copies are made, and digests computed, when the test says so, in its thread."""

    def enqueue(self, ticket: CopyTicket, *, urgent: bool) -> CopyTicket:
        self.waiting.append(ticket)
        return ticket

    def compute(self, ticket: CopyTicket) -> CopyTicket:
        self.waiting.append(ticket)
        return ticket

    def submit(
        self, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False, before: Before | None = None
    ) -> CopyTicket:
        self.waiting.append(HookedCopy(dst, src, self._next_hook()))
        return self.waiting[-1]

    def settle(self, most: int = 100) -> None:
        for ticket in self.waiting[:most]:
            ticket.run(None)  # as the engine's threads do
        del self.waiting[:most]


class Slow(Copies):
    """Copies are made by the engine's threads, which take up to a millisecond for each."""

    def __init__(self) -> None:
        super().__init__(self._copied)
        self._ends: dict[int, threading.Event] = {}  # thread → set at the end of the copy that it makes now
        self._over: list[threading.Event] = []  # of each of `waiting`

    def _copied(self) -> None:
        self._ends[threading.get_ident()].set()

    def submit(
        self, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False, before: Before | None = None
    ) -> CopyTicket:
        inner, pause, over = self._next_hook(), (len(self.waiting) % 3) * 0.5e-3, threading.Event()

        def slowly() -> None:
            self._ends[threading.get_ident()] = over
            time.sleep(pause)
            inner()

        self._over.append(over)
        self.waiting.append(self.enqueue(HookedCopy(dst, src, slowly), urgent=urgent))
        return self.waiting[-1]

    def settle(self, most: int = 100) -> None:
        for over in self._over[:most]:
            assert over.wait(WITHIN_S)  # the ticket's `wait` would take the error, which is for the cache to find
        del self.waiting[:most], self._over[:most]


def make(
    hbm: int = 9,
    dram: int | None = 6,
    copier: CopyEngine | None = None,
    *,
    incremental: bool = True,
    layout: KVLayout = LAYOUT,
    policy: MakePolicy = CostAwarePolicy,
    file: TierFile | None = None,
) -> PrefixCache:
    """A cache of so many granules of HBM, three of which are the scratch region, and of DRAM, perhaps in a file."""
    return PrefixCache(
        layout,
        TierMemory(hbm * GRANULE_BYTES, CPU),
        None if dram is None else TierMemory(dram * GRANULE_BYTES, CPU, file=file),
        copier or Flaky(),
        lambda tokens: 0.1 + 0.01 * tokens,
        scratch_tokens=MOST,
        incremental=incremental,
        policy=policy,
    )


def file_of(path: Path, dram: int, layout: KVLayout = LAYOUT, identity: str = "toy", unit: int = 0) -> TierFile:
    """A tier's file of so many granules."""
    least = kept_bytes(layout.nbytes(GRANULE_TOKENS), GRANULE_TOKENS, TOKEN_BYTES)
    unit = unit or -(-least // ALIGNMENT) * ALIGNMENT
    file = open_tier_file(path, FileShape(dram * GRANULE_BYTES, unit, TOKEN_BYTES, identity), lock_s=0)
    assert file is not None
    return file


def table_of(cache: PrefixCache) -> EntryTable:
    """The cache's entries, for tests that make a choice which the cache makes alone, as to evict one."""
    return cache._table


def entries(cache: PrefixCache) -> list[Entry]:
    """One a user."""
    table = table_of(cache)
    return [entry for user in table.users() if (entry := table.by_user.get(user)) is not None]


def compute(cache: PrefixCache, user: int, length: int, version: int = 0) -> Entry:
    """A whole entry, idle."""
    entry = cache.open(f"u{user}", sequence(user, version, length))
    assert entry is not None
    assert entry.region is not None
    write(entry.region, entry.tokens)
    cache.finish(entry)
    return entry


def settle(cache: PrefixCache, copier: Flaky) -> list[Entry]:
    """Let the copies under way end, and those that follow; returns the entries that arrived."""
    arrived = []
    for _ in range(4):
        copier.settle()
        arrived += cache.poll()
    return arrived


def spilled(cache: PrefixCache, copier: Flaky, entries: int) -> None:
    """Copies are made until there are so many in DRAM."""
    while cache.counters.spilled < entries:
        cache.poll()
        copier.settle()
        cache.poll()
