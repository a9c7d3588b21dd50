"""Models that are not HSTU, through the whole worker core: same outcomes, exact scores, audits that agree."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from relaygr_stream.models.transformer import Transformer
from relaygr_stream.settings.worker import Model
from tests.unit.engine.worlds import LIMITS, MAX_TOKENS, RETENTION, TRANSFORMER, WITH_CONTEXT, World, history, world

# ---- random traffic ----


@pytest.mark.parametrize(
    ("kind", "hbm", "dram", "extends"),
    [(TRANSFORMER, 9, 20, True), (RETENTION, 1, 2, True), (WITH_CONTEXT, 9, 20, False)],
    ids=["transformer", "retention", "contextual"],
)
def test_other_families_are_served_by_the_same_core(kind: Model, hbm: int, dram: int, extends: bool) -> None:
    world = World(hbm, dram, audit_share=0.5, kind=kind)
    assert isinstance(world.model, Transformer)
    rng = random.Random(5)
    for number in range(60):
        user, length = rng.randrange(6), rng.randrange(1, MAX_TOKENS)
        if number % 4:
            world.signal(f"r{number}", user, length, life=0.5)
        for _ in range(rng.randrange(8)):  # enough that nothing is late
            world.step()
        if number % 5 == 1:
            world.settle()
        # On a busy machine the model is slow, and what is predicted to come too late is refused.
        world.rank(f"r{number}", user, length, suffix=rng.randrange(4), full=number % 10 == 0, timeout=2.0)
        world.now += 0.05
    world.settle()
    assert len(world.answers) == 60
    world.check_scores()
    outcomes = {answer.measured.outcome for answer in world.answers if answer.status == "ok"}
    assert outcomes >= {"hbm", "joined", "full"}
    counters = world.cache.counters
    if extends:
        assert counters.loaded
        assert "dram" in outcomes
        assert counters.extended_in_place
        assert counters.extended_by_move
    assert world.audits
    assert all(deviation <= 1e-5 for _, deviation in world.audits)
    world.cache.check_integrity()
    world.close()


# ---- a state, which cannot go back ----


def test_a_state_grows_in_place_where_nobody_holds_it() -> None:
    with world(kind=RETENTION) as w:
        w.signal("r1", 1, 100)
        w.settle()
        w.rank("r1", 1, 100)
        w.settle()
        w.signal("r2", 1, 120)
        w.settle()
        w.rank("r2", 1, 120)
        w.settle()
        assert w.outcome("r2") == "hbm"
        assert (w.cache.counters.extended_in_place, w.cache.counters.extended_by_move) == (1, 0)


def test_a_state_that_a_request_waits_for_is_copied_before_it_grows() -> None:
    """Both requests of the user find theirs, in any order."""
    with world(kind=RETENTION) as w:
        w.signal("older", 1, 100)
        w.settle()
        w.signal("newer", 1, 120)
        w.settle()
        assert (w.cache.counters.extended_in_place, w.cache.counters.extended_by_move) == (0, 1)
        w.rank("newer", 1, 120)
        w.rank("older", 1, 100)
        w.settle()
        assert (w.outcome("newer"), w.outcome("older")) == ("hbm", "hbm")


def test_a_state_of_a_longer_history_is_of_no_use() -> None:
    with world(kind=RETENTION) as w:
        w.signal("r1", 1, 120)
        w.settle()
        w.rank("r2", 1, 100)
        w.settle()
        assert w.outcome("r2") == "full"


def test_a_state_that_is_being_rewritten_is_waited_for() -> None:
    """What is computed so far would serve, with the rest in the suffix, but the next chunk rewrites it."""
    with world(kind=RETENTION, lag=20, limits=replace(LIMITS, max_ranking_delay_ms=1e-6)) as w:  # the shortest chunks
        w.signal("r1", 1, 180)
        entry, _ = w.cache.find("u1", history(1, 180))
        assert entry is not None
        assert entry.region is not None
        while entry.region.length < 160:
            w.step()
        assert entry.region.length == 160
        w.rank("r1", 1, 180)
        w.settle()
        assert w.outcome("r1") == "joined"


def test_a_stale_state_serves_with_the_missing_behaviours_in_the_suffix() -> None:
    with world(kind=RETENTION, lag=16) as w:
        w.signal("r1", 1, 100)
        w.settle()
        w.rank("r2", 1, 110)
        w.settle()
        assert w.outcome("r2") == "hbm"
        assert w.cache.counters.opened == 1
        assert w.cache.counters.extended_by_move == 0


# ---- a prefix that cannot grow, and a suffix ----


def test_a_suffix_is_ranked_behind_a_whole_prefix() -> None:
    with world(kind=WITH_CONTEXT, audit_share=1.0) as w:
        w.signal("r1", 1, 100)
        w.settle()
        w.rank("r1", 1, 100, suffix=3)
        w.rank("longer", 1, 101, suffix=2)
        w.rank("only suffix", 2, 0, suffix=3)
        w.settle()
        assert [w.outcome(name) for name in ("r1", "longer", "only suffix")] == ["hbm", "full", "full"]
        assert w.answer("longer").measured.computed_tokens == 101
        assert [deviation <= 1e-5 for _, deviation in w.audits] == [True]


def test_a_whole_prefix_that_a_newer_one_replaced_serves_the_request_that_pinned_it() -> None:
    with world(kind=WITH_CONTEXT) as w:
        w.signal("older", 1, 100)
        w.signal("newer", 1, 101)
        w.settle()
        w.rank("older", 1, 100)
        w.rank("newer", 1, 101)
        w.settle()
        assert (w.outcome("older"), w.outcome("newer")) == ("hbm", "hbm")
        assert w.cache.counters.opened == 2
