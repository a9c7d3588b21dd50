"""A ranking that is ranked again here, because it could not be passed on: as if it had just come."""

from __future__ import annotations

import dataclasses

import pytest

from relaygr_stream.engine.commands import Cancel, Rank, RankTask
from relaygr_stream.settings.worker import Model
from tests.unit.engine.worlds import CONTEXTUAL, LIMITS, TOY, World, history, world

THREE = dataclasses.replace(LIMITS, queue_limit=3)


def loses_its_place(w: World, suffix: int) -> RankTask:
    """r1 has the scratch region lent, and is answered `overloaded` before the device starts it."""
    task = w.rank("r1", 1, 64, suffix=suffix, pass_to=5, client="many", timeout=1.0)
    assert not w.cache.scratch.free
    w.rank("r2", 30, 64, client="many", timeout=0.5)
    w.rank("r3", 31, 64, client="many", timeout=0.6)
    w.rank("r4", 32, 64, client="other", timeout=0.7)
    assert w.answer("r1").status == "overloaded"
    w.answers.clear()
    return task


def rank_again(w: World, task: RankTask) -> None:
    w.handle(Rank(task))


def only_in_dram(w: World) -> None:
    """User 1's prefix KV are in DRAM, and pins leave no room in HBM for them."""
    w.rank("warm", 1, 64)
    w.settle()
    for user in range(10, 16):
        w.signal(f"s{user}", user, 64, life=50.0)
        w.settle()


@pytest.mark.parametrize("lent", [False, True])
def test_what_it_held_before_is_no_more_its_own(lent: bool) -> None:
    """Its answer once gave a cache entry's region back as the scratch region."""
    with world(limits=THREE, dram=9) as w:
        only_in_dram(w)
        task = loses_its_place(w, suffix=3)
        w.handle(Cancel("s10"))  # there is room in HBM
        w.settle()
        w.rank("load", 1, 64)
        w.settle()
        if lent:
            w.rank("in scratch", 40, 192, full=True)
            assert not w.cache.scratch.free
        entry, _ = w.cache.find("u1", history(1, 64))
        assert entry is not None
        assert entry.region is not None
        before = entry.region.storage.clone()
        rank_again(w, task)
        w.settle()
        assert w.outcome("r1") == "hbm"
        w.rank("next in scratch", 41, 60, full=True)
        w.settle()
        assert (entry.region.storage == before).all(), "the cache's entry was used as the scratch region"


@pytest.mark.parametrize(("kind", "suffix"), [(CONTEXTUAL, 16), (CONTEXTUAL, 1), (TOY, 16)])
def test_it_is_scored_with_its_suffix(kind: Model, suffix: int) -> None:
    """A model that takes no suffix behind a prefix has it inferred with the prefix; the second time it was gone."""
    with world(limits=THREE, dram=9, kind=kind) as w:
        if kind is TOY:
            only_in_dram(w)
        else:
            w.signal("s", 1, 64, life=50.0)
            w.settle()
        task = loses_its_place(w, suffix)
        w.settle()
        w.answers.clear()
        rank_again(w, task)
        w.settle()
        assert w.answer("r1").status == "ok"  # world() compares its scores
        assert len(w.answer("r1").task.suffix) == suffix


def test_a_request_does_not_change() -> None:
    names = RankTask.__struct_fields__
    assert len(names) <= 15
    with world() as w:
        task = w.rank("r", 1, 64)
        before = [getattr(task, name) for name in names]
        w.settle()
        assert all(value is getattr(task, name) for name, value in zip(names, before, strict=True))
        with pytest.raises(AttributeError):
            task.full = True  # type: ignore[misc]


@pytest.mark.parametrize("kind", [TOY, CONTEXTUAL])
def test_one_whose_user_was_erased_meanwhile_leaves_nothing(kind: Model) -> None:
    with world(kind=kind, audit_share=1.0) as w:
        task = w.ranking("r", 1, 64)
        w.handle(Rank(task, leaves_nothing=True))
        w.settle()
        assert w.outcome("r") == "full"
        assert (w.cache.entries, w.audits) == (0, [])
