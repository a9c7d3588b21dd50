"""What evicting an entry is taken to cost, and what counts as a use of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from relaygr_stream.cache.entry import Entry, EntryState
from relaygr_stream.cache.fading import CostAwarePolicy
from relaygr_stream.cache.prefix_cache import PrefixCache
from tests.unit.cache.worlds import MOST, Flaky, compute, make, sequence, spilled, table_of, write

Price = Callable[[Entry], float]


def priced(hbm: int, dram: int) -> tuple[PrefixCache, Flaky, Price, Price]:
    """A cache, and what evicting an entry from HBM, and from DRAM, is held to cost there."""
    orders: list[CostAwarePolicy[str]] = []

    def order() -> CostAwarePolicy[str]:
        orders.append(CostAwarePolicy())
        return orders[-1]

    copier = Flaky()
    cache = make(hbm, dram, copier, policy=order)

    def price(tier: CostAwarePolicy[str], entry: Entry) -> float:
        return tier.value(entry.user_id) / tier.uses(entry.user_id)

    return cache, copier, partial(price, orders[0]), partial(price, orders[1])


def recompute_ms(tokens: int) -> float:
    """As the toy caches predict it."""
    return 0.1 + 0.01 * tokens


def test_evicting_costs_a_recomputation_with_a_copy_too() -> None:
    cache, copier, price, _ = priced(9, 6)
    entry = compute(cache, 1, MOST)
    assert price(entry) == recompute_ms(MOST)
    compute(cache, 2, MOST)
    spilled(cache, copier, 1)
    assert entry.clean
    assert price(entry) == recompute_ms(MOST)
    cache.close()


def test_a_grown_entry_costs_all_that_it_holds() -> None:
    cache, copier, price, in_dram = priced(12, 12)
    entry = compute(cache, 1, 100)
    compute(cache, 2, MOST)
    compute(cache, 3, MOST)
    spilled(cache, copier, 1)
    assert cache.extend(entry, sequence(1, 0, 120)) is entry
    assert entry.region is not None
    write(entry.region, entry.tokens)
    cache.finish(entry)
    assert entry.stored is not None
    assert price(entry) == recompute_ms(120)
    assert in_dram(entry) == recompute_ms(100), "the copy is as old"
    cache.close()


def test_being_copied_is_no_use(small: tuple[PrefixCache, Flaky]) -> None:
    cache, copier = small
    entry = compute(cache, 1, MOST)
    compute(cache, 2, MOST)
    before = table_of(cache).hbm.uses("u1")
    spilled(cache, copier, 1)
    assert entry.clean
    assert table_of(cache).hbm.uses("u1") == before


def test_a_use_during_a_copy_counts(small: tuple[PrefixCache, Flaky]) -> None:
    cache, copier = small
    entry = compute(cache, 1, MOST)
    compute(cache, 2, MOST)
    before = table_of(cache).hbm.uses("u1")
    cache.poll()
    assert entry.state is EntryState.SPILLING
    cache.pin(entry)
    cache.unpin(entry)
    copier.settle()
    cache.poll()
    assert entry.clean
    assert table_of(cache).hbm.uses("u1") > before + 0.5
