"""How well a worker's fitted costs predict: the real executor on the real model, measured once, then learnt from as it
is, with interruptions mixed in, and with the device's speed changing half-way."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.engine.build import DELAY_SLO_SHARE
from relaygr_stream.engine.cost_model import Costs
from relaygr_stream.engine.executor import SLICE_SHARE, Executor
from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.loading import load_model
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.messages import CostModel

CPU: Final = torch.device("cpu")
#: Triggers learn new coefficients with each status, four times a second; at some 20–100 ms a request, so often.
STATED_EVERY: Final = 5
#: Requests before the first one judged, and after the device's speed changed.
WARM_UP: Final = 60
ROWS: Final = (32, 64, 128, 256, 512)
SUFFIXES: Final = (0, 16, 64)


@dataclass(frozen=True)
class Measured:
    """One request in full: prefix in chunks, then the score. ops: (position, tokens, ms) of the chunks."""

    prefix: int
    suffix: int
    candidates: int
    ops: tuple[tuple[int, int, float], ...]
    score_ms: float

    @property
    def pre_infer_ms(self) -> float:
        return sum(ms for _, _, ms in self.ops)

    @property
    def full_ms(self) -> float:
        return self.pre_infer_ms + self.score_ms


@dataclass(frozen=True)
class Case:
    """interrupted: share of operations made 2–10 times longer; speed: the device's, from half-way on."""

    name: str
    interrupted: float = 0.0
    speed: float = 1.0


CASES: Final = (
    Case("as measured"),
    Case("5 % interrupted", interrupted=0.05),
    Case("15 % interrupted", interrupted=0.15),
    Case("half the speed", speed=0.5),
    Case("1.7 × the speed", speed=1.7),
    Case("half the speed, 10 % interrupted", interrupted=0.1, speed=0.5),
)


class _Recording(Costs):
    """Costs that keep what they were told."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[int, int, float]] = []

    def prefilled(self, position: int, tokens: int, ms: float) -> None:
        super().prefilled(position, tokens, ms)
        self.ops.append((position, tokens, ms))


def measure(settings: Settings, seconds: float) -> tuple[list[Measured], float]:
    """Full inferences in a worker's chunks, over log-uniform prefix lengths; and how long a chunk is to take."""
    torch.set_num_threads(settings.worker.threads)
    model = load_model(settings.model, settings.relay, device=CPU, dtype=getattr(torch, settings.worker.dtype))
    executor = Executor(model, CPU)
    longest = settings.relay.max_prefix_tokens
    region = KVRegion.new(model.layout, longest)
    executor.warm_up(region)
    executor.costs = costs = _Recording()
    rng = random.Random(1)
    items = np.random.default_rng(1).integers(0, settings.model.vocab, longest)
    requests = []
    until = time.perf_counter() + seconds
    delay_ms = executor.delay_ms(DELAY_SLO_SHARE * settings.relay.slo_ms)
    while time.perf_counter() < until:
        n, m, s = int(longest ** rng.uniform(0.6, 1.0)), rng.choice(ROWS), rng.choice(SUFFIXES)
        tokens = Tokens(np.stack([items[:n], np.zeros(n, np.int64), np.arange(n)]))
        costs.ops.clear()
        region.length = 0
        run = executor.prefill(region, tokens)
        while not run.done:
            run.advance(delay_ms)
        suffix = Tokens(np.zeros((3, s), np.int64))
        _, score_ms = executor.score([ScoreInput(region, suffix, np.zeros(m, np.int64))])
        requests.append(Measured(n, s, m, tuple(costs.ops), score_ms))
    return requests, executor.chunk_ms(SLICE_SHARE * delay_ms)


@dataclass(frozen=True)
class Errors:
    """|predicted ÷ measured - 1| of full inference, and of the prefix alone."""

    full: npt.NDArray[np.float64]
    prefix: npt.NDArray[np.float64]
    bias: float


def predict(requests: list[Measured], case: Case, chunk_ms: float) -> Errors:
    """Learn from the requests in order; each is predicted before anything of it is learnt, from stated coefficients."""
    rng = random.Random(2)

    def as_seen(ms: float) -> float:
        return ms * rng.uniform(2, 10) if rng.random() < case.interrupted else ms

    costs = Costs()
    stated = CostModel(c0=0.0, c1=0.0, c2=0.0, c3=0.0)
    half = len(requests) // 2
    full, prefix, ratios = [], [], []
    for number, request in enumerate(requests):
        slower = 1 / case.speed if number >= half else 1.0
        if number % STATED_EVERY == 0:
            # On a slower device a worker's chunks would have fewer tokens; the recorded ones take longer instead.
            stated = costs.model(chunk_ms * slower)
        if WARM_UP <= number < half or number >= half + WARM_UP:
            ratio = stated.full_ms(request.prefix, request.candidates) / (request.full_ms * slower)
            ratios.append(ratio)
            full.append(abs(ratio - 1))
            prefix.append(abs(stated.pre_infer_ms(request.prefix) / (request.pre_infer_ms * slower) - 1))
        for position, tokens, ms in request.ops:
            costs.prefilled(position, tokens, as_seen(ms * slower))
        costs.saw_suffix(request.suffix)
        costs.scored(request.prefix, request.suffix + request.candidates, as_seen(request.score_ms * slower))
    return Errors(np.array(full), np.array(prefix), float(np.median(ratios)) - 1)


def in_hindsight(requests: list[Measured]) -> npt.NDArray[np.float64]:
    """The floor: errors of the best coefficients there are for these requests, found knowing all of them."""
    judged = requests[WARM_UP:]
    n = np.array([request.prefix for request in judged], np.float64) / 1024
    m = np.array([request.candidates for request in judged], np.float64) / 1024
    ms = np.array([request.full_ms for request in judged])
    columns = np.stack([np.ones_like(n), n, n * n, n * m, m], axis=1) / ms[:, None]
    weights = np.ones_like(n)
    for _ in range(50):  # least absolute relative errors, by reweighting
        theta = np.linalg.lstsq(columns * weights[:, None], weights, rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(columns @ theta - 1), 1e-3))
    return np.asarray(np.abs(columns @ theta - 1), np.float64)
