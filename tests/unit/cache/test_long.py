"""The allocator and the cache for as long as it takes to meet what short runs do not: books checked after each step.

Worlds are small, so that checks that look at everything are quick and memory is always short; a new one begins every
few thousand operations, since what a run of bad luck leaves behind is then seen at its end too.
"""

from __future__ import annotations

import random

import pytest

from relaygr_stream.cache.arena import Arena, Extent
from relaygr_stream.cache.eviction import Evictor
from tests.longrun import LongRun
from tests.unit.cache.play import Going, Play
from tests.unit.cache.worlds import MOST, Copies, Flaky, Slow

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

UNIT = 16
UNITS = 40
#: Operations in one world.
WORLD = 4000
#: What all looks at contents cost is about what a hundred operations do; the books are looked at after each.
CONTENTS_EVERY = 20


class Allocator:
    """An arena and its evictor at random, beside a model with one owner per unit."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.arena = Arena(UNITS * UNIT, UNIT)
        self.evictor: Evictor[int] = Evictor(self.arena)
        self.extents: dict[int, Extent] = {}
        self.owner = [0] * UNITS
        self.names = 0

    def step(self) -> None:
        what, names = self.rng.random(), list(self.extents)
        if what < 0.4 or not names:
            self.allocate(self.rng.randrange(1, UNITS * UNIT // 3))
        elif what < 0.7:
            self.free(self.rng.choice(names))
        else:
            name = self.rng.choice(names)
            if self.rng.random() < 0.6:
                self.evictor.add(name, self.extents[name], self.rng.uniform(0.1, 100))
            elif name in self.evictor:
                self.evictor.remove(name)

    def allocate(self, nbytes: int) -> None:
        extent = self.arena.allocate(nbytes)
        if extent is None and (victims := self.evictor.choose(nbytes)) is not None:
            for name in victims:
                self.free(name)
            extent = self.arena.allocate(nbytes)
            assert extent is not None
        if extent is not None:
            self.names += 1
            self.extents[self.names] = extent
            self.mark(extent, 0, self.names)

    def free(self, name: int) -> None:
        extent = self.extents.pop(name)
        if name in self.evictor:
            self.evictor.remove(name)
        self.arena.free(extent)
        self.mark(extent, name, 0)

    def mark(self, extent: Extent, before: int, after: int) -> None:
        units = slice(extent.offset // UNIT, extent.end // UNIT)
        assert set(self.owner[units]) == {before}, "memory of another was handed out"
        self.owner[units] = [after] * (extent.size // UNIT)

    def check(self) -> None:
        self.arena.check_integrity()
        assert self.arena.used == UNIT * sum(owner != 0 for owner in self.owner)
        assert len(self.arena) == len(self.extents)


def test_allocator(long_run: LongRun) -> None:
    rng = long_run.random("allocator")
    world = Allocator(rng)
    for step in long_run.steps("allocator", 0.4):
        if step % WORLD == 0:
            world = Allocator(rng)
        world.step()
        world.check()


WHAT = ("request",) * 6 + ("go on",) * 2 + ("let go",) * 3 + ("poll",) * 4 + ("pin", "fail", "scratch")
HOW: tuple[Going, ...] = ("finish", "finish", "part", "cut short", "abort")


def a_step(play: Play, rng: random.Random) -> None:
    what = rng.choice(WHAT)
    if what == "request":
        length = rng.randrange(1, MOST + 1)
        play.request(rng.randrange(6), rng.choice((0, 0, 0, 1)), length, at_once=rng.random() < 0.75)
    elif what == "go on":
        play.go_on(rng.randrange(50), rng.choice(HOW), rng.random())
    elif what == "let go":
        play.let_go(rng.randrange(50))
    elif what == "poll":
        play.poll(rng.choice((100, 100, 1, 0)))
    elif what == "pin":
        play.pin_what_is_not_ready(rng.randrange(50))
    elif what == "fail":
        play.copier.fail_next = rng.randrange(3) // 2
    else:
        play.use_scratch()


def a_world(rng: random.Random, copies: type[Copies]) -> Play:
    return Play(rng.choice((6, 8, 10, 24)), rng.choice((None, 3, 6, 20)), copies())


@pytest.mark.parametrize(
    ("copies", "share"),
    [(Flaky, 0.45), (Slow, 0.05)],
)
def test_cache(long_run: LongRun, copies: type[Copies], share: float) -> None:
    what = f"cache, {copies.__name__.lower()} copies"
    rng = long_run.random(what)
    play: Play | None = None
    for step in long_run.steps(what, share):
        if step % WORLD == 0:
            if play is not None:
                play.end()
            play = a_world(rng, copies)
        assert play is not None
        a_step(play, rng)
        play.check_books()
        if step % CONTENTS_EVERY == 0:
            play.check_contents()
    assert play is not None
    play.end()
