"""What only an accelerator shows: the same worker runtime, with its memory, streams and kernels."""

from __future__ import annotations

import random

import pytest
import torch

from relaygr_stream.cache.copy import CopyEngine
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.models.devices import select_device
from tests.unit.engine.worlds import MAX_TOKENS, World

#: Another processor sums in another order; float32 with TF32 off still agrees this far (the audits compare on one
#: device, and hold 1e-5).
ACROSS_DEVICES = 1e-4


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.cuda), pytest.param("npu", marks=pytest.mark.npu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if there is None or there.type != request.param:
        pytest.skip(f"no {request.param} device: run the tests on a machine that has one, with its driver and torch")
    return select_device(request.param)


def test_random_traffic_is_scored_as_on_the_cpu(device: torch.device) -> None:
    world = World(hbm=12, dram=20, audit_share=0.3, device=device)
    rng = random.Random(5)
    for number in range(300):
        user, length = rng.randrange(8), rng.randrange(1, MAX_TOKENS)
        world.signal(f"r{number}", user, length, life=0.5)
        for _ in range(rng.randrange(4)):
            world.step(world.now)
        world.rank(f"r{number}", user, length, suffix=rng.randrange(4))
        world.now += 0.05
    world.settle()
    world.check_scores(ACROSS_DEVICES)
    world.cache.check_integrity()
    assert {"hbm", "joined"} <= {answer.measured.outcome for answer in world.answers}
    assert world.cache.counters.spilled > 0
    assert world.cache.counters.loaded > 0
    assert world.audits
    assert all(deviation <= 1e-5 for _, deviation in world.audits)
    world.close()


def test_copies_wait_for_the_device_and_are_whole(device: torch.device) -> None:
    hbm = TierMemory(64 << 20, device)
    dram = TierMemory(64 << 20, torch.device("cpu"), pinned=True)
    engine = CopyEngine(device)
    for round_ in range(10):
        near, far = hbm.arena.allocate(48 << 20), dram.arena.allocate(48 << 20)
        assert near is not None
        assert far is not None
        source = hbm.view(near, torch.float32)
        source.fill_(0.0)
        for _ in range(20):  # work that the copy must wait for
            source.add_(1.0)
        source.add_(float(round_))
        engine.submit(dram.view(far, torch.float32), source).wait()
        assert bool((dram.view(far, torch.float32) == 20.0 + round_).all())
        source.fill_(-1.0)
        engine.submit(source, dram.view(far, torch.float32), urgent=True).wait()
        assert bool((source == 20.0 + round_).all().item())
        hbm.arena.free(near)
        dram.arena.free(far)
    engine.close()
