"""Scenarios share a worker: none takes memory or device time from another, however many clients and tenants it has."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relaygr_stream.cache.entry import Entry
from relaygr_stream.engine.clients import SLACK_SLICES, Account, Clients
from relaygr_stream.engine.commands import DELEGATED_LANE, Query
from relaygr_stream.engine.forecast import MIN_SAMPLES, Forecast
from relaygr_stream.engine.queue import WorkQueue
from relaygr_stream.engine.ranking import Booking, Ranking
from relaygr_stream.engine.scheduler import Snapshot
from tests.properties import examples
from tests.unit.engine.test_clients import beside, served
from tests.unit.engine.test_overload import CAPACITY_PER_S, TOKENS, Simulation, waiting
from tests.unit.engine.test_queue import ranking
from tests.unit.engine.worlds import GRANULE_BYTES, LIMITS, MAX_TOKENS, World, world

FOOTPRINT = LIMITS.pinned_bytes
LIMITED = dataclasses.replace(LIMITS, delegated_bytes=3 * GRANULE_BYTES)


def booked(account: Account) -> Booking:
    return Booking(account=account, cost_ms=5.0)


def pinned(made: World, *, delegated: bool = False) -> Counter[str]:
    """What each scenario's requests hold, counted anew."""
    pins = [pin for pin in made.scheduler.pins._pins.values() if (pin.lane == DELEGATED_LANE) is delegated]
    held: dict[tuple[str, Entry], int] = {}
    for pin in pins:
        key = pin.scenario, pin.entry
        held[key] = max(held.get(key, 0), pin.nbytes, made.cache.entry_bytes(pin.entry))
    found: Counter[str] = Counter()
    for (scenario, _), nbytes in held.items():
        found[scenario] += nbytes
    return found


# ---- device time ----


@pytest.mark.parametrize("hog_timeout_s", [0.004, 0.1, 60.0])
def test_a_scenario_with_a_client_for_each_request_does_not_starve_one_with_a_single_client(
    hog_timeout_s: float,
) -> None:
    simulation = beside(hog_timeout_s, 4.0, lambda number: f"c{number}", ("feed", "search"))
    share, wait_s = served(simulation, "light")
    assert share >= 0.99
    assert wait_s <= 0.01, "it waits its turn, not until its deadline"
    share, _ = served(beside(hog_timeout_s, 4.0, lambda number: f"c{number}", ("feed", "feed")), "light")
    assert share < 0.99, "of one scenario, each name is a client"


def test_alone_a_scenario_has_the_whole_device() -> None:
    limits = dataclasses.replace(LIMITS, max_ranking_delay_ms=2.0)
    alone, sharing = (beside(0.02, 4.0, scenarios=names, limits=limits) for names in (("", ""), ("feed", "search")))
    done = [sum(answer.status == "ok" for answer in each.world.answers) for each in (alone, sharing)]
    assert done[1] >= 0.95 * done[0]


WORK = st.tuples(st.sampled_from(["feed", "search"]), st.sampled_from("abc"), st.floats(0.0, 1.0), st.floats(0.1, 5.0))


@given(st.lists(WORK, min_size=1, max_size=60))
def test_neither_a_scenario_nor_a_client_within_it_falls_behind_by_more_than_the_slack(
    work: list[tuple[str, str, float, float]],
) -> None:
    clients = Clients(20.0)
    queue = WorkQueue(clients)
    costs: dict[Ranking, float] = {}
    left: Counter[Account] = Counter()
    for number, (scenario, name, deadline, ms) in enumerate(work):
        made = ranking(f"r{number}", deadline)
        account = made.booking.account = clients.account(name, scenario)
        queue.add(made)
        costs[made] = ms
        left.update(account.line)
    while (urgent := queue.in_time.first()) is not None:
        assert isinstance(urgent, Ranking)
        for part in urgent.booking.account.line:
            rivals = [each for each in left if each.parent is part.parent and left[each]]
            assert part.served_ms <= min(each.served_ms for each in rivals) + clients.slack(part)
        queue.in_time.remove(urgent.booking.account)
        urgent.booking.account.serve(costs[urgent])
        left.subtract(urgent.booking.account.line)
    assert not any(left.values())


def test_a_scenario_waits_for_a_slice_of_another_and_not_for_most_of_its_slo() -> None:
    clients = Clients(SLACK_SLICES * 4.0)
    queue = WorkQueue(clients)
    for number in range(11):
        made = ranking(f"r{number}", 0.02 if number == 10 else 0.001 * number)
        made.booking.account = clients.account("a", "search" if number == 10 else "feed")
        queue.add(made)
    before = 0
    while (urgent := queue.in_time.first()) is not None and urgent is not made:
        assert isinstance(urgent, Ranking)
        queue.in_time.remove(urgent.booking.account)
        urgent.booking.account.serve(4.0)
        before += 1
    assert before == 2, "one slice, and the ranking that goes beyond it"


@pytest.mark.parametrize(("scenario", "slice_ms", "together"), [("", 0.2, 4), ("feed", 0.5, 2), ("feed", 2.0, 4)])
def test_a_batch_keeps_another_scenario_waiting_for_a_slice_more_than_one_ranking_does(
    scenario: str, slice_ms: float, together: int
) -> None:
    """Each ranking more takes 0.4 ms."""
    simulation = Simulation(dataclasses.replace(LIMITS, max_ranking_delay_ms=slice_ms))
    simulation.run(0.5 * CAPACITY_PER_S, 100, seed=1)
    for _ in range(2 * MIN_SAMPLES):
        for _ in range(4):
            simulation.rank(60.0, scenario=scenario)
        while simulation.world.step(simulation.device.now):
            pass
    assert simulation.device.batches[-4 // together] == together


@pytest.mark.parametrize("served_ms", [0.0, 1000.0], ids=["behind", "ahead"])
def test_a_ranking_that_has_begun_bars_no_scenario_that_was_given_less_device_time(served_ms: float) -> None:
    """Full inference of one scenario takes most of its SLO: another one would be refused for as long."""
    simulation = Simulation()
    device, made = simulation.device, simulation.world
    device.token_ms = 0.2

    def rank(name: str, scenario: str, timeout: float, *, full: bool) -> None:
        made.now = device.now
        made.rank(name, 0, MAX_TOKENS if full else TOKENS, timeout=timeout, scenario=scenario, full=full)

    def work() -> None:
        while made.step(device.now):
            pass

    for number in range(MIN_SAMPLES + 1):
        rank(f"f{number}", "feed", 1.0, full=True)
        work()
    made.scheduler.admission.clients.account("", "search").serve(served_ms)
    rank("long", "feed", (MAX_TOKENS * device.token_ms + 1.1) / 1e3, full=True)
    made.step(device.now)
    rank("quick", "search", 0.008, full=False)
    work()
    assert made.answer("quick").status == ("overloaded" if served_ms else "ok")


def test_a_scenario_that_was_away_does_not_go_first_for_what_others_were_given_meanwhile() -> None:
    """Its rankings that wait for a copy from DRAM join only when that is there."""
    clients = Clients(SLACK_SLICES * 10.0)
    away, busy = clients.account("", "away"), clients.account("", "busy")
    for _ in range(100):
        busy.serve(100.0)
        busy.leads()
    first = 0
    clients.add(booked(busy))
    while clients.goes_first(away) and first < 100:
        clients.add(booked(away))
        first += 1
    assert first == 3, "of 5 ms each, within a slice of 10"


BOOKED = st.tuples(st.integers(1, 60), st.integers(0, 12), st.sampled_from(["feed", "search"]), st.sampled_from("ab"))


@given(st.lists(BOOKED, min_size=1, max_size=20), st.integers(1, 60), st.integers(1, 12), st.floats(0, 30))
@example([*((1, ms, "search", "a") for ms in (2, 3, 4, 6, 7)), *((1, ms, "feed", "a") for ms in (2, 2, 11))], 1, 1, 0.0)
def test_what_is_forecast_before_a_ranking_is_what_is_done_before_it(
    tasks: list[tuple[int, int, str, str]], due: int, own: int, lead: float
) -> None:
    """At most, but for the last ranking of each client beside it and of the other scenario: it begins in its turn,
    and is done whole."""
    clients = Clients(4.0)
    forecast, queue = Forecast(clients), WorkQueue(clients)
    clients.account("a", "search").serve(lead)
    everyone = []
    for number, (at, work, scenario, name) in enumerate((*tasks, (due, own, "feed", "new"))):
        made = waiting(at / 1e3, float(work))
        made.booking.account, made.booking.number = clients.account(name, scenario), number
        everyone.append(made)
        queue.add(made)
        forecast.add(made)
    mine = everyone[-1]
    forecast.remove(mine)
    forecast._plant()
    _, ahead = forecast._ahead(mine, float(own))
    done = 0.0
    while (urgent := queue.in_time.first()) is not mine:
        assert isinstance(urgent, Ranking)
        queue.in_time.remove(urgent.booking.account)
        urgent.booking.account.serve(urgent.booking.expected_ms)
        if urgent.due <= mine.due:
            done += urgent.booking.expected_ms

    def longest(of: str, clients: str) -> int:
        return max((ms for _, ms, scenario, name in tasks if scenario == of and name in clients), default=0)

    beside = longest("feed", "a") + longest("feed", "b")
    assert done <= ahead + 2 * beside + longest("search", "ab"), "the other scenario is given as much as that beside it"


def test_pre_inference_of_a_scenario_with_few_announcements_does_not_wait_for_all_of_the_other() -> None:
    def begun(scenarios: tuple[str, str]) -> int:
        """Tokens that were computed for others before the quiet one's first."""
        with world(hbm=60, limits=dataclasses.replace(LIMITS, pinned_bytes=60 * GRANULE_BYTES)) as made:
            for user in range(30):
                made.signal(f"l{user}", user, 64, scenario=scenarios[0], due_s=0.05)
            made.signal("quiet", 40, 64, scenario=scenarios[1], due_s=0.1)
            entry = made.scheduler.pins.entry("quiet")
            assert entry is not None and entry.region is not None
            while not entry.region.length:
                made.step()
            computed = (made.scheduler.pins.entry(f"l{user}") for user in range(30))
            return sum(each.region.length for each in computed if each is not None and each.region is not None)

    assert begun(("search", "search")) == 30 * 64, "of one scenario, what is due first is computed first"
    assert begun(("search", "feed")) <= 5 * 64


def test_device_time_is_told_of_each_scenario() -> None:
    with world() as made:
        made.signal("s", 0, 64, scenario="feed")
        made.rank("full", 1, 64, scenario="search")
        made.settle()
        made.rank("s", 0, 64, scenario="feed")
        made.settle()
        now = made.handle(Query())
        assert isinstance(now, Snapshot)
        totals = now.scenarios
        assert totals["feed"]["pre_infer_ms"] > 0 and totals["search"]["full_ms"] > 0
        for name in ("pre_infer_ms", "ranking_ms", "full_ms"):
            assert sum(each[name] for each in totals.values()) == pytest.approx(now.totals[name])


def test_squares_of_device_time_are_those_of_whole_prefixes_and_of_each_ranking() -> None:
    squares, slices = {"prefix_ms2": 0.0, "ranking_ms2": 0.0}, 0
    with world() as made:
        for user, length in enumerate((192, 64)):
            before = made.scheduler.totals()
            made.signal(f"s{user}", user, length)
            while made.step():
                slices += 1
            made.rank(f"s{user}", user, length)
            made.settle()
            after = made.scheduler.totals()
            for spent, name in (("pre_infer_ms", "prefix_ms2"), ("ranking_ms", "ranking_ms2")):
                squares[name] += (after[spent] - before[spent]) ** 2
        assert slices > 2
        assert {name: after[name] for name in squares} == pytest.approx(squares)


# ---- waiting rankings ----


def test_the_scenario_with_most_memory_waiting_gives_way_though_each_of_its_clients_has_little() -> None:
    with world(limits=dataclasses.replace(LIMITS, waiting_bytes=1000)) as made:
        for number in range(10):
            made.rank(f"h{number}", number, 60, client=f"c{number}", nbytes=100, scenario="search")
        made.rank("mine", 11, 60, client="one", nbytes=300, scenario="feed")
        assert [(each.task.scenario, each.status) for each in made.answers] == 3 * [("search", "overloaded")]
        made.rank("more", 11, 60, client="other", nbytes=400, scenario="feed")
        assert made.answer("more").status == "overloaded", "its own scenario would have as much"
        made.settle()
        assert made.answer("mine").status == "ok"


# ---- what announced requests pin ----


def test_a_scenario_that_pins_all_makes_room_for_another_up_to_the_half() -> None:
    with world(hbm=14, limits=LIMITED) as made:
        for user in range(8):
            made.signal(f"l{user}", user, 64, scenario="search", tenant=f"t{user}")
        assert pinned(made) == {"search": FOOTPRINT}
        for user in range(8):
            made.signal(f"q{user}", user, 64, scenario="feed", tenant="shop")
        assert pinned(made) == {"search": FOOTPRINT / 2, "feed": FOOTPRINT / 2}
        assert [request for request in made.scheduler.pins._pins if request.endswith("l0")], "the latest gave way"
        made.settle()


def test_of_one_scenario_nobody_makes_room() -> None:
    with world(hbm=14, limits=LIMITED) as made:
        for user in range(8):
            made.signal(f"l{user}", user, 64, tenant=f"t{user}")
        made.signal("q", 9, 64, tenant="shop")
        assert [pin.request_id for pin in made.scheduler.pins._pins.values() if pin.charged == "shop"] == []
        made.settle()


def test_the_bytes_of_a_tenant_are_those_of_the_scenario_that_its_request_names() -> None:
    quotas = {"feed": 3 * GRANULE_BYTES, "search": GRANULE_BYTES}
    with world(hbm=14, limits=dataclasses.replace(LIMITED, tenant_bytes=quotas)) as made:
        for user in range(5):
            made.signal(f"s{user}", user, 64, scenario="search", tenant="shop")
            made.signal(f"f{user}", 10 + user, 64, scenario="feed", tenant="shop")
        assert pinned(made) == {"search": GRANULE_BYTES, "feed": 3 * GRANULE_BYTES}
        assert made.scheduler.signals.counters.signal_over_quota == 6
        made.settle()


SIGNALS = st.tuples(st.just("signal"), st.integers(0, 9), st.integers(1, MAX_TOKENS), st.booleans())
RANKINGS = st.tuples(st.just("rank"), st.integers(0, 9), st.integers(1, MAX_TOKENS), st.just(False))
STEPS = st.tuples(st.just("work"), st.just(0), st.integers(1, 8), st.just(False))
WAITS = st.tuples(st.just("wait"), st.just(0), st.integers(1, 20), st.just(False))


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.one_of(SIGNALS, RANKINGS, STEPS, WAITS)), max_size=30))
def test_whatever_they_do_the_books_hold_and_who_has_least_is_not_refused_for_who_has_most(
    steps: list[tuple[str, tuple[str, int, int, bool]]],
) -> None:
    with world(hbm=14, limits=LIMITED) as made:
        for number, (scenario, (what, user, amount, delegated)) in enumerate(steps):
            request = f"{scenario}{number}"
            if what == "signal":
                lane = DELEGATED_LANE if delegated else None
                made.signal(request, user, amount, tenant=scenario, scenario=scenario, lane=lane)
                if made.placed and made.placed[-1].result == "over_delegated":
                    held, most = pinned(made, delegated=True), made.cache.nbytes(amount)
                    rich = [name for name in held if name != scenario and held[name] > held[scenario] + most]
                    pins = [pin for pin in made.scheduler.pins._pins.values() if pin.scenario in rich]
                    assert not [pin for pin in pins if pin.lane == DELEGATED_LANE and pin.entry.pins == 1]
            elif what == "rank":
                made.rank(request, user, amount, tenant=scenario, scenario=scenario)
            elif what == "wait":
                made.now += amount / 10
                made.step()
            else:
                for _ in range(amount):
                    made.step()
            made.scheduler.check_integrity()
            for kind in (False, True):
                for name, nbytes in pinned(made, delegated=kind).items():
                    assert nbytes <= made.scheduler.pins._scenarios.bytes_of((name, kind))
        made.settle()
        made.now += 10
        made.step()
        assert not [*made.scheduler.pins._scenarios]
