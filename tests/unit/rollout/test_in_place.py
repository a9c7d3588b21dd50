"""Which workers serve which version in a rollout in place, and what it does not begin with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.cli.main import main
from relaygr_stream.errors import ConfigError
from relaygr_stream.ops.rollout import in_place
from relaygr_stream.ops.rollout.in_place import InPlace, check, share_meanwhile, unfinished, workers_for
from relaygr_stream.ops.rollout.routing import AssignmentsChanged, Bus
from relaygr_stream.wire.assignments import Assignments
from relaygr_stream.wire.routes import POSITIONS
from tests.statuses import worker_status
from tests.unit.rollout.worlds import World

NEW = "/models/new"


@given(st.integers(2, 256), st.lists(st.integers(1, POSITIONS), min_size=1, max_size=8, unique=True))
def test_workers_and_users_move_in_turn_and_neither_group_is_ever_without_workers(count: int, steps: list[int]) -> None:
    moved = share = 0
    for step in sorted(steps):
        while moved < workers_for(step, count):
            meanwhile = min(step, share_meanwhile(moved, count))
            assert meanwhile == 0 or moved, "no users without a worker"
            share = max(share, meanwhile)
            moved += 1
        share = step
        assert 1 <= moved <= count - 1, "the last one stays, for users who come back"
        assert abs(moved - share * count / POSITIONS) <= 1
    assert workers_for(POSITIONS, count) == count - 1


@pytest.mark.parametrize("count", [2, 3, 8])
def test_while_one_is_on_its_way_the_others_have_as_many_users_each(count: int) -> None:
    for moved in range(1, count - 1):
        here = share_meanwhile(moved, count) / moved
        there = (POSITIONS - share_meanwhile(moved, count)) / (count - 1 - moved)
        assert here == pytest.approx(there, rel=0.01)
    assert (share_meanwhile(0, count), share_meanwhile(count - 1, count)) == (0, POSITIONS)


class Seen:
    """In place of the view of a group."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.workers = {name: worker_status(name) for name in names}
        self.missing_lanes = 0


class Obeyed:
    """In place of the bus: workers are at once where they are assigned to."""

    def __init__(self, old: Seen, new: Seen) -> None:
        self._old, self._new = old, new

    async def assign(self, _: object, workers: Iterable[str], *__: object) -> int:
        for name in workers:
            self._old.workers.pop(name, None)
            self._new.workers[name] = worker_status(name, assigned=1)
        return 1


async def test_one_that_was_killed_counts_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all users were with one of three, or came back since too few were left."""
    monkeypatch.setattr(in_place, "LOOK_S", 0.0)
    old, new = Seen(("w0", "w1", "w2")), Seen()
    seen: dict[str, Any] = {"bus": Obeyed(old, new), "producer": None, "new": new, "old": old}
    moving = InPlace(**seen, to="next", checkpoint=NEW, assigned=None, say=print)
    await moving.begin()
    name, killed = old.workers.popitem()
    assert moving.share_before_next(POSITIONS) == POSITIONS // 2
    next_one = asyncio.create_task(moving.move_next())
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(new.workers) == 1
    old.workers[name] = killed
    await next_one
    assert (len(new.workers), len(old.workers)) == (2, 1)
    assert moving.share_before_next(POSITIONS) is None


def of(planner: str = "rollout", home: str = "", checkpoint: str = "", **workers: str) -> Assignments:
    checkpoints = {"next": checkpoint} if checkpoint else {}
    return Assignments(epoch=1, sent_ms=0, planner=planner, workers=workers, home=home, checkpoints=checkpoints)


@pytest.mark.parametrize(
    ("known", "asked", "why"),
    [
        (of("planner-1", w="feed"), {}, "planner planner-1 assigns the workers"),
        (None, {"checkpoint": ""}, "needs its model"),
        (None, {"source": "next", "to": ""}, "were started for group default"),
        (of(checkpoint="/models/other", w="next"), {}, "on their way to group next with the model in /models/other"),
        (of(checkpoint=NEW, w="next"), {"to": "third"}, "on their way to group next: finish that"),
        (of(checkpoint=NEW, w="next"), {"in_place": False}, "serve group next in place.*give --in-place"),
        (of(home="next", checkpoint=NEW), {"in_place": False, "source": "next", "to": ""}, "serve group next in place"),
        (None, {}, None),
        (None, {"in_place": False}, None),
        (of(checkpoint=NEW, w="next"), {}, None),
        (of(home="next", checkpoint=NEW), {"source": "next", "to": "", "checkpoint": ""}, None),
        (of(), {"in_place": False}, None),
    ],
)
def test_what_does_not_fit_the_workers_assignments_is_refused(
    known: Assignments | None, asked: dict[str, object], why: str | None
) -> None:
    whole = {"in_place": True, "to": "next", "checkpoint": NEW, "source": "", **asked}
    if why is None:
        check(known, **whole)  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError, match=why):
        check(known, **whole)  # type: ignore[arg-type]


def test_a_rollout_that_has_not_ended_is_known_by_the_workers_that_it_names() -> None:
    assert unfinished(of(checkpoint=NEW, w="next")) == "next"
    assert unfinished(of(home="next", checkpoint=NEW)) is None
    assert unfinished(of("planner-1", w="feed")) is None
    assert unfinished(None) is None


async def test_assignments_that_another_command_has_written_stay(world: World) -> None:
    one, other = Bus(world.settings), Bus(world.settings)
    await one.make_topic()
    assert await one.assignments() is None
    assert await other.assignments() is None
    first = await one.assign(world.producer, {"w": "next"}, "", {"next": NEW})
    second = await one.assign(world.producer, {"w": "next", "w2": "next"}, "", {"next": NEW})
    assert second > first
    with pytest.raises(AssignmentsChanged, match="another command has assigned the workers"):
        await other.assign(world.producer, {}, "", {})
    found = await other.assignments()
    assert found is not None
    assert (found.epoch, len(found.workers)) == (second, 2)
    assert await other.assign(world.producer, {}, "next", {"next": NEW}) > second


async def test_with_one_worker_nobody_would_answer(world: World) -> None:
    async with world.stating(world.old):
        with pytest.raises(ConfigError, match=r"has 1 worker.*run two, or leave out --in-place"):
            await world.roll_out(up=(), in_place=NEW)
    assert await world.share() == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (("--in-place", "--workers", "2", "--devices", "cpu"), "--in-place starts no workers.*leave out"),
        (("--in-place", "--back"), "leave out --in-place"),
        (("--in-place", "--checkpoint", ".", "--set", "model.factory=mine:make"), "not model.factory"),
    ],
)
def test_options_that_say_something_else_are_refused(line: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, ["rollout", "--bootstrap", "localhost:1", *line])
    assert result.exit_code == 2
    assert said.partition(".*")[0] in result.output
