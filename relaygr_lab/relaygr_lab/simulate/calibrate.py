"""Measures times on this machine: the configured model's operations, the worker's own steps, copies between tiers.

It takes a minute at most; nothing else should run during it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import torch

from relaygr_lab.simulate.costs import KV, DeviceCosts
from relaygr_lab.simulate.device import META, SimulatedCopies, SimulatedModel
from relaygr_lab.simulate.timeline import Clock
from relaygr_stream.cache.copy import CopyEngine
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.engine.build import assemble, load_executor
from relaygr_stream.engine.commands import Prefill, PrefillTask, Rank, RankTask, Times
from relaygr_stream.engine.cost_model import MAX_CHUNK, MIN_CHUNK
from relaygr_stream.engine.executor import Executor
from relaygr_stream.errors import ConfigError
from relaygr_stream.models.api import ROWS, RankingModel, ScoreInput, SteppedModel, Tokens, schema_of
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.settings.schema import Settings

Floats = npt.NDArray[np.float64]

#: Operations with random shapes: 3 s on two CPU cores with the built-in model, enough for the noise's P99.
ROUNDS: Final = 150
#: Uses of a shape on an accelerator before it is measured: the first may compile, the second record a graph.
FIRST_USES: Final = 2
#: Most tokens of a chunk on a CPU, of a few milliseconds; accelerators compute the longest that the executor makes.
LONGEST_ON_CPU: Final = 512
BATCHES: Final = (1, 1, 1, 2, 4)
#: Quantiles kept of measured / formula: the rarest factors decide a P99, but the samples do not reach beyond 1 in 200.
QUANTILES: Final = 101
#: Rankings after a pause that is longer than any under load, each followed by one without a pause.
PAUSES: Final = 40
PAUSE_S: Final = 0.01
COPY_BYTES: Final = 32 << 20
COPIES: Final = 8
STEP_REQUESTS: Final = 300


@dataclass
class Samples:
    """Operations of one kind: the features of their formula, and their times in milliseconds."""

    features: list[tuple[float, float, float]] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)

    def add(self, features: tuple[float, float, float], ms: float) -> None:
        """Add a measurement."""
        self.features.append(features)
        self.ms.append(ms)

    def fit(self) -> tuple[tuple[float, float, float], tuple[float, ...]]:
        """Coefficients, and quantiles of measured / formula."""
        features, ms = np.array(self.features), np.array(self.ms)
        coefficients = fit_relative(features, ms)
        ratios = ms / np.maximum(features @ coefficients, 1e-9)
        shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
        a, b, c = (float(each) for each in coefficients)
        return (a, b, c), tuple(round(float(each), 4) for each in np.quantile(ratios, shares))


def extend_features(position: int, tokens: int) -> tuple[float, float, float]:
    """The features of costs.py's first formula."""
    return 1.0, float(tokens), tokens * (position + tokens / 2)


def score_features(batch: Sequence[ScoreInput]) -> tuple[float, float, float]:
    """The features of costs.py's second formula."""
    shapes = [(one.kv.length, len(one.suffix) + len(one.candidates)) for one in batch]
    return 1.0, float(sum(m for _, m in shapes)), float(sum(n * m for n, m in shapes))


def fit_relative(features: Floats, ms: Floats) -> Floats:
    """Coefficients ≥ 0 with the least squared relative errors."""
    columns = features / ms[:, None]
    fitted = np.zeros(features.shape[1])
    used = list(range(features.shape[1]))
    while used:
        fitted[:] = 0.0
        scale = np.abs(columns[:, used]).max(axis=0)
        fitted[used] = np.linalg.lstsq(columns[:, used] / scale, np.ones_like(ms), rcond=None)[0] / scale
        if not (fitted < 0).any():
            break
        used.remove(int(np.argmin(fitted * features.mean(axis=0))))
    return fitted


def calibrate(
    settings: Settings,
    length: int,
    rows: int,
    rounds: int = ROUNDS,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> DeviceCosts:
    """Measure costs for prefixes of about `length` tokens and rankings of about `rows` suffix and candidate tokens.

    report(done, of): called after each round.

    Raises ConfigError for a model whose prefixes cannot grow: a simulated one's do.
    """
    worker = settings.worker
    executor = load_executor(settings)
    model, device = executor.model, executor.device
    if not model.incremental:
        raise ConfigError(
            f"{model.version} has incremental = False, and the simulation knows only models whose prefixes grow; "
            f"`relaygr bench slo` measures any model"
        )
    longest = min(settings.relay.max_prefix_tokens, 2 * length)
    layout = model.layout
    region = KVRegion.new(layout, longest, device=device)
    executor.warm_up(region)
    schema = schema_of(model)
    chunks = (MIN_CHUNK, LONGEST_ON_CPU if device.type == "cpu" else MAX_CHUNK)
    passes = 1 + (FIRST_USES if device.type != "cpu" else 0)
    for number in range(passes):  # the same shapes each time; the last time counts
        extends, scores = Samples(), Samples()
        rng = np.random.default_rng(settings.model.seed)
        for done in range(rounds):
            count = min(longest, int(np.exp(rng.uniform(*np.log(chunks)))))
            position = int(rng.integers(0, longest - count + 1))
            region.length = position
            tokens = Tokens.zeros(count, schema)
            tokens.array[:ROWS, tokens.context :] = rng.integers(0, 1000, (ROWS, count))[:, tokens.context :]
            extends.add(extend_features(position, count), _extend(model, region, tokens))
            size = int(rng.choice(BATCHES))
            batch = []
            for _ in range(size):
                kv = KVRegion(layout, region.storage, longest, int(rng.integers(longest // 4, longest + 1)))
                candidates = rng.integers(0, 1000, max(1, int(rows * rng.uniform(0.5, 1.5))))
                features = schema.zeros("candidate", len(candidates))
                batch.append(ScoreInput(kv, tokens.slice(0, 0), candidates, features))
            scores.add(score_features(batch), executor.score(batch)[1])
            report(number * rounds + done + 1, passes * rounds)
    cold_ms = _cold_ms(executor, batch[:1])
    region.length = 0
    steps = 1
    if hasattr(type(model), "prefill_in_steps"):  # as engine/executor.py asks
        whole = Tokens.zeros(min(longest, chunks[1]), schema)
        with torch.inference_mode():
            steps = max(1, sum(1 for _ in cast(SteppedModel, model).prefill_in_steps(region, whole)))
    prefill_ms, extend_factors = extends.fit()
    score_ms, score_factors = scores.fit()
    reload_speed, spill_speed = _copy_speeds(device, worker.device != "cpu")
    costs = DeviceCosts(
        source=f"measured: {device} ({worker.dtype}, {worker.threads} thread(s)), {model.note or model.version}",
        kv=KV.of(layout),
        prefill_ms=prefill_ms,
        score_ms=score_ms,
        extend_factors=extend_factors,
        score_factors=score_factors,
        steps=steps,
        cold_ms=round(cold_ms, 4),
        reload_bytes_per_s=reload_speed,
        spill_bytes_per_s=spill_speed,
    )
    return with_step(costs, settings)


def with_step(costs: DeviceCosts, settings: Settings) -> DeviceCosts:
    """The costs with the measured time of the worker's own step on this machine."""
    values = {name: getattr(costs, name) for name in costs.__struct_fields__}
    return DeviceCosts(**{**values, "step_ms": round(_step_ms(costs, settings), 4)})


def _extend(model: RankingModel, region: KVRegion, tokens: Tokens) -> float:
    """Milliseconds of one prefill of these tokens."""
    start = time.perf_counter()
    with torch.inference_mode():
        model.prefill(region, tokens)
        if region.storage.device.type != "cpu":
            torch.accelerator.synchronize(region.storage.device)
    return (time.perf_counter() - start) * 1e3


def _cold_ms(executor: Executor, batch: Sequence[ScoreInput]) -> float:
    """How much longer a ranking takes after a pause than right after another one, in milliseconds."""
    longer = []
    for _ in range(PAUSES):
        time.sleep(PAUSE_S)
        cold = executor.score(batch)[1]
        longer.append(cold - executor.score(batch)[1])
    return max(0.0, median(longer))


def _copy_speeds(device: torch.device, pinned: bool) -> tuple[float, float]:
    """Bytes per second of copies from host memory, and to it."""
    near = TierMemory(COPY_BYTES, device)
    far = TierMemory(COPY_BYTES, torch.device("cpu"), pinned=pinned)
    for memory in (near, far):
        memory.buffer.fill_(1)  # memory that was never written is not there yet
    copier = CopyEngine(device)
    try:
        return (
            _median_speed(lambda: copier.submit(near.buffer, far.buffer, urgent=True).wait()),
            _median_speed(lambda: copier.submit(far.buffer, near.buffer).wait()),
        )
    finally:
        copier.close()


def _median_speed(copy: Callable[[], None]) -> float:
    seconds = []
    for _ in range(COPIES):
        start = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - start)
    return round(COPY_BYTES / median(seconds))


def _step_ms(costs: DeviceCosts, settings: Settings) -> float:
    """Milliseconds of a step of the real scheduler with a device that takes no time."""
    clock = Clock()
    model = SimulatedModel(costs, clock, np.random.default_rng(1))
    executor = Executor(model, torch.device("cpu"), clock)
    worker = settings.worker
    scheduler = assemble(
        settings,
        executor,
        TierMemory(worker.hbm_bytes, META),
        TierMemory(worker.dram_bytes, META) if worker.dram_bytes else None,
        SimulatedCopies(costs, clock, lambda at: None),
        lambda *_: False,
    ).scheduler
    length = min(settings.relay.max_prefix_tokens, 512)
    tokens, none = Tokens.zeros(length), Tokens.zeros(0)
    candidates = np.zeros(100, np.int64)
    took: list[float] = []
    for number in range(STEP_REQUESTS):
        name, user = f"r{number}", f"u{number}"
        start, steps = time.perf_counter(), 0
        signal = PrefillTask(name, user, 0, tokens, clock.now, clock.now + 60.0, clock.now)
        times = Times(clock.now, clock.now + 60.0, clock.now + 60.0)
        ranking = RankTask(name, user, 0, tokens, none, candidates, times, False)
        for command in Prefill(signal), Rank(ranking):
            scheduler.handle(command, clock.now)
        while scheduler.step(clock.now):
            steps += 1
        took.append((time.perf_counter() - start) / max(1, steps))
    return median(took) * 1e3
