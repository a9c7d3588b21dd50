"""What a chunk is worth in steps, from which the next ones' lengths follow."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from relaygr_stream.engine.executor import STEPS_STEP, Executor
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.kv import KVRegion
from tests.unit.models.small_models import empty_region, small_model


class Stepped:
    """Takes so many milliseconds for each step, on a clock of its own."""

    def __init__(self, *steps_ms: float) -> None:
        self.__dict__.update(small_model().__dict__)
        self.steps_ms = steps_ms
        self.now = 0.0

    def prefill_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        for ms in self.steps_ms[:-1]:
            self.now += ms / 1e3
            yield
        self.now += self.steps_ms[-1] / 1e3
        kv.length += len(tokens)


def taken(*steps_ms: float, executor: Executor | None = None) -> Executor:
    """An executor after a prefill that took steps of these times."""
    if executor is None:
        model = Stepped(*steps_ms)
        executor = Executor(model, torch.device("cpu"), lambda: model.now)  # type: ignore[arg-type]
    executor.model.steps_ms = steps_ms  # type: ignore[attr-defined]
    run = executor.prefill(empty_region(small_model(), 8), Tokens(np.zeros((3, 8), np.int64)))
    while not run.done:
        run.advance(1e3)
    return executor


@pytest.mark.parametrize(
    ("steps_ms", "worth"),
    [
        ((6.0,), 1.0),
        ((4.0, 1.0), 1.25),  # two layers, of the last of which K and V are wanted alone
        ((4.0, 4.0, 4.0, 1.0), 3.25),
        ((4.0, 2.0, 6.0, 0.0), 3.0),
        ((0.0, 3.0), 1.0),
        ((4.0, 4.0, 90.0), 3.0),  # an interrupted last step made the next chunks ten times as long
    ],
)
def test_the_last_step_counts_as_what_it_takes(steps_ms: tuple[float, ...], worth: float) -> None:
    assert taken(*steps_ms).chunk_ms(1.0) == pytest.approx(worth)


def test_what_is_left_of_a_chunk_is_less_by_its_steps_and_at_least_another_step() -> None:
    model = Stepped(4.0, 6.0, 4.0)
    executor = Executor(model, torch.device("cpu"), lambda: model.now)  # type: ignore[arg-type]
    run = executor.prefill(empty_region(small_model(), 8), Tokens(np.zeros((3, 8), np.int64)))
    assert run.rest_ms(14.0) == 14.0
    for left in (10.0, 6.0):
        run.advance(1.0)
        assert run.rest_ms(14.0) == pytest.approx(left)


def test_chunks_are_as_long_as_those_before_were_worth() -> None:
    executor = taken(4.0, 1.0)
    assert executor.chunk_ms(2.5) == pytest.approx(2.5 * 1.25)
    taken(4.0, 4.0, executor=executor)  # one that was disturbed weighs little
    assert executor.chunk_ms(2.5) == pytest.approx(2.5 * (1.25 + STEPS_STEP * 0.75))


def test_a_chunk_of_one_step_says_nothing_of_longer_ones() -> None:
    executor = taken(4.0, 4.0, 4.0, 1.0)
    for _ in range(20):
        taken(1.0, executor=executor)
    assert executor.chunk_ms(1.0) == pytest.approx(3.25)


def test_a_step_waits_for_its_own_stream_and_not_for_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Stream:
        def synchronize(self) -> None:
            waited.append("its own")

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: waited.append("all"))
    model = small_model()
    executor = Executor(model, torch.device("cpu"))
    executor._asynchronous = True
    executor.prefill(empty_region(model, 20), Tokens.zeros(20)).advance(1.0)
    assert set(waited) == {"its own"}
