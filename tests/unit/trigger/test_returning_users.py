"""Returning users go where their prefix KV are: to their lane's owner, or to the delegate that has them."""

from __future__ import annotations

import pytest

from relaygr_stream.trigger import sent
from relaygr_stream.trigger.decision import Decision
from tests.unit.trigger.view import REFUSALS, TOKENS, View

LATE = REFUSALS["late"]


def place_of(found: Decision) -> str:
    return found.reason if found.delegate is None else found.delegate.worker


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_user_whose_prefix_kv_the_owner_has_is_not_delegated(reason: str) -> None:
    view = View()
    view.state("b", (2, 3))
    view.state("a", (0, 1))
    assert place_of(view.ask(user="known")) == "admitted"
    view.state("a", (0, 1), **REFUSALS[reason])
    assert place_of(view.ask(user="known", book=False)) == "admitted"
    assert place_of(view.ask(book=False)) == "b"


def test_a_delegates_user_goes_there_again_while_the_owner_is_busy_or_late() -> None:
    view = View()
    view.state("a", (0, 1), **LATE)
    view.state("b", (2, 3))
    assert place_of(view.ask(user="known")) == "b"
    for name, lane in (("c", 4), ("d", 5)):
        view.state(name, (lane,))
    for worker in ({"pre_infer_wait_ms": 1e5}, {"delegated_bytes": 10 * TOKENS - 1}):  # nothing new would go there
        view.state("b", (2, 3), **worker)
        for owner in ({"busy_share": 0.8}, {"busy_share": 0.3, **LATE}):
            view.state("a", (0, 1), **owner)
            found = view.ask(user="known")
            assert place_of(found) == "b"
            assert found.cost_ms <= 0.2 * TOKENS, "only what is new is computed"


def test_a_delegates_user_comes_home_when_the_owner_has_time() -> None:
    view = View()
    view.state("b", (2, 3))
    view.state("a", (0, 1), **LATE)
    assert place_of(view.ask(user="known")) == "b"
    view.state("a", (0, 1), busy_share=0.3)
    assert place_of(view.ask(user="known")) == "admitted"
    view.state("a", (0, 1), busy_share=0.9, **LATE)
    assert place_of(view.ask(user="known")) == "admitted", "the owner has it now"


def test_where_the_delegate_is_gone_another_is_found() -> None:
    view = View()
    view.state("a", (0, 1), **LATE)
    view.state("b", (2, 3))
    assert place_of(view.ask(user="known")) == "b"
    view.state("b", (2, 3), state="stopped")
    assert place_of(view.ask(user="known", book=False)) == "admitted"
    view.state("c", (4, 5))
    assert place_of(view.ask(user="known")) == "c"


def test_what_a_worker_had_before_it_was_started_again_is_gone() -> None:
    view = View()
    view.state("b", (2, 3))
    view.state("a", (0, 1))
    assert place_of(view.ask(user="own")) == "admitted"
    view.state("a", (0, 1), **LATE)
    assert place_of(view.ask(user="delegated")) == "b"
    view.state("a", (0, 1), incarnation=2, **LATE)
    assert place_of(view.ask(user="own", book=False)) == "b", "it has as little of it as of a new user's"
    view.state("b", (2, 3), incarnation=2)
    found = view.ask(user="delegated", book=False)
    assert (place_of(found), found.cost_ms) == ("b", TOKENS), "all of it is computed"
    view.state("b", (2, 3), incarnation=2, delegated_bytes=0)
    assert place_of(view.ask(user="delegated")) == "admitted", "and only where there is room"


def test_an_owner_that_was_started_again_is_charged_with_whole_prefixes() -> None:
    view = View()
    view.state("b", (2, 3))
    users = ("u1", "u2", "u3")
    for incarnation in (1, 2):
        view.now += 1.0
        view.state("a", (0, 1), incarnation=incarnation)
        assert [view.ask(user=user).reason for user in users] == ["admitted"] * 3
        assert view.ask().reason == "delegated", "behind three whole prefixes it would be late"


def test_a_delegate_that_falls_silent_between_two_looks_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View()
    view.state("a", (0, 1), **LATE)
    view.state("b", (2, 3))
    assert place_of(view.ask(user="known")) == "b"
    owner = view.owners.owner
    monkeypatch.setattr(view.owners, "owner", lambda lane: None if lane in (2, 3) else owner(lane))
    assert place_of(view.ask(user="known")) == "admitted"


def test_where_a_lane_came_from_is_no_delegate() -> None:
    """Its prefix KV were handed over, or are gone."""
    view = View()
    view.state("a", (0, 1))
    assert place_of(view.ask(user="known")) == "admitted"
    view.state("a", (1,))
    view.state("c", (0,), busy_share=0.9)
    assert place_of(view.ask(user="known")) == "admitted"


def test_only_so_many_users_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent, "MOST_USERS", 3)
    view = View()
    view.state("b", (2, 3))
    view.state("a", (0, 1))
    for user in ("first", "u1", "first", "u2", "u3"):
        assert place_of(view.ask(TOKENS // 2, user=user)) == "admitted"
    view.state("a", (0, 1), **LATE)
    places = {user: place_of(view.ask(user=user, book=False)) for user in ("u1", "first", "u2", "u3")}
    assert places == {"u1": "b", "first": "admitted", "u2": "admitted", "u3": "admitted"}, "u1 was here longest ago"
