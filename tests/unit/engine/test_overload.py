"""Rankings under overload, in simulated time: answered in time or `overloaded` at once, and nobody refused in vain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.engine.clients import Account, Clients
from relaygr_stream.engine.commands import Measured, Rank, RankTask, Times
from relaygr_stream.engine.forecast import (
    ALONE_DEADLINE_FACTOR,
    FORWARDED_DEADLINE_FRACTION,
    MIN_SAMPLES,
    Calibration,
    Forecast,
    Full,
)
from relaygr_stream.engine.ranking import QUEUED_DEADLINE_FRACTION, Ranking
from relaygr_stream.engine.scheduler import Limits
from relaygr_stream.models.api import RankingModel, ScoreInput, Tokens
from relaygr_stream.models.kv import KVRegion
from tests.unit.engine.worlds import LIMITS, World

USERS, TOKENS, TIMEOUT_S = 3, 60, 0.03
#: What the simulated device takes: a ranking 1 ms alone and 0.55 ms in a batch of four, a prefix token 0.02 ms.
BATCH_MS, RANKING_MS, TOKEN_MS = 0.6, 0.4, 0.02
CAPACITY_PER_S = 4 / (BATCH_MS + 4 * RANKING_MS) * 1e3


class Timed:
    """A model whose operations take simulated time; `now` is the clock."""

    def __init__(self, model: RankingModel) -> None:
        self.model = model
        self.now = 100.0
        self.batch_ms, self.ranking_ms, self.token_ms = BATCH_MS, RANKING_MS, TOKEN_MS
        self.batches: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        self.model.prefill(kv, tokens)
        self.now += len(tokens) * self.token_ms / 1e3

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        self.now += (self.batch_ms + self.ranking_ms * len(batch)) / 1e3
        self.batches.append(len(batch))
        return self.model.score(batch)


class Zeros:
    """A model that computes nothing. What is answered, and when, does not depend on scores."""

    def __init__(self, model: RankingModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        kv.length += len(tokens)

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        return [torch.zeros(len(one.candidates), len(self._model.tasks)) for one in batch]


def idle(model: RankingModel) -> Any:
    """A device that takes its time and computes nothing."""
    return Timed(Zeros(model))


class Simulation:
    """A world on the clock of its device."""

    def __init__(self, limits: Limits = LIMITS, **options: Any) -> None:
        self.world = World(wrap=idle, clock=lambda: self.device.now, limits=limits, **options)
        self.device: Timed = self.world.model  # type: ignore[assignment]
        for user in range(USERS):
            self.world.signal(f"s{user}", user, TOKENS, life=1e6)
        while self.world.step(self.device.now):
            pass
        self.sent = 0

    def rank(self, timeout: float = TIMEOUT_S, client: str = "", scenario: str = "") -> RankTask:
        self.world.now = self.device.now
        self.sent += 1
        return self.world.rank(
            f"r{self.sent}", self.sent % USERS, TOKENS, timeout=timeout, client=client, scenario=scenario
        )

    def run(self, rate: float, requests: int, seed: int, timeout: float = TIMEOUT_S) -> tuple[list[RankTask], int]:
        """Poisson arrivals; the rankings sent, and how many were answered `overloaded` as they came."""
        rng = np.random.default_rng(seed)
        at, tasks, refused = self.device.now, [], 0
        for _ in range(requests):
            at += rng.exponential(1 / rate)
            while self.device.now < at:
                if not self.world.step(self.device.now):
                    self.device.now = at
            before = len(self.world.answers)
            tasks.append(self.rank(timeout))
            refused += [answer.status for answer in self.world.answers[before:]] == ["overloaded"]
        while self.world.step(self.device.now):
            pass
        return tasks, refused

    def statuses(self, tasks: list[RankTask]) -> list[str]:
        found = {answer.task: answer.status for answer in self.world.answers}
        return [found[task] for task in tasks]


def test_at_twice_its_capacity_what_is_accepted_is_answered_in_time() -> None:
    seed = 1
    simulation = Simulation()
    simulation.run(0.5 * CAPACITY_PER_S, 100, seed)
    begun = simulation.device.now
    tasks, refused = simulation.run(2 * CAPACITY_PER_S, 600, seed)
    statuses = simulation.statuses(tasks)
    assert statuses.count("overloaded") == refused, "refused, but not as it came"
    assert 0.3 * len(tasks) < refused < 0.6 * len(tasks)
    accepted = [task for task, status in zip(tasks, statuses, strict=True) if status != "overloaded"]
    late = [
        task
        for task in accepted
        if statuses[tasks.index(task)] != "ok" or finished(simulation.world.measured(task)) > task.deadline
    ]
    assert len(late) <= 0.01 * len(accepted)
    served_per_s = len(accepted) / (simulation.device.now - begun)
    assert served_per_s > 0.9 * CAPACITY_PER_S, "refused what could have been served"


def finished(measured: Measured) -> float:
    return measured.started + measured.device_ms / 1e3


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_below_its_capacity_nothing_is_refused(load: float) -> None:
    simulation = Simulation()
    tasks, _ = simulation.run(load * CAPACITY_PER_S, 400, seed=1)
    assert set(simulation.statuses(tasks)) == {"ok"}


def test_nothing_is_refused_before_predictions_were_compared_with_measurements() -> None:
    simulation = Simulation()
    tasks = [simulation.rank() for _ in range(60)]
    assert not simulation.world.answers
    while simulation.world.step(simulation.device.now):
        pass
    assert "overloaded" not in simulation.statuses(tasks)


def test_a_cost_model_that_is_ten_times_too_high_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation()
    costs = simulation.world.executor.costs
    true = costs.score_ms
    monkeypatch.setattr(costs, "score_ms", lambda prefix, rows: 10 * true(prefix, rows))
    tasks, _ = simulation.run(0.7 * CAPACITY_PER_S, 400, seed=2)
    assert set(simulation.statuses(tasks)) == {"ok"}


def test_a_full_inference_that_cannot_be_in_time_is_refused_as_it_comes() -> None:
    simulation = Simulation()
    simulation.run(0.5 * CAPACITY_PER_S, 100, seed=3)
    world = simulation.world
    for number in range(MIN_SAMPLES):
        world.now = simulation.device.now
        world.rank(f"f{number}", 5, TOKENS, full=True)
        while world.step(simulation.device.now):
            pass
    spent = simulation.device.now
    world.now = spent
    world.rank("hopeless", 5, 150, full=True, timeout=0.001)
    assert world.answer("hopeless").status == "overloaded"
    assert "and 1 ms are left" in world.answer("hopeless").detail
    assert not world.step(simulation.device.now)
    assert simulation.device.now == spent
    world.rank("possible", 5, 150, full=True, timeout=0.01)
    while world.step(simulation.device.now):
        pass
    assert world.answer("possible").status == "ok"


# ---- the arithmetic ----


def waiting(deadline: float, expected_ms: float, *, guest: bool = False) -> Ranking:
    nothing = Tokens(np.zeros((3, 0), np.int64))
    task = RankTask("r", "u", 0, nothing, nothing, np.zeros(1, np.int64), Times(0.0, deadline, deadline), full=False)
    made = Ranking(Rank(task))
    made.booking.expected_ms, made.booking.guest = expected_ms, guest
    return made


def test_a_forecast_counts_what_comes_before_and_protects_what_was_accepted() -> None:
    forecast = Forecast()
    first, last = waiting(0.010, 6.0), waiting(0.030, 8.0)
    for task in (last, first):
        assert not forecast.full(task, 0.0)
        forecast.add(task)
    full = forecast.full(waiting(0.009, 5.0), 0.0)
    assert full == Full("ms", "its 5 ms would make a ranking late that was accepted before it", 0.010)
    assert not forecast.full(waiting(0.009, 3.0), 0.0)
    assert not forecast.full(waiting(0.020, 12.0), 0.0)
    assert "before it take 6 ms" in str(forecast.full(waiting(0.020, 15.0), 0.0))
    first.measured.device_ms = 6.0
    forecast.worked(first)
    assert not forecast.full(waiting(0.020, 15.0), 0.0)
    forecast.remove(first)
    forecast.remove(last)
    assert not forecast.full(waiting(0.020, ALONE_DEADLINE_FACTOR * 20.0), 0.0)
    assert forecast.full(waiting(0.020, ALONE_DEADLINE_FACTOR * 20.0 + 1.0), 0.0)


def test_the_last_places_of_a_queue_are_for_no_one_and_those_before_for_its_own() -> None:
    forecast = Forecast()
    forecast.add(waiting(0.010, 8.0))
    own = QUEUED_DEADLINE_FRACTION * 20.0 - 8.0
    assert not forecast.full(waiting(0.020, own - 0.1), 0.0)
    assert forecast.full(waiting(0.020, own + 0.1), 0.0)
    guests = FORWARDED_DEADLINE_FRACTION * 20.0 - 8.0
    assert not forecast.full(waiting(0.020, guests - 0.1, guest=True), 0.0)
    assert forecast.full(waiting(0.020, guests + 0.1, guest=True), 0.0)


@pytest.mark.parametrize(("user", "hops", "guest"), [(1, 0, False), (1, 1, False), (9, 0, False), (9, 1, True)])
def test_only_a_ranking_that_another_worker_could_answer_as_well_is_a_guest(user: int, hops: int, guest: bool) -> None:
    """One that was passed on to its prefix KV would be inferred in full anywhere else."""
    world = Simulation().world
    task = world.rank("r", user, TOKENS, hops=hops)
    assert world.waiting(task).booking.guest is guest


def test_a_ranking_that_is_late_anyway_is_no_reason_to_refuse_others() -> None:
    forecast = Forecast()
    forecast.add(waiting(0.010, 50.0))
    assert not forecast.full(waiting(0.005, 1.0), 0.0)


def test_a_calibration_corrects_and_does_not_believe_in_hangs() -> None:
    calibration = Calibration()
    for _ in range(MIN_SAMPLES - 1):
        calibration.add(2.0, 1.0)
    assert (calibration.trusted, calibration.factor) == (False, 1.0)
    calibration.add(2.0, 1.0)
    assert (calibration.trusted, calibration.factor) == (True, 0.5)
    calibration.add(2.0, 1e6)
    assert calibration.factor < 1.0


@pytest.mark.parametrize(("batch_ms", "ranking_ms", "largest"), [(BATCH_MS, RANKING_MS, 4), (0.1, 0.9, 2)])
def test_bursts_are_scored_together_where_that_is_sooner(batch_ms: float, ranking_ms: float, largest: int) -> None:
    simulation = Simulation()
    simulation.device.batch_ms, simulation.device.ranking_ms = batch_ms, ranking_ms
    simulation.run(500, 200, seed=4)
    simulation.device.batches.clear()
    for _ in range(12):
        simulation.rank(timeout=1.0)
    while simulation.world.step(simulation.device.now):
        pass
    assert simulation.device.batches == [largest] * (12 // largest)


def test_what_a_slow_spell_taught_does_not_refuse_rankings_for_ever() -> None:
    """Only what is scored is measured: an idle worker answered `overloaded` from then on."""
    simulation = Simulation()
    device = simulation.device
    usual, timeout_s = (1.0, 14.0), 0.2
    device.batch_ms, device.ranking_ms = usual
    simulation.run(5.0, 40, seed=3, timeout=timeout_s)
    device.batch_ms, device.ranking_ms = (15 * ms for ms in usual)
    simulation.run(5.0, 25, seed=4, timeout=timeout_s)
    device.batch_ms, device.ranking_ms = usual
    after, refused = simulation.run(5.0, 400, seed=5, timeout=timeout_s)
    assert refused, "the spell did not teach it anything"
    assert set(simulation.statuses(after[-100:])) == {"ok"}


def test_rankings_that_are_rightly_refused_cost_others_nothing() -> None:
    """Some need 180 ms of inference and have 60, on a device that is idle for most of the time."""
    simulation = Simulation()
    world, device = simulation.world, simulation.device
    device.token_ms = 3.0
    hits: list[RankTask] = []
    misses: list[RankTask] = []

    def miss(timeout: float) -> None:
        world.now = device.now
        misses.append(world.rank(f"m{len(misses)}", len(misses) % USERS, TOKENS, timeout=timeout, full=True))

    for _ in range(2 * MIN_SAMPLES):
        miss(10.0)
        while world.step(device.now):
            pass
    for _ in range(80):
        miss(0.06)
        tasks, _ = simulation.run(60.0, 4, seed=len(misses))
        hits += tasks
    statuses = simulation.statuses(misses[2 * MIN_SAMPLES :])
    assert set(simulation.statuses(hits)) == {"ok"}
    assert statuses.count("overloaded") > 0.9 * len(statuses)


@given(
    tasks=st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 12), st.sampled_from("abc"), st.integers(0, 12)), max_size=25
    ),
    deadline=st.integers(1, 70), own=st.integers(1, 12), client=st.sampled_from("abc"), guest=st.booleans(),
)  # fmt: skip
def test_a_forecast_says_what_a_walk_over_all_waiting_rankings_would(
    tasks: list[tuple[int, int, str, int]], deadline: int, own: int, client: str, guest: bool
) -> None:
    clients = Clients(20.0)
    forecast = Forecast(clients)
    accounts = {name: clients.account(name) for name in "abc"}
    accounts["a"].served_ms = 7.0
    everyone = []
    for number, (at, work, name, done) in enumerate(tasks):
        task = waiting(at / 1e3, float(work))
        task.booking.account, task.booking.number = accounts[name], number
        forecast.add(task)
        task.measured.device_ms = float(done)
        forecast.worked(task)
        everyone.append(task)
    asked = waiting(deadline / 1e3, float(own) - 0.25, guest=guest)  # off what deadlines are compared with
    asked.booking.account = accounts[client]
    assert forecast.full(asked, 0.0) == walked(everyone, asked, clients)


def walked(tasks: list[Ranking], task: Ranking, clients: Clients) -> Full | None:
    """`Forecast.full` at time 0, from the definition."""
    left, own = task.deadline * 1e3, task.booking.expected_ms
    if not tasks:
        late = own > ALONE_DEADLINE_FACTOR * left
        return Full("ms", f"it takes {own:.0f} ms, and {left:.0f} ms are left", hopeless=True) if late else None
    sure = left * (FORWARDED_DEADLINE_FRACTION if task.booking.guest else QUEUED_DEADLINE_FRACTION)
    before: dict[Account, float] = {}
    total = 0.0
    for each in sorted(tasks, key=lambda each: (each.deadline, each.booking.number)):
        work = max(0.0, each.booking.expected_ms - each.measured.device_ms)
        total += work
        if each.deadline <= task.deadline:
            before[each.booking.account] = before.get(each.booking.account, 0.0) + work
        elif 0.0 <= each.deadline * 1e3 - total < own:
            reason = f"its {own:.0f} ms would make a ranking late that was accepted before it"
            return Full("ms", reason, each.deadline)
    mine = before.pop(task.booking.account, 0.0)
    until = max(task.booking.account.served_ms, clients.whole.floor_ms) + mine + own + clients.slack_ms
    ahead = mine + sum(min(work, max(0.0, until - other.served_ms)) for other, work in before.items())
    if ahead + own <= (sure if ahead else ALONE_DEADLINE_FACTOR * left):
        return None
    reason = f"the rankings before it take {ahead:.0f} ms, it takes {own:.0f} ms, and {left:.0f} ms are left"
    return Full("ms", reason, task.deadline, hopeless=mine + own > sure)
