"""The core over a simulated device does what it does over the real one: same answers, same entries, same evictions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from relaygr_lab.simulate.costs import KV, DeviceCosts
from relaygr_lab.simulate.device import META, SimulatedCopies, SimulatedModel
from relaygr_lab.simulate.timeline import Clock

from relaygr_stream.cache.copy import Before, CopyEngine, CopyTicket
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.engine.audit import Auditor
from relaygr_stream.engine.executor import Executor
from tests.unit.engine.worlds import CPU, GRANULE_BYTES, LIMITS, MAX_TOKENS, TOY, OpenScheduler, World

COSTS = DeviceCosts(
    source="made up",
    kv=KV(TOY.layers, TOY.heads, TOY.dqk, TOY.dv, "float32"),
    prefill_ms=(0.05, 0.001, 1e-6),
    score_ms=(0.05, 0.001, 1e-6),
    reload_bytes_per_s=1e30,
    spill_bytes_per_s=1e30,
)


class Simulated(World):
    """A World whose model, memory and copies are the simulation's."""

    def __post_init__(self) -> None:
        self.device_clock = Clock(self.now)
        model = SimulatedModel(COSTS, self.device_clock, np.random.default_rng(1))
        executor = Executor(model, CPU, self.device_clock)
        self.cache = PrefixCache(
            model.layout,
            TierMemory(self.hbm * GRANULE_BYTES, META),
            TierMemory(self.dram * GRANULE_BYTES, META),
            SimulatedCopies(COSTS, self.device_clock, lambda at: None),
            executor.costs_of_prefix,
            scratch_tokens=MAX_TOKENS,
        )
        auditor = Auditor(0.0, lambda *_: False)
        self.scheduler = OpenScheduler(executor, self.cache, self.limits, auditor)

    def settle(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not self.step():
                if not self.scheduler.cache.copying:
                    return
                self.device_clock.now += 1e-3
        raise AssertionError("the core never comes to rest")


def play(world: World, seed: int) -> None:
    """Signals, rankings with and without signals, growing and changing histories, time that passes."""
    rng = np.random.default_rng(seed)
    lengths: dict[int, int] = {}
    for number in range(150):
        user = int(rng.integers(0, 8))
        length = lengths[user] = min(
            MAX_TOKENS, lengths.get(user, int(rng.integers(20, 120))) + int(rng.integers(0, 9))
        )
        version = int(rng.random() < 0.05)
        if rng.random() < 0.6:
            world.signal(f"r{number}", user, length, version=version, life=1.0)
            world.settle()
        if rng.random() < 0.8:
            world.rank(f"r{number}", user, length, version=version)
            world.settle()
        world.now += float(rng.random()) * 0.4
        world.settle()
    world.scheduler.check_integrity()


def copied_at_once(
    self: CopyEngine, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False, before: Before | None = None
) -> CopyTicket:
    ticket = CopyTicket(dst, src, before=before)
    ticket.run(None)
    return ticket


@pytest.mark.parametrize("seed", range(2))
def test_outcomes_and_books_agree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # What was measured decides about evictions, as does when copies are over: here that is the same for both.
    monkeypatch.setattr(CopyEngine, "submit", copied_at_once)
    monkeypatch.setattr(Executor, "costs_of_prefix", lambda self, tokens: 0.01 * tokens)
    whole = replace(LIMITS, max_ranking_delay_ms=1e6)  # as do how many chunks there are
    worlds = [World(hbm=12, dram=10, limits=whole), Simulated(hbm=12, dram=10, limits=whole)]
    for world in worlds:
        play(world, seed)
    stories = [
        [(a.task.request_id, a.status, a.measured.outcome, a.measured.computed_tokens) for a in world.answers]
        for world in worlds
    ]
    assert stories[0] == stories[1]
    assert {outcome for _, _, outcome, _ in stories[0]} >= {"hbm", "dram", "full"}
    real, simulated = (world.cache.counters.as_dict() for world in worlds)
    assert real == simulated
    assert worlds[0].cache.hbm_used == worlds[1].cache.hbm_used
    assert worlds[0].cache.dram_used == worlds[1].cache.dram_used
    for world in worlds:
        world.close()
