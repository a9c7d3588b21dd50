"""A small fleet with costs that make sense, and what it takes to look inside while it runs."""

from __future__ import annotations

from typing import Any

import msgspec
from relaygr_lab.simulate.costs import KV, DeviceCosts
from relaygr_lab.simulate.fleet import Fleet
from relaygr_lab.simulate.scenario import Scenario

from relaygr_stream.settings.load import load_settings
from relaygr_stream.workload.traffic import Traffic

#: 4 KiB a token; a prefix of 512 tokens takes about 8 ms, a ranking about 2 ms.
COSTS = DeviceCosts(
    source="made up",
    kv=KV(2, 4, 64, 64, "float32"),
    prefill_ms=(0.5, 0.012, 3e-6),
    score_ms=(0.5, 0.01, 1e-6),
    extend_factors=(0.9, 1.0, 1.0, 1.1, 1.4),
    score_factors=(0.9, 1.0, 1.0, 1.1, 1.4),
    step_ms=0.1,
    reload_bytes_per_s=5e9,
    spill_bytes_per_s=5e9,
)
SETTINGS = {
    "relay.max_prefix_tokens": "1024",
    "relay.slo_ms": "40",
    "worker.hbm_bytes": "48MiB",
    "worker.dram_bytes": "64MiB",
    "worker.audit_share": "0",
    "worker.truncate_to": "0",
}


def scenario(flags: dict[str, str] | None = None, *, rate: float = 60.0, **given: Any) -> Scenario:
    traffic = given.pop("traffic", {})
    settings = load_settings([], {**SETTINGS, **(flags or {})}).settings
    changed = msgspec.structs.replace(settings.trigger, **given.pop("trigger", {}))
    settings = msgspec.structs.replace(settings, trigger=changed)
    asked = Traffic(**{"rate": rate, "users": 10_000, "length": 512.0, "max_prefix": 1024, "return_s": 1.0, **traffic})
    values: dict[str, Any] = {"workers": 3, "lanes_per_worker": 4, "sample": 3, "seconds": 3.0, "warm_s": 1.0, **given}
    return Scenario(settings=settings, costs=COSTS, traffic=asked, **values)


def fleet_of(scene: Scenario) -> Fleet:
    return Fleet(scene, scene.groups[0])


def trace(fleet: Fleet) -> list[tuple[object, ...]]:
    """All that happened to the requests."""
    return [
        (r.name, r.at, r.user, r.lane, r.prefix, r.reason, r.status, r.outcome, r.latency_s) for r in fleet.requests
    ]
