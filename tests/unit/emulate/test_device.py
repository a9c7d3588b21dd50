"""The emulated device takes the times of its cost file, on a schedule that lateness does not shift."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from relaygr_lab.bench.lengths import COSTS_DIR
from relaygr_lab.emulate.device import FOLLOWS_S, EmulatedModel, WallClock, build, make
from relaygr_lab.emulate.process import FACTORY, main, run_emulated_worker
from relaygr_lab.policies import LeastRecent, Policy
from relaygr_lab.simulate.costs import MOST_TOKENS, DeviceCosts
from relaygr_lab.simulate.device import META

from relaygr_stream.cache.fading import CostAwarePolicy
from relaygr_stream.engine.executor import Executor
from relaygr_stream.errors import ConfigError, InputError
from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.settings.load import load_settings
from tests.unit.simulate.scenes import COSTS

QUIET = msgspec.structs.replace(COSTS, extend_factors=(1.0,), score_factors=(1.0,))


class Oversleeping:
    """A clock that only sleeping advances, by too much."""

    def __init__(self) -> None:
        self.now = 5.0
        self.late = 0.0

    def read(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.late


seconds = st.floats(1e-3, 0.5)


#: Less than any operation takes: who is late by more has no need to sleep, and is not late again.
lateness = st.floats(0.0, 0.9e-3)


@given(st.lists(st.tuples(seconds, lateness), min_size=1, max_size=30))
def test_lateness_does_not_add_up(operations: list[tuple[float, float]]) -> None:
    world = Oversleeping()
    clock = WallClock(world.read, world.sleep)
    begun = world.now
    for cost, late in operations:
        world.late = late
        clock.spend(cost)
    busy = sum(cost for cost, _ in operations)
    assert world.now - begun == pytest.approx(busy + operations[-1][1])
    assert clock.busy_s == pytest.approx(busy)
    assert clock.late_s == pytest.approx(operations[-1][1])


@given(st.lists(st.tuples(seconds, st.floats(0.0, 1e-3), st.floats(2 * FOLLOWS_S, 1.0)), min_size=1, max_size=30))
def test_after_idle_time_an_operation_takes_its_whole_cost(operations: list[tuple[float, float, float]]) -> None:
    world = Oversleeping()
    clock = WallClock(world.read, world.sleep)
    for cost, late, idle in operations:
        world.now += idle
        world.late = late
        before = world.now
        clock.spend(cost)
        assert world.now - before == pytest.approx(cost + late)
    assert clock.late_s == pytest.approx(sum(late for _, late, _ in operations))


def write(costs: DeviceCosts, folder: Path) -> Path:
    file = folder / "costs.toml"
    file.write_text(costs.as_toml())
    return file


def emulated(costs: DeviceCosts, folder: Path) -> EmulatedModel:
    settings = load_settings([], {"model.checkpoint": str(write(costs, folder))}).settings
    return make(settings.model, torch.device("cpu"), torch.float32)


def test_operations_are_charged_as_the_file_says_and_return_no_earlier(tmp_path: Path) -> None:
    model = emulated(msgspec.structs.replace(QUIET, steps=3), tmp_path)
    region = KVRegion.new(model.layout, 1024, device=META)
    expected, started = 0.0, time.perf_counter()
    for position, count in ((0, 300), (300, 64)):
        before = model.clock.busy_s
        assert sum(1 for _ in model.prefill_in_steps(region, Tokens.zeros(count))) == 3
        ms = QUIET.extend(position, count)
        expected += ms / 1e3
        assert model.clock.busy_s - before == pytest.approx(ms / 1e3)
        assert region.length == position + count
    (scores,) = model.score([ScoreInput(region, Tokens.zeros(8), np.arange(32, dtype=np.int64))])
    expected += QUIET.score([(364, 40)]) / 1e3
    assert time.perf_counter() - started >= expected  # together: one may make up for a late wake-up of another
    assert model.clock.busy_s == pytest.approx(expected)
    assert scores.shape == (32, 2)


def test_an_operation_uses_no_processor(tmp_path: Path) -> None:
    model = emulated(msgspec.structs.replace(QUIET, score_ms=(300.0, 0.0, 0.0)), tmp_path)
    region = KVRegion.new(model.layout, 64, device=META)
    before = time.thread_time()
    model.score([ScoreInput(region, Tokens.zeros(0), np.zeros(1, np.int64))])
    assert time.thread_time() - before < 0.1


def test_a_worker_holds_more_prefix_kv_than_the_machine_has_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = Oversleeping()
    monkeypatch.setattr("relaygr_lab.emulate.device.WallClock", lambda: WallClock(world.read, world.sleep))
    monkeypatch.setattr("relaygr_stream.engine.build.Executor", partial(Executor, clock=world.read))
    flags = {
        "model.factory": FACTORY,
        "model.checkpoint": str(write(QUIET, tmp_path)),
        "worker.hbm_bytes": "4000GiB",
        "worker.dram_bytes": "9000GiB",
    }
    woken = threading.Event()
    runtime = build(load_settings([], flags).settings, lambda *_: False, woken.set)
    cache = runtime.cache
    entry = cache.open("user", Tokens.zeros(512))
    assert entry is not None
    assert entry.region is not None
    runtime.executor.prefill(entry.region, entry.tokens).advance(1e6)
    assert runtime.bytes_per_token >= QUIET.kv.layout().bytes_per_token
    assert runtime.executor.costs_of_prefix(512) == pytest.approx(QUIET.extend(0, 512), rel=0.01)
    runtime.scheduler.close()


def test_a_worker_without_a_cost_file_says_so(tmp_path: Path) -> None:
    settings = load_settings([], {"model.factory": FACTORY}).settings
    with pytest.raises(ConfigError, match=r"model\.checkpoint to a cost file"):
        build(settings, lambda *_: False, lambda: None)
    missing = load_settings([], {"model.factory": FACTORY, "model.checkpoint": str(tmp_path / "no.toml")}).settings
    with pytest.raises(InputError, match=r"no\.toml"):
        build(missing, lambda *_: False, lambda: None)


@pytest.mark.parametrize("name", ["npu", "h100", "cpu"])
def test_packaged_costs_state_their_source(name: str) -> None:
    costs = DeviceCosts.read(COSTS_DIR / f"{name}.toml")
    assert costs.source.startswith(("assumed:", "measured:"))


@given(st.floats(0.1, 50.0), st.integers(0, 4000), st.integers(1, 2000))
def test_dilated_costs_take_so_many_times_as_long(factor: float, position: int, tokens: int) -> None:
    slower = QUIET.dilated(factor)
    assert slower.extend(position, tokens) == pytest.approx(factor * QUIET.extend(position, tokens))
    assert slower.full_ms(tokens, 40) == pytest.approx(factor * QUIET.full_ms(tokens, 40))
    assert slower.reload_bytes_per_s == pytest.approx(QUIET.reload_bytes_per_s / factor)


@given(st.floats(1.0, 100.0), st.integers(1, 100), st.sampled_from([16, 32]))
def test_the_longest_full_inference_is_the_longest(full_ms: float, rows: int, step: int) -> None:
    tokens = QUIET.longest_full(full_ms, rows, step)
    assert tokens == 0 or QUIET.full_ms(tokens, rows) <= full_ms
    assert QUIET.full_ms(tokens + step, rows) > full_ms


def test_a_device_that_takes_no_time_for_tokens_has_a_longest_prefix_all_the_same() -> None:
    free = msgspec.structs.replace(QUIET, prefill_ms=(1.0, 0.0, 0.0), score_ms=(1.0, 0.0, 0.0))
    assert MOST_TOKENS / 2 <= free.longest_full(10.0, 40, 32) < MOST_TOKENS
    assert free.longest_full(1.0, 40, 32) == 0


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 9)), min_size=1, max_size=60))
def test_least_recent_evicts_what_was_used_longest_ago(uses: list[tuple[str, int]]) -> None:
    policy, order = LeastRecent(), dict[str, int]()
    sizes = dict(reversed(uses))
    for key, _ in uses:
        policy.add(key, sizes[key], 3.0 * len(order) + 0.1)
        order.pop(key, None)
        order[key] = 1
        assert list(policy.cheapest()) == list(order)


def test_least_recent_forgets_earlier_uses_however_many_keys_there_are() -> None:
    policy = LeastRecent()
    for key in range(200):
        policy.add(str(key), 1, 1.0)
    for _ in range(10):
        policy.touch("0", 1, 1.0)
    for key in range(1, 200):
        policy.touch(str(key), 1, 1.0)
    assert next(iter(policy.cheapest())) == "0"
    policy.remove("0")
    policy.hold("0", 1, 1.0)
    assert next(iter(policy.cheapest())) == "0", "held without a use, it keeps the time of its last one"


@pytest.mark.parametrize(("policy", "order"), [("relay", CostAwarePolicy), ("lru", LeastRecent)])
async def test_a_worker_process_evicts_by_its_policy(
    monkeypatch: pytest.MonkeyPatch, policy: Policy, order: type[CostAwarePolicy[str]]
) -> None:
    seen: list[object] = []

    def build(*arguments: object) -> None:
        seen.append(arguments[-1])
        raise InterruptedError

    async def run_worker(context: None, build: Callable[..., object]) -> None:
        del context
        build(None, None, None)

    monkeypatch.setattr("relaygr_lab.emulate.device.build", build)
    monkeypatch.setattr("relaygr_stream.worker.run.run_worker", run_worker)
    with pytest.raises(InterruptedError):
        await run_emulated_worker(None, policy)  # type: ignore[arg-type]
    assert seen == [order]


def test_bad_arguments_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["worker", "--set", "relay.slo_ms=-1"])
    assert "relay.slo_ms" in capsys.readouterr().err
