"""Each reason for (not) admitting, at its boundary, and the numbers behind it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from relaygr_stream.settings.schema import Relay, Settings, Trigger
from relaygr_stream.trigger.decision import REASONS, Decision, LaneState, Policy, decide
from relaygr_stream.trigger.delegation import NOTICE_MS
from relaygr_stream.trigger.metrics import TriggerMetrics
from relaygr_stream.trigger.sent import NEW_SHARE
from relaygr_stream.trigger.statement import policy_status, stated_policy
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import CostModel, RequestEvent, with_version
from relaygr_stream.wire.worker_status import FALLBACK_COSTS, prefix_bytes, usable_costs
from tests.retained import retained
from tests.unit.trigger.parts import POLICY, claim, event, lane_status, worker_status


class OneLane:
    """A lane with an owner, at a time that stands still."""

    def __init__(self, budget: int = 10_000, policy: Policy = POLICY, **status: Any) -> None:
        self.now = 100.0
        self.state = LaneState(policy)
        self.state.observe(claim(worker_status(lane_status(budget=budget), **status), self.now))

    def decide(self, event: RequestEvent, age_ms: float = 0.0) -> Decision:
        return decide(event, self.state, age_ms=age_ms, now_s=self.now)

    def admit(self, event: RequestEvent) -> Decision:
        decision = self.decide(event)
        assert decision.admit, decision
        self.state.book(event, decision, self.now)
        return decision


def test_a_request_within_all_bounds_is_admitted() -> None:
    decision = OneLane().decide(event(25))
    assert decision == Decision("admitted", tokens=25, age_ms=0.0, predicted_ms=25.0, nbytes=300, cost_ms=25.0)
    assert decision.admit


def test_whatever_the_load_all_is_admitted_that_the_owner_may_compute() -> None:
    """It computes in idle time what it has room for, by what is due first; a choice beforehand gained nothing."""
    lane = OneLane(budget=300, queue_ms=1e5)
    for number in range(1000):
        lane.admit(event(25, f"{number}", f"{number}"))


def test_a_user_whose_prefix_kv_the_owner_has_costs_a_part() -> None:
    lane = OneLane()
    assert lane.admit(event(100, "a")).cost_ms == 100.0
    assert lane.decide(event(100, "b")).cost_ms == pytest.approx(NEW_SHARE * 100.0)
    assert lane.decide(event(100, "c", "another")).cost_ms == 100.0


def test_an_empty_or_too_long_prefix_is_not_pre_inferred() -> None:
    lane = OneLane()
    assert lane.decide(event(0)).reason == "empty_prefix"
    assert lane.decide(event(POLICY.max_prefix_tokens)).reason != "too_long"
    assert lane.decide(event(POLICY.max_prefix_tokens + 1)).reason == "too_long"


@pytest.mark.parametrize("tokens", [1, 25, 400, POLICY.max_prefix_tokens, POLICY.max_prefix_tokens + 1])
def test_a_reference_counts_as_the_history_that_it_refers_to(tokens: int) -> None:
    lane, carried = OneLane(), event(tokens)
    reference = HistoryReference(length=tokens, digest=bytes(16))
    referred = msgspec.structs.replace(carried, prefix=Behaviours(), **with_version(reference))
    assert lane.decide(referred) == lane.decide(carried)


def test_an_event_past_the_staleness_bound_is_not_pre_inferred() -> None:
    assert OneLane().decide(event(25), age_ms=POLICY.stale_ms).admit
    assert OneLane().decide(event(25), age_ms=POLICY.stale_ms + 1).reason == "stale"


def test_a_lane_without_an_owner_gets_no_admissions() -> None:
    lane = OneLane()
    lane.state.observe(None)
    assert lane.decide(event(25)).reason == "no_owner"


def test_a_lane_knows_who_owned_it_last() -> None:
    assert LaneState(POLICY).owner == ""
    lane = OneLane(name="w7")
    assert lane.state.owner == "w7"
    lane.state.observe(None)
    assert lane.state.owner == "w7", "a silent owner may come back"


def test_full_inference_is_predicted_with_the_candidates_and_the_owners_queue() -> None:
    assert OneLane(queue_ms=2.5).decide(event(8)).predicted_ms == 10.5
    crossed = CostModel(c0=0.0, c1=1.0, c2=0.0, c3=0.01)
    assert OneLane(costs=crossed).decide(event(8, candidates=30)).predicted_ms == pytest.approx(10.4)


def test_a_request_is_admitted_once_within_its_life() -> None:
    lane = OneLane()
    lane.admit(event(25, "a"))
    assert lane.decide(event(25, "a")).reason == "duplicate"
    assert lane.decide(event(25, "b")).admit
    lane.now += POLICY.life_ms / 1000 + 0.001
    assert lane.decide(event(25, "a")).admit


def test_without_a_word_of_the_event_a_ranking_is_expected_when_they_usually_come() -> None:
    """The owner's head starts are from signals to rankings: an event's age says nothing of them."""
    lane = OneLane(head_start_ms=300.0)
    assert lane.decide(event(25), age_ms=200.0).rank_in_ms == 300.0
    stated = msgspec.structs.replace(event(25), rank_in_ms=310.0)
    assert lane.decide(stated, age_ms=9.0).rank_in_ms == 301.0, "what it states counts first"
    assert OneLane(head_start_ms=NOTICE_MS - 1).decide(event(25)).rank_in_ms == 0.0, "so short that it decides nothing"


@pytest.mark.parametrize("full", [{"budget": 0}, {"pre_infer_wait_ms": 2 * POLICY.life_ms}])
def test_without_a_delegate_the_owner_gets_what_it_may_have_no_room_or_time_for(full: dict[str, Any]) -> None:
    """It knows better what is there, refuses what does not fit, and computes the rest in idle time."""
    assert OneLane(**full).decide(event(25)).admit


def test_what_was_not_admitted_is_no_duplicate() -> None:
    lane = OneLane()
    assert lane.decide(event(25, "a"), age_ms=POLICY.stale_ms + 1).reason == "stale"
    assert lane.decide(event(25, "a")).admit


def test_requests_of_past_lives_are_forgotten() -> None:
    lane = OneLane()
    for number in range(500):
        lane.admit(event(11, str(number)))
        lane.now += 1.0
    assert retained(lane.state, str) <= POLICY.life_ms / 1000 + 20  # ids, and the names of the worker and its parts


def test_deciding_changes_nothing() -> None:
    lane = OneLane(budget=300)
    first = lane.decide(event(25))
    assert [lane.decide(event(25)) for _ in range(10)] == [first] * 10
    lane.admit(event(25))


def test_bytes_are_whole_allocation_units() -> None:
    owner = worker_status(lane_status(), bytes_per_token=10, alloc_bytes=100)
    assert [prefix_bytes(tokens, owner) for tokens in (1, 10, 11)] == [100, 100, 200]


@pytest.mark.parametrize(
    "costs",
    [
        CostModel(c0=0, c1=0, c2=0, c3=0),
        CostModel(c0=1, c1=-0.1, c2=0, c3=0),
        CostModel(c0=float("nan"), c1=1, c2=0, c3=0),
        CostModel(c0=1, c1=float("inf"), c2=0, c3=0),
        CostModel(c0=1, c1=1e308, c2=1e308, c3=0),
    ],
)
def test_costs_that_cannot_be_reckoned_with_are_replaced(costs: CostModel) -> None:
    assert usable_costs(costs) == FALLBACK_COSTS
    assert OneLane(costs=costs).decide(event(1000)).cost_ms == FALLBACK_COSTS.pre_infer_ms(1000)


def test_the_policy_is_as_configured() -> None:
    settings = Settings(
        relay=Relay(life_window_ms=3000, max_prefix_tokens=7),
        trigger=Trigger(max_event_age_ms=11, delegate=True),
    )
    policy = Policy.from_settings(settings)
    assert policy == Policy(stale_ms=11.0, life_ms=3000.0, max_prefix_tokens=7, delegate=True)
    assert stated_policy(policy_status(policy)) == policy, "as `relaygr explain` reads it from a trigger's status"


def test_every_reason_is_counted_under_its_name_from_0_on() -> None:
    registry = CollectorRegistry()
    metrics = TriggerMetrics(registry)

    def counted(reason: str) -> float | None:
        return registry.get_sample_value("relaygr_trigger_decisions_total", {"reason": reason})

    for reason in REASONS:
        assert counted(reason) == 0.0
        metrics.decided(reason, 1e-5)
        assert counted(reason) == 1.0
