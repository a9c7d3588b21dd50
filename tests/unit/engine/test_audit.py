"""Audits: chosen by share, run when idle, exact, bounded in number, and never in anyone's way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from relaygr_stream.engine.audit import MAX_WAITING, Auditor, audit_deviation
from relaygr_stream.engine.commands import EraseUser, Measured, RankTask
from relaygr_stream.models.api import ScoreInput
from relaygr_stream.models.loading import load_model
from relaygr_stream.settings.schema import Relay
from relaygr_stream.settings.worker import Model
from relaygr_stream.wire.erase import Erase, user_mark
from relaygr_stream.worker.watch import AUDIT_TOLERANCE
from tests.unit.engine.worlds import CPU, MAX_TOKENS, Fraud, World, Wrapped
from tests.unit.models.small_models import full_scores, prefilled, random_items, random_tokens


def relayed(w: World, number: int, length: int = 40) -> tuple[RankTask, Measured]:
    """A ranking served from prefix KV."""
    w.signal(f"r{number}", number % 5, length)
    while w.scheduler.backlog:
        w.step()
    task = w.rank(f"r{number}", number % 5, length)
    while not any(answer.task is task for answer in w.answers):
        w.step()
    return task, w.measured(task)


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
    task, _ = relayed(w, 1)
    w.settle()
    ((found, deviation),) = w.audits
    assert found is task
    assert deviation == pytest.approx(Fraud.factor - 1, rel=1e-4)
    assert w.scheduler.auditor.worst == deviation
    w.close()


class Rounding(Wrapped):
    """Scores that each call rounds otherwise, as products of other shapes do; those of `cancels` candidates cancel."""

    noise, cancels = 1e-7, 1

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        self.noise = -self.noise
        return [
            scores * (1e-4 if len(one.candidates) == self.cancels else 1.0) + self.noise
            for one, scores in zip(batch, super().score(batch), strict=True)
        ]


def test_scores_that_nearly_cancel_are_judged_beside_others() -> None:
    """A single candidate's score may be near 0: its rounding is then a large part of it, and no deviation."""
    w = World(audit_share=1.0, wrap=Rounding)
    relayed(w, 1)
    w.settle()
    w.signal("one", 2, 40)
    w.settle()
    w.rank("one", 2, 40, candidates=1)
    w.settle()
    (_, many), (task, one) = w.audits
    assert len(task.candidates) == 1
    assert one <= many < 1e-5
    w.close()


def test_what_deviates_sets_no_scale_for_others() -> None:
    """Else one broken result, which may be anything, would hide all later ones."""
    reported: list[float] = []

    def report(task: RankTask, measured: Measured, deviation: float, ms: float) -> bool:
        reported.append(deviation)
        return deviation > 0.1

    auditor, w = Auditor(1.0, report), World(wrap=Loud)
    for number in range(2):
        auditor.consider(*relayed(w, number), np.ones((5, 2), np.float32))
        while auditor.step(w.executor, w.cache.scratch, 5.0):
            pass
    assert min(reported) > 0.1
    w.close()


def test_one_ranking_with_huge_scores_hides_no_later_deviation() -> None:
    """Relative to its scores, the deviations of the next hundreds of audits were nothing."""
    w = World(audit_share=1.0, wrap=Sized)
    assert isinstance(w.model, Sized)
    for number in range(3):
        w.model.size = 1e4 if number == 1 else 1.0
        relayed(w, number)
        w.settle()
    assert max(deviation for _, deviation in w.audits) < 1e-5
    w.model.off = 1e-3
    relayed(w, 3)
    w.settle()
    assert w.audits[-1][1] > 1e-4
    w.close()


class Sized(Wrapped):
    """Scores of this size, of which every second call's are off by so much."""

    size, off, calls = 1.0, 0.0, 0

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        self.calls += 1
        return [scores * self.size * (1 + self.off * (self.calls % 2)) for scores in super().score(batch)]


class Loud(Wrapped):
    """A device that computes a huge number once in the audits, and is well again."""

    calls = 0

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        self.calls += 1
        return [scores * (1e30 if self.calls == 2 else 1.0) for scores in super().score(batch)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("candidates", [1, 60])
def test_roundings_of_half_precision_are_far_from_the_tolerance_and_another_history_is_beyond(
    dtype: torch.dtype, candidates: int
) -> None:
    """In torch's operators: with the kernels in C, relayed scores are those of full inference to the bit."""
    shape = Model(layers=8, dim=64, heads=2, dqk=32, dv=32, vocab=1000, max_positions=64, scale_tokens=64)
    model = load_model(shape, Relay(), device=CPU, dtype=dtype, kernels="torch")
    tolerance, random, scale = AUDIT_TOLERANCE[str(dtype).removeprefix("torch.")], np.random.default_rng(1), 0.0
    for _ in range(6):
        tokens, other, items = random_tokens(random, 36), random_tokens(random, 36), random_items(random, candidates)
        full, wrong = (full_scores(model, each, items).float().numpy() for each in (tokens, other))
        cut = int(random.integers(1, 36))
        (found,) = model.score([ScoreInput(prefilled(model, tokens.slice(0, cut)), tokens.slice(cut, 36), items)])
        relayed_scores, scale = found.float().numpy(), max(scale, float(np.abs(full).max()))
        assert audit_deviation(relayed_scores, full, scale, half=True) < tolerance / 2
        if candidates > 1:
            assert audit_deviation(wrong, full, scale, half=True) > 2 * tolerance


def test_what_waits_is_bounded_and_the_newest_stay() -> None:
    audited: list[RankTask] = []

    def report(task: RankTask, measured: Measured, deviation: float, ms: float) -> bool:
        audited.append(task)
        return False

    auditor = Auditor(1.0, report)
    w = World()
    tasks = [relayed(w, number) for number in range(MAX_WAITING + 3)]
    for each in tasks:
        auditor.consider(*each, np.zeros((5, 2), np.float32))
    assert auditor.step(w.executor, w.cache.scratch, 5.0)  # tasks[3] is under way, with the scratch
    auditor.consider(*tasks[0], np.zeros((5, 2), np.float32))  # for which there is no room
    assert auditor.give_up_scratch(w.cache.scratch)
    assert not auditor.give_up_scratch(w.cache.scratch)
    auditor.consider(*tasks[1], np.zeros((5, 2), np.float32))  # in place of tasks[3], which stands still
    while auditor.step(w.executor, w.cache.scratch, 5.0):
        pass
    assert audited == [task for task, _ in (*tasks[4:], tasks[1])]
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


@pytest.mark.parametrize("running", [False, True])
def test_audits_of_an_erased_user_are_dropped(running: bool) -> None:
    """They kept the erased user's behaviours, and inferred them again."""
    w = World(audit_share=1.0)
    for user in (1, 2):
        w.signal(f"s{user}", user, MAX_TOKENS)
    w.settle()
    for user in (1, 2):
        w.rank(f"s{user}", user, MAX_TOKENS)
    while len(w.answers) < 2:
        w.step()
    if running:
        w.step()
        assert not w.cache.scratch.free
    w.handle(EraseUser(erasing("u1")))
    assert w.scheduler.auditor.users() == {"u2"}
    assert w.cache.scratch.free
    w.settle()
    assert [task.user_id for task, _ in w.audits] == ["u2"]
    w.scheduler.check_integrity()


def test_a_ranking_in_progress_of_an_erased_user_is_not_audited() -> None:
    w = World(audit_share=1.0)
    w.signal("s", 1, 40)
    w.settle()
    w.rank("s", 1, 40)  # it is ready to be scored
    w.handle(EraseUser(erasing("u1")))
    w.settle()
    assert w.outcome("s") == "hbm"
    assert w.audits == []


def erasing(user: str) -> Erase:
    mark = "0123456789abcdef"
    return Erase(id=mark, user=user_mark(mark, user), sent_ms=1)
