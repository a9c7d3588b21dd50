"""Due times: what can be done by the SLO comes first; what cannot gets the time that is left, or is refused early."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.engine.clients import Clients
from relaygr_stream.engine.commands import REPLY_SHARE, Rank, RankTask, Times
from relaygr_stream.engine.forecast import IDLE_S, AnswerWay, Forecast, IdleShare
from relaygr_stream.engine.queue import WorkQueue
from relaygr_stream.engine.ranking import QUEUED_DEADLINE_FRACTION
from relaygr_stream.engine.scheduler import Limits
from tests.unit.engine.test_overload import BATCH_MS, CAPACITY_PER_S, RANKING_MS, TOKENS, USERS, Simulation, waiting
from tests.unit.engine.test_queue import job, ranking
from tests.unit.engine.worlds import GRANULE_BYTES, LIMITS

#: An answer that leaves REPLY_S before the SLO ends is with its caller within it.
SLO_S, REPLY_S, TIMEOUT_S = 0.03, 0.002, 1.0
#: LIMITS would bound the queue, whatever is due.
ROOMY = dataclasses.replace(LIMITS, queue_limit=2048)
#: A device that takes so many times as long: fewer rankings overload it for longer than its idle time is averaged.
SLOWER = 4


class Served(Simulation):
    """A simulation of callers who wait much longer than the SLO. As the worker's core does where no other worker has
    time, it hands what is refused in again, as late."""

    timeout_s = TIMEOUT_S

    def __init__(self, limits: Limits = LIMITS, **options: Any) -> None:
        super().__init__(limits, **options)
        self.ends: dict[RankTask, tuple[str, float]] = {}  # status, seconds since its arrival
        self._seen = 0

    def ask(self, length: int = TOKENS, *, user: int | None = None, full: bool = False) -> RankTask:
        world, now = self.world, self.device.now
        world.now = now
        self.sent += 1
        task = world.ranking(
            f"r{self.sent}",
            self.sent % USERS if user is None else user,
            length,
            full=full,
            timeout=self.timeout_s,
            due=SLO_S - REPLY_S,
        )
        world.handle(Rank(task))
        self.look()
        return task

    def step(self) -> bool:
        worked = self.world.step(self.device.now)
        self.look()
        return worked

    def look(self) -> None:
        while self._seen < len(self.world.answers):
            answer = self.world.answers[self._seen]
            self._seen += 1
            if answer.status == "overloaded" and answer.retry_late and not answer.rank.late:
                self.world.now = self.device.now
                self.world.handle(answer.rank._replace(late=True))
            else:
                assert answer.task not in self.ends, "two answers"
                self.ends[answer.task] = (answer.status, self.device.now - answer.task.arrived)

    def until(self, at: float) -> None:
        while self.device.now < at:
            if not self.step():
                timer = self.world.scheduler.next_timer()
                self.device.now = min(at, max(self.device.now + 1e-6, math.inf if timer is None else timer))

    def load(self, rate: float, requests: int, seed: int = 1) -> list[RankTask]:
        rng, at, tasks = np.random.default_rng(seed), self.device.now, []
        for _ in range(requests):
            at += rng.exponential(1 / rate)
            self.until(at)
            tasks.append(self.ask())
        self.until(self.device.now + 2 * TIMEOUT_S)
        return tasks

    def good(self, tasks: list[RankTask]) -> int:
        """How many had scores within the SLO."""
        ends = [self.ends[task] for task in tasks]
        return sum(status == "ok" and took <= SLO_S for status, took in ends)


@pytest.mark.parametrize("load", [1.1, 3.0])
def test_goodput_stays_when_more_comes_than_the_device_can_carry(load: float) -> None:
    """Callers wait for a second, 33 SLOs: by their timeouts alone, everything would be late."""
    served, capacity_per_s = Served(ROOMY), CAPACITY_PER_S / SLOWER
    served.device.batch_ms, served.device.ranking_ms = SLOWER * BATCH_MS, SLOWER * RANKING_MS
    served.load(0.5 * capacity_per_s, 60)
    begun = served.device.now
    tasks = served.load(load * capacity_per_s, 900)
    lasted = max(task.arrived for task in tasks) - begun
    assert served.good(tasks) / lasted >= 0.9 * capacity_per_s
    later = [served.ends[task] for task in tasks if task.arrived > begun + 2 * IDLE_S]  # the share of idle time follows
    refused = sorted(took for status, took in later if status != "ok")
    assert refused and refused[int(0.99 * len(refused))] <= SLO_S, "refused, but late"


@pytest.mark.parametrize("load", [1.5, 3.0])
@pytest.mark.parametrize("head_start_s", [0.3 * SLO_S, 2 * SLO_S])
def test_under_overload_the_prefixes_of_rankings_that_are_refused_are_not_computed(
    load: float, head_start_s: float
) -> None:
    """They wait behind rankings in time, and a ranking that would not be is refused before its prefix is begun."""
    served = Served(dataclasses.replace(ROOMY, pinned_bytes=400 * GRANULE_BYTES), hbm=500)
    world, device = served.world, served.device
    device.token_ms = 0.15
    needs_s = (TOKENS * device.token_ms + BATCH_MS + RANKING_MS) / 1e3
    came = np.cumsum(np.random.default_rng(4).exponential(needs_s / load, 300)) + device.now
    comes = [(at, True, user) for user, at in enumerate(came.tolist(), USERS)]
    comes += [(at + head_start_s, False, user) for at, _, user in comes]
    tasks: list[RankTask] = []
    for at, announced, user in sorted(comes):
        served.until(at)
        if announced:
            world.now = device.now
            world.signal(f"r{user - USERS + 1}", user, TOKENS, due_s=head_start_s, life=TIMEOUT_S)
        else:
            tasks.append(served.ask(user=user))
    served.until(device.now + 2 * TIMEOUT_S)
    refused = {task.request_key for task in tasks if served.ends[task][0] != "ok"}
    vain_ms = sum(each.device_ms for each in world.placed if each.task.request_key in refused)
    time = world.scheduler.time
    assert len(refused) > 0.2 * len(tasks), "the device had time for all: no test"
    assert vain_ms <= 0.02 * (time.pre_infer_ms + time.full_ms)


class Starved(Served):
    """The device's thread waits for a processor before each step, about as long as the device works."""

    timeout_s = 0.2

    def step(self) -> bool:
        if self.world.scheduler.works:
            self.device.now += BATCH_MS * 3e-3
        return super().step()


def test_under_overload_the_time_that_the_thread_waits_for_a_processor_is_not_idle_time() -> None:
    """No late ranking gets it: one that were admitted to it would be refused long after its SLO."""
    served = Starved()
    served.load(0.1 * CAPACITY_PER_S, 50)
    tasks = served.load(0.8 * CAPACITY_PER_S, 1400)[700:]  # before, the share of idle time still follows the load
    refused = sorted(took for status, took in map(served.ends.__getitem__, tasks) if status != "ok")
    assert len(refused) > 100, "the device had time for all: no test"
    assert refused[int(0.99 * len(refused))] <= SLO_S, "refused, but late"


def test_a_refusal_says_whether_to_hand_the_ranking_in_again() -> None:
    """Under overload that would take another turn of the device, and end in the same answer."""
    served = Served()
    tasks = set(served.load(1.5 * CAPACITY_PER_S, 1600)[1200:])  # before, the share of idle time still follows the load
    answers = [each for each in served.world.answers if each.task in tasks and not each.rank.late]
    retried = [each.retry_late for each in answers if each.status == "overloaded"]
    assert len(retried) > 50 and not any(retried)
    served = measured_slow()
    served.ask(full=True)
    first = served.world.answers[-1]
    assert first.status == "overloaded" and first.retry_late, "the device has time"


def test_after_an_overload_the_next_rankings_are_in_time_again() -> None:
    served = Served(ROOMY)
    served.load(0.5 * CAPACITY_PER_S, 100)
    rng, at = np.random.default_rng(2), served.device.now
    for _ in range(300):
        at += rng.exponential(1 / (3 * CAPACITY_PER_S))
        served.until(at)
        served.ask()
    served.until(at + 2 * SLO_S)
    calm = served.load(0.3 * CAPACITY_PER_S, 100)
    assert served.good(calm) == len(calm)


def measured_slow() -> Served:
    """Full inference takes two SLOs, and has been measured."""
    served = Served()
    served.device.token_ms = 1.0
    served.load(0.5 * CAPACITY_PER_S, 100)
    for _ in range(30):
        served.ask(full=True)
        served.until(served.device.now + 4 * SLO_S)
    return served


def test_one_that_takes_longer_than_the_slo_gets_the_time_that_others_leave() -> None:
    served = measured_slow()
    slow = [served.ask(full=True) for _ in range(2)]
    quick = [served.ask() for _ in range(4)]
    served.until(served.device.now + TIMEOUT_S)
    assert [served.ends[task][0] for task in (*slow, *quick)] == ["ok"] * 6
    assert served.good(quick) == 4, "rankings that can be in time wait for one that cannot"


def test_a_late_ranking_learns_soon_that_others_leave_it_no_time_any_more() -> None:
    served = measured_slow()
    slow = [served.ask(full=True) for _ in range(3)]
    served.load(1.5 * CAPACITY_PER_S, 2250)  # for 0.8 s
    refused = [served.ends[task] for task in slow if served.ends[task][0] != "ok"]
    assert refused, "the device had time for all: no test"
    assert all(status == "overloaded" and took < 0.6 * TIMEOUT_S for status, took in refused), refused


@pytest.mark.parametrize("waiting", [2, 3, 20])
def test_what_is_not_begun_in_time_is_refused_before_it_is_due_while_others_can_be(waiting: int) -> None:
    """The device has hung until nine tenths of their time are over; a refusal at their due time would come too late."""
    served = Served()
    served.load(0.5 * CAPACITY_PER_S, 100)
    tasks = [served.ask() for _ in range(waiting)]
    assert not any(task in served.ends for task in tasks)
    served.device.now += QUEUED_DEADLINE_FRACTION * (SLO_S - REPLY_S) + 1e-6
    served.step()
    refused = [each for each in served.world.answers if each.task in tasks and each.status == "overloaded"]
    assert len(refused) == waiting - 1, "the last one keeps nobody else waiting"
    served.until(served.device.now + TIMEOUT_S)
    assert [served.ends[task][0] for task in tasks] == ["ok"] * waiting, "in idle time, as nobody else comes"


def test_a_ranking_that_its_device_has_begun_is_refused_as_soon_as_what_is_left_of_it_takes_too_long() -> None:
    """The device becomes four times as slow: at its due time, a refusal would come too late."""
    served = Served()
    served.device.token_ms = 0.1
    served.load(0.5 * CAPACITY_PER_S, 60)
    for _ in range(30):
        served.ask(150, full=True)
        served.until(served.device.now + SLO_S)
    served.world.scheduler.admission.idle.works(served.device.now, first=True)
    served.device.now += 10 * IDLE_S  # rankings leave no time
    task = served.ask(150, full=True)
    while served.device.now < task.arrived + 0.004:
        served.step()
    assert task not in served.ends
    served.device.token_ms = 0.4
    served.until(task.due + SLO_S)
    status, took = served.ends[task]
    assert status == "overloaded" and took < 0.9 * (task.due - task.arrived)


def test_without_predictions_a_late_ranking_does_not_wait_for_a_device_without_time_either() -> None:
    """Nothing of its kind has been measured, so that its work counts as none: it is refused all the same."""
    served = Served()
    served.load(0.5 * CAPACITY_PER_S, 100)
    served.device.token_ms = 1.0  # full inference takes two SLOs, and nothing is known of it
    slow = [served.ask(full=True) for _ in range(6)]
    served.load(1.5 * CAPACITY_PER_S, 2250)  # for 0.8 s
    refused = [served.ends[task] for task in slow if served.ends[task][0] != "ok"]
    assert refused, "the device had time for all: no test"
    assert all(status == "overloaded" and took < 0.8 * TIMEOUT_S for status, took in refused), refused


def test_a_worker_that_starts_into_an_overload_learns_what_rankings_take_and_refuses_the_rest() -> None:
    """Nothing is predicted at first, so all are admitted: were each given up when due, none would ever be measured."""
    served = Served()
    served.device.token_ms, takes_s = 0.4, 0.025  # full inference: most of an SLO
    rng, at, tasks = np.random.default_rng(3), served.device.now, []
    for _ in range(500):
        at += rng.exponential(takes_s / 8)
        served.until(at)
        tasks.append(served.ask(full=True))
    served.until(at + 2 * TIMEOUT_S)
    later = tasks[250:]
    assert served.good(later) >= 0.45 * (later[-1].arrived - later[0].arrived) / takes_s


@given(st.floats(1.0, 1e5), st.floats(1.0, 1e5), st.floats(0.0, 1e3), st.floats(0.0, 1e4))
def test_a_ranking_is_due_no_later_than_its_deadline(timeout: float, slo: float, reply: float, age: float) -> None:
    times = Times.from_timeout(10.0, timeout, slo, reply, age)
    assert times.due <= times.deadline


def test_a_caller_who_waits_for_less_than_the_slo_is_due_then() -> None:
    times = Times.from_timeout(10.0, 20.0, slo_ms=50.0, reply_ms=5.0, age_ms=3.0)
    assert (times.deadline, times.due) == pytest.approx((10.0 + 0.013, 10.0 + 0.013))
    times = Times.from_timeout(10.0, 1000.0, slo_ms=50.0, reply_ms=5.0, age_ms=3.0)
    assert (times.deadline, times.due) == pytest.approx((10.0 + 0.992, 10.0 + 0.042))


@given(st.floats(10.0, 30.0), st.integers(1, 100))
def test_of_twenty_answers_about_one_takes_longer_than_what_is_kept_for_their_way(usual_ms: float, seed: int) -> None:
    way, rng = AnswerWay(), np.random.default_rng(seed)
    longer = 0
    for number in range(4000):
        ms = usual_ms * rng.lognormal(0.0, 0.7)
        longer += number >= 1000 and ms > way.ms
        way.add(ms)
    assert 0.03 <= longer / 3000 <= 0.07
    for _ in range(1000):
        way.add(math.inf)  # no broker takes any
    assert way.ms <= REPLY_SHARE * 1000.0


def test_pre_inference_comes_after_rankings_in_time_and_before_late_ones() -> None:
    queue, ahead = WorkQueue(), job(1.0)
    late, soon = ranking("late", 9.0), ranking("soon", 9.0)
    late.is_late()
    queue.add(late)
    queue.add_background(ahead)
    queue.add(soon)
    assert queue.in_time.first() is soon and queue.late.first() is late and queue.background() is ahead


def test_a_job_is_as_late_as_the_rankings_that_wait_for_it() -> None:
    queue, first, second = WorkQueue(), ranking("first", 9.0), ranking("second", 9.0)
    shared = job(1.0, first)
    queue.add_background(shared)
    queue.add(first, shared)
    first.is_late()
    queue.add(first, shared)
    assert queue.in_time.first() is None and queue.late.first() is shared
    assert queue.background() is None, "nobody's pre-inference any more"
    shared.waiters.append(second)
    queue.add(second, shared)
    assert queue.in_time.first() is shared


@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 50.0)), max_size=20))
def test_the_idle_share_is_a_share_and_comes_back(worked: list[tuple[float, float]]) -> None:
    idle, now = IdleShare(), 0.0
    for pause, ms in worked:
        now += pause
        idle.works(now, first=True)
        now += ms / 1e3
        idle.works(now, first=False)
        assert 0.0 <= idle.share(now) <= 1.0
    assert idle.share(now + 40 * IDLE_S) == pytest.approx(1.0)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 12), st.sampled_from("ab")), min_size=1, max_size=20),
    st.sampled_from([0.0, 0.125, 0.5, 1.0]),
    st.data(),
)
def test_a_late_ranking_that_waits_is_told_what_it_would_be_if_it_came_now(
    tasks: list[tuple[int, int, str]], idle: float, data: st.DataObject
) -> None:
    """It is asked about several times while it waits, and stays where it is."""
    clients = Clients(20.0)
    accounts = {name: clients.account(name) for name in "ab"}
    forecast, everyone = Forecast(clients), []
    for number, (at, work, name) in enumerate(tasks):
        everyone.append(waiting(at / 1e3, float(work)))
        everyone[-1].booking.account, everyone[-1].booking.number = accounts[name], number
        forecast.add(everyone[-1])
    asked = data.draw(st.sampled_from(everyone))
    told = forecast.full_when_idle(asked, 0.0, idle, waits=True)
    forecast.remove(asked)
    assert told == forecast.full_when_idle(asked, 0.0, idle)
