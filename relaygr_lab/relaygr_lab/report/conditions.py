"""What a report says of its conditions, of `bench slo` and of `bench paper`."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from relaygr_lab.bench.lengths import FULL_SHARE, grid_length
from relaygr_lab.bench.run import Bench
from relaygr_lab.bench.statistics import fewest_samples, samples_for
from relaygr_lab.paper.plan import PaperOptions, Where
from relaygr_lab.paper.results import Outcome, Record
from relaygr_lab.paper.setup import GRID, GROWTH, MOST_RATE, SUFFIX, Setup
from relaygr_lab.paper.simulated import BUS, REQUESTS, TOLERANCE
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_stream.settings.schema import Settings

#: The options that the report states under `conditions.traffic`: benchmarks/simulate_slo.py simulates the same traffic.
#: UNEVEN: of these only the names of those in use are stated, and a report with one is not simulated.
TRAFFIC: Final = ("candidates", "suffix", "growth", "known", "users", "zipf", "delay", "warm_up_s")
UNEVEN: Final = ("sigma", "mix", "tide", "arrivals")
MACHINE: Final = f"{os.cpu_count()} CPU cores, {platform.machine()}, {platform.system()}"


def of_slo(bench: Bench, command: str) -> dict[str, Any]:
    """Of a bench that has run."""
    options, settings = bench.options, bench.settings
    model, worker = settings.model, settings.worker
    note = f", {bench.about['note']}" if bench.about.get("note") else ""
    samples = options.samples
    arrivals = "Poisson arrivals" if options.arrivals is None else f"times of {options.arrivals.describe()}"
    shape = f"HSTU, {model.layers} layers, D {model.dim}, {model.heads} heads of {model.dqk}, random weights"
    device = bench.about.get("device", worker.device)
    words = {
        "model": f"{model.factory or model.checkpoint or shape}, {worker.dtype}{note}",
        "machine": f"{MACHINE}; {options.workers} worker(s) on {device}, {worker.threads} thread(s) an operator",
        "memory": f"a worker has {worker.hbm_bytes >> 20:,} MiB HBM tier, {worker.dram_bytes >> 20:,} MiB DRAM tier",
        "broker": bench.about["broker"],
        "traffic": f"open loop, {arrivals}; {options.candidates} candidates, {options.suffix} suffix behaviours; "
        f"a return brings {options.growth:g} new behaviours; {options.delay.describe()}",
        "statistics": f"a probe judges about {samples} requests ({fewest_samples()} is the fewest that have a P99; "
        f"{samples_for(0.95)}, all good, would show it with 95 % confidence) after {options.warm_up_s:g} s of warm-up; "
        f"latencies count from the scheduled send time; values to within {options.tolerance - 1:.0%}; "
        f"{options.repeats} repeat(s)",
        "disturbance": _disturbance(bench),
        **({"overload": "; ".join(bench.overloaded)} if bench.overloaded else {}),
        "command": command,
    }
    return {
        "words": words,
        "slo_ms": settings.relay.slo_ms,
        "preset": options.preset,
        "length": bench.length,
        "workers": options.workers,
        "traffic": {name: getattr(options, name) for name in TRAFFIC}
        | {"uneven": [name for name in UNEVEN if getattr(options, name)]},
        "settings": msgspec.to_builtins(
            {name: getattr(settings, name) for name in ("relay", "trigger", "worker", "model")}
        ),
    }


def _disturbance(bench: Bench) -> str:
    """The influence of other processes on the run, as text."""
    known = [one.probe for one in bench.measured if one.probe.others_cores is not None]
    if not known:
        return "the CPU time of other processes is unknown on this system"
    aside = sum(probe.set_aside for probe in known)
    counted = [probe.others_cores or 0.0 for probe in known if not probe.set_aside]
    return (
        f"other processes used {sum(counted) / max(1, len(counted)):.2f} CPU cores on average over the probes that "
        f"count, {max(counted, default=0.0):.2f} at most; {aside} of {len(known)} probes were set aside and repeated "
        f"because of them, or because the machine stood still"
    )


def fixed(options: PaperOptions, settings: Settings, costs: DeviceCosts) -> dict[str, Any]:
    """What must not change between the parts of one run."""
    sections = {name: getattr(settings, name) for name in ("relay", "trigger", "worker", "model", "client")}
    built: dict[str, Any] = msgspec.to_builtins(
        {
            "quick": options.quick,
            "broker": options.broker,
            "samples": options.samples,
            "least_s": options.least_s,
            "stages": options.stages,
            "tolerance": options.tolerance,
            "seed": options.seed,
            "arrivals": None if options.arrivals is None else options.arrivals.describe(),
            "costs": costs,
            "settings": sections,
        }
    )
    return built


def _repeats(outcomes: Sequence[Outcome], where: Where) -> str:
    """How often each value was found there, in words."""
    times = Counter((one.setup, one.mode) for one in outcomes if one.where == where).values()
    least, most = min(times, default=0), max(times, default=0)
    return f"{least}" if least == most else f"{least} to {most}"


def of_paper(
    options: PaperOptions, settings: Settings, costs: DeviceCosts, command: str, record: Record
) -> dict[str, Any]:
    """Of a run whose outcomes the record has."""
    slo, usual = settings.relay.slo_ms, Setup()
    lengths = ", ".join(f"{Setup(share=share).length(costs, slo):,}" for share in GRID)
    worker, samples = settings.worker, max(fewest_samples(), options.samples)
    logged = {} if options.arrivals is None else {"arrivals": f"those of {options.arrivals.describe()}, where stated"}
    if record.engine_costs.exists():
        real = DeviceCosts.read(record.engine_costs)
        logged["the real engine"] = f"{real.source}; its unit is {grid_length(real, slo):,} tokens"
    measured, simulated = (_repeats(record.outcomes, where) for where in ("fleet", "simulated"))
    broker = "Apache Kafka" if options.broker == "kafka" else "Tansu"
    words = {
        "devices": f"emulated: {costs.source}; {costs.kv.layout().bytes_per_token >> 10} KiB of K and V a token",
        "fleet": f"{usual.workers} workers unless stated, each with {worker.hbm_bytes >> 30} GiB HBM tier and "
        f"{worker.dram_bytes >> 30} GiB DRAM tier; {broker}, one node",
        "machine": MACHINE,
        "lengths": f"{lengths} tokens; the unit is the length whose full inference takes {FULL_SHARE:g} of the SLO",
        "SLO": f"P99 ≤ {slo:g} ms, head start {usual.delay_ms:g} ms unless stated, undilated",
        "dilation": f"all times of serving × k, so that no probe exceeds {MOST_RATE:g} requests/s; the bus is not "
        "dilated and weighs 1/k as much",
        "traffic": f"Poisson arrivals and {usual.candidates} candidates unless stated, {SUFFIX} suffix behaviours; a "
        f"return brings {GROWTH:g} new behaviours",
        "measured": f"a probe judges the requests of {options.least_s:g} s, {samples} at least; values to "
        f"within {options.tolerance - 1:.0%}; repeats of a value: {measured}; the interval is the range of the "
        "repeats, with one repeat there is none, and the bracket of the search is given",
        "simulated": f"a probe judges {REQUESTS:,} requests; values to within {TOLERANCE - 1:.0%}; median and range "
        f"of the seeds, of a value: {simulated}; one way of the bus {BUS.p50_ms:g} ms at P50, "
        f"{BUS.p99_ms:g} at P99, weighing 1/k",
        "command": command,
        **logged,
    }
    return {"words": words, **fixed(options, settings, costs)}
