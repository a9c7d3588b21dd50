"""Whether the simulation tells the truth, and how fast: `python relaygr_lab/benchmarks/simulate.py`.

Truth: one real core with the real model on this machine's clock, under arrivals at wall-clock times, against the
simulation of the same arrivals with costs fitted to the operations of that very run: what is judged is the simulation,
not whether a shared machine is as fast now as a minute ago. Forwarding: three real workers with a hot lane, and all of
them overloaded, beside the same load simulated (simulate_forwarding.py). Lanes: which move as workers join and leave,
and how even their loads are (simulate_lanes.py). Speed: a thousand workers.
With CHECK=1 in the environment it exits non-zero, naming the bounds not kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from judge import judge
from relaygr_lab.bench.model import with_bench_model
from relaygr_lab.simulate.calibrate import Samples, calibrate, extend_features, score_features
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_lab.simulate.fleet import Fleet
from relaygr_lab.simulate.run import run_group, run_scenario
from relaygr_lab.simulate.scenario import Group, Mode, Scenario
from relaygr_lab.simulate.story import Story, hit_share, latencies, percentile, story_of
from relaygr_lab.simulate.timeline import Timeline
from relaygr_lab.simulate.worker import SimulatedWorker
from simulate_forwarding import compare as forwarding
from simulate_lanes import compare as lanes
from simulate_slo import compare

from relaygr_stream.engine.build import build
from relaygr_stream.engine.commands import Answer, Command, Query
from relaygr_stream.engine.executor import Executor
from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.worker.core import WorkerCore
from relaygr_stream.worker.device import Submitted, take_turn
from relaygr_stream.worker.statement import Identity, Statements
from relaygr_stream.workload.traffic import Traffic

#: Bounds: the simulation's P99 and hit share are within this of the real core's, relative; and a thousand workers at
#: RATE requests per second each simulate at least as fast as time passes.
WITHIN = 0.15
FORWARDING_S = 12.0
WORKERS = 1000
RATE = 2.0
#: A model whose full inference of 1,024 tokens takes about half of the SLO on a 2-core machine, as the SLO bench's.
SETTINGS = {
    "relay.slo_ms": "40", "relay.max_prefix_tokens": "2048", "relay.max_suffix_tokens": "16",
    "worker.hbm_bytes": "128MiB", "worker.dram_bytes": "1GiB", "worker.max_ranking_delay_ms": "4",
    "worker.audit_share": "0", "worker.truncate_to": "0",
}  # fmt: skip


class LiveWorker:
    """The real core and model, stepped by the live timeline; stands where a SimulatedWorker does."""

    def __init__(self, core: WorkerCore, settings: Settings, on_answers: Callable[[list[Answer], float], None]) -> None:
        self.core, self.name, self.alive, self.most_pinned, self.most_held = core, core.name, True, 0, 0
        self.busy_s = 0.0
        self._on_answers = on_answers
        self._inbox: deque[Submitted] = deque()
        self._runtime = build(settings, lambda *_: False, lambda: None)
        self.scheduler = self._runtime.scheduler
        self.extends, self.scores = Samples(), Samples()
        self._record(self._runtime.executor)
        self._statements = Statements(settings, self._runtime, 0.0)

    def _record(self, executor: Executor) -> None:
        """Note what every operation took."""
        prefilled, score = executor.costs.prefilled, executor.score

        def note_extend(position: int, tokens: int, ms: float) -> None:
            self.extends.add(extend_features(position, tokens), ms)
            prefilled(position, tokens, ms)

        def note_score(batch: Sequence[ScoreInput]) -> tuple[list[npt.NDArray[np.float32]], float]:
            scores, ms = score(batch)
            self.scores.add(score_features(batch), ms)
            return scores, ms

        setattr(executor.costs, "prefilled", note_extend)  # noqa: B010  # mypy is right that this is no way to write a program
        setattr(executor, "score", note_score)  # noqa: B010

    def submit(self, command: Command) -> None:
        self._inbox.append(Submitted(command))

    def state(self, positions: Mapping[int, int], tell: Callable[[WorkerStatus, float], None]) -> None:
        self._inbox.append(Submitted(Query(tuple(positions)), (positions, tell)))

    def turn(self, clock: Callable[[], float]) -> bool:
        now = clock()
        for turn in take_turn(self.scheduler, self._inbox, clock):
            if turn.error is not None:
                raise turn.error
            for (positions, tell), taken in turn.replies:
                self.most_pinned = max(self.most_pinned, sum(taken.lane_bytes.values()))
                self.most_held = max(self.most_held, taken.pinned_bytes)
                me = Identity(self.name, 1, "live", 1)
                tell(self._statements.status(me, "serving", taken, positions, now, int(now * 1e3)), now)
            self.busy_s = sum(vars(self.scheduler.time).values()) / 1e3
            if turn.answers:
                self._on_answers(turn.answers, clock())
        return turn.worked


class LiveTimeline(Timeline):
    """Simulated arrivals happen when this machine's clock says so; between them the workers' devices work."""

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[LiveWorker] = []
        self._started: float | None = None

    def wall(self) -> float:
        assert self._started is not None
        return time.perf_counter() - self._started

    def run(self, until: float) -> None:
        if self._started is None:
            self._started = time.perf_counter()
        while (now := self.wall()) < until:
            super().run(now)
            if not any(worker.turn(self.wall) for worker in self.workers):
                time.sleep(0.0002)
        super().run(until)


class LiveFleet(Fleet):
    """The same lanes, trigger, bus and clients around real workers."""

    def __init__(self, scenario: Scenario, group: Group) -> None:
        self._live = LiveTimeline()
        self._histories = np.random.default_rng(1).integers(0, 20000, (3, scenario.settings.relay.max_prefix_tokens))
        super().__init__(scenario, group, self._live)
        self._live.workers = self.workers  # type: ignore[assignment]
        self.live_worker = self._live.workers[0]

    def _make_worker(self, core: WorkerCore, seed: int) -> SimulatedWorker:
        del seed  # nothing is drawn here
        return LiveWorker(core, self._settings, partial(self._answered, core.name))  # type: ignore[return-value]

    def _tokens(self, length: int) -> Tokens:
        return Tokens(self._histories[:, :length])


def live(scenario: Scenario) -> tuple[Story, LiveWorker]:
    fleet = LiveFleet(scenario, scenario.groups[0])
    busy: list[float] = []
    begin = fleet.start + scenario.warm_s
    for at in (begin, begin + scenario.seconds):
        fleet.timeline.at(at, lambda _: busy.append(fleet.live_worker.busy_s))
    started = time.perf_counter()
    fleet.run()
    story = story_of(fleet, scenario, [busy[1] - busy[0]], time.perf_counter() - started)
    worker = fleet.live_worker
    worker.scheduler.close()
    return story, worker


def show(what: str, story: Story) -> tuple[float, float]:
    values = latencies(story)
    p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
    hits = hit_share(story).value
    returning = hit_share(story, returning=True).value
    print(
        f"{what:>10}: {len(values):5} requests, P50 {p50:6.1f} ms, P90 {percentile(values, 0.9):6.1f}, P99 {p99:6.1f}, "
        f"hits {hits:.1%} (returning {returning:.1%}), device busy {story.busy.mean():.1%}"
    )
    return p99, hits


def validate(mode: Mode, rate: float, seconds: float, settings: Settings) -> list[str]:
    traffic = Traffic(
        rate=rate, users=10**6, revisit=0.5, return_s=3.0, length=1024.0, sigma=0.3, max_prefix=2048, candidates=100
    )
    calibrated = calibrate(settings, 1024, 108, rounds=60)
    scenario = Scenario(
        settings=settings, costs=calibrated, traffic=traffic, workers=1, lanes_per_worker=4, sample=1, seconds=seconds,
        warm_s=6.0, mode=mode,
    )  # fmt: skip
    real, worker = live(scenario)
    prefill_ms, extend_factors = worker.extends.fit()
    score_ms, score_factors = worker.scores.fit()
    fitted = msgspec.structs.replace(
        calibrated,
        prefill_ms=prefill_ms, extend_factors=extend_factors, score_ms=score_ms, score_factors=score_factors,
    )  # fmt: skip
    simulated = run_group(dataclasses.replace(scenario, costs=fitted), scenario.groups[0])
    shape = [(1024, 108)]
    print(
        f"extending to 512: {calibrated.extend(0, 512):.1f} ms calibrated, {fitted.extend(0, 512):.1f} in the run; "
        f"a score: {calibrated.score(shape):.1f} and {fitted.score(shape):.1f} ms"
    )
    print(f"\n{mode}, {rate:g} requests/s, the same {len(real.at)} requests")
    real_p99, real_hits = show("real", real)
    p99, hits = show("simulated", simulated)
    broken = []
    for name, found, truth in (("P99", p99, real_p99), ("hits", hits, real_hits)):
        error = found / truth - 1 if truth else found
        print(f"{name:>10}: {error:+.1%}")
        if not abs(error) <= WITHIN:
            broken.append(f"{mode}: {name} off by {error:+.1%}; bound: ±{WITHIN:.0%}")
    return broken


def speed(settings: Settings, costs: DeviceCosts, seconds: float) -> list[str]:
    traffic = Traffic(rate=RATE * WORKERS, users=10**7, return_s=3.0)
    scenario = Scenario(
        settings=settings, costs=costs, traffic=traffic, workers=WORKERS, sample=WORKERS, seconds=seconds, warm_s=3.0
    )
    started = time.perf_counter()
    story = run_scenario(scenario)
    wall = time.perf_counter() - started
    cores = os.cpu_count() or 1
    ratio = story.simulated_s * cores / story.cpu_s
    print(
        f"\n{WORKERS} workers at {RATE:g} requests/s each, {cores} processes: {story.simulated_s:.1f} simulated s in "
        f"{wall:.1f} s, processes' starts and what else ran included; {story.cpu_s:.1f} s of processor time: "
        f"{ratio:.2f} × real time on {cores} cores"
    )
    return [] if ratio >= 1 else [f"{WORKERS} workers at {ratio:.2f} × real time; bound: at least 1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=15.0, help="requests per second of the validation")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--only", choices=["truth", "forwarding", "lanes", "speed"])
    parser.add_argument("--slo", type=Path, help="only: beside `relaygr bench slo`'s report.json")
    parser.add_argument("--costs", type=Path, help="with --slo: calibrated costs (default: calibrate now)")
    chosen = parser.parse_args()
    settings = with_bench_model(load_settings([], SETTINGS))
    parts = {
        "truth": lambda: validate("relay", chosen.rate, chosen.seconds, settings),
        "forwarding": lambda: forwarding(FORWARDING_S, WITHIN),
        "lanes": lambda: lanes(200, range(4)),
        "speed": lambda: speed(load_settings([]).settings, calibrate(settings, 1024, 108, rounds=30), 27.0),
    }
    if chosen.slo is not None:
        judge(lambda: compare(chosen.slo, chosen.costs, WITHIN))
    else:
        judge(*(parts[name] for name in ([chosen.only] if chosen.only else parts)))


if __name__ == "__main__":
    main()
