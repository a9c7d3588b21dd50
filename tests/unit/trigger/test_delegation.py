"""Delegation: only what the owner would have too late, only to a worker that is clearly sooner and has room for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.trigger import load
from relaygr_stream.trigger.decision import REFUSED_FACTOR, Decision, LaneState, Policy, decide
from relaygr_stream.trigger.delegation import PAUSE_S, Delegation
from relaygr_stream.trigger.load import OwnerLoads
from relaygr_stream.wire.fleet import LOOKED_AT, TRAVEL_MS, OwnerDirectory
from tests.unit.trigger.delegating_fleet import Fleet
from tests.unit.trigger.parts import POLICY, event, lane_status, worker_status

LANES = 6
TOKENS, HEAD_MS = 100, 300.0


class View:
    """A trigger's view: `a` owns lanes 0 and 1, where requests come; a prefix of n tokens takes n ms and 10·n bytes."""

    def __init__(self, lanes: int = LANES, policy: Policy = POLICY) -> None:
        self.now = 100.0
        self.owners = OwnerDirectory(3000.0, clock=lambda: self.now)
        loads = OwnerLoads()
        self.led: set[int] = set(range(lanes))
        self.delegation = Delegation(self.owners, loads, lanes, seed=1, led=lambda lane: lane in self.led)
        self.lanes = [LaneState(policy, 0, 60.0, self.now, lane, loads, self.delegation) for lane in range(lanes)]
        self.number = 0

    def state(self, name: str, lanes: tuple[int, ...], *, of_lanes: dict[str, Any] | None = None, **more: Any) -> None:
        bounds = {"budget": 10**6, "rate": 1e5} | (of_lanes or {})
        plain = worker_status(*(lane_status(lane=lane, **bounds) for lane in lanes), name=name)
        self.owners.take(msgspec.structs.replace(plain, **({"delegated_bytes": 10**6} | more)))
        for lane in lanes:
            self.lanes[lane].observe(self.owners.owner(lane), self.now)

    def ask(
        self,
        tokens: int = TOKENS,
        *,
        user: str = "",
        lane: int = 0,
        book: bool = True,
        again: bool = False,
        rank_in_ms: float = HEAD_MS,
    ) -> Decision:
        """user: by default one that was never here. again: the same request."""
        self.number += not again
        asked = event(tokens, f"r{self.number}", user or f"u{self.number}", rank_in_ms=rank_in_ms)
        state = self.lanes[lane]
        state.observe(self.owners.owner(lane), self.now)
        found = decide(asked, state, age_ms=0.0, now_s=self.now)
        if book and found.delegate is not None:
            state.delegate(asked, found, self.now)
        elif book and found.admit:
            state.admit(asked, found, self.now)
        return found


REFUSALS: dict[str, dict[str, Any]] = {
    "over_load": {"of_lanes": {"rate": 0.0}},
    "over_footprint": {"of_lanes": {"budget": 0}},
    "too_late": {"pre_infer_wait_ms": HEAD_MS + 1},
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_what_would_be_refused_goes_to_a_worker_with_room_and_time(reason: str) -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS[reason])
    assert view.ask().reason == reason, "there is no other worker"
    view.state("b", (2, 3))
    found = view.ask()
    assert found.reason == "delegated"
    assert found.delegate is not None
    assert (found.delegate.worker, found.delegate.lane in (2, 3)) == ("b", True)
    assert (found.nbytes, found.cost_ms) == (10 * TOKENS, TOKENS)
    assert not found.admit
    assert view.lanes[0].ledger.outstanding == 0, "the owner does not pin it"


@pytest.mark.parametrize("reason", ["over_load", "over_footprint"])
def test_what_would_be_refused_is_delegated_whenever_it_is_ranked(reason: str) -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS[reason])
    view.state("b", (2, 3))
    assert view.ask(rank_in_ms=0.0).reason == "delegated", "unknown: until the end of the life window"


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
    view.state("a", (0, 1), **REFUSALS["over_load"])
    view.state("b", (2, 3), **changes)
    assert view.ask().reason == "over_load"
    view.state("b", (2, 3))
    assert view.ask().reason == "delegated"


def test_what_was_sent_counts_against_the_room_until_a_status_includes_it() -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS["over_load"])
    view.state("b", (2, 3), delegated_bytes=25 * TOKENS)
    assert [view.ask().reason for _ in range(3)] == ["delegated", "delegated", "over_load"]
    view.now += 0.1
    view.state("b", (2, 3), delegated_bytes=15 * TOKENS)
    assert [view.ask().reason for _ in range(2)] == ["delegated", "over_load"]


def test_a_silent_worker_and_one_of_an_earlier_release_get_nothing() -> None:
    view = View()
    view.state("b", (2, 3))
    view.now += 3.1
    view.state("a", (0, 1), **REFUSALS["over_load"])
    assert view.ask().reason == "over_load"
    view.state("b", (2, 3), delegated_bytes=0)
    assert view.ask().reason == "over_load"


@pytest.mark.parametrize(
    ("tokens", "reason"), [(0, "empty_prefix"), (5, "not_at_risk"), (POLICY.max_prefix_tokens + 1, "too_long")]
)
def test_what_needs_no_prefill_is_not_delegated(tokens: int, reason: str) -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS["over_load"])
    view.state("b", (2, 3))
    assert view.ask(tokens).reason == reason


def test_a_request_is_delegated_once() -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS["over_load"])
    view.state("b", (2, 3))
    assert [view.ask().reason, view.ask(again=True).reason] == ["delegated", "duplicate"]


def test_after_a_signal_that_no_broker_took_nothing_is_delegated_for_a_while() -> None:
    view = View()
    view.state("a", (0, 1), **REFUSALS["over_load"])
    view.state("b", (2, 3))
    view.delegation.not_sent(view.now)
    assert view.ask().reason == "over_load"
    view.now += PAUSE_S
    view.state("a", (0, 1), **REFUSALS["over_load"])
    view.state("b", (2, 3))
    assert view.ask().reason == "delegated"


def test_a_lane_that_takes_no_signals_leaves_the_others_to_be_used() -> None:
    """One broker of several is away: it led lane 2, or is about to lose it."""
    view = View()
    view.state("a", (0, 1), **REFUSALS["over_load"])
    view.state("b", (2, 3))
    view.led.remove(2)
    looks = [view.ask(user="known"), *(view.ask(book=False) for _ in range(20))]
    assert {found.delegate.lane for found in looks if found.delegate is not None} == {3}
    view.delegation.not_sent(view.now, 3)
    for user in ("", "known"):
        assert view.ask(user=user).reason == "over_load"
    view.led.add(2)
    for user in ("", "known"):
        found = view.ask(user=user)
        assert found.delegate is not None and found.delegate.lane == 2


def test_all_with_room_are_used_and_few_are_looked_at() -> None:
    """All triggers see the same soonest worker; each sends to the sooner of two at random."""
    view = View(lanes=2 + 40)
    view.state("a", (0, 1), **REFUSALS["over_load"])
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


def place_of(found: Decision) -> str:
    return found.reason if found.delegate is None else found.delegate.worker


LATE = REFUSALS["too_late"]


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_user_whose_prefix_kv_the_owner_has_is_not_delegated(reason: str) -> None:
    view = View()
    view.state("b", (2, 3))
    view.state("a", (0, 1))
    assert place_of(view.ask(user="known")) == "admitted"
    view.state("a", (0, 1), **REFUSALS[reason])
    assert place_of(view.ask(user="known", book=False)) == reason
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
    assert place_of(view.ask(user="known")) == "too_late", "the owner has it now"


def test_where_the_delegate_is_gone_another_is_found() -> None:
    view = View()
    view.state("a", (0, 1), **LATE)
    view.state("b", (2, 3))
    assert place_of(view.ask(user="known")) == "b"
    view.state("b", (2, 3), state="stopped")
    assert place_of(view.ask(user="known", book=False)) == "too_late"
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
    assert place_of(view.ask(user="delegated")) == "too_late", "and only where there is room"


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
    assert place_of(view.ask(user="known")) == "too_late"


def test_where_a_lane_came_from_is_no_delegate() -> None:
    """Its prefix KV were handed over, or are gone."""
    view = View()
    view.state("a", (0, 1))
    assert place_of(view.ask(user="known")) == "admitted"
    view.state("a", (1,))
    view.state("c", (0,), busy_share=0.9)
    assert place_of(view.ask(user="known")) == "admitted"


def test_only_so_many_users_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MOST_USERS", 3)
    view = View()
    view.state("b", (2, 3))
    view.state("a", (0, 1))
    for user in ("first", "u1", "first", "u2", "u3"):
        assert place_of(view.ask(TOKENS // 2, user=user)) == "admitted"
    view.state("a", (0, 1), **LATE)
    places = {user: place_of(view.ask(user=user, book=False)) for user in ("u1", "first", "u2", "u3")}
    assert places == {"u1": "b", "first": "too_late", "u2": "too_late", "u3": "too_late"}, "u1 was here longest ago"


@settings(max_examples=100)
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
    view.state("a", (0, 1), **REFUSALS["over_load"])
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


@settings(max_examples=15, deadline=None)
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
    assert on.p(0.99) <= 0.7 * off.p(0.99)
    assert on.outcomes["hit"] >= 2 * off.outcomes["hit"]
    on, off = (Fleet(4, 2, make, triggers).run(0.08, 60.0, 0.3) for make in (Delegation, None))
    assert all(on.p(q) <= off.p(q) + 1.0 for q in (0.5, 0.9, 0.99))
    assert on.outcomes["full"] <= off.outcomes["full"]
