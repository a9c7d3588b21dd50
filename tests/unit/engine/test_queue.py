"""The order of the device's work."""

from __future__ import annotations

import numpy as np
import torch

from relaygr_stream.engine.commands import Rank, RankTask, Times
from relaygr_stream.engine.executor import PrefillRun
from relaygr_stream.engine.queue import WorkQueue
from relaygr_stream.engine.ranking import PrefillJob, Ranking
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.kv import KVLayout, KVRegion

NOTHING = Tokens(np.zeros((3, 0), np.int64))
REGION = KVRegion(KVLayout(1, 1, 1, 1, torch.float32), torch.empty(0), 0)


def ranking(name: str, deadline: float) -> Ranking:
    times = Times(0.0, deadline, deadline)
    return Ranking.of(Rank(RankTask(name, "u", 0, NOTHING, NOTHING, np.zeros(1, np.int64), times, full=False)))


def job(due: float, *waiters: Ranking) -> PrefillJob:
    return PrefillJob(PrefillRun(None, REGION, NOTHING), due, waiters=list(waiters))  # type: ignore[arg-type]  # never run


def cost(ranking: Ranking) -> float:
    return ranking.deadline


def test_rankings_by_deadline_in_batches_up_to_the_next_flight() -> None:
    queue = WorkQueue()
    waiter = ranking("waiter", 3.0)
    joined = job(9.0, waiter)
    for name, deadline in (("d", 4.0), ("b", 2.0), ("a", 1.0), ("c", 2.5)):
        queue.add(ranking(name, deadline))
    queue.add(waiter, joined)
    assert [each.task.request_id for each in queue.in_time.pop_ready(2)] == ["a", "b"]
    assert [each.task.request_id for each in queue.in_time.pop_ready(8)] == ["c"]
    assert queue.in_time.first() is joined
    assert queue.in_time.pop_ready(8) == []
    joined.over = True
    assert [each.task.request_id for each in queue.in_time.pop_ready(8)] == ["d"]
    assert queue.in_time.first() is None


def test_a_batch_costs_no_more_than_it_may_but_has_one_ranking() -> None:
    queue = WorkQueue()
    for name, deadline in (("a", 2.0), ("b", 2.5), ("c", 3.0), ("d", 9.0)):
        queue.add(ranking(name, deadline))
    assert [each.task.request_id for each in queue.in_time.pop_ready(8, cost, 5.0)] == ["a", "b"]
    assert [each.task.request_id for each in queue.in_time.pop_ready(8, cost, 5.0)] == ["c"]
    assert [each.task.request_id for each in queue.in_time.pop_ready(8, cost, 5.0)] == ["d"]
    assert queue.in_time.pop_ready(8, cost, 5.0) == []


def test_a_batch_has_as_many_as_are_asked_for_whatever_they_cost() -> None:
    queue = WorkQueue()
    for name in "abc":
        queue.add(ranking(name, 9.0))
    assert [each.task.request_id for each in queue.in_time.pop_ready(8, cost, 5.0, least=2)] == ["a", "b"]


def test_ties_go_to_who_came_first() -> None:
    queue = WorkQueue()
    for name in "abc":
        queue.add(ranking(name, 1.0))
    assert [each.task.request_id for each in queue.in_time.pop_ready(8)] == ["a", "b", "c"]


def test_answered_rankings_are_passed_over() -> None:
    queue = WorkQueue()
    first, second = ranking("a", 1.0), ranking("b", 2.0)
    queue.add(first)
    queue.add(second)
    first.answered = True
    assert queue.in_time.first() is second


def test_a_flight_is_urgent_only_while_someone_waits() -> None:
    queue = WorkQueue()
    waiter = ranking("a", 1.0)
    shared = job(5.0, waiter)
    queue.add_background(shared)
    queue.add(waiter, shared)
    assert queue.in_time.first() is shared
    shared.waiters.clear()
    assert queue.in_time.first() is None
    assert queue.background() is shared


def test_pre_inference_by_due_time() -> None:
    queue = WorkQueue()
    late, soon = job(2.0), job(1.0)
    queue.add_background(late)
    queue.add_background(soon)
    assert queue.background() is soon
    soon.over = True
    assert queue.background() is late
    late.over = True
    assert queue.background() is None
