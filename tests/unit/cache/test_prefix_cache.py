"""The life of entries in the cache, step by step: states, costs, refusals, failures, shutdown."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch

from relaygr_stream.cache.copy import Convert, CopyEngine, CopyTicket, unchanged
from relaygr_stream.cache.entry import Coverage, Entry, EntryState
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.storage import StorageKind
from relaygr_stream.cache.tiers import GRANULE_TOKENS
from relaygr_stream.errors import CacheCorruption, CapacityError
from relaygr_stream.models.kv import KVLayout
from tests.unit.cache.worlds import CPU, GRANULE_BYTES, MOST, Flaky, compute, holds, make, sequence, write


@pytest.fixture
def small() -> Iterator[tuple[PrefixCache, Flaky]]:
    """Two entries of the longest sequence fit beside the scratch region."""
    copier = Flaky()
    cache = make(9, 6, copier)
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
    cache = make(6, None)
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
    copier = Flaky()
    cache = make(9, 6, copier)
    for user in range(12):
        compute(cache, user, MOST)
        settle(cache, copier)
    assert cache.counters.forgotten >= 4
    assert cache.dram_used <= 6 * GRANULE_BYTES
    cache.check_integrity()
    cache.close()


def test_capacity_error_names_the_numbers_that_clash() -> None:
    with pytest.raises(CapacityError) as caught, closing(Flaky()) as copier:
        make(5, None, copier)
    text = str(caught.value)
    size = 3 * GRANULE_BYTES
    for part in (f"worker.hbm_bytes = {5 * GRANULE_BYTES}", f"{MOST} tokens", f"{size} bytes", f"at least {2 * size}"):
        assert part in text
    make(6).close()


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


# ---- costs ----


def price(cache: PrefixCache, entry: Entry) -> float:
    """What evicting the entry is held to cost."""
    return cache._hbm._evictor._policy._held[entry.user_id].cost_ms


def recompute_ms(tokens: int) -> float:
    """As the toy caches predict it."""
    return 0.1 + 0.01 * tokens


def spilled(cache: PrefixCache, copier: Flaky, entries: int) -> None:
    """Copies are made until there are so many in DRAM."""
    while cache.counters.spilled < entries:
        cache._write_back()
        copier.settle()
        cache.poll()


def test_evicting_costs_a_recomputation_or_with_a_copy_a_reload(small: tuple[PrefixCache, Flaky]) -> None:
    cache, copier = small
    entry = compute(cache, 1, MOST)
    assert price(cache, entry) == recompute_ms(MOST)
    compute(cache, 2, MOST)
    spilled(cache, copier, 1)
    assert entry.clean
    assert entry.region is not None
    reload_ms = cache._holdings.reloads.predict_ms(entry.region.storage.nbytes)
    assert 0 < reload_ms < 0.1 * recompute_ms(MOST)
    assert price(cache, entry) == pytest.approx(reload_ms, abs=2e-3)
    for _ in range(1000):
        cache._holdings.reloads.forgotten()  # few copies live to be reloaded: most of a recomputation is at stake
    cache.pin(entry)
    cache.unpin(entry)
    assert price(cache, entry) == pytest.approx(recompute_ms(MOST) + reload_ms, rel=0.01)


def test_a_grown_entry_costs_what_its_copy_lacks() -> None:
    copier = Flaky()
    cache = make(12, 12, copier)
    entry = compute(cache, 1, 100)
    compute(cache, 2, MOST)
    compute(cache, 3, MOST)
    spilled(cache, copier, 1)
    assert entry.clean
    assert cache.extend(entry, sequence(1, 0, 120)) is entry
    assert entry.region is not None
    write(entry.region, entry.tokens)
    cache.finish(entry)
    assert entry.stored is not None
    reload_ms = cache._holdings.reloads.predict_ms(entry.region.storage.nbytes)
    assert price(cache, entry) == pytest.approx(recompute_ms(120) - recompute_ms(100) + reload_ms, abs=2e-3)
    cache._holdings._forget(entry)  # idle all the while
    assert price(cache, entry) == recompute_ms(120)
    cache.close()


def test_being_copied_is_no_use(small: tuple[PrefixCache, Flaky]) -> None:
    cache, copier = small
    entry = compute(cache, 1, MOST)
    compute(cache, 2, MOST)
    policy = cache._hbm._evictor._policy
    before = policy._held["u1"].uses
    spilled(cache, copier, 1)
    assert entry.clean
    assert policy._held["u1"].uses == before


def test_a_use_during_a_copy_counts(small: tuple[PrefixCache, Flaky]) -> None:
    cache, copier = small
    entry = compute(cache, 1, MOST)
    compute(cache, 2, MOST)
    before = cache._hbm._evictor._policy._held["u1"].uses
    cache._write_back()
    assert entry.state is EntryState.SPILLING
    cache.pin(entry)
    cache.unpin(entry)
    copier.settle()
    cache.poll()
    assert entry.clean
    assert cache._hbm._evictor._policy._held["u1"].uses > before + 0.5


# ---- DRAM ----


def test_write_backs_end_where_dram_is_smaller_than_what_should_be_reclaimable() -> None:
    """Forgetting a clean entry's copy for another's would go round for ever."""
    copier = Flaky()
    cache = make(30, 3, copier)
    for user in range(27):
        compute(cache, user, GRANULE_TOKENS)
    for _ in range(50):
        copier.settle()
        cache.poll()
    assert cache.counters.spilled == 3
    assert cache.counters.forgotten == 0
    assert not cache.copying
    # Once clean entries have left HBM, their copies may be forgotten for others.
    for user in range(30, 40):
        compute(cache, user, GRANULE_TOKENS)
        copier.settle()
        cache.poll()
    assert cache.counters.evicted_clean > 0
    assert cache.counters.forgotten > 0
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize(("storage", "granules"), [("exact", 3), ("int8", 2)])
def test_a_dram_tier_that_cannot_hold_one_entry_is_refused(storage: StorageKind, granules: int) -> None:
    with pytest.raises(CapacityError) as caught, closing(Flaky()) as copier:
        make(9, granules - 1, copier, storage=storage)
    for part in (
        f"worker.dram_bytes = {(granules - 1) * GRANULE_BYTES}",
        f"{MOST} tokens",
        f"it takes {3 * GRANULE_BYTES // (1 if storage == 'exact' else 2)} bytes",
        repr(storage),
        "relay.max_prefix_tokens",
    ):
        assert part in str(caught.value)
    make(9, granules, storage=storage).close()


def test_int8_holds_more_and_says_that_it_rounded() -> None:
    held = {}
    for storage in ("exact", "int8"):
        copier = Flaky()
        cache = make(30, 6, copier, storage=storage)
        for user in range(30):
            compute(cache, user, 2 * GRANULE_TOKENS)
            settle(cache, copier)
        held[storage] = sum(1 for entry in cache._holdings._entries.values() if entry.stored is not None)
        cache.check_integrity()
        cache.close()
    assert held == {"exact": 3, "int8": 6}


@pytest.mark.parametrize("storage", ["exact", "int8"])
def test_rounded_stays_rounded_until_computed_anew(storage: StorageKind) -> None:
    copier = Flaky()
    cache = make(9, 12, copier, storage=storage)
    rounds = storage == "int8"
    entry = compute(cache, 1, 100)
    compute(cache, 2, MOST)
    spilled(cache, copier, 1)
    assert not entry.approximate  # HBM still has what was computed
    cache._holdings._evict(entry)
    assert entry.state is EntryState.DRAM
    assert cache.load(entry)
    settle(cache, copier)
    assert entry.approximate == rounds
    same = cache.extend(entry, sequence(1, 0, 110))
    assert same is entry
    assert entry.region is not None
    write(entry.region, entry.tokens)
    cache.finish(entry)
    assert entry.approximate == rounds
    grown = cache.extend(entry, sequence(1, 0, 150))
    assert grown is not None
    assert grown is not entry
    assert grown.approximate == rounds
    cache.abort(grown)
    assert not compute(cache, 1, 100).approximate
    cache.check_integrity()
    cache.close()


# ---- the end ----


class Gated(CopyEngine):
    """Copies that wait for the gate; `entered` counts those that a thread has begun."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)

    def submit(
        self, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False, convert: Convert = unchanged
    ) -> CopyTicket:
        def when_open(dst: torch.Tensor, src: torch.Tensor) -> None:
            self.entered.release()
            self.gate.wait(30)
            convert(dst, src)

        return super().submit(dst, src, urgent=urgent, convert=when_open)

    def begun(self, copies: int) -> None:
        """Wait until threads have begun so many more."""
        for _ in range(copies):
            assert self.entered.acquire(timeout=30)


def at_rest(cache: PrefixCache) -> None:
    """Wait for the copies under way."""
    for _ in range(3000):
        cache.poll()
        if not cache.copying:
            return
        time.sleep(0.01)
    raise AssertionError("copies go on for ever")


def test_closed_in_the_middle_of_copies_the_books_hold_and_nobody_waits_for_ever() -> None:
    copier = Gated()
    cache = make(9, 20, copier)
    copier.gate.set()
    for user in (1, 2, 3):
        compute(cache, user, 2 * GRANULE_TOKENS)
    at_rest(cache)
    for user in (4, 5):
        compute(cache, user, 2 * GRANULE_TOKENS)  # in place of the two that have copies
    away = [entry for entry in cache._holdings._entries.values() if entry.state is EntryState.DRAM]
    assert len(away) == 2
    copier.begun(2)
    copier.gate.clear()
    assert cache.load(away[0])
    cache.pin(away[0])
    cache.poll()
    spilling = [entry for entry in cache._holdings._entries.values() if entry.state is EntryState.SPILLING]
    assert len(spilling) == 2
    copier.begun(2)  # the load, and one of the spills: the other waits
    closing_ = threading.Thread(target=cache.close)
    closing_.start()
    cache.check_integrity()
    copier.gate.set()
    closing_.join(30)
    assert not closing_.is_alive()
    at_rest(cache)
    assert away[0].state is EntryState.PINNED
    assert holds(away[0].region or pytest.fail("no region"), away[0].tokens)
    assert [entry.stored is not None for entry in spilling] == [True, False]
    assert cache.counters.copy_failures == 1
    cache.check_integrity()
    cache.unpin(away[0])
    assert cache.load(away[1])  # whatever is asked for now fails, in good order
    at_rest(cache)
    assert away[1].state is EntryState.GONE
    cache.check_integrity()
    assert cache.pinned_bytes == 0
