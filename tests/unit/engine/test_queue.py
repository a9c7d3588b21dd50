"""The order of the device's work."""

from __future__ import annotations

import numpy as np
import torch

from relaygr_stream.engine.commands import Rank, RankTask, Times
from relaygr_stream.engine.executor import PrefillRun
from relaygr_stream.engine.queue import Turns, WorkQueue
from relaygr_stream.engine.ranking import PrefillJob, Ranking
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.kv import KVLayout, KVRegion

NOTHING = Tokens(np.zeros((3, 0), np.int64))
REGION = KVRegion(KVLayout(1, 1, 1, 1, torch.float32), torch.empty(0), 0)


def ranking(name: str, deadline: float) -> Ranking:
    times = Times(0.0, deadline, deadline)
    return Ranking(Rank(RankTask(name, "u", 0, NOTHING, NOTHING, np.zeros(1, np.int64), times, full=False)))


def job(due: float, *waiters: Ranking) -> PrefillJob:
    return PrefillJob(PrefillRun(None, REGION, NOTHING), due, waiters=list(waiters))  # type: ignore[arg-type]  # never run


def removed(turns: Turns[Ranking | PrefillJob], most: int = 8) -> list[str]:
    """Rankings from the front, up to the first job."""
    names: list[str] = []
    while len(names) < most and isinstance(first := turns.first(), Ranking):
        turns.remove(first.booking.account)
        names.append(first.task.request_id)
    return names


def test_rankings_by_deadline_in_batches_up_to_the_next_job() -> None:
    queue = WorkQueue()
    waiter = ranking("waiter", 3.0)
    joined = job(9.0, waiter)
    for name, deadline in (("d", 4.0), ("b", 2.0), ("a", 1.0), ("c", 2.5)):
        queue.add(ranking(name, deadline))
    queue.add(waiter, joined)
    assert removed(queue.in_time, 2) == ["a", "b"]
    assert removed(queue.in_time) == ["c"]
    assert queue.in_time.first() is joined
    assert removed(queue.in_time) == []
    joined.over = True
    assert removed(queue.in_time) == ["d"]
    assert queue.in_time.first() is None


def test_ties_go_to_who_came_first() -> None:
    queue = WorkQueue()
    for name in "abc":
        queue.add(ranking(name, 1.0))
    assert removed(queue.in_time) == ["a", "b", "c"]


def test_answered_rankings_are_passed_over() -> None:
    queue = WorkQueue()
    first, second = ranking("a", 1.0), ranking("b", 2.0)
    queue.add(first)
    queue.add(second)
    first.answered = True
    assert queue.in_time.first() is second


def test_a_job_is_urgent_only_while_someone_waits() -> None:
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
