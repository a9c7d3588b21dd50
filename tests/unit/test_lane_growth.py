"""Lanes that grow: whose they are, over which a user is hashed, and the command's core, stopped anywhere."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.bus.balance import MemberClaim, assign_lanes
from relaygr_stream.errors import BrokerError, ConfigError, CoPartitionError, DecodeError, RelayError
from relaygr_stream.ops.lane_growth import grow
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.trigger.intake import read_event
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import RequestEvent
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.routes import Routes
from relaygr_stream.wire.topic_files import lane_of, lanes_in, load_topics

TOPICS = ("retrieval", "pre-infer", "ranking")


@given(st.integers(1, 8), st.integers(1, 24), st.integers(2, 16))
def test_added_lanes_go_to_the_workers_of_the_lanes_that_they_split(members: int, lanes: int, factor: int) -> None:
    """As far as shares allow: all of them, where every member had as many lanes."""
    names = [f"w{number}" for number in range(members)]
    before = assign_lanes(lanes, {name: MemberClaim() for name in names})
    claims = {name: MemberClaim(tuple(sorted(owned)), 1) for name, owned in before.items()}
    after = assign_lanes(factor * lanes, claims)
    assert sorted(lane for owned in after.values() for lane in owned) == list(range(factor * lanes))
    assert all(before[name] <= after[name] for name in names)
    if lanes % members == 0:
        assert all({lane % lanes for lane in after[name]} == before[name] for name in names)


@given(st.text(min_size=1, max_size=20), st.integers(1, 40), st.integers(1, 16), st.integers(1, 4))
def test_a_client_that_lags_sends_to_a_lane_of_the_user(user: str, stated: int, first: int, second: int) -> None:
    topics = load_topics(Kafka(partitions=stated))
    assert topics.grow(stated * first * second) is (first * second > 1)
    assert {topic.partitions for topic in topics.all if topic.lanes} == {stated * first * second}
    lanes = topics.lanes_of(user)
    assert lanes[0] == topics.lane_of(user)
    for count in (stated, stated * first, topics.lanes):
        assert lane_of(user, count) in lanes
    assert not topics.grow(stated), "never fewer"


def test_a_cluster_may_have_a_multiple_of_the_stated_lanes_also_in_the_middle_of_a_growth() -> None:
    assert lanes_in(dict.fromkeys(TOPICS, 64), 16) == 64
    assert lanes_in({"retrieval": 16, "pre-infer": 64, "ranking": 64}, 16) == 16
    for other in ({"retrieval": 16, "ranking": 24}, {"retrieval": 8, "ranking": 12}):
        with pytest.raises(CoPartitionError, match="retrieval and ranking"):
            lanes_in(other, 8)


@given(st.text(min_size=1, max_size=20), st.integers(2, 40), st.integers(1, 16))
def test_without_a_stated_number_users_are_served_on_the_lanes_of_every_number_before(
    user: str, before: int, factor: int
) -> None:
    topics = load_topics(Kafka())
    topics.follow(before * factor)
    assert topics.lanes_of(user)[0] == topics.lane_of(user)
    assert lane_of(user, before) in topics.lanes_of(user)
    topics.follow(before)  # as a process that does not know of those that were added
    lane = lane_of(user, before * factor)
    assert lane == topics.lane_of(user) or topics.splits(lane, user)
    assert not topics.splits(lane + 1, user)


def test_a_sender_that_hashes_nobody_is_not_served_on_the_first_lane() -> None:
    topics = load_topics(Kafka())
    users = [f"u{number}" for number in range(640)]
    assert sum(0 in topics.lanes_of(user) for user in users) < 400
    stated = load_topics(Kafka(partitions=1))
    stated.grow(64)
    assert all(0 in stated.lanes_of(user) for user in users)


def test_an_event_on_a_lane_that_was_just_added_is_read() -> None:
    """A trigger may own it before it has counted: its events were dead letters."""
    topics = load_topics(Kafka(partitions=4))
    user = next(user for number in range(99) if lane_of(user := f"u{number}", 16) == 13)
    event = encode(
        RequestEvent(request_id="r", user_id=user, candidates=1, prefix=Behaviours.from_arrays([1], [0], [1]))
    )
    for lane in (1, 13):
        record = Record(topics.retrieval.name, lane, 0, 0, user.encode(), event, ())
        assert read_event(RequestEvent, record, topics) is not None
    with pytest.raises(DecodeError, match="partition 1 of 4, the event came on 14"):
        read_event(RequestEvent, Record(topics.retrieval.name, 14, 0, 0, user.encode(), event, ()), topics)


def test_the_routes_keep_all_else_when_lanes_grow() -> None:
    routes = Routes.of_one("", 16, epoch=7).moved("next", 16, 2500)
    grown = routes.grown("", 64)
    assert (grown.lanes_of(""), grown.lanes_of("next"), grown.share_of("next")) == (64, 16, 2500)
    assert grown.epoch == routes.epoch + 1


class Killed(Exception):
    """The command's process ends."""


class Fleet:
    """A fleet whose workers have lanes as soon as both their topics do. dies: in this call, before or behind it."""

    def __init__(self, dies: str = "", when: str = "before", triggers: bool = True) -> None:
        self.partitions = dict.fromkeys(TOPICS, 16)
        self.clients = 0  # nothing is announced
        self.dies, self._when = dies, when
        self._triggers = triggers
        self.announcements: list[int] = []
        self.calls: list[str] = []

    def _call(self, name: str, when: str) -> None:
        if (name, when) == (self.dies, self._when):
            self.dies = ""
            raise Killed
        if when == "before":
            self.calls.append(name)

    async def counts(self) -> dict[str, int]:
        self._call("counts", "before")
        return dict(self.partitions)

    async def add(self, counts: Mapping[str, int]) -> None:
        self._call("add", "before")
        assert self.clients, "a client that starts now would count lanes without an owner"
        for name, count in counts.items():
            self.partitions[name] = count
            self._call("add", "middle")
        self._call("add", "after")

    def unowned(self, lanes: int) -> dict[str, list[int]]:
        self._call("unowned", "before")
        owned = min(self.partitions["pre-infer"], self.partitions["ranking"])
        triggers = self.partitions["retrieval"] if self._triggers else 16
        return {"worker": list(range(owned, lanes)), "trigger": list(range(triggers, lanes))}

    async def announced(self) -> int:
        self._call("announced", "before")
        return self.clients

    async def announce(self, lanes: int) -> None:
        self._call("announce", "before")
        assert not any(self.unowned(lanes).values()), "before every lane has an owner"
        self.clients = lanes
        self.announcements.append(lanes)
        self._call("announce", "after")


STEPS = [
    ("counts", "before"),
    ("announced", "before"),
    ("add", "before"),
    ("add", "middle"),
    ("add", "after"),
    ("unowned", "before"),
    ("announce", "before"),
    ("announce", "after"),
]


@pytest.mark.parametrize(("step", "when"), STEPS)
async def test_a_growth_that_ended_anywhere_is_run_again_and_goes_on(step: str, when: str) -> None:
    fleet, said = Fleet(step, when), list[str]()
    with pytest.raises(Killed):
        await grow(fleet, 64, said.append)
    await grow(fleet, 64, said.append)
    assert (set(fleet.partitions.values()), fleet.clients) == ({64}, 64)
    await grow(fleet, 64, said.append)
    assert said[-1] == "clients go by 64 lanes already"
    assert fleet.announcements == [16, 64]


@pytest.mark.parametrize(
    ("lanes", "said"), [(8, "there are 16"), (24, "a multiple of 16, such as 32"), (160_000, "10000 at most")]
)
async def test_a_number_that_cannot_be_is_refused_before_anything_changes(lanes: int, said: str) -> None:
    fleet = Fleet()
    with pytest.raises(ConfigError, match=said):
        await grow(fleet, lanes, print)
    assert fleet.calls == ["counts", "announced"]


async def test_lanes_without_an_owner_are_named_and_not_announced() -> None:
    fleet, said = Fleet(triggers=False), list[str]()
    with pytest.raises(RelayError, match=r"no trigger has lanes 16–63 after 0 s, and users stay on 16 lanes"):
        await grow(fleet, 64, said.append, owned_s=0.0)
    assert said[-1] == "no trigger has 48 of 64 lanes yet"
    assert fleet.announcements == [16]


async def test_of_two_commands_the_larger_number_stays() -> None:
    class Grown(Fleet):
        def unowned(self, lanes: int) -> dict[str, list[int]]:
            if lanes == 32 and self.clients < 64:  # another command is done meanwhile
                self.partitions = dict.fromkeys(TOPICS, 64)
                self.clients = 64
            return super().unowned(lanes)

    fleet = Grown()
    with pytest.raises(ConfigError, match="64 were announced meanwhile"):
        await grow(fleet, 32, print)
    assert fleet.clients == 64


async def test_what_a_broker_refuses_is_said() -> None:
    class Refusing(Fleet):
        async def add(self, counts: Mapping[str, int]) -> None:
            raise BrokerError("the broker adds no partitions")

    fleet = Refusing()
    with pytest.raises(BrokerError, match="adds no partitions"):
        await grow(fleet, 64, print)
    assert fleet.announcements == [16]
