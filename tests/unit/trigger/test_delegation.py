"""Delegation: only what the owner would have too late, only to a worker that is clearly sooner and has room for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.fleet import LOOKED_AT, TRAVEL_MS
from relaygr_stream.trigger.decision import REFUSED_FACTOR
from relaygr_stream.trigger.delegation import NOTICE_MS, PAUSE_S, Delegation
from tests.properties import examples
from tests.unit.trigger.delegating_fleet import Fleet
from tests.unit.trigger.parts import POLICY
from tests.unit.trigger.view import HEAD_MS, REFUSALS, TOKENS, View


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_would_be_refused_goes_to_a_worker_with_room_and_time(reason: str) -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS[reason])
    assert view.ask(book=False).reason == "admitted", "there is no other worker"
    view.state("b", (2, 3))
    found = view.ask()
    assert found.reason == "delegated"
    assert found.delegate is not None
    assert (found.delegate.worker, found.delegate.lane in (2, 3)) == ("b", True)
    assert (found.nbytes, found.cost_ms) == (10 * TOKENS, TOKENS)
    assert not found.admit
    claim = view.owners.owner(0)
    assert claim is not None
    assert view.core.observe(0).ahead(claim, view.now).own_bytes == 0, "the owner does not pin it"


def test_what_would_be_refused_is_delegated_whenever_it_is_ranked() -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS["full"])
    view.state("b", (2, 3))
    assert view.ask(rank_in_ms=0.0).reason == "delegated", "unknown: until the end of the life window"


@pytest.mark.parametrize("reason", REFUSALS)
def test_nothing_is_delegated_whose_ranking_comes_before_the_owner_knows(reason: str) -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS[reason])
    view.state("b", (2, 3))
    assert view.ask(rank_in_ms=NOTICE_MS - 1, book=False).reason == "admitted"
    assert view.ask(rank_in_ms=NOTICE_MS, book=False).reason == "delegated"


def test_an_owner_in_time_keeps_its_own() -> None:
    view = View()
    view.state("a", (0, 1))
    view.state("b", (2, 3))
    assert [view.ask().reason for _ in range(3)] == ["admitted"] * 3


def test_an_owner_is_not_relieved_by_a_worker_that_is_no_sooner() -> None:
    """At 350 ms it is late for the ranking, at 300; the other one would be done at 360."""
    view = View()
    view.state("a", (0, 1), pre_infer_wait_ms=250.0)
    view.state("b", (2, 3), pre_infer_wait_ms=250.0)
    assert view.ask(book=False).reason == "admitted"
    view.state("b", (2, 3), pre_infer_wait_ms=250.0 - TRAVEL_MS)
    assert view.ask(book=False).reason == "delegated"


def test_what_came_together_is_late_at_the_owner_before_it_says_so() -> None:
    """300 ms of work fit before the ranking; the owner's status is from before all of it."""
    view = View()
    view.state("a", (0, 1))
    view.state("b", (2, 3))
    assert [view.ask().reason for _ in range(4)] == ["admitted"] * 3 + ["delegated"]
    view.now += 1.0
    view.state("a", (0, 1))  # it has done all of it
    assert view.ask().reason == "admitted"


def test_what_was_sent_is_worked_off_before_the_owner_says_so() -> None:
    view = View()
    view.state("a", (0, 1))
    view.state("b", (2, 3))
    for _ in range(10):  # 100 ms of work each 100 ms, and no status in between
        assert view.ask().reason == "admitted"
        view.now += 0.1


def test_time_in_which_nothing_was_sent_is_not_saved() -> None:
    view = View()
    view.state("a", (0, 1))
    view.state("b", (2, 3))
    view.now += 1.0
    assert [view.ask().reason for _ in range(4)] == ["admitted"] * 3 + ["delegated"]


def test_what_the_owner_has_already_does_not_make_it_late() -> None:
    view = View()
    view.state("a", (0, 1))
    view.state("b", (2, 3))
    users = ("u1", "u2", "u3")
    assert [view.ask(user=user).reason for user in users] == ["admitted"] * 3
    view.now += 0.5
    assert [view.ask(user=user).reason for user in users] == ["admitted"] * 3
    assert view.ask().reason == "admitted", "three that return take a third of one who is new"


@pytest.mark.parametrize(
    "changes",
    [
        {"delegated_bytes": 10 * TOKENS - 1},
        {"state": "draining"},
        {"pre_infer_wait_ms": REFUSED_FACTOR * (HEAD_MS + TOKENS) - TOKENS - TRAVEL_MS + 1},
        {"queue_ms": REFUSED_FACTOR * (HEAD_MS + TOKENS) - TOKENS - TRAVEL_MS + 1},
    ],
)
def test_a_worker_without_room_or_time_gets_nothing(changes: dict[str, Any]) -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS["full"])
    view.state("b", (2, 3), **changes)
    assert view.ask().reason == "admitted"
    view.state("b", (2, 3))
    assert view.ask().reason == "delegated"


def test_what_was_sent_counts_against_the_room_until_a_status_includes_it() -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS["full"])
    view.state("b", (2, 3), delegated_bytes=25 * TOKENS)
    assert [view.ask().reason for _ in range(3)] == ["delegated", "delegated", "admitted"]
    view.now += 0.1
    view.state("b", (2, 3), delegated_bytes=15 * TOKENS)
    assert [view.ask().reason for _ in range(2)] == ["delegated", "admitted"]


def test_a_silent_worker_and_one_of_an_earlier_release_get_nothing() -> None:
    view = View()
    view.state("b", (2, 3))
    view.now += 3.1
    view.state("a", (0, 1), **REFUSALS["full"])
    assert view.ask().reason == "admitted"
    view.state("b", (2, 3), delegated_bytes=0)
    assert view.ask().reason == "admitted"


@pytest.mark.parametrize(("tokens", "reason"), [(0, "empty_prefix"), (POLICY.max_prefix_tokens + 1, "too_long")])
def test_what_needs_no_prefill_is_not_delegated(tokens: int, reason: str) -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS["full"])
    view.state("b", (2, 3))
    assert view.ask(tokens).reason == reason


def test_a_request_is_delegated_once() -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS["full"])
    view.state("b", (2, 3))
    assert [view.ask().reason, view.ask(again=True).reason] == ["delegated", "duplicate"]


def test_after_a_signal_that_no_broker_took_nothing_is_delegated_for_a_while() -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS["full"])
    view.state("b", (2, 3))
    view.delegation.not_sent(view.now)
    assert view.ask().reason == "admitted"
    view.now += PAUSE_S
    view.state("a", (0, 1), **REFUSALS["full"])
    view.state("b", (2, 3))
    assert view.ask().reason == "delegated"


def test_a_lane_that_takes_no_signals_leaves_the_others_to_be_used() -> None:
    """One broker of several is away: it led lane 2, or is about to lose it."""
    view = View()
    view.state("a", (0, 1), **REFUSALS["full"])
    view.state("b", (2, 3))
    view.with_leader.remove(2)
    looks = [view.ask(user="known"), *(view.ask(book=False) for _ in range(20))]
    assert {found.delegate.lane for found in looks if found.delegate is not None} == {3}
    view.delegation.not_sent(view.now, 3)
    for user in ("", "known"):
        assert view.ask(user=user, book=False).reason == "admitted"
    view.with_leader.add(2)
    for user in ("", "known"):
        found = view.ask(user=user)
        assert found.delegate is not None and found.delegate.lane == 2


def test_all_with_room_are_used_and_few_are_looked_at() -> None:
    """All triggers see the same soonest worker; each sends to the sooner of two at random."""
    view = View(lanes=2 + 40)
    view.state("a", (0, 1), **REFUSALS["full"])
    for number in range(40):
        view.state(f"p{number}", (2 + number,), pre_infer_wait_ms=float(number))
    asked: list[int] = []
    owner = view.owners.owner

    def counted(lane: int, silence_ms: float | None = None) -> Any:
        asked.append(lane)
        return owner(lane, silence_ms)

    view.owners.owner = counted  # type: ignore[method-assign]
    chosen = {found.delegate.worker for _ in range(60) if (found := view.ask(book=False)).delegate is not None}
    assert len(asked) <= 60 * (1 + LOOKED_AT)
    assert len(chosen) > 10


@settings(max_examples=examples(100))
@given(
    room=st.one_of(st.integers(0, 5000), st.just(10**6)),
    wait_ms=st.floats(0, 1500),
    sizes=st.lists(st.integers(10, 200), min_size=1, max_size=30),
    gap_s=st.floats(0, 0.05),
)
def test_between_two_statuses_a_delegate_gets_no_more_than_its_room_and_time(
    room: int, wait_ms: float, sizes: list[int], gap_s: float
) -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS["full"])
    view.state("b", (2, 3), delegated_bytes=room, pre_infer_wait_ms=wait_ms)
    sent, done_s = 0, view.now + wait_ms / 1e3
    for tokens in sizes:
        found = view.ask(tokens)
        if found.delegate is not None:
            sent += tokens
            done_s = max(done_s, view.now) + tokens / 1e3
            assert TRAVEL_MS + (done_s - view.now) * 1e3 <= REFUSED_FACTOR * (HEAD_MS + tokens) + 1e-6
        assert 10 * sent <= room
        view.now += gap_s


# ---- a fleet in simulated time ----


@settings(max_examples=examples(15), deadline=None)
@given(load=st.sampled_from([0.1, 0.5, 0.8, 1.2]), head_s=st.sampled_from([0.08, 0.3]), seed=st.integers(0, 99))
def test_one_answer_each_and_one_hop_whatever_the_load(load: float, head_s: float, seed: int) -> None:
    books = Fleet(3, 2, Delegation).run(load, 3.0, head_s, seed)
    for number, home in books.homes.items():
        assert books.answers[number] == [books.delegates.get(number, home)]
        assert books.delegates.get(number) != home


@pytest.mark.parametrize("triggers", [1, 8])
def test_first_visits_at_80_percent_load_are_faster_and_without_load_none_is_slower(triggers: int) -> None:
    """Also where each trigger decides for one lane, and sees what the others sent a status later."""
    on, off = (Fleet(4, 2, make, triggers).run(0.8, 40.0, 0.3) for make in (Delegation, None))
    assert on.p(0.99) <= 0.5 * off.p(0.99)
    assert on.outcomes["full"] <= 0.5 * off.outcomes["full"]
    on, off = (Fleet(4, 2, make, triggers).run(0.08, 60.0, 0.3) for make in (Delegation, None))
    assert all(on.p(q) <= off.p(q) + 1.0 for q in (0.5, 0.9, 0.99))
    assert on.outcomes["full"] <= off.outcomes["full"]
