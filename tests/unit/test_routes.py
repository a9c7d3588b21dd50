"""Routes as a value: each user in one group, users that move one way while a share grows, groups that stay apart."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.errors import DecodeError
from relaygr_stream.settings import Scenario
from relaygr_stream.settings.scenarios import MAX_SCENARIOS
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.routes import (
    POSITIONS,
    RoutePart,
    Routes,
    encode_routes,
    group_settings,
    key_of,
    position,
    routes_topic,
    with_newer,
)
from relaygr_stream.wire.signature import Signer
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.wire.worker_status import StatusReader

USERS = [f"user-{number}" for number in range(300)]
names = st.sampled_from(["", "a", "b", "c"])
shares = st.integers(0, POSITIONS)


def followed(*records: Record, reader: StatusReader | None = None) -> Mapping[str, Routes]:
    """The routes by scenario that a reader of these records knows."""
    known: Mapping[str, Routes] = {}
    for each in records:
        known = with_newer(each, reader or StatusReader(), known)
    return known


def members(routes: Routes, group: str) -> set[str]:
    return {user for user in USERS if routes.group_of(user) == group}


@st.composite
def some_routes(draw: st.DrawFn) -> Routes:
    """What any sequence of moves makes."""
    routes = Routes.of_one("", 8)
    for group, share in draw(st.lists(st.tuples(names, shares), max_size=4)):
        if routes.groups != (group,):
            routes = routes.moved(group, 8, share)
    return routes


@given(some_routes(), names, st.lists(shares, min_size=1, max_size=5))
def test_while_a_share_grows_users_only_move_to_it_and_the_others_stay(
    routes: Routes, group: str, steps: list[int]
) -> None:
    if routes.groups == (group,):
        return
    for share in sorted(steps):
        if share < routes.share_of(group):
            continue
        later = routes.moved(group, 8, share)
        later.validate()
        assert later.epoch > routes.epoch
        assert later.share_of(group) == share
        for user in USERS:
            now, then = routes.group_of(user), later.group_of(user)
            assert then in (now, group)
        routes = later


@given(some_routes(), names, shares)
def test_going_back_moves_only_the_users_who_came(routes: Routes, group: str, share: int) -> None:
    if routes.groups == (group,):
        return
    moved = routes.moved(group, 8, share)
    back = moved.moved(group, 8, 0)
    back.validate()
    assert not members(back, group)
    stayed = [user for user in USERS if moved.group_of(user) != group]
    assert all(back.group_of(user) == moved.group_of(user) for user in stayed)


@pytest.mark.parametrize("lanes", [1, 7, 16, 100])
def test_each_part_has_its_share_of_the_users_of_every_lane(lanes: int) -> None:
    """Else a canary would have the users of some lanes alone."""
    routes = Routes.of_one("", lanes).moved("next", lanes, POSITIONS // 4)
    for lane in range(min(lanes, 16)):
        users = [user for user in (f"u{number}" for number in range(8_000)) if lane_of(user, lanes) == lane]
        part = sum(routes.group_of(user) == "next" for user in users) / len(users)
        assert part == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / len(users)) ** 0.5)


def test_positions_are_those_that_other_clients_compute() -> None:
    """docs/reference/protocol.md names these."""
    assert [position(user) for user in ("user-17", "21", "foobar", "用户")] == [5353, 5464, 6319, 1667]


@pytest.mark.parametrize(
    "parts", [[("", 1)], [("", POSITIONS), ("a", 1)], [("", POSITIONS // 2), ("", POSITIONS // 2)]]
)
def test_routes_that_are_not_all_users_in_one_group_each_are_refused(parts: list[tuple[str, int]]) -> None:
    routes = Routes(
        epoch=1, sent_ms=0, parts=tuple(RoutePart(group=group, share=share, lanes=8) for group, share in parts)
    )
    with pytest.raises(DecodeError):
        followed(record(routes))


def record(routes: Routes, headers: tuple[tuple[str, bytes], ...] = ()) -> Record:
    return Record("relaygr.routes", 0, 0, 0, b"default", encode_routes(routes), headers)


def test_the_highest_epoch_counts_whatever_comes_last() -> None:
    older = Routes.of_one("", 8, epoch=1)
    newer = older.moved("a", 8, 500)
    assert followed(record(newer), record(older)) == {"": newer}


def test_a_field_of_a_later_release_is_skipped() -> None:
    value = {**msgspec.to_builtins(Routes.of_one("", 8)), "later": 1}
    found = Record("relaygr.routes", 0, 0, 0, b"default", msgspec.msgpack.encode(value), ())
    assert followed(found) == {"": Routes.of_one("", 8)}


def test_with_a_secret_only_signed_routes_are_believed() -> None:
    signer, routes = Signer("a secret of a fleet"), Routes.of_one("", 8)
    reader = StatusReader(signer=signer)
    headers = tuple(signer.sign("relaygr.routes", b"default", encode_routes(routes)))
    assert followed(record(routes, headers), reader=reader) == {"": routes}
    with pytest.raises(DecodeError, match="no signature"):
        followed(record(routes), reader=reader)


def test_no_topic_and_no_consumer_group_of_one_group_is_anothers() -> None:
    topics = [load_topics(group_settings(Settings(), group, 4).kafka) for group in ("", "a", "b")]
    every = [topic.name for some in topics for topic in some.all] + [routes_topic(topics[0]).name]
    assert len(set(every)) == len(every)
    assert topics[0] == load_topics(Settings().kafka)
    assert topics[1].lanes == 4


def test_an_epoch_that_no_later_one_could_pass_is_refused() -> None:
    with pytest.raises(DecodeError, match="ahead"):
        followed(record(Routes.of_one("", 8, epoch=2**52)))


def of_scenario(name: str, routes: Routes) -> Record:
    key, headers = key_of(name)
    return Record("relaygr.routes", 0, 0, 0, key, encode_routes(routes), tuple(headers))


def test_each_scenario_has_routes_of_its_own() -> None:
    own, feed = Routes.of_one("", 8, epoch=9), Routes.of_one("feed", 4, epoch=3)
    known = followed(record(own), of_scenario("feed", feed), of_scenario("ads", feed))
    assert known == {"": own, "feed": feed, "ads": feed}
    older = of_scenario("feed", Routes.of_one("old", 4, epoch=2))
    assert with_newer(older, StatusReader(), known) is known


@pytest.mark.parametrize("name", ["A", "a.b", "", "a" * 25, "\x00"])
def test_a_record_of_no_scenarios_name_is_refused(name: str) -> None:
    headers = tuple(key_of("feed")[1])
    found = Record("relaygr.routes", 0, 0, 0, name.encode(), encode_routes(Routes.of_one("x", 4)), headers)
    with pytest.raises(DecodeError, match="no scenario's name"):
        with_newer(found, StatusReader(), {})


def test_as_many_scenarios_as_a_file_may_have_are_followed_and_no_more() -> None:
    known: Mapping[str, Routes] = {}
    for number in range(MAX_SCENARIOS):
        known = with_newer(of_scenario(f"s{number}", Routes.of_one("x", 4)), StatusReader(), known)
    known = with_newer(record(Routes.of_one("", 8)), StatusReader(), known)
    assert len(known) == MAX_SCENARIOS + 1
    with pytest.raises(DecodeError, match="more are not followed"):
        with_newer(of_scenario("more", Routes.of_one("x", 4)), StatusReader(), known)
    assert with_newer(of_scenario("s1", Routes.of_one("y", 4, epoch=1)), StatusReader(), known)["s1"].groups == ("y",)


def test_a_scenarios_signature_is_of_its_name() -> None:
    signer, routes = Signer("a secret of a fleet"), Routes.of_one("feed", 8)
    reader, (key, headers) = StatusReader(signer=signer), key_of("feed")
    signed = tuple(signer.sign("relaygr.routes", key, encode_routes(routes), headers))
    found = Record("relaygr.routes", 0, 0, 0, key, encode_routes(routes), signed)
    assert with_newer(found, reader, {}) == {"feed": routes}
    stripped = tuple((name, text) for name, text in signed if name != "relaygr-kind")
    for other in (found._replace(key=b"ads"), found._replace(headers=stripped)):
        with pytest.raises(DecodeError, match="no signature"):
            with_newer(other, reader, {})


def test_a_groups_settings_are_those_of_the_scenario_of_its_name() -> None:
    settings = Settings(scenarios=(Scenario(name="feed", slo_ms=20.0),))
    feed, other = (group_settings(settings, group, 4) for group in ("feed", "other"))
    assert (feed.scenario, feed.relay.slo_ms, feed.kafka.prefix) == ("feed", 20.0, "relaygr.feed.")
    assert (other.scenario, other.relay.slo_ms, other.kafka.prefix) == ("", 50.0, "relaygr.other.")
    assert feed.kafka.partitions == other.kafka.partitions == 4
