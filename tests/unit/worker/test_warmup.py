"""Warm-up: who is expected back is brought back in idle time, and never at anyone's expense."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from relaygr_stream.cache.fading import FadingFrequency
from relaygr_stream.worker import warmup
from tests.unit.worker.worlds import LIMITS, World


@pytest.fixture(autouse=True)
def _every_copy_takes_as_long_by_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an entry is worth depends on what copies took: on a busy machine one of them takes long by chance."""
    monkeypatch.setattr("relaygr_stream.cache.reloads.Reloads.predict_ms", lambda self, nbytes: nbytes / 1e6)


def ticking() -> Callable[[], float]:
    """A clock for the executor by which every operation takes a millisecond."""
    ticks = itertools.count()
    return lambda: next(ticks) * 1e-3


@contextmanager
def warm_world(*, enabled: bool = True, hbm: int = 9, dram: int = 40) -> Iterator[World]:
    """Scratch takes 3 granules of 9: three entries of 2 fit beside it; DRAM takes all."""
    world = World(hbm=hbm, dram=dram, limits=replace(LIMITS, warm_up=enabled), clock=ticking())
    try:
        yield world
    finally:
        world.settle()
        world.check_scores()
        world.scheduler.check_integrity()
        world.close()


def visit(w: World, user: int, *, length: int = 100) -> str | None:
    """One ranking by this user; where its prefix was found."""
    name = f"{user}-{len(w.answers)}"
    w.rank(name, user, length)
    w.settle()
    return w.outcome(name)


def rounds(w: World, count: int, users: int, gap: float) -> None:
    """Users come in turns, `gap` seconds apart."""
    for _ in range(count):
        for user in range(users):
            visit(w, user)
            w.now += gap


def wait(w: World, seconds: float, step: float = 0.1) -> None:
    """Idle time goes by."""
    for _ in range(round(seconds / step)):
        w.settle()
        w.now += step
    w.settle()


def push_out(w: World, user: int) -> None:
    """Fill HBM with others until this user's entry is in DRAM alone."""
    for other in range(80):
        if not w.cache.in_hbm(f"u{user}"):
            return
        visit(w, 50 + other % 8)
    raise AssertionError("it never leaves")


def regular(w: World, user: int, visits: int = 6, length: int = 100) -> None:
    """A user who comes every 10 s."""
    for _ in range(visits):
        visit(w, user, length=length)
        w.now += 10.0


def test_a_user_expected_back_is_brought_back_before_he_comes() -> None:
    with warm_world() as w:
        regular(w, 1)
        w.now -= 9.0  # a second after his last visit
        push_out(w, 1)
        wait(w, 5.0)
        assert not w.cache.in_hbm("u1")  # too early
        wait(w, 4.0)
        assert w.cache.in_hbm("u1")
        assert visit(w, 1) == "hbm"
        counters = w.scheduler.warm_up.counters
        assert (counters.started, counters.hit, counters.wasted) == (1, 1, 0)


def test_switched_off_it_does_nothing() -> None:
    with warm_world(enabled=False) as w:
        regular(w, 1)
        w.now -= 9.0
        push_out(w, 1)
        wait(w, 10.0)
        assert visit(w, 1) == "dram"
        assert w.scheduler.warm_up.counters.started == 0


def test_a_user_seen_once_or_overdue_is_not_expected() -> None:
    with warm_world() as w:
        visit(w, 2)
        push_out(w, 2)
        regular(w, 1)
        push_out(w, 1)
        w.now += 100.0
        wait(w, 30.0, step=1.0)
        assert w.scheduler.warm_up.counters.started == 0


def test_nothing_is_warmed_while_there_is_work() -> None:
    with warm_world() as w:
        regular(w, 1)
        w.now -= 9.0
        push_out(w, 1)
        w.now += 8.0
        w.signal("pre-infer", 7, 150)
        while w.scheduler.backlog:
            started = w.scheduler.warm_up.counters.started
            assert started == 0
            w.step()
        w.settle()
        assert w.scheduler.warm_up.counters.started == 1


def test_what_is_worth_more_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    with warm_world() as w:
        regular(w, 1)
        w.now -= 9.0
        push_out(w, 1)
        before = {f"u{user}" for user in range(50, 60) if w.cache.in_hbm(f"u{user}")}
        monkeypatch.setattr(FadingFrequency, "value", lambda policy, key: 1e6)
        wait(w, 12.0)
        assert w.scheduler.warm_up.counters.started == 0
        assert all(w.cache.in_hbm(user) for user in before)


def test_a_key_that_left_is_expected_with_the_uses_remembered_of_it() -> None:
    order: FadingFrequency[str] = FadingFrequency(4.0)
    order.add("often", 10, 2.0)
    order.add("often", 10, 2.0)
    assert order.expected("often", 2.0) == order.value("often")
    order.remove("often")
    assert 3.0 < order.expected("often", 2.0) < 4.0
    assert order.expected("never", 2.0) == 0.0


def test_what_was_warmed_can_be_evicted_at_once_and_counts_as_waste() -> None:
    with warm_world() as w:
        regular(w, 1)
        w.now -= 9.0
        push_out(w, 1)
        wait(w, 9.0)
        assert w.cache.in_hbm("u1")
        push_out(w, 1)
        w.settle()
        counters = w.scheduler.warm_up.counters
        assert (counters.started, counters.hit) == (1, 0)
        assert counters.wasted == 1


def test_users_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "MAX_USERS", 3)
    with warm_world() as w:
        rounds(w, 2, users=6, gap=1.0)
        assert len(w.scheduler.warm_up._users) == 3
        assert len(w.scheduler.warm_up._expected) <= 3


def test_without_a_dram_tier_there_is_nothing_to_bring_back() -> None:
    world = World(dram=0, limits=replace(LIMITS, warm_up=True))
    world.rank("r", 1, 100)
    world.settle()
    assert world.scheduler.warm_up._users == {}
    world.close()
