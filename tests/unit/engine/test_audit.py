"""Audits: chosen by share, run when idle, exact, bounded in number, and never in anyone's way."""

from __future__ import annotations

import numpy as np
import pytest

from relaygr_stream.cache.storage import StorageKind
from relaygr_stream.engine.audit import MAX_WAITING, Auditor
from relaygr_stream.engine.commands import RankTask
from tests.unit.engine.worlds import MAX_TOKENS, Fraud, World


def relayed(w: World, number: int, length: int = 40) -> RankTask:
    """A ranking served from prefix KV."""
    w.signal(f"r{number}", number % 5, length)
    while w.scheduler.backlog:
        w.step()
    task = w.rank(f"r{number}", number % 5, length)
    while not task.answered:
        w.step()
    return task


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (1.0, 60, 60), (0.5, 15, 45)])
def test_the_share_is_audited(share: float, least: int, most: int) -> None:
    w = World(audit_share=share)
    for number in range(60):
        relayed(w, number)
        w.settle()
    assert least <= w.scheduler.auditor.done == len(w.audits) <= most
    assert w.scheduler.auditor.worst <= 1e-5
    w.close()


def test_full_inference_is_not_audited() -> None:
    w = World(audit_share=1.0)
    w.rank("r", 1, 50)
    w.settle()
    assert w.outcome("r") == "full"
    assert w.audits == []
    w.close()


def test_a_deviation_is_found() -> None:
    w = World(audit_share=1.0, wrap=Fraud)
    task = relayed(w, 1)
    w.settle()
    ((found, deviation),) = w.audits
    assert found is task
    assert deviation == pytest.approx(Fraud.factor - 1, rel=1e-4)
    assert w.scheduler.auditor.worst == deviation
    w.close()


def test_what_waits_is_bounded_and_the_newest_stay() -> None:
    audited: list[RankTask] = []

    def report(task: RankTask, deviation: float, ms: float) -> bool:
        audited.append(task)
        return False

    auditor = Auditor(1.0, report)
    w = World()
    tasks = [relayed(w, number) for number in range(MAX_WAITING + 3)]
    for task in tasks:
        auditor.consider(task, np.zeros((5, 2), np.float32))
    assert auditor.step(w.executor, w.cache.scratch, 5.0)  # tasks[3] is under way, with the scratch
    auditor.consider(tasks[0], np.zeros((5, 2), np.float32))  # for which there is no room
    assert auditor.give_up_scratch(w.cache.scratch)
    assert not auditor.give_up_scratch(w.cache.scratch)
    auditor.consider(tasks[1], np.zeros((5, 2), np.float32))  # in place of tasks[3], which stands still
    while auditor.step(w.executor, w.cache.scratch, 5.0):
        pass
    assert audited == [*tasks[4:], tasks[1]]
    w.close()


def test_audits_wait_while_the_scratch_is_lent() -> None:
    w = World(audit_share=1.0)
    relayed(w, 1)
    region = w.cache.scratch.borrow()
    assert not w.step()
    w.cache.scratch.give_back(region)
    w.settle()
    assert len(w.audits) == 1
    w.close()


def test_requests_go_before_audits() -> None:
    w = World(audit_share=1.0)
    relayed(w, 1, MAX_TOKENS)
    w.step()
    w.signal("next", 2, 100)
    w.rank("next", 2, 100)
    while not any(answer.task.request_id == "next" for answer in w.answers):
        w.step()
        assert w.audits == []
    w.settle()
    assert len(w.audits) == 2
    w.close()


@pytest.mark.parametrize("storage", ["exact", "int8"])
def test_scores_from_rounded_prefix_kv_are_told_apart(storage: StorageKind) -> None:
    w = World(hbm=9, dram=30, audit_share=1.0, storage=storage)
    for user in range(6):  # two fit at a time: the others are in DRAM
        w.rank(f"first {user}", user, MAX_TOKENS)
        w.settle()
    for user in range(6):
        w.rank(f"again {user}", user, MAX_TOKENS)
        w.settle()
    reloaded = [task for task, _ in w.audits if task.outcome == "dram"]
    assert reloaded
    deviations = [deviation for task, deviation in w.audits if task.approximate]
    if storage == "exact":
        assert deviations == []
        assert w.scheduler.auditor.worst_rounded == 0
    else:
        assert all(task.approximate for task in reloaded)
        assert w.scheduler.auditor.worst_rounded == max(deviations)
        assert 1e-5 < max(deviations) < 0.1
    assert w.scheduler.auditor.worst <= 1e-5
    w.close()
