"""A worker's runtime from settings: budgets without room for a prefix are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.tier_file import TierFile
from relaygr_stream.engine.build import WorkerRuntime, build
from relaygr_stream.engine.commands import DELEGATED_LANE, Prefill, PrefillTask
from relaygr_stream.engine.executor import Executor
from relaygr_stream.errors import CapacityError, ConfigError, ModelError
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.settings.schema import Kafka, Relay, Settings
from relaygr_stream.settings.worker import Model, Worker
from relaygr_stream.wire.worker_status import prefix_bytes
from tests.unit.engine.worlds import (
    CPU,
    GRANULE_BYTES,
    MAX_TOKENS,
    RETENTION,
    TOY,
    WITH_CONTEXT,
    toy_model,
)

#: Three granules for the longest sequence, as in the worlds; the longest prefix is two.
RELAY = Relay(max_prefix_tokens=128, max_suffix_tokens=64)


def settings_of(**worker: Any) -> Settings:
    tiers = {"hbm_bytes": 9 * GRANULE_BYTES, "dram_bytes": 8 * GRANULE_BYTES, "pinned_share": 0.5}
    return Settings(relay=RELAY, model=TOY, worker=Worker(**tiers | worker))


def built(settings: Settings) -> WorkerRuntime:
    runtime = build(settings, lambda *_: False, lambda: None)
    runtime.cache.close()
    return runtime


@pytest.mark.parametrize(
    ("worker", "parts"),
    [
        (
            {"hbm_bytes": 5 * GRANULE_BYTES},
            [f"worker.hbm_bytes = {5 * GRANULE_BYTES}", "192 tokens", f"at least {6 * GRANULE_BYTES}"],
        ),
        (
            {"pinned_share": 0.2},
            [
                f"worker.pinned_share = 0.2 of worker.hbm_bytes = {9 * GRANULE_BYTES} is {9 * GRANULE_BYTES // 5} ",
                "relay.max_prefix_tokens = 128",
                f"it takes {2 * GRANULE_BYTES} bytes",
            ],
        ),
        ({"pinned_share": 0.0}, ["worker.pinned_share = 0 of", "is 0 bytes"]),
        (
            {"dram_bytes": 2 * GRANULE_BYTES},
            [f"worker.dram_bytes = {2 * GRANULE_BYTES}", f"it takes {3 * GRANULE_BYTES} bytes", "to 0 for no DRAM"],
        ),
    ],
)
def test_budgets_that_cannot_hold_one_prefix_are_refused_naming_the_numbers(
    worker: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(CapacityError) as caught:
        built(settings_of(**worker))
    for part in parts:
        assert part in str(caught.value)


def test_a_tenants_bytes_are_its_scenarios_and_hold_one_prefix() -> None:
    feed = Scenario(name="feed", max_pinned_bytes=2 * GRANULE_BYTES)
    others = Scenario(name="ads", max_pinned_bytes=7 * GRANULE_BYTES), Scenario(name="search")
    fleet = msgspec.structs.replace(settings_of(), scenarios=(feed, *others))
    for name, most in (("feed", 2 * GRANULE_BYTES), ("ads", 7 * GRANULE_BYTES), ("search", 0)):
        settings = msgspec.structs.replace(fleet, scenario=name)
        assert built(settings).scheduler._limits.tenant_bytes == {"": most}
    shared = (feed, Scenario(name="search", served_by="feed", max_pinned_bytes=7 * GRANULE_BYTES))
    settings = msgspec.structs.replace(fleet, scenarios=shared, scenario="feed")
    most_of = {"feed": 2 * GRANULE_BYTES, "search": 7 * GRANULE_BYTES}
    assert built(settings).scheduler._limits.tenant_bytes == most_of, "each scenario's own"
    least = msgspec.structs.replace(feed, max_pinned_bytes=2 * GRANULE_BYTES - 1)
    with pytest.raises(CapacityError, match=r"scenario.feed.max_pinned_bytes = \d+ cannot hold one prefix of"):
        built(msgspec.structs.replace(fleet, scenarios=(least,), scenario="feed"))


@pytest.mark.parametrize("model", ["models/none", "nowhere.model:build"])
def test_a_scenarios_model_that_is_not_there_is_told_by_its_key(model: str) -> None:
    scenarios = Scenario(name="ads", model=model), Scenario(name="feed")
    fleet = msgspec.structs.replace(settings_of(), scenarios=scenarios)
    with pytest.raises(ModelError, match=rf"^`scenario.ads.model`: .*{model.partition(':')[0]}"):
        built(fleet.serving("ads"))
    absent = msgspec.structs.replace(fleet, model=Model(checkpoint="models/none"))
    with pytest.raises(ModelError, match=r"^models/none: no such folder"):
        built(absent.serving("feed"))


def test_budgets_that_just_hold_one_prefix_are_taken() -> None:
    least = built(settings_of(hbm_bytes=6 * GRANULE_BYTES, pinned_share=2 / 6, dram_bytes=3 * GRANULE_BYTES))
    without = built(settings_of(dram_bytes=0))
    assert [runtime.cache.hbm_used for runtime in (least, without)] == [3 * GRANULE_BYTES] * 2  # the scratch region


@pytest.mark.parametrize(
    ("hbm", "share", "room"),
    [
        (
            8,
            0.5,
            1.0,
        ),  # one beside the pinned share and the scratch region of three: no longest prefix, which takes two
        (10, 0.5, 2.0),  # two: a quarter of the pinned share, 1.25, is no room for a longest prefix
        (40, 0.5, 5.0),
        (9, 1.0, 0.0),
    ],
)
def test_the_room_for_other_workers_users_holds_a_longest_prefix_where_hbm_does(
    hbm: int, share: float, room: float
) -> None:
    runtime = build(settings_of(hbm_bytes=hbm * GRANULE_BYTES, pinned_share=share), lambda *_: False, lambda: None)
    assert runtime.delegated_bytes == room * GRANULE_BYTES
    assert runtime.longest_bytes == 2 * GRANULE_BYTES
    signal = PrefillTask("r", "u", DELEGATED_LANE, Tokens.zeros(RELAY.max_prefix_tokens), 1.0, 9.0, 0.0)
    runtime.scheduler.handle(Prefill(signal), 0.0)
    pinned = runtime.scheduler.pins.lane_bytes(DELEGATED_LANE)
    assert pinned == (runtime.longest_bytes if room >= 2 else 0)
    scratch = runtime.cache.hbm_used - pinned
    assert not pinned or share * hbm * GRANULE_BYTES + pinned + scratch <= hbm * GRANULE_BYTES
    runtime.cache.close()


@pytest.mark.parametrize("kind", [TOY, RETENTION, WITH_CONTEXT], ids=["tokens", "state", "both"])
@given(tokens=st.integers(1, MAX_TOKENS))
def test_triggers_never_count_less_than_a_prefix_takes(kind: Model, tokens: int) -> None:
    cache, stated = accounts(kind)
    assert prefix_bytes(tokens, stated) >= cache.nbytes(tokens)
    if kind is not WITH_CONTEXT:  # its context tokens count as part of the others
        assert prefix_bytes(tokens, stated) == cache.nbytes(tokens)


@functools.cache
def accounts(kind: Model) -> tuple[PrefixCache, Any]:
    """A worker's cache, and what it states of its prefixes' bytes."""
    settings = msgspec.structs.replace(settings_of(), model=kind)
    runtime = built(msgspec.structs.replace(settings, relay=Relay(max_prefix_tokens=MAX_TOKENS, max_suffix_tokens=0)))
    return runtime.cache, runtime


def warmed_up(late_s: Callable[[int], float]) -> tuple[float, float, int]:
    """Costs after a warm-up whose clock's n-th reading is so late, in milliseconds; and how often it was read."""
    now, readings = 0.0, 0

    def clock() -> float:
        nonlocal now, readings
        now += 1e-4 + late_s(readings)
        readings += 1
        return now

    model = toy_model()
    executor = Executor(model, CPU, clock)
    executor.warm_up(KVRegion.new(model.layout, MAX_TOKENS))
    return executor.costs.prefill_ms(0, 64), executor.costs.score_ms(64, 16), readings


def test_costs_are_fitted_neither_to_first_uses_nor_to_an_interruption() -> None:
    """First uses allocate and compile; and a process may have no core for a moment, whatever it is at."""
    *costs, readings = warmed_up(lambda reading: 0.0)
    *slow_first, _ = warmed_up(lambda reading: 0.01 if reading < readings // 3 else 0.0)
    assert slow_first == pytest.approx(costs)
    for interrupted in range(0, readings, 7):
        *found, _ = warmed_up(lambda reading, at=interrupted: 0.5 if reading == at else 0.0)  # type: ignore[misc]
        assert found == pytest.approx(costs), interrupted


def file_of(settings: Settings) -> TierFile:
    """The file of the DRAM tier of a worker that is built and ends."""
    file = built(settings).tier_file
    assert file is not None
    file.close()
    return file


def test_the_tiers_file_is_taken_by_a_worker_of_the_same_name_model_and_type(tmp_path: Path) -> None:
    settings = settings_of(name="w", dram_path=str(tmp_path))
    assert (file_of(settings).holds, file_of(settings).holds) == (False, True)
    model = msgspec.structs.replace(settings.model, seed=settings.model.seed + 1)
    changed = file_of(msgspec.structs.replace(settings, model=model))
    assert not changed.holds
    assert "it is of model" in changed.dropped
    assert not file_of(settings_of(name="w", dram_path=str(tmp_path), dtype="bfloat16")).holds
    assert not file_of(settings_of(name="w", dram_path=str(tmp_path), dram_bytes=9 * GRANULE_BYTES)).holds
    assert not file_of(settings_of(name="v", dram_path=str(tmp_path))).holds


def test_no_two_workers_have_one_file(tmp_path: Path) -> None:
    def settings(prefix: str, name: str) -> Settings:
        found = settings_of(name=name, dram_path=str(tmp_path))
        return msgspec.structs.replace(found, kafka=Kafka(prefix=prefix))

    assert not file_of(settings("x", "y-1")).holds
    assert not file_of(settings("xy-", "1")).holds
    longest = file_of(settings("x" * 64, "y" * 128)).path
    longest.rename(tmp_path / f"relaygr-{'x' * 64}{'y' * 128}.dram")  # the name that it had in the last release
    assert file_of(settings("x" * 64, "y" * 128)).holds
    assert len(list(tmp_path.iterdir())) == 3


def test_a_runtime_that_is_closed_gives_its_file_to_the_next_or_removes_it(tmp_path: Path) -> None:
    """In one process, too: a worker that comes back to its group opens it again."""
    settings = settings_of(name="w", dram_path=str(tmp_path))
    first = built(settings)
    first.close(for_good=False)
    second = built(settings)
    assert second.tier_file is not None
    assert second.tier_file.holds
    second.close(for_good=True)
    assert list(tmp_path.iterdir()) == []
    built(settings_of()).close(for_good=True)  # in memory


def test_without_a_name_no_file_is_found_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs `worker\.name`"):
        built(settings_of(dram_path=str(tmp_path)))
