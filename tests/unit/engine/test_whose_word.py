"""Who may replace a user's prefix KV: a ranking alone, and a signal on another worker's behalf, replace no sequence
that a signal of the user's lane asked for. Both come by `ranking`, whose writers may name any user."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from relaygr_stream.cache.transit import Fill, Reservation, Reserve
from relaygr_stream.engine.commands import DELEGATED_LANE
from tests.unit.engine.worlds import GRANULE_BYTES, LIMITS, MAX_TOKENS, World, history, world


def visit(w: World, request: str, user: int = 1, length: int = 64, version: int = 0, lane: int | None = None) -> Any:
    """The user is announced and ranked; returns where its prefix KV were found."""
    w.signal(request, user, length, version=version, lane=lane)
    w.settle()
    w.rank(request, user, length, version=version)
    w.settle()
    return w.outcome(request)


def kept(w: World, version: int = 0, length: int = 64) -> bool:
    """Whether the user's entry is of this sequence."""
    entry, _ = w.cache.find("u1", history(1, length, version))
    return entry is not None and np.array_equal(entry.tokens.array, history(1, length, version).array)


@pytest.mark.parametrize("while_pinned", [False, True])
@pytest.mark.parametrize("length", [1, 64, MAX_TOKENS])
def test_a_wrong_guess_leaves_what_a_signal_made(length: int, while_pinned: bool) -> None:
    with world(hbm=30) as w:
        visit(w, "first")
        if while_pinned:
            w.signal("pinned", 1, 64)
        for number in range(3):
            w.rank(f"guess {number}", 1, length, version=1)
            w.settle()
            assert w.outcome(f"guess {number}") == "full"
        if while_pinned:
            w.rank("pinned", 1, 64)
            w.settle()
            assert w.outcome("pinned") == "hbm"
        w.rank("next", 1, 64)  # unannounced: only what is kept serves it
        w.settle()
        assert w.outcome("next") == "hbm" and kept(w)
        w.check_scores()


def test_a_wrong_guess_leaves_what_is_in_dram() -> None:
    with world(hbm=6, dram=30) as w:  # HBM has room for one longest prefix
        visit(w, "first")
        visit(w, "other", 2, MAX_TOKENS)
        entry = w.cache.find("u1", history(1, 64))[0]
        assert entry is not None and entry.region is None
        w.rank("guess", 1, 64, version=1)
        w.settle()
        w.rank("next", 1, 64)
        w.settle()
        assert (w.outcome("guess"), w.outcome("next")) == ("full", "dram")


def test_the_next_signal_replaces_a_history_that_was_rewritten() -> None:
    with world(hbm=30) as w:
        visit(w, "first")
        assert visit(w, "rewritten", version=1) == "hbm"
        assert kept(w, version=1) and not kept(w)


def test_a_ranking_replaces_what_only_rankings_asked_for() -> None:
    """Users who are never announced have their prefix KV by their rankings, as before."""
    with world(hbm=30) as w:
        for version in (0, 1):
            for number in range(2):
                w.rank(f"{version}.{number}", 1, 64, version=version)
                w.settle()
        assert [w.outcome(f"{version}.{number}") for version in (0, 1) for number in (0, 1)] == ["full", "hbm"] * 2


def test_a_ranking_replaces_on_the_word_of_its_own_signal() -> None:
    with world(hbm=30) as w:
        visit(w, "first")
        w.signal("own", 1, 64)
        w.rank("own", 1, 64, version=1)  # retrieval ended with another history than it began
        w.settle()
        assert kept(w, version=1)


@pytest.mark.parametrize("cause", ["its ranking came first", "no bytes may be pinned"])
def test_a_signal_that_gets_nothing_lets_rankings_replace_what_it_contradicts(cause: str) -> None:
    """Else a user whose signals come too late, or to a full worker, would be inferred in full for ever."""
    with world(hbm=30) as w:
        visit(w, "first")
        if cause == "its ranking came first":
            w.rank("late", 1, 64, version=1)
            w.settle()
            w.signal("late", 1, 64, version=1)
        else:
            w.scheduler.signals._footprint = 0
            w.signal("late", 1, 64, version=1)
        w.rank("next", 1, 64, version=1)
        w.settle()
        w.rank("again", 1, 64, version=1)
        w.settle()
        assert w.outcome("again") == "hbm" and kept(w, version=1)


def test_a_signal_on_another_workers_behalf_replaces_its_like_alone() -> None:
    """Such signals come by `ranking`, too."""
    with world(hbm=30, limits=replace(LIMITS, delegated_bytes=6 * GRANULE_BYTES)) as w:
        visit(w, "first")
        w.signal("forged", 1, 64, version=1, lane=DELEGATED_LANE)
        w.rank("forged", 1, 64, version=1)
        w.settle()
        assert kept(w) and w.outcome("forged") == "full"
        assert w.scheduler.signals.counters.signal_outranked == 1
        assert visit(w, "delegated", 2, lane=DELEGATED_LANE) == "hbm"
        assert visit(w, "rewritten", 2, lane=DELEGATED_LANE, version=1) == "hbm"
        w.rank("guess", 2, 64)
        w.settle()
        assert w.outcome("guess") == "full"


def test_what_another_worker_handed_over_is_replaced_by_no_ranking() -> None:
    with world(hbm=30) as w:
        arriving = w.handle(Reserve("u1", history(1, 64), 64))
        assert isinstance(arriving, Reservation) and w.handle(Fill(arriving))
        w.rank("guess", 1, 64, version=1)
        w.settle()
        assert w.outcome("guess") == "full" and kept(w)
        assert visit(w, "rewritten", version=1) == "hbm"


def test_the_word_stays_when_the_entry_grows() -> None:
    with world(hbm=30) as w:
        visit(w, "first")
        w.rank("longer", 1, MAX_TOKENS)  # its user's newest behaviours, unannounced
        w.settle()
        w.rank("guess", 1, 64, version=1)
        w.settle()
        assert w.outcome("guess") == "full" and kept(w, length=MAX_TOKENS)
