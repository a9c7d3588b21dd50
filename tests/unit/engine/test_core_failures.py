"""Devices and models that fail: out of memory, errors, broken contracts; all are answered, nothing stays held."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from relaygr_stream.engine.executor import CALM_S
from relaygr_stream.engine.scheduler import GIVE_UP_AFTER
from relaygr_stream.errors import DeviceError
from tests.unit.engine.worlds import LIMITS, MAX_TOKENS, World, Wrapped, world
from tests.waiting import Clock


@contextmanager
def failing(**options: Any) -> Iterator[tuple[World, Wrapped]]:
    with world(wrap=Wrapped, **options) as w:
        model = w.model
        assert isinstance(model, Wrapped)
        yield w, model


def test_out_of_memory_once_costs_half_a_chunk() -> None:
    with failing() as (w, model):
        model.error = torch.OutOfMemoryError("no")
        model.fail_prefill = 1
        w.signal("r1", 1, MAX_TOKENS)
        w.settle()
        w.rank("r1", 1, MAX_TOKENS)
        w.settle()
        assert w.outcome("r1") == "hbm"
        totals = w.scheduler.totals()
        assert (totals["out_of_memory"], totals["device_failures"]) == (1, 0)


def test_out_of_memory_is_tried_with_half_the_chunk_and_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    class Small(Wrapped):
        """A device that holds 64 tokens at a time."""

        def prefill(self, kv: Any, tokens: Any) -> None:
            lengths.append(len(tokens))
            if len(tokens) > 64:
                raise torch.OutOfMemoryError("no")
            self.model.prefill(kv, tokens)

    with world(wrap=Small) as w:
        monkeypatch.setattr(w.executor.costs, "chunk", lambda position, budget_ms: 128)
        w.rank("r1", 1, MAX_TOKENS)
        w.settle()
        assert w.outcome("r1") == "full"
    assert lengths == [128, 64, 64, 64]


def test_out_of_memory_twice_is_a_typed_failure() -> None:
    with failing() as (w, model):
        model.error = torch.OutOfMemoryError("no memory left")
        model.fail_prefill = 2
        w.rank("r1", 1, 100)
        w.settle()
        assert w.answer("r1").status == "failed"
        assert "no memory left" in w.answer("r1").detail
        w.rank("r2", 1, 100)
        w.settle()
        assert w.outcome("r2") == "full"


@pytest.mark.parametrize("together", [1, 3])
def test_out_of_memory_while_scoring_is_tried_again(together: int) -> None:
    with failing() as (w, model):
        for user in range(together):
            w.signal(f"r{user}", user, 40)
        w.settle()
        model.error = torch.OutOfMemoryError("no")
        model.fail_score = 1
        for user in range(together):
            w.rank(f"r{user}", user, 40)
        w.settle()
        assert [w.outcome(f"r{user}") for user in range(together)] == ["hbm"] * together


def test_chunks_grow_again_when_memory_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    class Watched(Wrapped):
        def prefill(self, kv: Any, tokens: Any) -> None:
            lengths.append(len(tokens))
            super().prefill(kv, tokens)

    def chunks(w: World, user: int, length: int) -> list[int]:
        lengths.clear()
        w.rank(f"r{user}", user, length, full=True)
        w.settle()
        return lengths

    clock = Clock()
    with world(wrap=Watched, clock=clock) as w:
        monkeypatch.setattr(w.executor.costs, "chunk", lambda position, budget_ms: 128)
        assert isinstance(w.model, Watched)
        w.model.error, w.model.fail_prefill = torch.OutOfMemoryError("no"), 1
        assert chunks(w, 0, MAX_TOKENS) == [128, 64, 64, 64]
        w.model.fail_score = 1  # which says nothing of chunks
        assert chunks(w, 1, MAX_TOKENS) == [64] * 3
        clock.now += CALM_S
        assert chunks(w, 2, MAX_TOKENS) == [64, 128]


def test_what_failed_does_not_stay_pinned() -> None:
    with failing() as (w, model):
        model.fail_prefill = 1
        w.signal("r1", 1, 100, life=50.0)
        w.settle()
        assert (len(w.scheduler.pins), w.cache.pinned_bytes, w.cache.entries) == (0, 0, 0)
        w.rank("r1", 1, 100)
        w.settle()
        assert w.outcome("r1") == "full"


def test_a_signal_that_waited_for_what_failed_is_computed_itself() -> None:
    with failing() as (w, model):
        w.signal("short", 1, 100)
        w.signal("long", 1, 150)
        model.fail_prefill = 1
        w.settle()
        assert "short" not in w.scheduler.pins
        w.rank("long", 1, 150)
        w.settle()
        assert w.outcome("long") == "hbm"


def test_an_audit_that_fails_is_dropped() -> None:
    """Once ended the device thread, and with it the worker."""
    with failing(audit_share=1.0) as (w, model):
        w.signal("r1", 1, 40)
        w.settle()
        w.rank("r1", 1, 40)
        while not w.answers:
            w.step()
        model.fail_prefill = 1
        w.settle()
        assert w.outcome("r1") == "hbm"
        assert w.audits == []
        assert w.cache.scratch.free
        w.rank("r2", 1, 40)
        w.settle()
        assert len(w.audits) == 1


@pytest.mark.parametrize("fault", ["no progress", "one too many", "one too few", "wrong shape"])
def test_a_model_that_breaks_its_contract_fails_typed(fault: str) -> None:
    """Without progress the core once went round for ever; a wrong number of scores ended the device thread."""

    class Broken(Wrapped):
        def prefill(self, kv: Any, tokens: Any) -> None:
            if fault != "no progress":
                self.model.prefill(kv, tokens)

        def score(self, batch: Any) -> Any:
            rows = self.model.score(batch)
            changed = {"one too many": [*rows, *rows], "one too few": rows[1:], "wrong shape": [r[:1] for r in rows]}
            return changed.get(fault, rows)

    with world(wrap=Broken) as w:
        w.rank("r1", 1, 100)
        w.settle()
        assert w.answer("r1").status == "failed"
        assert "ModelError" in w.answer("r1").detail


def test_a_device_that_fails_whatever_it_is_given_is_given_up() -> None:
    with failing() as (w, model):
        model.fail_prefill = 10**6
        for number in range(2 * GIVE_UP_AFTER):
            w.rank(f"r{number}", number, 100)
        with pytest.raises(DeviceError, match=f"cpu failed {GIVE_UP_AFTER} times in a row, at last with RuntimeError"):
            w.settle()
        assert [answer.status for answer in w.answers] == ["failed"] * GIVE_UP_AFTER
        model.fail_prefill = 0  # so that the world may end in peace
        w.executor.failed_in_a_row = 0


def test_failures_with_a_success_between_are_not_the_device() -> None:
    with failing() as (w, model):
        for number in range(3 * GIVE_UP_AFTER):
            model.fail_prefill = number % 2
            w.rank(f"r{number}", number, 100)
            w.settle()
        assert {answer.status for answer in w.answers} == {"ok", "failed"}


def test_bad_rankings_that_come_together_are_one_failure_and_not_the_device() -> None:
    """Each failed in the batch and alone: seven of one client in a batch once ended a worker."""
    limits = replace(LIMITS, batch=2 * GIVE_UP_AFTER, max_ranking_delay_ms=1e3)  # all are scored together
    with failing(limits=limits) as (w, model):
        for number in range(2 * GIVE_UP_AFTER):
            w.signal(f"r{number}", 1, 40)
        w.settle()
        model.fail_score = 10**6
        for number in range(2 * GIVE_UP_AFTER):
            w.rank(f"r{number}", 1, 40)
        w.settle()
        assert {answer.status for answer in w.answers} == {"failed"}
        assert w.executor.failed_in_a_row < GIVE_UP_AFTER
        model.fail_score = 0


@pytest.mark.parametrize("kind", ["score", "prefill"])
def test_time_of_the_device_that_failed_counts_for_the_worker_and_its_client(kind: str) -> None:
    """A worker whose device fails stated that it was idle, and a client with bad rankings always went first."""
    clock = Clock()

    class Slow(Wrapped):
        def prefill(self, kv: Any, tokens: Any) -> None:
            clock.now += 0.005
            super().prefill(kv, tokens)

        def score(self, batch: Any) -> Any:
            clock.now += 0.005
            return super().score(batch)

    with world(wrap=Slow, clock=clock) as w:
        model = w.model
        assert isinstance(model, Wrapped)
        if kind == "score":
            w.signal("r", 1, 40)
            w.settle()
        before = w.scheduler.time.ranking_ms + w.scheduler.time.full_ms
        setattr(model, f"fail_{kind}", 1)
        task = w.rank("r", 1, 40)
        account = w.waiting(task).booking.account
        w.settle()
        assert w.answer("r").status == "failed"
        assert w.scheduler.time.ranking_ms + w.scheduler.time.full_ms - before == pytest.approx(5.0)
        assert [w.measured(task).device_ms, account.served_ms] == pytest.approx([5.0, 5.0])
