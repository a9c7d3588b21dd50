"""The cache alone, at random: every entry carries its own bytes wherever it goes, and the books hold at each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from relaygr_stream.cache.copy import Convert, CopyEngine, CopyTicket, unchanged
from relaygr_stream.cache.entry import Coverage, Entry, EntryState
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.storage import StorageKind
from relaygr_stream.cache.tiers import GRANULE_TOKENS
from relaygr_stream.errors import CacheCorruption, CapacityError
from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.models.tokens import Tokens

CPU = torch.device("cpu")
LAYOUT = KVLayout(layers=2, heads=2, dqk=4, dv=4, dtype=torch.float32)
GRANULE_BYTES = GRANULE_TOKENS * LAYOUT.bytes_per_token  # 8 KiB: two pages
MOST = 3 * GRANULE_TOKENS  # the longest sequence


def sequence(user: int, version: int, length: int) -> Tokens:
    """A longer sequence of the same user and version continues a shorter one."""
    items = np.arange(length, dtype=np.int64) + 10_000 * user + 1_000 * version
    return Tokens(np.stack([items, np.zeros_like(items), np.ones_like(items)]))


def contents(tokens: Tokens, layer: int, head: int) -> torch.Tensor:
    """K (and −V) of tokens as a stand-in for a model has them: the item id, layer and head in digits (n, 4).

    All are integers and the largest is 127, so that int8 keeps them as they are.
    """
    items = torch.from_numpy(tokens.array[0])
    who = items // 10_000 + 20 * (LAYOUT.heads * layer + head)
    return torch.stack([torch.full_like(items, 127), items % 100, items // 100 % 100, who], 1).float()


def write(region: KVRegion, tokens: Tokens) -> None:
    """Stand-in for a model's `extend` up to the end of `tokens`."""
    start, stop = region.length, len(tokens)
    for layer in range(LAYOUT.layers):
        for part, sign in zip(region.layer(layer), (1, -1), strict=True):
            for head in range(LAYOUT.heads):
                part[head, start:stop] = sign * contents(tokens.slice(start, stop), layer, head)
    region.length = stop


def holds(region: KVRegion, tokens: Tokens) -> bool:
    """Whether the region's first tokens are those of the sequence."""
    n = min(region.length, len(tokens))
    expected = [
        sign * contents(tokens.slice(0, n), layer, head)
        for layer in range(LAYOUT.layers)
        for sign in (1, -1)
        for head in range(LAYOUT.heads)
    ]
    found = [
        part[head, :n] for layer in range(LAYOUT.layers) for part in region.layer(layer) for head in range(LAYOUT.heads)
    ]
    return torch.equal(torch.stack(found), torch.stack(expected))


def fail_half_way(dst: torch.Tensor, src: torch.Tensor) -> None:
    """A conversion that the device refuses when it has overwritten what was there."""
    dst.view(torch.uint8).fill_(255)
    raise RuntimeError("the bus is broken")


class Flaky(CopyEngine):
    """Copies that are made when the test says so, some of which the device refuses."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.fail_next = 0
        self.waiting: list[CopyTicket] = []

    def submit(
        self, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False, convert: Convert = unchanged
    ) -> CopyTicket:
        if self.fail_next:
            self.fail_next -= 1
            convert = fail_half_way
        self.waiting.append(CopyTicket(dst, src, None, convert))
        return self.waiting[-1]

    def settle(self, most: int = 100) -> None:
        """Make the oldest copies."""
        for ticket in self.waiting[:most]:
            ticket._run(None)
        del self.waiting[:most]


def make(
    hbm: int = 9,
    dram: int | None = 6,
    *,
    incremental: bool = True,
    copier: Flaky | None = None,
    storage: StorageKind = "exact",
) -> tuple[PrefixCache, Flaky]:
    """A cache of so many granules of HBM, three of which are the scratch region, and of DRAM (where int8 takes half of
    a granule: 4 elements and 4 bytes of scale for 16 bytes)."""
    copier = copier or Flaky()
    cache = PrefixCache(
        LAYOUT,
        TierMemory(hbm * GRANULE_BYTES, CPU),
        None if dram is None else TierMemory(dram * GRANULE_BYTES, CPU),
        copier,
        lambda tokens: 0.1 + 0.01 * tokens,
        scratch_tokens=MOST,
        incremental=incremental,
        storage=storage,
    )
    return cache, copier


def compute(cache: PrefixCache, user: int, length: int, version: int = 0) -> Entry:
    """A whole entry, idle."""
    entry = cache.open(f"u{user}", sequence(user, version, length))
    assert entry is not None
    assert entry.region is not None
    write(entry.region, entry.tokens)
    cache.finish(entry)
    return entry


class CacheMachine(RuleBasedStateMachine):
    """Every call of the cache in any order its contract allows; readers keep what they pinned."""

    incremental = True
    storage: StorageKind = "exact"

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[tuple[Entry, KVRegion, Tokens]] = []
        self.seen: set[EntryState] = set()

    @initialize(dram=st.sampled_from([None, 3, 6, 20]), hbm=st.sampled_from([6, 7, 8, 9, 10, 24]))
    def begin(self, dram: int | None, hbm: int) -> None:
        self.cache, self.copier = make(hbm, dram, incremental=self.incremental, storage=self.storage)
        self.budget, self.dram_budget = hbm * GRANULE_BYTES, (dram or 0) * GRANULE_BYTES

    def entries(self) -> list[Entry]:
        return [*self.cache._holdings._entries.values(), *self.cache._holdings._retired]

    def computing(self) -> list[Entry]:
        return [entry for entry in self.entries() if entry.computing]

    @rule(
        user=st.integers(0, 4),
        version=st.sampled_from([0, 0, 0, 1]),
        length=st.integers(1, MOST),
        at_once=st.sampled_from([True, True, True, False]),
    )
    def request(self, user: int, version: int, length: int, at_once: bool) -> None:
        """As a signal or ranking does: find, then the step that fits; a reader keeps a pin on what it found."""
        self._request(user, version, length)
        entry = self.cache._holdings.get(f"u{user}")
        if at_once and entry is not None and entry.computing:
            assert entry.region is not None
            write(entry.region, entry.tokens)
            self.cache.finish(entry)

    def _request(self, user: int, version: int, length: int) -> None:
        tokens = sequence(user, version, length)
        entry, coverage = self.cache.find(f"u{user}", tokens)
        if entry is not None and coverage is Coverage.COVERS:
            if entry.state is EntryState.DRAM:
                self.cache.load(entry)
            elif entry.ready:
                self.read(entry, tokens)
        elif entry is not None and coverage is Coverage.PREFIX:
            assert self.incremental
            if entry.ready:
                old = entry.region
                grown = self.cache.extend(entry, tokens)
                if grown is not None:
                    assert grown.region is not None
                    assert grown.region.length < length
                    assert holds(grown.region, tokens)
                    assert (grown is entry) == (grown.region is old)
            elif entry.state is EntryState.DRAM:
                self.cache.load(entry)
        else:
            self.cache.open(f"u{user}", tokens)

    def read(self, entry: Entry, tokens: Tokens) -> None:
        self.cache.pin(entry)
        region = entry.region
        assert region is not None
        self.readers.append((entry, KVRegion(LAYOUT, region.storage, region.capacity, len(tokens)), tokens))

    @rule(data=st.data(), how=st.sampled_from(["finish", "finish", "part", "cut short", "abort"]))
    def go_on(self, data: st.DataObject, how: str) -> None:
        if not (computing := self.computing()):
            return
        entry = data.draw(st.sampled_from(computing))
        region = entry.region
        assert region is not None
        if how == "finish":
            write(region, entry.tokens)
            self.cache.finish(entry)
        elif how == "part":
            if region.length + 1 < len(entry.tokens):
                stop = data.draw(st.integers(region.length + 1, len(entry.tokens) - 1))
                write(region, entry.tokens.slice(0, stop))
        elif how == "cut short":
            length = region.length
            self.cache.cut_short(entry)
            kept = self.incremental and length > 0 and not entry.retired
            if kept:
                assert entry.ready
                assert len(entry.tokens) == length
        else:
            self.cache.abort(entry)
            assert self.cache.find(entry.user_id, entry.tokens)[0] is not entry

    @rule(data=st.data())
    def pin_what_is_not_ready(self, data: st.DataObject) -> None:
        busy = [entry for entry in self.entries() if (entry.computing or entry.load) and not entry.retired]
        if busy:
            entry = data.draw(st.sampled_from(busy))
            self.cache.pin(entry)
            assert entry.region is not None
            self.readers.append((entry, KVRegion(LAYOUT, entry.region.storage, entry.region.capacity, 0), entry.tokens))

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.readers:
            at = data.draw(st.integers(0, len(self.readers) - 1))
            entry = self.readers.pop(at)[0]
            self.cache.unpin(entry)

    @rule(copies=st.sampled_from([100, 100, 1, 0]))
    def poll(self, copies: int) -> None:
        self.copier.settle(copies)
        for entry in self.cache.poll():
            assert entry.failed or entry.ready or entry.retired

    @rule(fails=st.integers(0, 3))
    def next_copy_fails(self, fails: int) -> None:
        self.copier.fail_next = fails // 3

    @rule()
    def use_scratch(self) -> None:
        region = self.cache.scratch.borrow()
        assert (region.length, region.capacity) == (0, MOST)
        region.storage.fill_(-1.0)
        assert not self.cache.scratch.free
        self.cache.scratch.give_back(region)

    @invariant()
    def books_hold(self) -> None:
        self.cache.check_integrity()
        assert self.cache.hbm_used <= self.budget
        assert self.cache.dram_used <= self.dram_budget
        held = {entry: sum(1 for reader in self.readers if reader[0] is entry) for entry, _, _ in self.readers}
        assert self.cache.pins() == held

    @invariant()
    def everyone_reads_their_own(self) -> None:
        for _, region, tokens in self.readers:
            assert holds(region, tokens.slice(0, region.length))
        for entry in self.entries():
            self.seen.add(entry.state)
            if entry.region is not None and entry.load is None and not entry.failed:
                assert holds(entry.region, entry.tokens)
            if entry.stored is not None and entry.spill is None:
                dram = self.cache._dram
                assert dram is not None
                elements = torch.empty(entry.stored.capacity * LAYOUT.elements_per_token)
                dram.storage.reload(elements, dram.view(entry.stored))
                copy = KVRegion(LAYOUT, elements, entry.stored.capacity, entry.stored.length)
                assert holds(copy, entry.tokens)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for entry in self.computing():
            self.cache.abort(entry)
        for entry, _, _ in self.readers:
            self.cache.unpin(entry)
        for _ in range(4):
            self.copier.settle()
            self.cache.poll()
        self.cache.check_integrity()
        assert self.cache.pinned_bytes == 0
        assert not self.cache._holdings._retired
        self.cache.close()


class WholeSequencesOnly(CacheMachine):
    """A model whose K/V of a beginning are not those of the whole."""

    incremental = False


class StoredAsInt8(CacheMachine):
    """DRAM copies that round."""

    storage: StorageKind = "int8"


SETTINGS = settings(max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck))
TestCache = CacheMachine.TestCase
TestCache.settings = SETTINGS
TestWholeSequencesOnly = WholeSequencesOnly.TestCase
TestWholeSequencesOnly.settings = settings(SETTINGS, max_examples=20)
TestStoredAsInt8 = StoredAsInt8.TestCase
TestStoredAsInt8.settings = settings(SETTINGS, max_examples=30)


@pytest.fixture
def small() -> Iterator[tuple[PrefixCache, Flaky]]:
    """Two entries of the longest sequence fit beside the scratch region."""
    cache, copier = make(9, 6)
    yield cache, copier
    cache.check_integrity()
    cache.close()


def settle(cache: PrefixCache, copier: Flaky) -> list[Entry]:
    arrived = []
    for _ in range(4):
        copier.settle()
        arrived += cache.poll()
    return arrived


def test_an_entry_goes_through_all_states_and_carries_its_bytes(small: tuple[PrefixCache, Flaky]) -> None:
    cache, copier = small
    tokens = sequence(1, 0, MOST)
    entry = cache.open("u1", tokens)
    assert entry is not None
    assert entry.region is not None
    seen = [entry.state]
    cache.pin(entry)
    write(entry.region, tokens)
    cache.finish(entry)
    seen.append(entry.state)
    cache.unpin(entry)
    seen.append(entry.state)
    compute(cache, 2, MOST)
    cache.poll()  # less than a quarter is free: what is idle is written back
    seen.append(entry.state)
    settle(cache, copier)
    compute(cache, 3, MOST)
    seen.append(entry.state)
    assert cache.load(entry)
    seen.append(entry.state)
    assert settle(cache, copier) == [entry]
    assert entry.state is EntryState.IDLE
    assert entry.region is not None
    assert holds(entry.region, tokens)
    cache.open("u1", sequence(1, 1, 10))
    seen.append(entry.state)
    names = ["computing", "pinned", "idle", "spilling", "dram", "loading", "gone"]
    assert [state.value for state in seen] == names


def test_what_loses_nothing_is_evicted_first(small: tuple[PrefixCache, Flaky]) -> None:
    cache, copier = small
    first, second = compute(cache, 1, MOST), compute(cache, 2, MOST)
    cache._write_back()
    copier.settle()
    cache.poll()
    assert first.clean
    cache.pin(second)
    cache.unpin(second)  # used since, so cheap to lose it is not
    compute(cache, 3, MOST)
    assert first.state is EntryState.DRAM
    assert cache.counters.evicted_clean == 1
    assert cache.counters.evicted_lost == 0


def test_a_grown_entry_takes_its_older_copy_along(small: tuple[PrefixCache, Flaky]) -> None:
    cache, copier = small
    entry = compute(cache, 1, 60)
    compute(cache, 2, MOST)
    compute(cache, 3, 2 * GRANULE_TOKENS)
    settle(cache, copier)
    assert entry.clean
    grown = cache.extend(entry, sequence(1, 0, 100))
    assert grown is not None
    assert grown is not entry
    assert entry.state is EntryState.GONE
    assert grown.region is not None
    write(grown.region, grown.tokens)
    cache.finish(grown)
    assert grown.stored is not None
    assert (grown.stored.length, grown.clean) == (60, False)
    for user in (4, 5):
        compute(cache, user, MOST)
    assert grown.state is EntryState.DRAM
    assert len(grown.tokens) == 60  # what its copy is of
    assert cache.load(grown)
    settle(cache, copier)
    assert grown.region is not None
    assert holds(grown.region, sequence(1, 0, 60))


def test_a_reader_keeps_the_old_region_of_an_entry_that_moved(small: tuple[PrefixCache, Flaky]) -> None:
    cache, _ = small
    entry = compute(cache, 1, 60)
    cache.pin(entry)
    region = entry.region
    assert region is not None
    grown = cache.extend(entry, sequence(1, 0, 100))
    assert grown is not None
    assert grown is not entry
    assert grown.region is not None
    write(grown.region, grown.tokens)
    cache.finish(grown)
    assert holds(region, sequence(1, 0, 60))
    assert cache.entries == 1
    used = cache.hbm_used
    cache.unpin(entry)
    assert cache.hbm_used == used - GRANULE_BYTES


def test_an_entry_is_not_evicted_for_its_own_continuation() -> None:
    cache, _ = make(6, None)
    entry = compute(cache, 1, 2 * GRANULE_TOKENS)
    assert cache.extend(entry, sequence(1, 0, MOST)) is None
    assert entry.state is EntryState.IDLE
    assert entry.region is not None
    assert holds(entry.region, entry.tokens)
    assert cache.counters.no_room == 1
    cache.check_integrity()
    cache.close()


def test_computations_that_nobody_wants_are_kept_as_far_as_they_are(small: tuple[PrefixCache, Flaky]) -> None:
    cache, _ = small
    entry = cache.open("u1", sequence(1, 0, 100))
    assert entry is not None
    assert entry.region is not None
    write(entry.region, sequence(1, 0, 40))
    cache.cut_short(entry)
    assert cache.find("u1", sequence(1, 0, 100)) == (entry, Coverage.PREFIX)
    assert len(entry.tokens) == 40
    nothing = cache.open("u2", sequence(2, 0, 100))
    assert nothing is not None
    cache.cut_short(nothing)
    assert nothing.state is EntryState.GONE


def test_a_reload_that_fails_costs_the_entry_and_nothing_else(small: tuple[PrefixCache, Flaky]) -> None:
    cache, copier = small
    entry = compute(cache, 1, MOST)
    compute(cache, 2, MOST)
    settle(cache, copier)
    compute(cache, 3, MOST)
    assert entry.state is EntryState.DRAM
    copier.fail_next = 1
    assert cache.load(entry)
    cache.pin(entry)  # someone waits for it
    assert settle(cache, copier) == [entry]
    assert entry.failed
    assert cache.find("u1", entry.tokens) == (None, Coverage.NONE)
    assert cache.counters.copy_failures == 1
    cache.unpin(entry)
    assert cache.pins() == {}


def test_a_spill_that_fails_is_not_tried_for_ever(small: tuple[PrefixCache, Flaky]) -> None:
    cache, copier = small
    copier.fail_next = 10
    entries = [compute(cache, user, MOST) for user in (1, 2)]
    settle(cache, copier)
    assert cache.counters.copy_failures == 2
    assert [entry.state for entry in entries] == [EntryState.IDLE] * 2
    assert not cache.copying
    copier.fail_next = 0


def test_dram_full_forgets_and_goes_on() -> None:
    cache, copier = make(9, 6)
    for user in range(12):
        compute(cache, user, MOST)
        settle(cache, copier)
    assert cache.counters.forgotten >= 4
    assert cache.dram_used <= 6 * GRANULE_BYTES
    cache.check_integrity()
    cache.close()


def test_capacity_error_names_the_numbers_that_clash() -> None:
    with pytest.raises(CapacityError) as caught, closing(Flaky()) as copier:
        make(5, copier=copier)
    text = str(caught.value)
    size = 3 * GRANULE_BYTES
    for part in (f"worker.hbm_bytes = {5 * GRANULE_BYTES}", f"{MOST} tokens", f"{size} bytes", f"at least {2 * size}"):
        assert part in text
    make(6)[0].close()


def test_sizes_are_what_the_arena_takes() -> None:
    odd = KVLayout(layers=1, heads=1, dqk=8, dv=16, dtype=torch.float32)  # a granule of 6,144 bytes: a page and a half
    cache = PrefixCache(odd, TierMemory(1 << 18, CPU), None, CopyEngine(CPU), lambda n: n, scratch_tokens=64)
    for tokens in (1, 64, 65, 128, 129):
        before = cache.hbm_used
        entry = cache.open(f"u{tokens}", sequence(0, 0, tokens))
        assert entry is not None
        assert cache.hbm_used - before == cache.nbytes(tokens) == cache.entry_bytes(entry)
    cache.check_integrity()
    cache.close()


def test_corruption_is_found(small: tuple[PrefixCache, Flaky]) -> None:
    cache, _ = small
    entry = compute(cache, 1, 10)
    entry.pins += 1  # behind the cache's back
    with pytest.raises(CacheCorruption, match="not noted"):
        cache.check_integrity()
    entry.pins -= 1
    cache.check_integrity()
    extent, entry.extent = entry.extent, None
    with pytest.raises(CacheCorruption):
        cache.check_integrity()
    entry.extent = extent
