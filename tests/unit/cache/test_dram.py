"""The DRAM tier: small ones, rounding ones, and copies that the end meets half-way."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest
import torch

from relaygr_stream.cache.copy import Before, CopyEngine, CopyTicket
from relaygr_stream.cache.entry import EntryState
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.tiers import GRANULE_TOKENS
from relaygr_stream.errors import CapacityError
from tests.unit.cache.worlds import (
    CPU,
    GRANULE_BYTES,
    MOST,
    Flaky,
    HookedCopy,
    compute,
    entries,
    holds,
    make,
)
from tests.waiting import WITHIN_S


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


def test_a_dram_tier_that_cannot_hold_one_entry_is_refused() -> None:
    with pytest.raises(CapacityError) as caught, closing(Flaky()) as copier:
        make(9, 2, copier)
    for part in (
        f"worker.dram_bytes = {2 * GRANULE_BYTES}",
        f"{MOST} tokens",
        f"it takes {3 * GRANULE_BYTES} bytes",
        "relay.max_prefix_tokens",
    ):
        assert part in str(caught.value)
    make(9, 3).close()


# ---- the end ----


class Gated(CopyEngine):
    """Copies that wait for the gate; `entered` counts those that a thread has begun."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.submitted: list[CopyTicket] = []

    def submit(
        self, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False, before: Before | None = None
    ) -> CopyTicket:
        def when_open() -> None:
            self.entered.release()
            self.gate.wait(WITHIN_S)

        self.submitted.append(self.enqueue(HookedCopy(dst, src, when_open), urgent=urgent))
        return self.submitted[-1]

    def begun(self, copies: int) -> None:
        """Wait until threads have begun so many more."""
        for _ in range(copies):
            assert self.entered.acquire(timeout=WITHIN_S)


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
    away = [entry for entry in entries(cache) if entry.state is EntryState.DRAM]
    assert len(away) == 2
    copier.begun(cache.counters.spilled)  # three where a poll came between the ends of the first two
    copier.gate.clear()
    assert cache.load(away[0])
    cache.pin(away[0])
    cache.poll()
    spilling = [entry for entry in entries(cache) if entry.state is EntryState.SPILLING]
    assert len(spilling) == 2
    spilling.sort(key=lambda entry: copier.submitted.index(entry.spill or pytest.fail("no spill")))
    copier.begun(2)  # the load, and one of the spills: the other waits
    waiting = spilling[1].spill
    assert waiting is not None
    closing_ = threading.Thread(target=cache.close)
    closing_.start()
    assert waiting._done.wait(WITHIN_S)  # the ticket's `wait` would take the error, which is for the cache to find
    cache.check_integrity()
    copier.gate.set()
    closing_.join(WITHIN_S)
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
