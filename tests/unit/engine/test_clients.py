"""Clients share a worker: none takes places, memory or device time from others by asking more, sooner or longer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.engine.clients import MOST_CLIENTS, UNBOOKED, Account, Clients
from relaygr_stream.engine.commands import Query
from relaygr_stream.engine.queue import WorkQueue
from relaygr_stream.engine.ranking import Ranking
from relaygr_stream.engine.scheduler import Limits
from tests.unit.engine.test_overload import CAPACITY_PER_S, Simulation
from tests.unit.engine.test_queue import ranking, removed
from tests.unit.engine.worlds import LIMITS, World, world

#: What one well-behaved client asks for: a tenth of what the device can do.
LIGHT_PER_S, LIGHT_TIMEOUT_S = 0.1 * CAPACITY_PER_S, 0.1
REQUESTS = 60


def beside(
    hog_timeout_s: float,
    hog_load: float,
    hog_name: Callable[[int], str] = lambda _: "hog",
    scenarios: tuple[str, str] = ("", ""),
    limits: Limits = LIMITS,
) -> Simulation:
    """A light client beside one that asks for `hog_load` times what the device can do; both at even distances.

    scenarios: of the light one, and of the other.
    """
    simulation = Simulation(limits)
    simulation.run(0.5 * CAPACITY_PER_S, 100, seed=1)  # predictions are compared with measurements
    begun, hogs = simulation.device.now, 0
    for number in range(REQUESTS):
        at = begun + number / LIGHT_PER_S
        while simulation.device.now < at:
            while begun + hogs / (hog_load * CAPACITY_PER_S) <= simulation.device.now:
                hogs += 1
                simulation.rank(hog_timeout_s, hog_name(hogs), scenarios[1])
            if not simulation.world.step(simulation.device.now):
                simulation.device.now += 1 / (hog_load * CAPACITY_PER_S)
        simulation.rank(LIGHT_TIMEOUT_S, "light", scenarios[0])
    while simulation.world.step(simulation.device.now):
        pass
    return simulation


def served(simulation: Simulation, client: str) -> tuple[float, float]:
    """The share of its rankings that have scores, and the median of their waits in seconds."""
    answers = [answer for answer in simulation.world.answers if answer.task.client == client]
    waits = sorted(answer.measured.started - answer.task.arrived for answer in answers if answer.status == "ok")
    return len(waits) / len(answers), waits[len(waits) // 2] if waits else float("inf")


@pytest.mark.parametrize("hog_timeout_s", [0.004, 0.1, 60.0])
def test_one_client_cannot_starve_another_whatever_its_deadlines(hog_timeout_s: float) -> None:
    simulation = beside(hog_timeout_s, hog_load=4.0)
    share, wait_s = served(simulation, "light")
    assert share >= 0.99
    assert wait_s <= 0.01, "it waits its turn, not until its deadline"


def test_alone_the_greedy_client_has_the_whole_device() -> None:
    simulation = beside(0.02, hog_load=4.0)
    done = sum(answer.status == "ok" for answer in simulation.world.answers[100:])
    seconds = REQUESTS / LIGHT_PER_S
    assert done >= 0.85 * CAPACITY_PER_S * seconds


def test_who_has_most_waiting_loses_its_latest_ranking_when_places_are_out() -> None:
    with world(limits=dataclasses.replace(LIMITS, queue_limit=8)) as w:
        for number in range(8):
            w.rank(f"h{number}", number, 20, timeout=60.0 + number, client="hog")
        w.rank("late", 9, 20, timeout=90.0, client="hog")
        assert w.answer("late").status == "overloaded"
        w.rank("l1", 9, 20, client="light")
        assert w.answer("h7").status == "overloaded"
        assert "its client has the most rankings waiting" in w.answer("h7").detail
        for number in range(3):
            w.rank(f"m{number}", 9, 20, client="other")
        w.rank("enough", 9, 20, client="other")  # four each: nobody has more than it would have
        w.settle()
        assert {w.answer(name).status for name in ("l1", "m0", "m1", "m2")} == {"ok"}


def test_who_has_most_memory_waiting_loses_when_bytes_are_out_however_cheap_its_rankings() -> None:
    with world(limits=dataclasses.replace(LIMITS, waiting_bytes=1000)) as w:
        for number in range(2):
            w.rank(f"h{number}", number, 1, client="hog", nbytes=450)  # a byte of work, much of padding
        for number in range(10):
            w.rank(f"l{number}", number, 60, client="light", nbytes=20)
        assert [answer.task.request_id for answer in w.answers] == ["h1"]
        w.rank("whole", 3, 1, client="third", nbytes=1001)
        assert w.answer("whole").status == "overloaded"
        w.settle()
        assert w.scheduler.admission.clients.whole.nbytes == 0


def test_a_ranking_that_does_not_fit_even_then_costs_nobody_a_place() -> None:
    """One that no room is enough for would throw out what others wait for, at no cost of its own."""
    with world(limits=dataclasses.replace(LIMITS, waiting_bytes=1200)) as w:
        for number in range(6):
            w.rank(f"a{number}", number, 20, client="a", nbytes=100)
            w.now += 0.01
        w.rank("b", 8, 20, client="b", nbytes=500)
        waiting = list(w.scheduler.admission.waiting)
        w.rank("c", 9, 20, client="c", nbytes=550)  # a has more until it has lost one, and that is not enough
        assert list(w.scheduler.admission.waiting) == waiting, "who lost a place got another one back"
        w.step()  # some are started: the oldest of the others is what queue_ms tells of
        unstarted = [each for each in waiting if not each.measured.started]
        assert w.handle(Query()).queue_ms >= (w.now - unstarted[0].task.arrived) * 1e3  # type: ignore[attr-defined]
        assert [(answer.task.request_id, answer.status) for answer in w.answers] == [("c", "overloaded")]
        w.settle()
        assert {answer.status for answer in w.answers if answer.task.request_id != "c"} == {"ok"}


def test_names_are_bounded_in_number_and_the_rest_share_one_account() -> None:
    clients = Clients(20.0)
    named = [clients.account(f"c{number}") for number in range(MOST_CLIENTS)]
    for account in named:
        account.served_ms = 1.0
    assert len({*named}) == MOST_CLIENTS
    rest = {clients.account(f"x{number}") for number in range(1000)}
    assert len(rest) == 1
    clients.whole.floor_ms = 1.0  # all others have been given as much by now
    assert clients.account("new") not in rest
    assert len(clients) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 1.0), st.floats(0.1, 5.0)), min_size=1, max_size=60))
def test_nobody_with_work_ready_falls_behind_by_more_than_the_slack(work: list[tuple[str, float, float]]) -> None:
    clients = Clients(20.0)
    queue = WorkQueue(clients)
    costs: dict[Ranking, float] = {}
    waiting: dict[Account, int] = {}
    for number, (name, deadline, ms) in enumerate(work):
        made = ranking(f"r{number}", deadline)
        account = made.booking.account = clients.account(name)
        queue.add(made)
        costs[made] = ms
        waiting[account] = waiting.get(account, 0) + 1
    while (urgent := queue.in_time.first()) is not None:
        assert isinstance(urgent, Ranking)
        ready = [account for account, left in waiting.items() if left]
        least = min(account.served_ms for account in ready)
        account = urgent.booking.account
        assert account.served_ms <= least + clients.slack_ms
        queue.in_time.remove(account)
        account.served_ms += costs[urgent]
        waiting[account] -= 1
    assert not any(waiting.values())


def test_of_one_client_the_nearest_deadline_goes_first_whatever_it_was_given() -> None:
    queue = WorkQueue(Clients(20.0))
    for deadline in (3.0, 1.0, 2.0):
        queue.add(ranking(str(deadline), deadline))
    UNBOOKED.served_ms += 1e6
    assert removed(queue.in_time) == ["1.0", "2.0", "3.0"]


def test_a_client_that_was_away_cannot_claim_what_others_were_given_meanwhile() -> None:
    clients = Clients(20.0)
    queue = WorkQueue(clients)
    busy, new = ranking("busy", 1.0), ranking("new", 2.0)
    busy.booking.account, new.booking.account = clients.account("busy"), clients.account("new")
    busy.booking.account.served_ms = 5000.0
    queue.add(busy)
    assert queue.in_time.first() is busy
    queue.add(new)
    assert new.booking.account.served_ms == 5000.0
    assert queue.in_time.first() is busy
    busy.booking.account.served_ms += 20.1
    assert queue.in_time.first() is new


def test_a_world_without_clients_has_one_account() -> None:
    w: World = World()
    for number in range(5):
        w.rank(f"r{number}", number, 20)
    assert len(w.scheduler.admission.clients) == 1
    w.settle()
    w.close()
