"""Copies lent to and coming from other workers: whose room they take, what may happen meanwhile, and how they end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from relaygr_stream.cache.entry import Coverage, Entry, EntryState
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.tiers import GRANULE_TOKENS, capacity_for
from relaygr_stream.cache.transit import Discard, GiveBack, Lease, Reservation, giving_back
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.kv import KVRegion
from tests.unit.cache.worlds import (
    GRANULE_BYTES,
    LAYOUT,
    MOST,
    Flaky,
    compute,
    entries,
    holds,
    make,
    sequence,
    table_of,
    write,
)

Pair = tuple[PrefixCache, Flaky]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """DRAM for six granules: two entries of the longest sequence."""
    copier = Flaky()
    cache = make(24, 6, copier)
    yield cache, copier
    cache.check_integrity()
    cache.close()


def lend(cache: PrefixCache, copier: Flaky, user: int) -> Lease:
    for _ in range(3):
        lease = cache.transit.lend(f"u{user}")
        if isinstance(lease, Lease):
            return lease
        assert lease == "soon"
        copier.settle()
        cache.poll()
    raise AssertionError("never lent")


def lent_holds(lease: Lease) -> bool:
    region = KVRegion(LAYOUT, lease.data.view(torch.float32), lease.capacity, len(lease.tokens))
    return holds(region, lease.tokens)


def bring(cache: PrefixCache, user: int, tokens: Tokens) -> bool:
    """A copy comes from elsewhere; whether it was taken."""
    reservation = cache.transit.reserve(f"u{user}", tokens, capacity_for(len(tokens)))
    if not isinstance(reservation, Reservation):
        return False
    fill(reservation)
    return cache.transit.fill(reservation)


def fill(reservation: Reservation) -> None:
    region = KVRegion(
        LAYOUT, torch.zeros(reservation.copy.capacity * LAYOUT.elements_per_token), reservation.copy.capacity
    )
    write(region, reservation.tokens)
    reservation.data.copy_(region.storage.view(torch.uint8))


def found(cache: PrefixCache, user: int) -> Entry:
    (entry,) = (entry for entry in entries(cache) if entry.user_id == f"u{user}")
    return entry


def test_what_is_only_in_hbm_is_copied_out_first(pair: Pair) -> None:
    cache, copier = pair
    entry = compute(cache, 1, 100)
    assert cache.transit.lend("u1") == "soon"
    assert entry.state is EntryState.SPILLING
    lease = lend(cache, copier, 1)
    assert lent_holds(lease)
    assert len(lease.tokens) == 100
    cache.transit.give_back(lease)
    assert entry.clean


def test_who_has_nothing_lends_nothing(pair: Pair) -> None:
    cache, _ = pair
    assert cache.transit.lend("u1") == "never"
    computing = cache.open("u1", sequence(1, 0, 10))
    assert computing is not None
    assert cache.transit.lend("u1") == "never"
    cache.abort(computing)


def test_what_somebody_waits_for_no_more_is_given_back(pair: Pair) -> None:
    cache, _ = pair
    reservation = cache.transit.reserve("u1", sequence(1, 0, 10), 10, 1.0)
    assert isinstance(reservation, Reservation)
    assert giving_back(reservation) == Discard(reservation)
    lease = Lease(cast(Any, None), sequence(1, 0, 10), 10, torch.zeros(0), 1.0)
    assert giving_back(lease) == GiveBack(lease)
    assert [giving_back(reply) for reply in ("soon", "held", None, 7)] == [None] * 4
    cache.transit.discard(reservation)


def test_a_lent_copy_is_not_forgotten_for_others(pair: Pair) -> None:
    cache, copier = pair
    for user in (1, 2):
        compute(cache, user, MOST)
        cache.transit.give_back(lend(cache, copier, user))
        table_of(cache).evict_from_hbm(found(cache, user))
    lease = lend(cache, copier, 1)
    for user in (3, 4, 5):
        bring(cache, user, sequence(user, 0, MOST))
        assert lent_holds(lease)
    assert found(cache, 1).stored is not None
    cache.transit.give_back(lease)


def test_a_user_may_come_back_with_another_sequence_meanwhile(pair: Pair) -> None:
    cache, copier = pair
    compute(cache, 1, MOST)
    lease = lend(cache, copier, 1)
    compute(cache, 1, MOST, 1)
    compute(cache, 2, MOST)
    cache.transit.give_back(lend(cache, copier, 2))
    assert lent_holds(lease)
    assert cache.dram_used == 6 * GRANULE_BYTES
    cache.transit.give_back(lease)
    assert cache.dram_used == 3 * GRANULE_BYTES


@pytest.mark.parametrize("length", [80, 150], ids=["in place", "by move"])
def test_a_lent_copy_stays_as_it_is_while_its_sequence_grows(pair: Pair, length: int) -> None:
    cache, copier = pair
    entry = compute(cache, 1, 70)
    lease = lend(cache, copier, 1)
    grown = cache.extend(entry, sequence(1, 0, length))
    assert grown is not None
    assert grown.region is not None
    write(grown.region, grown.tokens)
    cache.finish(grown)
    again, stored = lend(cache, copier, 1), entry.stored
    for user in range(2, 8):
        compute(cache, user, MOST)  # so little of HBM is free that idle entries are written back
    for _ in range(3):
        cache.poll()
        copier.settle()
    assert entry.stored is stored
    assert lent_holds(lease)
    assert len(lease.tokens) == 70
    assert lent_holds(again)
    cache.transit.give_back(lease)
    cache.transit.give_back(again)


def test_what_came_serves_its_user(pair: Pair) -> None:
    cache, copier = pair
    tokens = sequence(1, 0, 100)
    assert bring(cache, 1, tokens)
    entry, coverage = cache.find("u1", sequence(1, 0, 90))
    assert coverage is Coverage.COVERS
    assert cache.find("u1", sequence(1, 1, 90))[1] is Coverage.NONE
    assert entry is not None
    assert cache.load(entry)
    copier.settle()
    assert cache.poll() == [entry]
    assert entry.region is not None
    assert holds(entry.region, tokens)


def test_what_is_here_stays_unless_it_is_less_of_the_same(pair: Pair) -> None:
    cache, _ = pair
    assert bring(cache, 1, sequence(1, 0, 100))
    assert not bring(cache, 1, sequence(1, 0, 100))
    assert not bring(cache, 1, sequence(1, 0, 90))
    assert not bring(cache, 1, sequence(1, 1, 120))
    assert bring(cache, 1, sequence(1, 0, 120))
    assert cache.dram_used == 2 * GRANULE_BYTES
    entry = found(cache, 1)
    assert cache.load(entry)  # somebody uses it
    assert not bring(cache, 1, sequence(1, 0, 150))


def test_what_was_computed_meanwhile_stays(pair: Pair) -> None:
    cache, _ = pair
    reservation = cache.transit.reserve("u1", sequence(1, 0, 100), 128)
    assert isinstance(reservation, Reservation)
    entry = compute(cache, 1, 100)
    assert not cache.transit.fill(reservation)
    assert found(cache, 1) is entry
    assert cache.dram_used == 0


def test_what_broke_off_leaves_nothing(pair: Pair) -> None:
    cache, _ = pair
    reservation = cache.transit.reserve("u1", sequence(1, 0, 100), 128)
    assert isinstance(reservation, Reservation)
    assert cache.dram_used == cache.transit.reserved_bytes == 2 * GRANULE_BYTES
    cache.check_integrity()
    cache.transit.discard(reservation)
    assert cache.dram_used == cache.entries == 0


def two_in_dram(pair: Pair) -> PrefixCache:
    """DRAM is full with the copies of u1, whose use fades, and of u2, who was here just now."""
    cache, copier = pair
    for user in (1, 2):
        compute(cache, user, MOST)
        cache.transit.give_back(lend(cache, copier, user))
        table_of(cache).evict_from_hbm(found(cache, user))
    return cache


def test_only_what_is_worth_less_goes_for_it(pair: Pair) -> None:
    cache = two_in_dram(pair)
    assert cache.transit.reserve("u3", sequence(3, 0, 2), GRANULE_TOKENS) == "full"
    assert cache.counters.forgotten == 0
    assert bring(cache, 4, sequence(4, 0, MOST))
    assert sorted(cache.transit.users()) == ["u2", "u4"]


def test_nobody_who_stays_is_forgotten_for_a_copy_that_is_worth_less(pair: Pair) -> None:
    cache = two_in_dram(pair)
    compute(cache, 3, 2)
    assert cache.transit.lend("u3") == "never"
    assert cache.counters.forgotten == 0


def test_worth_is_of_a_byte_as_in_eviction(pair: Pair) -> None:
    """A copy with two tokens takes a granule all the same."""
    cache, _ = pair
    compute(cache, 1, 2)
    compute(cache, 2, GRANULE_TOKENS)
    worth = cache.transit.worth(["u1", "u2"])
    assert worth["u1"] < worth["u2"] / 2


def test_worth_follows_use_and_cost(pair: Pair) -> None:
    cache, _ = pair
    compute(cache, 1, 50)
    for _ in range(3):
        entry = compute(cache, 2, 50)
        cache.pin(entry)
        cache.unpin(entry)
    computing = cache.open("u3", sequence(3, 0, 50))
    assert computing is not None
    worth = cache.transit.worth(["u1", "u2", "u3", "u4"])
    assert sorted(worth) == ["u1", "u2"]
    assert worth["u2"] > worth["u1"]
    cache.abort(computing)
