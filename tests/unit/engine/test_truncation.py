"""Rankings that are cut to their newest behaviours (worker.truncate_to), in simulated time."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.cache.entry import Coverage
from relaygr_stream.engine.admission import Admission
from relaygr_stream.engine.commands import Rank, RankTask
from relaygr_stream.engine.forecast import MIN_SAMPLES, Forecast
from relaygr_stream.engine.ranking import QUEUED_DEADLINE_FRACTION, Ranking
from relaygr_stream.models.api import ScoreInput, Tokens, relative_deviation
from relaygr_stream.models.kv import KVRegion
from tests.properties import examples
from tests.unit.engine.test_overload import Timed, finished, idle
from tests.unit.engine.worlds import CONTEXTUAL, LIMITS, World

NEWEST = 16
#: Of the simulated device: full inference of 180 behaviours takes 4.6 ms. Nine tenths of 3 ms hold 85 of them.
LENGTH, TIMEOUT_S, FITTING = 180, 0.003, 80


class Device:
    """A worker's core on the clock of its simulated device, with predictions that have proved good.

    What it refuses comes back as late: no other worker has it in time. compared: how many predictions were compared
    with what was measured.
    """

    def __init__(self, newest: int, compared: int = 2 * MIN_SAMPLES, **options: Any) -> None:
        limits = replace(LIMITS, truncate_to=newest)  # without DRAM, whose copies take real time
        options = {"wrap": Timed, "limits": limits, "dram": 0, **options}
        self.world = World(clock=lambda: self.timed.now, **options)
        self.timed: Timed = self.world.model  # type: ignore[assignment]
        scratch = self.world.cache.scratch.borrow()
        self.world.executor.warm_up(scratch)  # as a worker's start does
        self.world.cache.scratch.give_back(scratch)
        for number in range(compared):
            self.rank(f"first {number}", 1000 + number, 32 * (1 + number % 5), timeout=100.0)
            self.rest()

    def rank(self, request: str, user: int, length: int, **options: Any) -> RankTask:
        """A ranking that arrives now, whose suffix is `suffix` behaviours of different items."""
        self.world.now = self.timed.now
        suffix, whole = options.pop("suffix", 3), options.pop("whole", False)
        behind = Tokens(np.stack([np.arange(suffix) + 11, np.arange(suffix) % 5, np.arange(suffix) + 99]))
        task = self.world.ranking(request, user, length, **options)
        task = msgspec.structs.replace(task, suffix=behind)
        self.world.handle(Rank(task, whole=whole))
        if (answers := self.world.answers) and answers[-1].task is task and answers[-1].status == "overloaded":
            answers.pop()
            self.world.handle(Rank(task, late=True, whole=whole))
        return task

    def rest(self) -> None:
        while self.world.step(self.timed.now):
            pass

    def status(self, request: str) -> tuple[str, str | None, int]:
        """Status, outcome and length of the cut."""
        answer = self.world.answer(request)
        return answer.status, answer.measured.outcome, answer.measured.truncated_to


def in_full(world: World, tokens: npt.NDArray[np.int64], candidates: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Scores of full inference of these behaviours, in one piece."""
    length = tokens.shape[1]
    region = KVRegion.new(world.truth.layout, length)
    with torch.inference_mode():
        world.truth.prefill(region, Tokens(tokens))
        return world.truth.score([ScoreInput(region, Tokens.zeros(0), candidates)])[0].numpy()


@pytest.mark.parametrize(
    ("suffix", "timeout", "fitting"), [(3, TIMEOUT_S, FITTING), (20, 0.0015, 32), (20, 0.0012, 16)]
)
def test_scores_are_those_of_full_inference_of_the_newest_behaviours(suffix: int, timeout: float, fitting: int) -> None:
    device = Device(fitting)
    whole = device.world.ranking("whole", 1, LENGTH).tokens.array
    task = device.rank("r", 1, LENGTH, suffix=suffix, timeout=timeout)
    device.rest()
    assert device.status("r") == ("ok", "truncated", fitting)
    assert finished(device.world.measured(task)) <= task.deadline
    newest = np.arange(suffix) + 11, np.arange(suffix) % 5, np.arange(suffix) + 99
    kept = np.concatenate([whole, np.stack(newest)], axis=1)[:, -fitting:]
    kept[2, 0] = 0
    found = device.world.answer("r").scores
    assert found is not None
    assert relative_deviation(found, in_full(device.world, kept, task.candidates)) <= 1e-5


def test_what_was_cut_is_never_cached() -> None:
    device = Device(NEWEST)
    device.rank("cut", 1, LENGTH, timeout=TIMEOUT_S)
    device.rest()
    assert device.status("cut")[1] == "truncated"
    assert device.world.cache.find("u1", device.world.ranking("", 1, LENGTH).tokens)[0] is None
    assert device.world.cache.scratch.free
    later = device.rank("later", 1, LENGTH, timeout=1.0)
    device.rest()
    assert device.status("later") == ("ok", "full", 0)
    assert device.world.measured(later).computed_tokens == LENGTH
    device.rank("hit", 1, LENGTH, timeout=TIMEOUT_S)
    device.rest()
    assert device.status("hit") == ("ok", "hbm", 0)
    device.world.scheduler.check_integrity()


def test_what_must_not_be_cut_is_refused_as_without_the_setting() -> None:
    device = Device(NEWEST)
    device.rank("mode full", 1, LENGTH, timeout=TIMEOUT_S, full=True)
    device.rank("mode whole", 1, LENGTH, timeout=TIMEOUT_S, whole=True)
    device.rank("no time even so", 2, LENGTH, timeout=0.001)
    device.rank("no longer", 3, NEWEST - 3, timeout=0.0003)
    assert [answer.status for answer in device.world.answers[-4:]] == ["overloaded"] * 4
    assert all(answer.measured.truncated_to == 0 for answer in device.world.answers)
    contextual = Device(NEWEST, kind=CONTEXTUAL)  # its first tokens describe the user; the newest behaviours do not
    contextual.rank("r", 1, LENGTH, timeout=TIMEOUT_S, suffix=0)
    assert contextual.status("r") == ("overloaded", None, 0)


def test_nothing_is_cut_before_predictions_were_compared_with_measurements() -> None:
    device = Device(NEWEST, compared=MIN_SAMPLES - 1)
    for number in range(MIN_SAMPLES):  # predictions of prefill may be enough
        device.world.signal(f"signal {number}", 2000 + number, 32)
        device.rest()
    device.rank("r", 1, LENGTH, timeout=TIMEOUT_S)
    device.rest()
    assert device.world.answer("r").measured.truncated_to == 0


def test_audits_compare_no_cut_ranking() -> None:
    device = Device(NEWEST, audit_share=1.0)
    device.rank("r", 1, LENGTH, timeout=TIMEOUT_S)
    device.rest()
    assert device.status("r")[1] == "truncated"
    assert device.world.audits == []  # nor any in full; a hit is audited
    device.rank("again", 1000 + 2 * MIN_SAMPLES - 1, 32, timeout=1.0)  # the last that was inferred in full
    device.rest()
    assert device.status("again")[1] == "hbm"
    assert [task.request_id for task, _ in device.world.audits] == ["again"]


# ---- whatever comes ----

#: User, prefix, suffix, time until the deadline in ms, time since the ranking before in ms.
Arrivals = list[tuple[int, int, int, float, float]]
arrivals: st.SearchStrategy[Arrivals] = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.integers(0, 170),
        st.integers(0, 16),
        st.floats(0.5, 12.0),
        st.sampled_from((0.0, 0.5, 3.0)),
    ),
    min_size=1,
    max_size=25,
)


def play(device: Device, requests: Arrivals) -> list[tuple[str, str | None, int, float]]:
    """What became of each request: status, outcome, length of the cut, and when it was finished."""
    at, tasks = device.timed.now, []
    for number, (user, length, suffix, left_ms, pause_ms) in enumerate(requests):
        at += pause_ms / 1e3
        while device.timed.now < at:
            if not device.world.step(device.timed.now):
                device.timed.now = at
        tasks.append(device.rank(f"r{number}", user, length, suffix=suffix, timeout=left_ms / 1e3))
    device.rest()
    device.world.scheduler.check_integrity()
    return [(*device.status(task.request_id), finished(device.world.measured(task))) for task in tasks]


def expected_ms(admission: Admission, ranking: Ranking, newest: int) -> float:
    """What a ranking with these newest behaviours alone is booked with."""
    cut = Ranking(ranking.rank)
    cut.keep_newest(newest)
    admission.book(cut, (None, Coverage.NONE))
    return cut.booking.expected_ms


def in_time(admission: Admission, ranking: Ranking, ms: float, now: float) -> bool:
    """Whether it would be answered in time behind those that wait, if it took so long."""
    forecast = Forecast(admission.clients)
    for waiting in admission.waiting:
        forecast.add(waiting)
    return forecast.full(ranking, now, ms, alone=QUEUED_DEADLINE_FRACTION) is None


def checked_cuts(requests: Arrivals, newest: int) -> list[Ranking]:
    """The rankings that were cut: each is in time by the model's costs, and would not have been in full."""
    device = Device(newest, wrap=idle)
    admission = device.world.scheduler.admission
    truncate = admission.truncate
    cuts: list[Ranking] = []

    def checked(ranking: Ranking, now: float) -> bool:
        before = Ranking(ranking.rank)
        before.booking = copy(ranking.booking)
        ms, done = before.booking.expected_ms, truncate(ranking, now)
        if done and ranking.measured.truncated_to:
            assert ranking.measured.truncated_to == newest < len(before.tokens) + len(before.suffix)
            assert not in_time(admission, before, ms, now)
            ms = expected_ms(admission, before, newest)
            assert ranking.booking.expected_ms == ms
            assert now + ms / 1e3 < ranking.deadline
            cuts.append(ranking)
        assert done == in_time(admission, before, ms, now) or not before.booking.infers or not ms
        return done

    admission.truncate = checked  # type: ignore[method-assign]
    play(device, requests)
    for answer in device.world.answers:
        assert (answer.measured.outcome == "truncated") == (answer.measured.truncated_to > 0)
    return cuts


@settings(max_examples=examples(25), deadline=None)
@given(requests=arrivals, newest=st.sampled_from((8, 16, 48)))
def test_a_cut_is_in_time_by_the_models_costs_and_all_of_it_would_not_be(requests: Arrivals, newest: int) -> None:
    checked_cuts(requests, newest)


@pytest.mark.parametrize("newest", [8, 16])
def test_two_of_three_that_come_at_once_are_cut(newest: int) -> None:
    assert len(checked_cuts([(1, 170, 3, 12.0, 0.0), (2, 170, 3, 2.0, 0.0), (3, 170, 3, 2.9, 0.0)], newest)) == 2


@settings(max_examples=examples(12), deadline=None)
@given(requests=arrivals)
def test_a_worker_that_has_time_answers_as_without_the_setting(requests: Arrivals) -> None:
    in_time = [(user, length, suffix, 1000.0, pause) for user, length, suffix, _, pause in requests]
    assert play(Device(8, wrap=idle), in_time) == play(Device(0, wrap=idle), in_time)


def test_under_overload_more_are_answered_in_time() -> None:
    rng = np.random.default_rng(5)
    requests: Arrivals = [(2000 + each, 170, 3, 12.0, float(rng.exponential(2.0))) for each in range(300)]
    answered = {}
    for newest in (0, NEWEST):
        device = Device(newest, wrap=idle)
        found = play(device, requests)
        answered[newest] = [outcome for status, outcome, *_ in found if status == "ok"]
        assert {status for status, *_ in found} <= {"ok", "overloaded"}, "accepted, and late"
    print(
        f"in time: {len(answered[0])} of 300 in full; cut where needed {len(answered[NEWEST])}, "
        f"{answered[NEWEST].count('truncated')} of them truncated: {len(answered[NEWEST]) / len(answered[0]):.2f}×"
    )
    assert "truncated" not in answered[0]
    assert len(answered[NEWEST]) > 1.2 * len(answered[0])
