"""Forwarding: only to a worker that is in time and has room, never back, never more than twice.

What a fleet makes of it: tests/unit/simulate/test_fleet.py.
"""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.engine.budgets import AVERAGE_S, BusyShare
from relaygr_stream.fleet import FULL_SHARE, LOOKED_AT, TRAVEL_MS, OwnerDirectory
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import CostModel, RankingRequest, WorkerStatus
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.worker.forwarding import IN_TIME_SHARES, Forwarding, next_hop
from tests.properties import examples
from tests.retained import retained
from tests.statuses import lane_statuses, worker_status

LANES = 6


class View:
    """What worker `a` sees of its peers, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.peers = OwnerDirectory(1500.0, clock=lambda: self.now)
        self.forwarding = Forwarding("a", self.peers, load_topics(Kafka(partitions=LANES)), seed=1)
        self.state("a", (0, 1))

    def state(self, name: str, lanes: tuple[int, ...], **changes: Any) -> None:
        """A status: 10 ms a ranking, nothing to do."""
        plain = worker_status(name, lane_statuses(lanes), costs=CostModel(c0=10, c1=0, c2=0, c3=0), busy_share=0.0)
        self.peers.take(msgspec.structs.replace(plain, **changes))

    def ask(self, left_ms: float = 100.0, hops: int = 0, home: int = 0, prefix: int = 50) -> int | str:
        user = next(name for number in count() if lane_of(name := f"u{number}", LANES) == home)
        return self.forwarding.elsewhere(user, prefix, 5, hops, left_ms, self.now)


def test_it_goes_to_a_lane_of_a_worker_that_is_in_time() -> None:
    view = View()
    assert view.ask() == "alone"
    view.state("b", (2, 3))
    assert view.ask() in (2, 3)
    least = (TRAVEL_MS + 10) / IN_TIME_SHARES[0]
    view = View()
    view.state("b", (2, 3))
    assert view.ask(left_ms=least - 0.1) == "late"
    assert view.ask(left_ms=least + 0.1) in (2, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"queue_ms": 60.0},
        {"costs": CostModel(c0=0, c1=2, c2=0, c3=0)},
        {"costs": CostModel(c0=math.nan, c1=0, c2=0, c3=0)},
        {"costs": CostModel(c0=-5, c1=0, c2=0, c3=0)},
        {"busy_share": FULL_SHARE},
        {"busy_share": math.nan},
    ],
)
def test_a_peer_that_states_no_room_gets_nothing(changes: dict[str, Any]) -> None:
    view = View()
    view.state("b", (2, 3), **changes)
    assert view.ask() == "late"


@pytest.mark.parametrize("state", ["starting", "draining", "stopped"])
def test_only_a_serving_worker_is_asked(state: str) -> None:
    view = View()
    view.state("b", (2, 3), state=state)
    assert view.ask() == "alone"


def test_a_silent_worker_and_one_that_states_no_busy_share_get_nothing() -> None:
    view = View()
    view.state("b", (2, 3))
    said = view.peers.workers()["b"]
    view.now += 1.6
    assert view.ask() == "alone"
    old = msgspec.msgpack.decode(encode(said))
    del old["busy_share"]
    view.peers.take(decode(WorkerStatus, msgspec.msgpack.encode(old)))
    assert view.ask() == "late"


def test_two_hops_at_most_and_never_back_to_the_users_own_worker() -> None:
    view = View()
    view.state("b", (2, 3))
    assert view.ask(hops=2) == "hops"
    assert view.ask(hops=1, home=2) == "alone"
    view.state("c", (4, 5))
    assert {view.ask(hops=1, home=2) for _ in range(3)} <= {4, 5}


def test_in_a_large_fleet_a_few_are_looked_at_and_all_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is handled on the loop, where heartbeats live: its cost must not grow with the fleet."""
    view = View()
    looked: list[int] = []
    for number in range(500):
        view.state(f"p{number}", (100 + number,))
    full_ms = CostModel.full_ms

    def counted(costs: CostModel, prefix: int, candidates: int) -> float:
        looked.append(prefix)
        return full_ms(costs, prefix, candidates)

    monkeypatch.setattr(CostModel, "full_ms", counted)
    lanes = {view.ask() for _ in range(400)}
    assert len(looked) <= 400 * LOOKED_AT
    assert "late" not in lanes
    assert len(lanes) > 200


def test_what_was_sent_to_workers_of_long_ago_is_forgotten() -> None:
    view = View()
    kept: list[int] = []
    for number in range(300):
        view.state(f"pod-{number}", (2, 3))
        assert view.ask() in (2, 3)
        view.now += 10.0
        view.state("a", (0, 1))
        kept.append(retained(view.forwarding))
    assert kept[299] <= 1.1 * kept[100]


def test_the_second_hop_needs_a_clearer_place() -> None:
    view = View()
    view.state("b", (2, 3), queue_ms=40.0)
    assert view.ask(hops=1) == "late"
    assert view.ask(hops=0) in (2, 3)


def test_a_lane_that_another_worker_claimed_since_is_not_used() -> None:
    view = View()
    view.state("b", (2, 3))
    view.state("a", (0, 1, 2))
    assert {view.ask() for _ in range(3)} == {3}
    view.state("a", (0, 1, 2, 3))
    assert view.ask() == "late"


def test_what_was_sent_counts_until_it_is_worked_off() -> None:
    view = View()
    view.state("b", (2, 3))
    # TRAVEL + waiting / FULL_SHARE + 10 ≤ 70 ms: waiting ≤ 42.5 ms, and one more.
    assert [view.ask() == "late" for _ in range(7)] == [False] * 5 + [True] * 2
    view.state("b", (2, 3))
    assert view.ask() == "late", "its next status says nothing of what is on its way"
    view.now += 10 / FULL_SHARE / 1e3 + 1e-6
    assert view.ask() in (2, 3)
    assert view.ask() == "late"


def test_a_peer_that_is_busy_with_our_rankings_keeps_its_room() -> None:
    """Nobody else asks it for anything: its whole device is for us, though it states that it is busy."""
    view = View()
    busy, given = 0.0, 0
    for step in range(400):
        if step % 25 == 0:
            view.state("b", (2, 3), busy_share=busy)
        sent = view.ask() in (2, 3)
        given += sent
        busy += 0.01 / AVERAGE_S * (sent - busy)
        view.now += 0.01
    assert 0.7 * 400 < given <= (FULL_SHARE + 0.02) * 400 + 7


def test_a_status_that_cannot_know_of_what_was_just_sent_gives_no_more_room() -> None:
    view = View()
    view.state("b", (2, 3), busy_share=0.5)
    assert [view.ask() == "late" for _ in range(3)] == [False, False, True]
    view.state("b", (2, 3), busy_share=0.5)
    # TRAVEL + waiting / 0.35 + 10 ≤ 70 ms: waiting ≤ 17.5 of 20 ms, in 7.1 ms.
    view.now += 6.5e-3
    assert view.ask() == "late"
    view.now += 1e-3
    assert view.ask() in (2, 3)


def test_unknown_fields_travel_along() -> None:
    prefix = Behaviours.from_arrays([1, 2], [0, 0], [1, 2])
    request = RankingRequest(request_id="r", user_id="u", prefix=prefix, candidates=b"1234", mode="full")
    fields = msgspec.msgpack.decode(encode(request)) | {"new": [1, {"a": b"b"}]}
    value = next_hop(msgspec.msgpack.encode(fields), 1, 1234, 56.5)
    assert msgspec.msgpack.decode(value)["new"] == [1, {"a": b"b"}]
    assert decode(RankingRequest, value) == msgspec.structs.replace(request, hops=1, sent_ms=1234, timeout_ms=56.5)


def test_a_busy_share_follows_the_device_within_a_second() -> None:
    busy = BusyShare()
    total = 0.0
    for _ in range(20):
        total += 100.0
        busy.update(total, 0.25)
    assert busy.share == pytest.approx(0.4, abs=0.01)
    assert busy.update(total + 1e6, 5.0) == 1.0
    assert busy.update(total, 5.0) == 0.0


@settings(max_examples=examples(40))
@given(busy_share=st.floats(0, 1), gap=st.floats(0.0005, 0.05), left_ms=st.floats(20, 500), seed=st.integers(0, 99))
def test_between_two_statuses_no_peer_gets_more_than_its_room(
    busy_share: float, gap: float, left_ms: float, seed: int
) -> None:
    view = View()
    random = np.random.default_rng(seed)
    view.state("b", (2, 3), busy_share=busy_share, costs=CostModel(c0=0, c1=1, c2=0, c3=0))
    begun, sent_ms = view.now, 0
    while (seconds := view.now - begun) < 0.5:
        size = int(random.integers(1, max(2, int(left_ms / 4))))
        if isinstance(view.ask(left_ms=left_ms, prefix=size), int):
            sent_ms += size
        assert sent_ms <= IN_TIME_SHARES[0] * left_ms + max(0.0, FULL_SHARE - busy_share) * seconds * 1e3 + 1e-6
        view.now += random.exponential(gap)
    if busy_share >= FULL_SHARE:
        assert not sent_ms
