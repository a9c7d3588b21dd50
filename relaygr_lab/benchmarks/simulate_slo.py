"""What `relaygr bench slo` measured (its report.json) over the real pipeline, beside a simulation of the same traffic.

Of every probe that ran to its end undisturbed: rate, length, returns, delays and settings as there; costs and ways as
measured in the same probe (slo_fit.py). A probe's P99 is that of a hundred requests, so it is set beside the P99 of as
many simulated ones: the median over twenty simulated probes, which begin as fresh as the real one did, and the range
that nine of ten fall in. The bench cuts a probe short that misses the SLO, so real ones here have all met it: simulated
ones that miss it are left out as well, and how many of the twenty are left is printed.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec
from relaygr_lab.bench.populations import known_users
from relaygr_lab.bench.run import LANES_PER_WORKER
from relaygr_lab.bench.statistics import passes
from relaygr_lab.simulate.calibrate import calibrate
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_lab.simulate.run import run_group
from relaygr_lab.simulate.scenario import Mode, Scenario
from relaygr_lab.simulate.story import Story, hit_share, joined, latencies, percentile
from slo_fit import Fit, Probe

from relaygr_stream.settings.schema import Settings
from relaygr_stream.workload.items import StageDelay
from relaygr_stream.workload.quantiles import nearest_rank
from relaygr_stream.workload.traffic import Traffic

#: Simulations of each probe. Not one that is twenty times as long: in that, more users than a probe has come by.
PROBES: Final = 20
MODES: Final[dict[str, Mode]] = {"full": "full", "cache": "cache", "relay": "relay", "relay-hbm": "relay"}


def compare(report: Path, costs_file: Path | None, within: float) -> list[str]:
    """Print both; returns the bounds not kept."""
    found = json.loads(report.read_text(encoding="utf-8"))
    if why := not_comparable(conditions := found["conditions"]):
        return [f"beside bench slo: {report}: {why}"]
    given = conditions["traffic"]
    settings = msgspec.convert(conditions["settings"], Settings)
    whole = [p for p in found["probes"] if not (p["cut_short"] or p["set_aside"]) and p["mode"] in MODES]
    probes = [p for p in whole if sum(p["outcomes"].values())]
    if not ({"full"} <= {p["mode"] for p in probes} and {"relay"} & {p["mode"] for p in probes}):
        return [
            f"beside bench slo: in {report} no probe of `full` and of `relay` ran to its end undisturbed, with answers"
        ]
    if costs_file is None:
        costs = calibrate(settings, probes[0]["length"], given["suffix"] + given["candidates"])
    else:
        costs = DeviceCosts.read(costs_file)
    fit = Fit(costs, settings, probes, given)
    print(f"{'':42}P50 ms{'':13}P99 ms{'':27}hits")
    print(f"{'mode':>10} {'returns':>7} {'tokens':>6} {'per s':>6} {'real':>8} {'simulated':>9} {'real':>8} "
          f"{'simulated':>20} {'pass':>5} {'real':>6} {'simulated':>9}")  # fmt: skip
    errors: dict[str, list[float]] = {"P50": [], "P99": [], "hits": []}
    for probe in probes:
        scenarios = [_scenario(probe, settings, given, fit, seed) for seed in range(PROBES)]
        stories = [run_group(scenario, scenario.groups[0]) for scenario in scenarios]
        kept = [story for story in stories if passes(len(story.at), _bad(story, settings.relay.slo_ms))]
        p99s = [percentile(latencies(one), 0.99) for one in kept or stories]
        story = joined(kept or stories)
        low, mid, high = (nearest_rank(p99s, share) for share in (0.05, 0.5, 0.95))  # some are infinite: no answer
        p50 = percentile(latencies(story), 0.5)
        scored = sum(probe["outcomes"].values())
        real_hits, hits = 1 - probe["outcomes"].get("full", 0) / scored, hit_share(story).value
        errors["P50"].append(p50 / probe["p50"] - 1)
        errors["P99"].append(float(mid) / probe["p99"] - 1)
        errors["hits"].append(hits - real_hits)
        print(
            f"{probe['mode']:>10} {probe['revisit']:7.0%} {probe['length']:6} {probe['rate']:6.1f} {probe['p50']:8.1f} "
            f"{p50:9.1f} {probe['p99']:8.1f} {mid:6.1f} ({low:5.1f}-{high:5.1f}) {len(kept):2}/{PROBES} "
            f"{real_hits:6.1%} {hits:9.1%}",
            flush=True,
        )
    broken = []
    for name, off in errors.items():
        near = sum(abs(one) <= within for one in off)
        print(f"{name:>10}: median error {median(off):+.1%}, largest {max(off, key=abs):+.1%}, "
              f"{near} of {len(off)} within {within:.0%}")  # fmt: skip
        if not abs(median(off)) <= within:
            broken.append(f"beside bench slo: {name} off by {median(off):+.1%}; bound: ±{within:.0%}")
    return broken


def not_comparable(conditions: dict[str, Any]) -> str:
    """Why the costs of a report's probes cannot be told from it; empty: they can."""
    if "traffic" not in conditions:
        return "does not state its traffic; measure anew with this release"
    if conditions["workers"] != 1:
        return f"measured {conditions['workers']} workers; compare a run with --workers 1"
    if uneven := conditions["traffic"]["uneven"]:
        return f"measured with {', '.join(uneven)}; compare a run of even traffic"
    return ""


def _bad(story: Story, slo_ms: float) -> int:
    return int((latencies(story) > slo_ms).sum())


def _scenario(probe: Probe, settings: Settings, given: dict[str, Any], fit: Fit, seed: int) -> Scenario:
    if probe["mode"] == "relay-hbm":
        worker = msgspec.structs.replace(settings.worker, dram_bytes=0)
        settings = msgspec.structs.replace(settings, worker=worker)
    returns = probe["rate"] * probe["revisit"]
    known = known_users(given["known"], probe["length"], probe["revisit"])
    traffic = Traffic(
        rate=probe["rate"], users=given["users"], zipf=given["zipf"], revisit=probe["revisit"],
        length=float(probe["length"]), return_s=known / returns if returns else 1.0, growth=given["growth"],
        max_prefix=settings.relay.max_prefix_tokens, suffix=given["suffix"], candidates=given["candidates"],
        delay=StageDelay(**given["delay"]),
    )  # fmt: skip
    there, back = fit.ways(probe)
    return Scenario(
        settings=settings, costs=fit.costs(probe), traffic=traffic, workers=1, sample=1,
        lanes_per_worker=LANES_PER_WORKER, seconds=probe["requests"] / probe["rate"], warm_s=3 * traffic.return_s + 2.0,
        mode=MODES[probe["mode"]], bus=there, answers=back, seed=seed,
    )  # fmt: skip
