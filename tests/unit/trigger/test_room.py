"""An owner's pinned bytes are one room for all its lanes, whichever trigger has them."""

from __future__ import annotations

from relaygr_stream.fleet import Claim
from relaygr_stream.trigger.decision import LaneState, decide
from relaygr_stream.trigger.ledger import LaneLedger
from relaygr_stream.trigger.load import OwnerLoads
from relaygr_stream.wire.messages import LaneStatus
from tests.unit.trigger.parts import POLICY, event, lane_status, worker_status

#: Three lanes of one owner, each with a third of the room for one prefix.
LANES = range(3)
THIRD = 100


class Trigger:
    """A trigger that has some of the lanes. log_end: where lane 0's signals end, of which the owner has read none."""

    def __init__(self, lanes: range = LANES, log_end: int = 0) -> None:
        loads = OwnerLoads()
        ledgers = {lane: LaneLedger(0 if lane else log_end, 60.0, 0.0) for lane in lanes}
        self.lanes = {lane: LaneState(POLICY, ledger, lane, loads) for lane, ledger in ledgers.items()}

    def hear(self, *stated: LaneStatus) -> None:
        status = worker_status(*stated, bytes_per_token=1, alloc_bytes=1)
        for each in stated:
            if each.lane in self.lanes:
                self.lanes[each.lane].observe(Claim(status, each, 0.0), 0.0)

    def is_full(self, lane: int, nbytes: int) -> bool:
        return self.lanes[lane].is_full(nbytes)

    def admit(self, lane: int, tokens: int, request_id: str) -> None:
        asked = event(tokens, request_id=request_id)
        decision = decide(asked, self.lanes[lane], age_ms=0.0, now_s=0.0)
        assert decision.admit, decision
        self.lanes[lane].admit(asked, decision, 0.0)


def _granted(*lanes: int) -> list[LaneStatus]:
    return [lane_status(lane=lane, budget=THIRD) for lane in lanes]


def test_a_lane_takes_what_the_others_do_not() -> None:
    trigger = Trigger()
    trigger.hear(*_granted(*LANES))
    assert not trigger.is_full(0, 3 * THIRD)
    assert trigger.is_full(0, 3 * THIRD + 1)


def test_what_one_lane_took_is_gone_for_all() -> None:
    trigger = Trigger()
    trigger.hear(*_granted(*LANES))
    trigger.admit(0, 2 * THIRD + 50, "r")
    assert not trigger.is_full(1, 50)
    assert trigger.is_full(1, 51)


def test_what_other_triggers_lanes_hold_is_gone_and_the_rest_is_anybodys() -> None:
    trigger = Trigger(range(2))
    trigger.hear(*_granted(0, 1), lane_status(lane=2, budget=THIRD, pinned=THIRD + 50))
    assert not trigger.is_full(0, 2 * THIRD - 50)
    assert trigger.is_full(0, 2 * THIRD - 49)


def test_a_lane_on_hold_knows_no_room_that_is_full() -> None:
    trigger = Trigger(log_end=7)
    trigger.hear(*_granted(*LANES))
    assert not trigger.is_full(0, 4 * THIRD)
    assert trigger.is_full(1, 4 * THIRD)


def test_a_lane_that_the_owner_lost_lends_nothing() -> None:
    trigger = Trigger()
    trigger.hear(*_granted(*LANES))
    trigger.hear(*_granted(0, 1))
    assert not trigger.is_full(0, 2 * THIRD)
    assert trigger.is_full(0, 2 * THIRD + 1)
