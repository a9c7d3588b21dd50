"""A worker as a delegate, and as the owner of what others computed: room, own users first, one hop, no lost ranking."""

from __future__ import annotations

import dataclasses
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.engine.commands import DELEGATED_LANE, LanesLost, Rank
from relaygr_stream.errors import BrokerError, DecodeError
from relaygr_stream.fleet import TRAVEL_MS
from relaygr_stream.settings.schema import Relay
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import PreInferSignal, RankingRequest
from relaygr_stream.wire.records import HEADER_KIND, KIND_DELEGATED, Record
from relaygr_stream.worker.effects import Release
from relaygr_stream.worker.forwarding import IN_TIME_SHARES
from relaygr_stream.worker.intake import Intake, IntakeLimits
from tests.properties import examples
from tests.unit.engine.worlds import GRANULE_BYTES, LIMITS, MAX_TOKENS, World, world
from tests.unit.worker.test_forwarding import View
from tests.unit.worker.test_outbox_forwards import World as Outgoing

BOTH = dataclasses.replace(LIMITS, pinned_bytes=3 * GRANULE_BYTES, delegated_bytes=3 * GRANULE_BYTES)


def on_behalf(made: World, request: str, user: int, length: int = 64, life: float = 2.0) -> None:
    made.signal(request, user, length, life=life, lane=DELEGATED_LANE)


def test_a_delegated_prefix_is_a_hit_and_in_no_lanes_books() -> None:
    with world(limits=BOTH) as made:
        on_behalf(made, "r", 1)
        made.settle()
        assert [made.scheduler.pins.lane_bytes(lane) for lane in range(4)] == [0] * 4
        assert made.scheduler.pins.lane_bytes(DELEGATED_LANE) == GRANULE_BYTES
        made.handle(LanesLost(frozenset(range(4))))
        made.rank("r", 1, 64)
        made.settle()
        assert made.outcome("r") == "hbm"
        assert made.scheduler.pins.lane_bytes(DELEGATED_LANE) == 0
        assert made.scheduler.signals.counters.signal_delegated == 1


def test_what_others_delegate_ends_with_its_life_window() -> None:
    with world(limits=BOTH) as made:
        on_behalf(made, "r", 1, life=0.5)
        made.settle()
        made.now += 0.6
        made.settle()
        assert made.scheduler.pins.lane_bytes(DELEGATED_LANE) == 0
        made.rank("r", 1, 64)  # the entry is idle, not gone
        made.settle()
        assert made.outcome("r") == "hbm"


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 8), st.integers(1, 3)), min_size=1, max_size=12))
def test_own_signals_find_their_room_whatever_others_delegate(signals: list[tuple[bool, int, int]]) -> None:
    """The trigger admits to the lanes' budgets, which know nothing of delegates."""
    with world(hbm=12, dram=0, limits=BOTH) as made:
        admitted = 0
        for number, (own, user, granules) in enumerate(signals):
            if not own:
                on_behalf(made, f"d{number}", 100 + number, granules * 64)
            elif admitted + granules <= 3:
                admitted += granules
                made.signal(f"o{number}", user * 20 + number, granules * 64)
            made.settle()
            assert made.scheduler.pins.lane_bytes(DELEGATED_LANE) <= BOTH.delegated_bytes
        counters = made.scheduler.signals.counters
        assert counters.signal_over_footprint == 0
        assert sum(made.scheduler.pins.lane_bytes(lane) for lane in range(4)) == admitted * GRANULE_BYTES


def test_beyond_its_room_a_delegate_refuses() -> None:
    with world(limits=BOTH) as made:
        for number in range(4):
            on_behalf(made, f"r{number}", number)
        assert made.scheduler.signals.counters.signal_over_delegated == 1
        made.settle()


def test_a_ranking_is_passed_on_unless_its_prefix_is_here() -> None:
    with world() as made:
        made.rank("away", 1, 64, pass_to=5)
        assert made.answer("away").status == "overloaded"
        assert made.answer("away").rank.pass_to == 5
        assert (len(made.scheduler.rankings), made.cache.entries) == (0, 0), "nothing is kept of it"
        made.signal("here", 2, 64)
        made.settle()
        made.rank("here", 2, 64, pass_to=5)
        made.settle()
        assert made.outcome("here") == "hbm"
        made.rank("shorter", 2, MAX_TOKENS, pass_to=5)
        assert made.answer("shorter").status == "overloaded"
        made.signal("later", 3, 64)
        made.rank("earlier", 3, 64, pass_to=5)
        assert made.answer("earlier").status == "overloaded", "what is computed for a later request would be waited for"
        made.settle()


def test_requests_of_one_user_share_a_delegates_room() -> None:
    with world(limits=BOTH) as made:
        for number in range(6):
            on_behalf(made, f"r{number}", 1)
        assert made.scheduler.pins.lane_bytes(DELEGATED_LANE) == GRANULE_BYTES
        assert made.scheduler.signals.counters.signal_over_delegated == 0
        made.settle()
        for number in range(6):
            assert made.scheduler.pins.lane_bytes(DELEGATED_LANE) == GRANULE_BYTES
            made.rank(f"r{number}", 1, 64)
            made.settle()
        assert made.scheduler.pins.lane_bytes(DELEGATED_LANE) == 0


def record(signal: PreInferSignal, kind: str = KIND_DELEGATED) -> Record:
    headers = ((HEADER_KIND, kind.encode()),) if kind else ()
    return Record("ranking", 3, 7, 0, b"u", encode(signal), headers)


def test_a_delegated_signal_has_no_lane_and_its_age_counts() -> None:
    intake = Intake(IntakeLimits(Relay(life_window_ms=2000), 900.0, 4, 1 << 20))
    signal = PreInferSignal(
        request_id="r", user_id="u", prefix=Behaviours.from_arrays([1, 2], [0, 0], [1, 2]), rank_in_ms=300.0,
        life_ms=5000.0, admitted_ms=int(time.time() * 1e3) - 5, delegate="w1",
    )  # fmt: skip
    begun = time.monotonic()
    task = intake.signal(record(signal), time.monotonic()).task
    assert task.lane == DELEGATED_LANE
    assert begun + 0.25 <= task.due <= time.monotonic() + 0.3 - 4e-3
    assert task.expires <= time.monotonic() + 2.0 - 4e-3
    with pytest.raises(DecodeError, match="on whose behalf"):
        intake.signal(record(msgspec.structs.replace(signal, delegate=msgspec.UNSET)), time.monotonic())
    own = msgspec.structs.replace(signal, delegate=msgspec.UNSET)
    assert intake.signal(record(own, kind=""), time.monotonic()).task.lane == 3


async def test_a_ranking_passed_on_is_a_hop_to_its_delegate() -> None:
    out = Outgoing("alone")
    asked = await out.settle(pass_to=6)
    ((_, value, more),) = out.others.sent
    assert more["partition"] == 6
    assert decode(RankingRequest, value).hops == 1
    assert out.asked == [], "no other worker is looked for"
    assert (out.done, out.scores.sent, len(out.device)) == ([asked], [], 1)
    assert (out.forwards("delegate"), out.forwards("sent")) == (1, 0)


async def test_one_that_cannot_be_passed_on_is_ranked_here() -> None:
    out = Outgoing("alone")
    out.others.error = BrokerError("no leader")
    await out.settle(pass_to=6)
    _, rank = out.device
    assert isinstance(rank, Rank)
    assert rank.pass_to is None
    assert rank.waited_s > 0.0
    assert (out.done, out.scores.sent) == ([], []), "it has no answer yet"


async def test_a_cancel_is_copied_to_the_delegate_and_may_be_lost() -> None:
    out = Outgoing("alone")
    cancel = Record("ranking", 3, 7, 0, b"u", b"value", ((HEADER_KIND, b"cancel"),))
    await out.requests.outbox.release(Release("r", 6, cancel))
    ((topic, value, more),) = out.others.sent
    assert (topic, value, more["partition"], more["headers"]) == ("ranking", b"value", 6, cancel.headers)
    out.others.error = BrokerError("no leader")
    await out.requests.outbox.release(Release("r", 6, cancel))


def test_a_delegate_that_is_gone_or_late_is_not_asked() -> None:
    view = View()
    assert view.forwarding.lane_of_delegate("b", 100.0) is None
    view.state("b", (2, 3))
    assert view.forwarding.lane_of_delegate("b", 100.0) in (2, 3)
    assert view.forwarding.lane_of_delegate("a", 100.0) is None, "that is this worker"
    view.state("c", (2,))
    assert {view.forwarding.lane_of_delegate("b", 100.0) for _ in range(5)} == {3}, "its other lane moved"
    assert view.forwarding.lane_of_delegate("b", TRAVEL_MS / IN_TIME_SHARES[0] - 0.1) is None
    view.state("b", (2, 3), queue_ms=IN_TIME_SHARES[0] * 100.0)
    assert view.forwarding.lane_of_delegate("b", 100.0) is None
    view.state("b", (2, 3), state="draining")
    assert view.forwarding.lane_of_delegate("b", 100.0) is None
    view.state("b", (2, 3))
    view.now += 1.6
    assert view.forwarding.lane_of_delegate("b", 100.0) is None, "it is silent"
