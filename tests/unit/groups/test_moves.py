"""Which group a worker serves: the newest assignments decide, a failed move is not tried twice, and a worker that is
not named serves what it was started for."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.groups.moves import MAX_REASON, GroupMoves, ServedGroup
from relaygr_stream.wire.assignments import Assignments
from tests.waiting import until

PLACES = ("", "feed", "search")


def assigned(epoch: int, **workers: str) -> Assignments:
    return Assignments(epoch=epoch, sent_ms=0, planner="p", workers=workers)


def moves(own: str = "feed") -> GroupMoves:
    made = GroupMoves("w", own, iter(("feed", "search")))
    made.set_out()
    made.arrive()
    return made


def away(made: GroupMoves) -> bool:
    return made.target != made.serving


def go(made: GroupMoves) -> str:
    found = made.set_out()
    made.arrive()
    return found.group


def test_without_assignments_all_is_as_before() -> None:
    made = moves()
    assert not away(made)
    assert made.stated() == {}
    made.take(assigned(5, other="search"))
    assert not away(made)
    assert made.stated() == {"assigned": 5}


def test_it_goes_where_the_newest_say_and_states_their_epoch_once_it_serves_there() -> None:
    made = moves()
    made.take(assigned(5, w="search"))
    assert away(made)
    assert made.stated() == {}
    assert made.set_out() == ServedGroup("search")
    assert made.stated() == {}, "on its way"
    made.arrive()
    assert made.stated() == {"assigned": 5}
    made.take(assigned(6, w="search"))
    assert made.stated() == {"assigned": 6}
    made.take(assigned(7, other="search"))
    assert go(made) == "feed", "not named: what it was started for"
    made.take(assigned(8, w=""))
    assert go(made) == "", "the group of no scenario"


def test_a_move_that_failed_is_not_tried_again_and_the_next_epoch_is() -> None:
    made = moves()
    made.take(assigned(5, w="feed"))
    made.take(assigned(6, w="search"))
    made.set_out()
    made.give_up("the model cannot be loaded" * 50, ServedGroup("feed"), 6)
    assert go(made) == "feed"
    assert not away(made)
    assert made.assigned == 5, "the epoch that it obeys is still the one before"
    assert made.given_up is not None
    assert (made.given_up.epoch, len(made.given_up.reason)) == (6, MAX_REASON)
    made.take(assigned(7, w="search"))
    assert go(made) == "search"
    assert made.assigned == 7


def test_later_assignments_that_come_on_the_way_count_after_a_failure() -> None:
    made = moves()
    made.take(assigned(6, w="search"))
    made.set_out()
    made.take(assigned(7, w="search"))
    made.give_up("the device is full", ServedGroup("feed"), 6)
    assert away(made), "another epoch: tried again"


def test_a_scenario_that_it_has_no_settings_of_is_given_up_before_it_leaves() -> None:
    made = moves()
    made.take(assigned(5, w="ads"))
    assert not away(made)
    assert made.given_up is not None
    assert made.given_up.reason == "no file of this worker has a section [scenario.ads] with workers of its own"
    assert made.assigned is None
    made.take(assigned(6, w="feed"))
    assert made.assigned == 6


async def test_it_waits_until_it_is_called_away() -> None:
    made = moves()
    waiting = asyncio.create_task(made.until_away(asyncio.Event()))
    for still in (assigned(1), assigned(2, w="feed"), assigned(3, w="ads")):
        made.take(still)
        await asyncio.sleep(0)
        assert not waiting.done()
    made.take(assigned(4, w="search"))
    async with asyncio.timeout(60):
        await waiting


def in_place(epoch: int, checkpoint: str = "/models/new", home: str = "", **workers: str) -> Assignments:
    return Assignments(
        epoch=epoch, sent_ms=0, planner="p", workers=workers, home=home, checkpoints={"next": checkpoint}
    )


def test_a_group_without_a_section_is_served_with_the_model_that_the_record_names() -> None:
    made = moves("")
    made.take(in_place(5, w="next"))
    assert made.set_out() == ServedGroup("next", "/models/new")
    made.arrive()
    made.take(in_place(6, "/models/newer", w="next"))
    assert away(made), "the same group, and another model"
    made.take(in_place(7, other="next"))
    assert go(made) == ""


@pytest.mark.parametrize(("own", "serves"), [("", "next"), ("feed", "feed")])
def test_who_is_not_named_serves_the_home_of_those_started_for_no_scenario(own: str, serves: str) -> None:
    made = moves(own)
    made.take(in_place(5, home="next"))
    assert made.set_out().group == serves


def test_the_model_of_a_scenario_is_that_of_its_section() -> None:
    made = moves("feed")
    made.take(msgspec.structs.replace(assigned(5, w="search"), checkpoints={"search": "/models/other"}))
    assert made.set_out() == ServedGroup("search")


async def test_a_place_that_it_cannot_serve_is_given_up_before_it_leaves() -> None:
    made = GroupMoves("w", why_not=lambda place: "no such folder" if place.checkpoint == "/models/none" else "")
    made.set_out()
    made.arrive()
    waiting = asyncio.create_task(made.until_away(asyncio.Event()))
    made.take(in_place(5, "/models/none", w="next"))
    await until(lambda: made.given_up is not None, "given up")
    assert made.given_up is not None
    assert (made.given_up.epoch, made.given_up.reason, waiting.done(), away(made)) == (
        5,
        "no such folder",
        False,
        False,
    )
    made.take(in_place(6, w="next"))
    async with asyncio.timeout(60):
        await waiting


steps = st.lists(st.tuples(st.sampled_from(["take", "arrives", "fails"]), st.sampled_from([*PLACES, "ads", None])))


@given(st.sampled_from(PLACES), steps)
def test_after_any_history_it_serves_what_the_newest_say_or_has_given_that_epoch_up(
    own: str, history: list[tuple[str, str | None]]
) -> None:
    made, epoch, wanted, tried = moves(own), 0, own, set[int]()
    for what, place in history:
        before, serving_at = made.serving, made.epoch
        if what == "take":
            epoch += 1
            made.take(assigned(epoch) if place is None else assigned(epoch, w=place))
            wanted = own if place is None else place
        elif what == "arrives":
            go(made)
        elif made.set_out() != before:
            assert serving_at not in tried, "no epoch is tried twice"
            tried.add(serving_at)
            made.give_up("it fails", before, serving_at)
            go(made)
    go(made)
    assert not away(made), "no move is left that would be tried for ever"
    given_up = made.given_up is not None and made.given_up.epoch == epoch
    if epoch and not given_up:
        assert (made.serving, made.assigned) == (ServedGroup(wanted), epoch)
    elif epoch:
        assert made.assigned != epoch
    assert made.serving.group in PLACES


@pytest.mark.parametrize("own", PLACES)
def test_a_worker_that_starts_goes_to_its_scenario_at_once(own: str) -> None:
    made = GroupMoves("w", own, ("feed", "search"))
    made.take(assigned(5, w="search"))
    assert made.set_out() == ServedGroup("search")
