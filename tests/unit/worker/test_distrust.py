"""Scores that cannot be right: not finite, or unlike full inference. Nobody gets them twice, and readiness tells."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import RankingModel, ScoreInput
from relaygr_stream.models.loading import load_model
from relaygr_stream.settings.schema import Kafka, Relay
from relaygr_stream.settings.worker import Model
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.worker_status import StatusReader
from relaygr_stream.worker.watch import DEVIATIONS_TO_UNREADY
from tests.unit.engine.worlds import CPU, LIMITS, Fraud, World, Wrapped, toy_model, world
from tests.unit.worker.services import Hangable, Peer, made, worker_on, worker_settings
from tests.waiting import until


class NotFinite(Wrapped):
    """Gives NaN, or what `value` says, for the item id `poison`."""

    poison = 3
    value = float("nan")

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        scores = self.model.score(batch)
        for one, rows in zip(batch, scores, strict=True):
            rows[torch.from_numpy(one.candidates == self.poison)] = self.value
        return scores


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scores_that_are_not_finite_are_answered_failed(value: float) -> None:
    with world(wrap=NotFinite) as w:
        w.model.value = value  # type: ignore[attr-defined]
        w.rank("bad", 1, 50)  # item ids 0, 3, 6, 9, 12, in two columns
        w.rank("good", 2, 50, candidates=1)
        w.settle()
        assert (w.answer("bad").status, w.answer("bad").scores) == ("failed", None)
        assert w.answer("bad").detail == "2 of 10 scores are NaN or infinite"
        assert w.outcome("good") == "full"


def test_what_scores_that_are_not_finite_came_from_serves_nobody_else() -> None:
    class Spoilt(Wrapped):
        """Prefix KV that were spoilt once."""

        spoil = True

        def prefill(self, kv: Any, tokens: Any) -> None:
            self.model.prefill(kv, tokens)
            if self.spoil:
                kv.storage.fill_(float("nan"))
                self.spoil = False

    with world(wrap=Spoilt) as w:
        w.signal("first", 1, 50)
        w.settle()
        w.rank("first", 1, 50)
        w.settle()
        assert w.answer("first").status == "failed"
        w.rank("second", 1, 50)
        w.settle()
        assert w.outcome("second") == "full"
        assert w.cache.counters.distrusted == 1


@pytest.mark.parametrize("batch", [1, 4])
def test_what_waits_at_distrusted_prefix_kv_is_inferred_anew(batch: int) -> None:
    class Once(NotFinite):
        """The first ranking's scores are no numbers, the others' are."""

        def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
            scores, self.poison = super().score(batch), -1
            return scores

    with world(limits=dataclasses.replace(LIMITS, batch=batch), wrap=Once) as w:
        for name in ("first", "second", "third", "of one who asks later"):
            w.signal(name, 1, 50)
        w.settle()
        for name in ("first", "second", "third"):
            w.rank(name, 1, 50, candidates=5 if name == "first" else 3)  # the poison is among the first's alone
        w.settle()
        assert w.answer("first").status == "failed"
        assert {w.outcome(name) for name in ("second", "third")} <= {"full", "joined"}
        assert w.cache.pinned_bytes == 0, "nobody is to get what it pinned"
        w.check_scores()


def test_an_audit_that_deviates_drops_the_entry_from_both_tiers() -> None:
    w = World(audit_share=1.0, wrap=Fraud)
    w.signal("r1", 1, 50)
    w.settle()
    w.rank("r1", 1, 50)
    w.signal("next", 1, 50)  # holds the entry
    w.settle()
    assert w.cache.counters.distrusted == 1
    assert w.cache.entries == 0
    assert w.cache.pinned_bytes == 0
    w.rank("next", 1, 50)
    w.settle()
    assert w.outcome("next") == "full"
    w.close()


class Spoiling(Hangable):
    """What it computes anywhere but in the scratch region, which is the first it sees, is a little off."""

    def __init__(self, model: RankingModel) -> None:
        super().__init__(model)
        self.scratch = 0

    def prefill(self, kv: Any, tokens: Any) -> None:
        super().prefill(kv, tokens)
        self.scratch = self.scratch or kv.storage.data_ptr()
        if kv.storage.data_ptr() != self.scratch:
            kv.storage.mul_(1.5)


def spoiling(model: Model, device: torch.device, dtype: torch.dtype) -> RankingModel:
    """model.factory = "tests.unit.worker.test_distrust:spoiling"."""
    made.append(Spoiling(toy_model(device)))
    return made[-1]


async def test_a_worker_whose_audits_deviate_says_so_in_readiness(embedded_settings: Kafka) -> None:
    settings = worker_settings(embedded_settings, audit_share=1.0)
    model = msgspec.structs.replace(settings.model, factory="tests.unit.worker.test_distrust:spoiling")
    settings = msgspec.structs.replace(settings, model=model)
    async with Peer(embedded_settings) as peer, worker_on(settings) as w:
        for number in range(DEVIATIONS_TO_UNREADY):
            assert w.ready
            await peer.signal(f"r{number}", "u", 50)
            await until(lambda: peer.statuses and peer.statuses[-1].counters["signals"] == number + 1)  # noqa: B023
            await peer.reply(await peer.rank(f"r{number}", "u", 50))
            await until(lambda: peer.statuses[-1].counters["audits"] == number + 1)  # noqa: B023
        # Each audit dropped the entry: every signal had to be computed anew.
        assert peer.statuses[-1].counters["signal_computed"] == DEVIATIONS_TO_UNREADY
        await until(lambda: not w.ready, "unready")
        assert w.context.why_not_ready() == (
            f"{DEVIATIONS_TO_UNREADY} audits deviated from full inference; see the log, then restart the worker"
        )


async def test_an_audit_without_numbers_leaves_the_status_readable(embedded_settings: Kafka) -> None:
    """Its deviation is infinite, for good, and what is not finite would make every later status invalid."""
    async with Peer(embedded_settings) as peer, worker_on(worker_settings(embedded_settings)) as w:
        w.runtime.scheduler.auditor.worst = math.inf
        await until(lambda: peer.statuses and peer.statuses[-1].counters["audit_deviation"] > 1e300)
        status = peer.statuses[-1]
        record = Record("worker-status", 0, 0, 0, status.name.encode(), encode(status), ())
        assert StatusReader().read(record) == status


def test_an_error_of_the_model_shows_its_traceback_once_per_kind() -> None:
    with capture_logs() as lines, world(wrap=Wrapped) as w:
        model = w.model
        assert isinstance(model, Wrapped)
        for number, (extend, score, error) in enumerate(
            [(1, 0, RuntimeError("a")), (1, 0, RuntimeError("b")), (0, 2, RuntimeError("c")), (1, 0, ValueError("d"))]
        ):
            model.fail_prefill, model.fail_score, model.error = extend, score, error
            w.rank(f"r{number}", number, 50)
            w.settle()
    shown = [line for line in lines if line["event"] == "the model or its device failed"]
    assert [line["error"] for line in shown] == ["RuntimeError: a", "RuntimeError: c", "ValueError: d"]
    assert all(isinstance(line["exc_info"], Exception) for line in shown)


def failing_factory(model: Model, device: torch.device, dtype: torch.dtype) -> RankingModel:
    raise LookupError("no such weights")


def test_a_factory_that_fails_shows_its_traceback() -> None:
    model = Model(factory="tests.unit.worker.test_distrust:failing_factory")
    with capture_logs() as lines, pytest.raises(ModelError, match="no such weights"):
        load_model(model, Relay(), device=CPU, dtype=torch.float32)
    (line,) = lines
    assert line["event"] == "the model's factory failed"
    assert isinstance(line["exc_info"], LookupError)
