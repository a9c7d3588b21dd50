"""A probe of a fleet with emulated devices, end to end: real processes, every policy, devices of a cost file."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from relaygr_lab.bench.dilation import Fleet
from relaygr_lab.bench.lengths import costs_named
from relaygr_lab.bench.modes import ABLATIONS, CACHE, FULL_ANY, FULL_LANE, RELAY, Mode
from relaygr_lab.bench.pipeline import Pipeline
from relaygr_lab.bench.populations import Population
from relaygr_lab.bench.probe import Judgement, run_probe
from relaygr_lab.bench.results import Probe
from relaygr_lab.policies import Policy

from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.workload.generator import GeneratorOptions
from relaygr_stream.workload.items import StageDelay

K = 20.0
ANYWHERE = next(mode for mode in ABLATIONS if mode.route == "any")
LENGTH = 352


@pytest.mark.stack
@pytest.mark.parametrize("policy", ["relay", "lru"])
async def test_every_mode_is_served_by_devices_of_the_cost_file(
    embedded_settings: Kafka, tmp_path: Path, policy: Policy
) -> None:
    settings: Settings = load_settings(["fleet"], {"relay.slo_ms": "200"}).settings
    kafka = msgspec.structs.replace(embedded_settings, partitions=4)
    fleet = Fleet(costs_named("npu"), K)
    settings = fleet.settings(msgspec.structs.replace(settings, kafka=kafka), tmp_path)
    async with Pipeline("fleet", settings, 2, tmp_path, fleet, policy) as pipeline:
        users = Population("users", traffic(LENGTH))

        async def probe(mode: Mode, population: Population = users) -> Probe:
            judgement = Judgement(settings.relay.slo_ms, samples=20, least_s=1.0, warm_up_s=1.0)
            measured = await run_probe(pipeline, mode, population, 8.0, judgement, repeat=0, clock=time.monotonic)
            return measured.probe

        full_ms = K * costs_named("npu").full_ms(LENGTH, 40)
        for mode in (FULL_LANE, FULL_ANY) if policy == "relay" else ():  # policies judge events
            found = await probe(mode)
            assert set(found.outcomes) == {"full"}, found  # not whether in time: other tests run beside this one
            assert found.announced == 0
            # Every ranking takes the device as long as the file says.
            assert 0.95 * full_ms <= found.stage_means["device"] <= (1.25 + lateness(found)) * full_ms
        relayed = await probe(RELAY)
        assert relayed.admitted > 0, relayed
        assert relayed.admitted_hits >= 0.9 * relayed.admitted
        assert relayed.stage_means["device"] < (0.5 + lateness(relayed)) * full_ms
        cached = await probe(CACHE)
        assert cached.announced == 0
        assert cached.outcomes.get("hbm", 0) > 0
        if policy == "lru":
            return  # its routes are the relay's
        anywhere = await probe(ANYWHERE)
        assert anywhere.outcomes.get("full", 0) > 0, "half of the rankings go to the other worker"


def lateness(found: Probe) -> float:
    """The most by which the judged requests may exceed the cost file's time, as a share of full inference.

    `device_late` is the share over all requests. The judged ones, at least half of these, may have had all of it.
    """
    assert found.device_late is not None
    assert found.device_late >= 0.0
    return 2 * found.device_late


def traffic(length: int) -> GeneratorOptions:
    return GeneratorOptions(
        rate=1.0,
        users=100_000,
        zipf=0.0,
        revisit=0.5,
        length=length,
        sigma=0.0,
        items=20_000,
        suffix=8,
        candidates=32,
        max_prefix=8192,
        delay=StageDelay(K * 150.0, 0.1),
        known=10,
        seed=1,
    )
