"""Bad input is told from a bad device: what one user's model refuses is that user's, however often it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from relaygr_stream.engine.scheduler import GIVE_UP_AFTER
from relaygr_stream.errors import DeviceError
from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.kv import KVRegion
from tests.unit.engine.worlds import MAX_TOKENS, World, Wrapped, history, world

BAD_USERS = frozenset(range(1, 40, 2))
BAD_ITEMS = {int(history(user, 64).array[0][10]) for user in BAD_USERS}


class Picky(Wrapped):
    """Refuses histories with some items."""

    probes = 0

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        self.probes += not tokens.array.any()
        if BAD_ITEMS & set(tokens.array[0].tolist()):
            raise ValueError("unknown item")
        self.model.prefill(kv, tokens)


class PickyScores(Wrapped):
    """Refuses some candidates."""

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        if any(len(one.candidates) == 7 for one in batch):
            raise RuntimeError("candidate out of range")
        return self.model.score(batch)


@pytest.mark.parametrize("users", [(1,), (1, 3), tuple(BAD_USERS)])
@pytest.mark.parametrize("announced", [False, True])
def test_histories_that_a_model_refuses_end_no_worker(users: Sequence[int], announced: bool) -> None:
    with world(wrap=Picky) as w:
        for number in range(5 * GIVE_UP_AFTER):
            user = users[number % len(users)]
            if announced:
                w.signal(f"r{number}", user, 64)
                w.settle()
                w.now += 0.1
            w.rank(f"r{number}", user, 64)
            w.settle()
            w.now += 1.0
        assert {answer.status for answer in w.answers} == {"failed"}
        assert "unknown item" in w.answers[0].detail
        good = next(user for user in range(60, 99) if not BAD_ITEMS & set(history(user, 64).array[0].tolist()))
        w.rank("good", good, 64)
        w.settle()
        assert w.outcome("good") == "full"


def test_candidates_that_a_model_refuses_end_no_worker() -> None:
    with world(wrap=PickyScores) as w:
        for number in range(3 * GIVE_UP_AFTER):
            w.rank(f"r{number}", number, 64, candidates=7)
            w.settle()
        assert {answer.status for answer in w.answers} == {"failed"}


def test_a_flood_of_bad_input_is_probed_ever_more_rarely() -> None:
    with world(wrap=Picky) as w:
        model: Any = w.model
        before = model.probes
        for number in range(16 * GIVE_UP_AFTER):
            w.rank(f"r{number}", 1, 64)
            w.settle()
        assert model.probes - before == 5  # after 8, 16, 32, 64 and 128 failures
        w.rank("good", 60, 5)
        w.settle()
        for number in range(GIVE_UP_AFTER):
            w.rank(f"s{number}", 1, 64)
            w.settle()
        assert model.probes - before == 6, "after a success it starts again"


def failing_prefill(model: Wrapped) -> None:
    model.fail_prefill = 10**6


def failing_score(model: Wrapped) -> None:
    model.fail_score = 10**6


@pytest.mark.parametrize("breaks", [failing_prefill, failing_score])
@pytest.mark.parametrize("error", [RuntimeError("on fire"), torch.OutOfMemoryError("none left")])
@pytest.mark.parametrize("users", [1, 4])
def test_a_device_that_fails_is_given_up_whoever_asks(
    breaks: Callable[[Wrapped], None], error: Exception, users: int
) -> None:
    w = World(wrap=Wrapped)
    model: Any = w.model
    model.error = error
    breaks(model)

    def ask() -> None:
        for number in range(2 * GIVE_UP_AFTER):
            w.rank(f"r{number}", number % users, 64)
            w.settle()

    with pytest.raises(DeviceError, match=f"cpu failed {GIVE_UP_AFTER} times in a row"):
        ask()
    w.close()


def test_a_device_that_fails_while_the_scratch_region_is_lent_is_given_up() -> None:
    w = World(wrap=Wrapped)
    model: Any = w.model
    for number in range(3 * GIVE_UP_AFTER):
        w.rank(f"r{number}", number, MAX_TOKENS, full=True)
    assert not w.cache.scratch.free
    failing_prefill(model)
    with pytest.raises(DeviceError, match="times in a row"):
        w.settle()
    w.close()
