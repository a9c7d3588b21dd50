"""Where answers come to: another partition, of another broker, when nothing comes by the present one."""

from __future__ import annotations

from relaygr_stream.client.replies import UNHEARD_S, ReplyRoute, reply_partitions


def test_the_two_partitions_are_of_different_brokers() -> None:
    leaders = {0: 1, 1: 1, 2: -1, 3: 2}
    for _ in range(50):
        first, second = reply_partitions(leaders, None)
        assert {leaders[first], leaders[second]} == {1, 2}
        assert reply_partitions(leaders, 1) == [1, 3]
    assert reply_partitions({0: 1, 1: 1}, 0) == [0]
    assert reply_partitions({0: -1}, None) == [0]


def test_requests_name_the_other_when_nothing_comes_and_stay_while_it_does() -> None:
    now = 0.0
    route = ReplyRoute([5, 7], clock=lambda: now)
    for _ in range(10):
        assert route.choose() == 5
        now += 0.9 * UNHEARD_S
        route.heard(5)
    assert route.choose() == 5
    now += 0.9 * UNHEARD_S
    route.heard(7)  # a copy's answer says nothing of the present one
    assert route.choose() == 5
    now += 0.2 * UNHEARD_S
    assert route.choose() == 7
    now += 0.9 * UNHEARD_S
    assert route.choose() == 7
    route.heard(7)
    now += 100 * UNHEARD_S  # nothing was asked meanwhile
    assert route.choose() == 7


def test_copies_name_the_one_that_answers_whichever_that_is() -> None:
    now = 0.0
    route = ReplyRoute([5, 7], clock=lambda: now)
    route.choose()
    now = 0.2
    assert route.choose_again() == 7  # by 5 an answer is due
    route.heard(5)
    now = 0.3
    route.choose()
    assert route.choose_again() == 5  # by 7, too, and for longer
    route.heard(7)
    assert route.choose_again() == 7


def test_where_there_is_only_one_it_is_named() -> None:
    now = 0.0
    route = ReplyRoute([5], clock=lambda: now)
    assert route.choose() == route.choose_again() == 5
    now = 2 * UNHEARD_S
    assert route.choose() == route.choose_again() == 5
