"""What a chunk is worth in steps, from which the next ones' lengths follow."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from relaygr_stream.models.api import KVRegion, Tokens
from relaygr_stream.worker.executor import STEPS_STEP, Chunk, Engine
from tests.unit.models.small_models import empty_region, small_model


class Stepped:
    """Takes so many milliseconds for each step, on a clock of its own."""

    def __init__(self, *steps_ms: float) -> None:
        self.__dict__.update(small_model().__dict__)
        self.steps_ms = steps_ms
        self.now = 0.0

    def extend_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        for ms in self.steps_ms[:-1]:
            self.now += ms / 1e3
            yield
        self.now += self.steps_ms[-1] / 1e3
        kv.length += len(tokens)


def taken(model: Stepped) -> tuple[Engine, Chunk]:
    engine = Engine(model, torch.device("cpu"), lambda: model.now)  # type: ignore[arg-type]
    chunk = engine.chunk(empty_region(small_model(), 8), Tokens(np.zeros((3, 8), np.int64)))
    while not chunk.finished:
        chunk.step()
    return engine, chunk


@pytest.mark.parametrize(
    ("steps_ms", "worth"),
    [
        ((6.0,), 1.0),
        ((4.0, 1.0), 1.25),  # two layers, of the last of which K and V are wanted alone
        ((4.0, 4.0, 4.0, 1.0), 3.25),
        ((4.0, 2.0, 6.0, 0.0), 3.0),
        ((0.0, 3.0), 1.0),
    ],
)
def test_the_last_step_counts_as_what_it_takes(steps_ms: tuple[float, ...], worth: float) -> None:
    assert taken(Stepped(*steps_ms))[1].whole_steps == pytest.approx(worth)


def test_chunks_are_as_long_as_those_before_were_worth() -> None:
    engine, chunk = taken(Stepped(4.0, 1.0))
    assert engine.chunk_ms(2.5) == 2.5
    engine.learn(chunk)
    assert engine.chunk_ms(2.5) == pytest.approx(2.5 * 1.25)
    engine.learn(taken(Stepped(4.0, 4.0))[1])  # one that was disturbed weighs little
    assert engine.chunk_ms(2.5) == pytest.approx(2.5 * (1.25 + STEPS_STEP * 0.75))
