"""One probe: open-loop traffic through a pipeline for some time, and its result.

The first `warm_up_s` are not judged. If the first stage of requests does not pass, a second and a third follow, and the
P99 of all of them is judged: one hiccup of the machine then does not decide. A probe that can no longer pass is cut
short, so that an overload takes little time.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np

from relaygr_lab.bench.modes import Mode
from relaygr_lab.bench.options import TIMEOUT_SLOS
from relaygr_lab.bench.pipeline import Pipeline
from relaygr_lab.bench.populations import Population
from relaygr_lab.bench.results import DEVICE_WORK, STAGES, Probe, Spread
from relaygr_lab.bench.statistics import QUANTILE, STAGES_AT_MOST, allowed_bad, passes
from relaygr_lab.cpu_times import CpuTimes
from relaygr_stream.client import Ranking
from relaygr_stream.wire.messages import HITS
from relaygr_stream.workload.driver import Result, drive
from relaygr_stream.workload.items import WorkItem
from relaygr_stream.workload.quantiles import nearest_rank, quantile

#: One in this many answers, the slowest, is examined to find the causes of slowness.
SLOW: Final = 20


@dataclass(frozen=True)
class Judgement:
    """The length of a probe, and its criterion."""

    slo_ms: float
    samples: int  # least number of judged requests
    least_s: float  # least time of judged requests
    warm_up_s: float
    stages: int = STAGES_AT_MOST  # a probe that would fail by a few goes on for so many stages in all
    whole: bool = False  # a probe that can no longer pass goes on, too
    timeout_slos: float = TIMEOUT_SLOS  # of a ranking: workers refuse what would be late by it
    period_s: float = 0.0  # of a tide: a stage has whole periods, so that its mean rate is the one that is stated

    def seconds(self, rate: float) -> float:
        """Expected seconds of a probe of one stage at this rate, warm-up included."""
        return self.warm_up_s + self.stage_s(rate)

    def stage_s(self, rate: float) -> float:
        """Expected seconds of a stage."""
        least = max(self.least_s, self.samples / rate)
        return self.period_s * math.ceil(least / self.period_s) if self.period_s else least


@dataclass(frozen=True)
class Measured:
    """A probe, and the bus's time of each answered request in milliseconds: to the worker, and back.

    Without those that went by the owner of their lane to its delegate: what they waited at the owner is no bus's time.
    """

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
    """Send `rate` requests per second until the verdict is clear.

    clock(): seconds since the run began. progress(requests, bad): called after each judged request.
    """
    traffic = _Staged(population, rate, judgement)
    tally = _Tally(judgement, traffic, progress)
    totals, decisions = pipeline.totals(), await pipeline.decisions()
    devices, cpu = await pipeline.device_ms(), CpuTimes.now()
    pipeline.client.route = mode.route
    started, began = clock(), time.monotonic()
    with no_collections():
        await drive(
            pipeline.client,
            traffic,
            mode=mode.request,
            announce=mode.announce,
            timeout=judgement.timeout_slos * judgement.slo_ms / 1e3,
            on_result=tally,
            stop=tally.decided,
        )
    await pipeline.fresh_statuses()
    seconds = time.monotonic() - began
    cpu_after = CpuTimes.now()
    after, decided = pipeline.totals(), await pipeline.decisions()
    busy_ms, late_ms = (now - before for now, before in zip(await pipeline.device_ms(), devices, strict=True))
    results = tally.judged()
    latencies = [_latency_ms(one, judgement) for one in results]
    done = {result.item.request.request_id: result for result in results}
    announced = done.keys() if mode.announce else set()
    admitted = announced & await pipeline.admitted()
    answered = sorted((one for one in results if one.ranking is not None), key=lambda one: one.latency_ms)
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
        requests=len(results),
        bad=sum(map(tally.is_bad, results)),
        cut_short=tally.hopeless,
        p50=quantile(latencies, 0.5),
        p99=_p99(latencies) or 0.0,
        p99_short=_p99_of(results, latencies, long=False) if population.two_kinds else None,
        p99_long=_p99_of(results, latencies, long=True) if population.two_kinds else None,
        stages={name: Spread.of(values) for name, values in stages.items()},
        stage_means=_means(stages),
        slow_stages=_means(_stages(slow)),
        slow_outcomes=_outcomes(slow),
        errors=dict(Counter(one.error for one in results if one.error is not None)),
        outcomes=_outcomes(answered),
        announced=len(announced),
        admitted=len(admitted),
        admitted_hits=sum(done[one].outcome in HITS for one in admitted),
        decisions={name: int(total - decisions.get(name, 0)) for name, total in decided.items()},
        others_cores=None if cpu is None or cpu_after is None else cpu_after.others_since(cpu),
        cores_busy=None if cpu is None or cpu_after is None else cpu_after.busy_since(cpu),
        device_late=late_ms / busy_ms if busy_ms else None,
        workers=pipeline.workers,
        sent=_sent(results, judgement.warm_up_s),
        cut=sum(one.outcome == "truncated" and one.latency_ms <= judgement.slo_ms for one in results)
        / max(1, len(results)),
        refused_p99=_p99([one.latency_ms for one in results if one.ranking is None]),
        device_ms_per_s={name: (after.get(name, 0.0) - totals.get(name, 0.0)) / seconds for name in DEVICE_WORK},
    )
    bus = _stages(direct(answered))
    return Measured(probe, bus["inbound"], bus["outbound"])


def direct(answered: Sequence[Result]) -> list[Result]:
    """Those that came to the worker that scored them without a way by another one."""
    return [one for one in answered if one.ranking is not None and one.ranking.admission != "delegated"]


def _sent(results: Sequence[Result], since: float) -> float | None:
    """The rate at which these requests were due."""
    seconds = max((one.item.at for one in results), default=since) - since
    return len(results) / seconds if seconds > 0 else None


def _latency_ms(result: Result, judgement: Judgement) -> float:
    """Until its scores came; without scores its timeout, even if it was refused sooner."""
    return result.latency_ms if result.ranking is not None else judgement.timeout_slos * judgement.slo_ms


def _p99_of(results: Sequence[Result], latencies: Sequence[float], *, long: bool) -> float | None:
    """Of the users of one kind."""
    return _p99([ms for one, ms in zip(results, latencies, strict=True) if one.item.long == long])


def _p99(latencies: Sequence[float]) -> float | None:
    return nearest_rank(latencies, QUANTILE) if latencies else None


@contextmanager
def no_collections() -> Iterator[None]:
    """Without garbage collection: a full one takes tens of milliseconds in the client, which would count as latency."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Staged:
    """A probe's traffic, stage by stage; can be iterated once.

    The first stage is made beforehand, since making requests takes CPU time that the relay may need.
    """

    def __init__(self, population: Population, rate: float, judgement: Judgement) -> None:
        self._population, self._rate, self._judgement = population, rate, judgement
        self._stages = judgement.stages
        since = judgement.warm_up_s
        until = since + (judgement.stage_s(rate) if judgement.period_s else judgement.least_s)
        self._first = population.take(rate, count=judgement.samples, since=since, until=until)
        self._stage = sum(item.at >= since for item in self._first)  # requests to be judged in each
        #: The due time of the last request of each completely sent stage, in seconds since the probe began.
        self.ended: Final[list[float]] = []

    @property
    def most(self) -> int:
        """Number of judged requests in all stages."""
        return self._stages * self._stage

    def requests(self, stages: int) -> int:
        """Number of judged requests in the first `stages` stages."""
        return stages * self._stage

    def __iter__(self) -> Iterator[WorkItem]:
        yield from self._first
        self.ended.append(self._first[-1].at)
        rest = self._population.stream(self._rate, after=self._first[-1].at)
        while len(self.ended) < self._stages:
            for item in islice(rest, self._stage):
                yield item
            self.ended.append(item.at)


class _Tally:
    """Judges results as they arrive; sets `decided` when there is a verdict.

    A stage is judged only when all requests up to its end are complete, since slow ones complete last.
    """

    def __init__(self, judgement: Judgement, traffic: _Staged, progress: Callable[[int, int], object]) -> None:
        self._judgement = judgement
        self._traffic = traffic
        self._progress = progress
        self._results: list[Result] = []
        self._bad = 0
        self._stage = 0  # the first that is not judged yet
        self._accepted: float | None = None  # when the last request of the stage that passed was sent
        self.decided = asyncio.Event()

    @property
    def hopeless(self) -> bool:
        """Whether the probe was decided as failed before its end."""
        return self.decided.is_set() and self._accepted is None

    def is_bad(self, result: Result) -> bool:
        """Whether the request got no scores of its whole history within the SLO."""
        return result.outcome in (None, "truncated") or result.latency_ms > self._judgement.slo_ms

    def judged(self) -> list[Result]:
        """The results of the stages that decided the verdict."""
        if self._accepted is None:
            return self._results
        return [result for result in self._results if result.item.at <= self._accepted]

    def __call__(self, result: Result) -> None:
        if result.item.at < self._judgement.warm_up_s:
            return
        self._results.append(result)
        self._bad += self.is_bad(result)
        if not self.decided.is_set():
            self._judge()
        self._progress(len(self._results), self._bad)

    def _judge(self) -> None:
        """Decide: failed with more bad requests than a whole probe may have, passed after a stage with few enough."""
        if self._bad > allowed_bad(self._traffic.most):
            if not self._judgement.whole:
                self.decided.set()
            return
        for ended in self._traffic.ended[self._stage :]:
            requests = self._traffic.requests(self._stage + 1)
            if len(self._results) < requests:
                return
            over = [result for result in self._results if result.item.at <= ended]
            if len(over) < requests:
                return
            if passes(requests, sum(map(self.is_bad, over))):
                self._accepted = ended
                self.decided.set()
                return
            self._stage += 1


def _stages(answered: Sequence[Result]) -> dict[str, list[float]]:
    """Milliseconds of each answered request in each stage."""
    stages: dict[str, list[float]] = {name: [] for name in STAGES}
    for result in answered:
        assert isinstance(result.ranking, Ranking)
        timings, whole = result.ranking.timings, result.ranking.latency_s * 1e3
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
