"""A model that is not HSTU, through the whole worker core: same outcomes, exact scores, audits that agree."""

from __future__ import annotations

import random

from msgspec.structs import replace

from relaygr_stream.models.transformer import Transformer
from tests.unit.worker.worlds import MAX_TOKENS, TOY, World

TRANSFORMER = replace(TOY, factory="relaygr_stream.models.transformer:make")


def test_the_transformer_is_served_by_the_same_core() -> None:
    world = World(hbm=9, dram=20, audit_share=0.5, kind=TRANSFORMER)
    assert isinstance(world.model, Transformer)
    rng = random.Random(5)
    for number in range(300):
        user, length = rng.randrange(6), rng.randrange(1, MAX_TOKENS)
        if number % 4:
            world.signal(f"r{number}", user, length, life=0.5)
        for _ in range(rng.randrange(8)):  # enough that nothing is late
            world.step()
        # On a busy machine the model is slow, and what is predicted to come too late is refused.
        world.rank(f"r{number}", user, length, suffix=rng.randrange(4), full=number % 10 == 0, timeout=2.0)
        world.now += 0.05
    world.settle()
    assert len(world.answers) == 300
    world.check_scores()
    assert {answer.task.outcome for answer in world.answers if answer.status == "ok"} == {
        "hbm",
        "dram",
        "joined",
        "full",
    }
    counters = world.cache.counters
    assert counters.loaded
    assert counters.extended_in_place
    assert counters.extended_by_move
    assert world.audits
    assert all(deviation <= 1e-5 for _, deviation in world.audits)
    world.cache.check_integrity()
    world.close()
