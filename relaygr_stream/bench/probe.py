"""One probe: a stretch of open-loop traffic through a pipeline, and what became of it.

The first `warm_up_s` are not judged. A probe that cannot pass any more is cut short, so that overload costs little
time. Knows nothing of searches.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from relaygr_stream.bench.interference import CpuTimes
from relaygr_stream.bench.modes import Mode
from relaygr_stream.bench.pipeline import Pipeline
from relaygr_stream.bench.results import DEVICE_WORK, STAGES, Probe, Spread
from relaygr_stream.bench.statistics import allowed_bad
from relaygr_stream.bench.traffic import Population
from relaygr_stream.client import Ranking
from relaygr_stream.demo.report import quantile
from relaygr_stream.workload.driver import Result, drive

#: A ranking is given up after so many SLOs: late is late, but how late is worth knowing.
TIMEOUT_SLOS: Final = 8.0
#: The slowest of so many requests are looked at to tell what is slow.
SLOW: Final = 20


@dataclass(frozen=True)
class Judgement:
    """How long a probe takes, and what it is judged by."""

    slo_ms: float
    samples: int  # requests judged, at least
    least_s: float  # but for no shorter time than this
    warm_up_s: float

    def seconds(self, rate: float) -> float:
        """Expected length of a probe at this rate, warm-up included."""
        return self.warm_up_s + max(self.least_s, self.samples / rate)


@dataclass(frozen=True)
class Measured:
    """A probe, and what the bus took of each answered request, in milliseconds."""

    probe: Probe
    bus_in: list[float]
    bus_out: list[float]


async def run_probe(
    pipeline: Pipeline,
    mode: Mode,
    population: Population,
    rate: float,
    judgement: Judgement,
    *,
    repeat: int,
    clock: Callable[[], float],
    progress: Callable[[int, int], object] = lambda requests, bad: None,
) -> Measured:
    """Send `rate` requests per second for as long as the judgement needs.

    clock: seconds since the run began. progress(requests, bad): called after each judged request.
    """
    until = judgement.warm_up_s + judgement.least_s
    items = population.take(rate, count=judgement.samples, since=judgement.warm_up_s, until=until)
    judged = sum(item.at >= judgement.warm_up_s for item in items)
    tally = _Tally(judgement, allowed_bad(judged), progress)
    announced = {item.request.request_id for item in items if mode.announce and item.at >= judgement.warm_up_s}
    totals, decisions = pipeline.totals(), await pipeline.decisions()
    cpu = CpuTimes.now()
    started, began = clock(), time.monotonic()
    with _no_collections():
        await drive(
            pipeline.client,
            items,
            mode=mode.request,
            announce=mode.announce,
            timeout=TIMEOUT_SLOS * judgement.slo_ms / 1e3,
            on_result=tally,
            stop=tally.hopeless,
        )
    await pipeline.fresh_statuses()
    seconds = time.monotonic() - began
    cpu_after = CpuTimes.now()
    after, decided = pipeline.totals(), await pipeline.decisions()
    done = {result.item.request.request_id: result for result in tally.results}
    admitted = announced & pipeline.admitted & done.keys()
    answered = sorted((one for one in tally.results if one.ranking is not None), key=lambda one: one.latency_ms)
    slow = answered[-max(1, len(answered) // SLOW) :]
    stages = _stages(answered)
    probe = Probe(
        mode=mode.name,
        revisit=population.revisit,
        length=population.length,
        rate=rate,
        repeat=repeat,
        started_s=started,
        seconds=seconds,
        requests=len(tally.results),
        bad=tally.bad,
        cut_short=tally.hopeless.is_set(),
        p50=quantile(latencies := [one.latency_ms for one in tally.results], 0.5),
        p99=sorted(latencies)[-1 - allowed_bad(len(latencies))] if latencies else 0.0,
        stages={name: Spread.of(values) for name, values in stages.items()},
        stage_means=_means(stages),
        slow_stages=_means(_stages(slow)),
        slow_outcomes=_outcomes(slow),
        errors=dict(Counter(one.error for one in tally.results if one.error is not None)),
        outcomes=_outcomes(answered),
        announced=len(announced & done.keys()),
        admitted=len(admitted),
        admitted_hits=sum(done[one].outcome not in (None, "full") for one in admitted),
        decisions={name: int(total - decisions.get(name, 0)) for name, total in decided.items()},
        others_cores=None if cpu is None or cpu_after is None else cpu_after.others_since(cpu),
        device_ms_per_s={name: (after.get(name, 0.0) - totals.get(name, 0.0)) / seconds for name in DEVICE_WORK},
    )
    return Measured(probe, stages["inbound"], stages["outbound"])


@contextmanager
def _no_collections() -> Iterator[None]:
    """A full collection of the client's many requests takes tens of milliseconds, which would be laid to the relay."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Tally:
    """Judges results as they come; sets `hopeless` when the probe cannot pass any more."""

    def __init__(self, judgement: Judgement, allowed: int, progress: Callable[[int, int], object]) -> None:
        self._judgement = judgement
        self._allowed = allowed
        self._progress = progress
        self.results: list[Result] = []
        self.bad = 0
        self.hopeless = asyncio.Event()

    def __call__(self, result: Result) -> None:
        if result.item.at < self._judgement.warm_up_s:
            return
        self.results.append(result)
        self.bad += result.ranking is None or result.latency_ms > self._judgement.slo_ms
        if self.bad > self._allowed:
            self.hopeless.set()
        self._progress(len(self.results), self.bad)


def _stages(answered: Sequence[Result]) -> dict[str, list[float]]:
    """Milliseconds of each answered request in each stage."""
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    for result in answered:
        assert isinstance(result.ranking, Ranking)
        timings, whole = result.ranking.timings, result.ranking.latency_ms
        # Whole milliseconds on the wire: an age may come out a little above what is left for it.
        inbound = min(timings.inbound_ms, max(0.0, whole - timings.worker_ms))
        stages["sent_late"].append(max(0.0, result.latency_ms - whole))
        stages["inbound"].append(inbound)
        stages["queued"].append(timings.queued_ms)
        stages["device"].append(timings.device_ms)
        stages["between"].append(max(0.0, timings.worker_ms - timings.queued_ms - timings.device_ms))
        stages["outbound"].append(max(0.0, whole - inbound - timings.worker_ms))
    return stages


def _means(stages: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: float(np.mean(values)) if values else 0.0 for name, values in stages.items()}


def _outcomes(answered: Sequence[Result]) -> dict[str, int]:
    return dict(Counter(str(one.outcome) for one in answered))
