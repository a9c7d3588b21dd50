"""Where answers come to: another partition, of another broker, when nothing comes by the present one."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from relaygr_stream.client.answers import PARTITION_SILENCE_EXPIRES_S, SWITCH_AFTER_S, ReplyRoute, reply_partitions
from relaygr_stream.errors import TopicError

DEAD, ALIVE = 5, 7
EVERY_S, HEDGE_S = 0.05, 0.2


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
    route = ReplyRoute("scores", [5, 7], clock=lambda: now)
    for _ in range(10):
        assert route.choose() == 5
        now += 0.9 * SWITCH_AFTER_S
        route.received(5)
    assert route.choose() == 5
    now += 0.9 * SWITCH_AFTER_S
    route.received(7)  # a copy's answer says nothing of the present one
    assert route.choose() == 5
    now += 0.2 * SWITCH_AFTER_S
    assert route.choose() == 7
    now += 0.9 * SWITCH_AFTER_S
    assert route.choose() == 7
    route.received(7)
    now += 100 * SWITCH_AFTER_S  # nothing was asked meanwhile
    assert route.choose() == 7


def test_copies_name_the_one_that_answers_whichever_that_is() -> None:
    now = 0.0
    route = ReplyRoute("scores", [5, 7], clock=lambda: now)
    assert route.choose() == 5
    now = 0.2
    assert route.choose_again({5: 1}, 0.0) == 7  # nothing came by 5
    assert route.choose_again({}, 0.0) == 5  # no broker has the copy that named it
    now = 0.4
    assert route.choose_again({5: 1, 7: 1}, 0.2) == 5  # nor by 7
    route.received(7)
    assert route.choose_again({5: 1}, 0.2) == 7
    assert route.choose_again({7: 1}, 0.2) == 7
    now = 0.6
    assert route.choose_again({7: 1}, 0.5) == 5  # what came before the last copy says nothing of now


def test_a_partition_without_a_leader_is_not_named_while_the_other_has_one() -> None:
    led = {5, 7}
    route = ReplyRoute(
        "scores",
        [5, 7],
        waits=SimpleNamespace(waits_s=lambda asked: {each: 0.0 if each in led else math.inf for each in asked}),
        clock=lambda: 0.0,
    )
    assert route.choose() == 5
    led.remove(5)
    assert {route.choose(), route.choose_again({7: 1}, 0.0)} == {7}
    led.clear()
    assert {route.choose(), route.choose_again({7: 1}, 0.0)} == {7, 5}


def test_where_answers_come_and_a_lane_is_dead_copies_do_not_name_a_partition_of_the_same_broker() -> None:
    """A broker that is away leads a third of the lanes and the other partition: two seconds after the last request that
    named it, every hedge did, and was answered to nobody."""
    now = 0.0
    route = ReplyRoute("scores", [ALIVE, DEAD], clock=lambda: now)
    named = []
    for number in range(400):
        now = number * EVERY_S
        sent_s, first = now, route.choose()
        now += 0.02
        route.received(ALIVE)
        now = sent_s + HEDGE_S
        named.append((first, route.choose_again({}, sent_s)))
    assert set(named) == {(ALIVE, ALIVE)}


def test_where_there_is_only_one_it_is_named() -> None:
    now = 0.0
    route = ReplyRoute("scores", [5], clock=lambda: now)
    assert route.choose() == route.choose_again({5: 1}, 0.0) == 5
    now = 2 * SWITCH_AFTER_S
    assert route.choose() == route.choose_again({5: 1}, 0.0) == 5


def test_a_partition_that_exists_no_more_is_not_named() -> None:
    now = 0.0
    route = ReplyRoute("scores", [5, 7], clock=lambda: now)
    route.counted(7)
    assert {route.choose(), route.choose_again({}, 0.0)} == {5}
    route.counted(5)
    with pytest.raises(TopicError, match=r"scores has 5 partitions now.* 5 and 7.*open a new client"):
        route.choose()
    assert "open a new client" in str(route.gone)
    route.counted(16)
    assert route.gone is None
    assert route.choose() == 5
    now += 2 * SWITCH_AFTER_S
    assert route.choose() == 7, "it is there again"


def lost_with_one_dead(answer_s: float, seconds: float) -> list[float]:
    """When those requests were made whose every copy named the dead partition; by the other, answers take so long."""
    now = 0.0
    route = ReplyRoute("scores", [DEAD, ALIVE], clock=lambda: now)
    answered: dict[int, float] = {}
    events: list[tuple[float, int, Callable[[], None]]] = []
    order = itertools.count()

    def at(when: float, what: Callable[[], None]) -> None:
        heapq.heappush(events, (when, next(order), what))

    def send(number: int, copies: int, *before: int) -> None:
        if number in answered:
            return
        named = route.choose_again(Counter(before), now - HEDGE_S) if before else route.choose()
        if named == ALIVE:

            def answer() -> None:
                route.received(ALIVE)
                answered.setdefault(number, now)

            at(now + answer_s, answer)
        if copies:
            at(now + HEDGE_S, lambda: send(number, copies - 1, *before, named))

    made = [EVERY_S * number for number in range(int(seconds / EVERY_S))]
    for number, when in enumerate(made):
        at(when, lambda number=number: send(number, 2))  # type: ignore[misc]
    while events:
        now, _, what = heapq.heappop(events)
        what()
    return [when for number, when in enumerate(made) if number not in answered]


@pytest.mark.parametrize("answer_s", [0.02, 0.3, 0.6, 0.9, 1.5])
def test_with_one_dead_the_other_is_named_however_slow_it_is(answer_s: float) -> None:
    assert lost_with_one_dead(answer_s, 30.0) == []


def test_one_that_is_back_is_found_when_the_other_dies_in_turn() -> None:
    now = 0.0
    route = ReplyRoute("scores", [5, 7], clock=lambda: now)
    assert route.choose() == 5
    now = SWITCH_AFTER_S + 0.1
    assert route.choose() == 7  # 5 is dead
    now += PARTITION_SILENCE_EXPIRES_S
    route.received(7)
    route.choose()
    now += SWITCH_AFTER_S + 0.1  # 7 is dead, 5 is back
    assert route.choose() == 5
