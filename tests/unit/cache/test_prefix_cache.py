"""The life of entries in the cache, step by step: states, refusals, failures."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from relaygr_stream.cache.copy import CopyEngine
from relaygr_stream.cache.entry import Coverage, EntryState
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.tiers import GRANULE_TOKENS
from relaygr_stream.errors import CacheCorruption, CapacityError
from relaygr_stream.models.kv import KVLayout
from tests.unit.cache.worlds import (
    CPU,
    GRANULE_BYTES,
    MOST,
    WITH_STATE,
    Flaky,
    compute,
    holds,
    make,
    sequence,
    settle,
    table_of,
    write,
)


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
    cache.poll()
    copier.settle()
    cache.poll()
    assert first.clean
    cache.pin(second)
    cache.unpin(second)  # used since, so cheap to lose it is not
    compute(cache, 3, MOST)
    assert first.state is EntryState.DRAM
    assert cache.counters.evicted_clean == 1
    assert cache.counters.evicted_lost == 0


def test_a_clean_entry_goes_before_a_dirty_one_that_is_worth_less(small: tuple[PrefixCache, Flaky]) -> None:
    cache, copier = small
    copier.fail_next = 1  # one of the two is never written back
    both = [compute(cache, user, MOST) for user in (1, 2)]
    settle(cache, copier)
    ((clean,), (dirty,)) = ([entry for entry in both if entry.clean is is_clean] for is_clean in (True, False))
    for _ in range(1000):  # a use of the clean one costs a reload if it is evicted, one of the other a computation
        cache.pin(clean)
        cache.unpin(clean)
    assert next(table_of(cache).hbm.cheapest()) is dirty
    compute(cache, 3, MOST)
    assert (clean.state, dirty.state) == (EntryState.DRAM, EntryState.IDLE)
    assert (cache.counters.evicted_clean, cache.counters.evicted_lost) == (1, 0)


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


def test_a_state_that_is_being_copied_does_not_grow_in_place() -> None:
    """Nor one that a reader holds; with neither, it does."""
    copier = Flaky()
    with closing(make(9, 9, copier, layout=WITH_STATE)) as cache:
        entry = compute(cache, 1, 40)
        assert cache.transit.lend("u1") == "soon"  # a copy starts
        grown = cache.extend(entry, sequence(1, 0, 50))
        assert grown is not None
        assert grown.region is not entry.region
        assert grown.region is not None
        write(grown.region, grown.tokens)
        cache.finish(grown)
        settle(cache, copier)
        assert cache.extend(grown, sequence(1, 0, 60)) is grown
        write(grown.region, grown.tokens)
        cache.finish(grown)
        cache.pin(grown)
        other = cache.extend(grown, sequence(1, 0, 64))
        assert other is not grown
        assert holds(grown.region, sequence(1, 0, 60))
        assert other is not None
        cache.abort(other)
        cache.unpin(grown)


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
