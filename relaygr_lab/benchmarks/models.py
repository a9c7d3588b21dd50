"""Model families beside each other: bytes, full inference and hits by length; throughput and length within an SLO.

    python relaygr_lab/benchmarks/models.py [--quick] [--threads N]

Each model's times are those of a worker's executor, in chunks as while serving. The models take turns at every length,
so a machine whose speed drifts is as slow for all. Throughput and length are those of one device with these times and
a simulated queue (lab/bench/capacity.py): no broker, no trigger. `relaygr bench slo --set model.factory=…` measures the
whole.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from floors import Machine
from relaygr_lab.bench.capacity import RequestCost, Traffic, predicted_rate, revisit_matters, slack_ms
from relaygr_lab.bench.cells import BUS_MS
from relaygr_lab.bench.lengths import FULL_SHARE
from relaygr_lab.bench.modes import FULL, RELAY, Mode

from relaygr_stream import settings
from relaygr_stream.cache.tiers import capacity_for
from relaygr_stream.engine.executor import Executor
from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.loading import load_model

ROOT: Final = Path(__file__).parents[2]
CPU: Final = torch.device("cpu")
#: The shape and traffic of `relaygr bench slo --preset quick`.
SHAPE: Final = settings.Model(layers=2, dim=256, heads=4, dqk=64, dv=64, vocab=20_000)
SUFFIX, CANDIDATES, GROWTH = 8, 32, 3
SLO_MS: Final = 50.0
STAGE_DELAY_MS: Final = 150.0
MAX_DELAY_MS: Final = 10.0
FAMILIES: Final = {
    "HSTU": "",
    "transformer": "relaygr_stream.models.transformer:make",
    "retention": "examples.models.retention:make",
    "contextual": "examples.models.contextual:make",
}
LENGTHS: Final = (256, 512, 1024, 2048, 4096, 8192)
REVISITS: Final = (0.0, 0.5, 0.9)
#: Hits and extensions measured for each full inference, which takes many times as long.
HITS: Final = 5


@dataclass
class Times:
    """Milliseconds by prefix length, one value for each round."""

    prefix: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    extension: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    hit: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def cost(self, length: float) -> RequestCost:
        """The medians at a length; between and beyond the measured ones, along straight lines between logarithms."""
        return RequestCost(*(_interpolated(values, length) for values in (self.prefix, self.extension, self.hit)))


class Family:
    """One model on one device, and what was measured of it."""

    def __init__(self, name: str, lengths: Sequence[int]) -> None:
        self.name = name
        self.times = Times()
        shape = msgspec.structs.replace(SHAPE, factory=FAMILIES[name])
        model = load_model(shape, settings.Relay(), device=CPU, dtype=torch.float32)
        self.executor = Executor(model, CPU)
        self.layout = model.layout
        self._region = KVRegion.new(model.layout, max(lengths) + GROWTH)
        self.executor.warm_up(self._region)

    def measure(self, tokens: Tokens, suffix: Tokens, candidates: npt.NDArray[np.int64]) -> None:
        """One full inference of `tokens` and their ranking, then hits and extensions by GROWTH tokens."""
        length, times = len(tokens) - GROWTH, self.times
        times.prefix[length].append(self._prefill(tokens.slice(0, length), from_length=0))
        ranking = ScoreInput(self._region, suffix, candidates)
        times.hit[length] += [self.executor.score([ranking])[1] for _ in range(HITS)]
        incremental = self.executor.model.incremental
        for _ in range(HITS if incremental else 1):
            before = self._region.state.clone()
            times.extension[length].append(self._prefill(tokens, from_length=length if incremental else 0))
            self._region.state.copy_(before)

    def _prefill(self, tokens: Tokens, from_length: int) -> float:
        self._region.length = from_length
        run, ms = self.executor.prefill(self._region, tokens), 0.0
        while not run.done:
            ms += run.advance(MAX_DELAY_MS)
        return ms

    def nbytes(self, length: int) -> int:
        """Bytes of a prefix in HBM."""
        return self.layout.nbytes(capacity_for(length))


def measure(families: Sequence[Family], lengths: Sequence[int], rounds: int, progress: Callable[[str], object]) -> None:
    """Measure all families at all lengths, in turn."""
    random = np.random.default_rng(7)
    draw = [random.integers(0, high, max(lengths) + GROWTH + SUFFIX) for high in (SHAPE.vocab, 4, 10**6)]
    history, candidates = Tokens(np.stack(draw)), random.integers(0, SHAPE.vocab, CANDIDATES)
    for number in range(rounds):
        for length in lengths:
            progress(f"round {number + 1} of {rounds}: {length} tokens")
            for family in families:
                tokens = history.slice(0, length + GROWTH)
                family.measure(tokens, history.slice(length, length + SUFFIX), candidates)


def _interpolated(values: dict[int, list[float]], length: float) -> float:
    known = sorted(values)
    at = min(max(bisect_left(known, length), 1), len(known) - 1)
    low, high = known[at - 1], known[at]
    first, last = statistics.median(values[low]), statistics.median(values[high])
    share = math.log(length / low) / math.log(high / low)
    return first * math.exp(share * math.log(last / first))


# ---- throughput and length within the SLO, from these times ----


@dataclass(frozen=True)
class Found:
    """length: where full inference takes FULL_SHARE of the SLO, and rates are compared. rates: relay over full, by
    revisit ratio. longer: lengths over `length` at full inference's rate; None: longer than any that was measured."""

    length: float
    full_rate: float
    rates: dict[float, float]
    longer: dict[float, float | None]


def find(times: Times) -> Found:
    """Rates and lengths that one device carries within the SLO, among the lengths that were measured.

    A device that is too slow for full inference at the least of them carries nothing.
    """
    least, longest = min(times.prefix), max(times.prefix)
    length = _largest(lambda n: times.cost(n).full <= FULL_SHARE * SLO_MS, least, longest)
    full_rate = _rate(FULL, times, length, 0.0)
    rates = {ratio: _rate(RELAY, times, length, ratio) / full_rate if full_rate else math.nan for ratio in REVISITS}
    longer: dict[float, float | None] = {}
    for ratio in REVISITS[1:]:
        most = _largest(partial(_carries, times, ratio, full_rate), length, longest)
        longer[ratio] = None if most >= longest else most / length
    return Found(length, full_rate, rates, longer)


def _carries(times: Times, revisit: float, rate: float, length: float) -> bool:
    return _rate(RELAY, times, length, revisit) >= rate


def _rate(mode: Mode, times: Times, length: float, revisit: float) -> float:
    """The largest rate whose P99 is within the SLO; 0 if a single first visit is not."""
    traffic, cost = Traffic(length, revisit, GROWTH, CANDIDATES, STAGE_DELAY_MS), times.cost(length)
    if revisit_matters(mode, revisit) and cost.full > slack_ms(mode, traffic, SLO_MS) - BUS_MS:
        return 0.0
    return predicted_rate(mode, cost, traffic, SLO_MS, BUS_MS, workers=1, least_busy=0.0)


def _largest(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The largest length up to `high` for which `holds`, if it holds for `low`."""
    if holds(high):
        return high
    for _ in range(14):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


# ---- the table ----


def table(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Markdown, one column for each model."""
    cells = [["", *names], *([head, *values] for head, values in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names) + 1)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "| " + " | ".join("-" * width for width in widths) + " |", *lines[1:]])


def rows(families: Sequence[Family], lengths: Sequence[int]) -> list[tuple[str, list[str]]]:
    """The table's rows: bytes, times and ratios by length, then what one device carries."""
    found = [find(family.times) for family in families]
    made: list[tuple[str, list[str]]] = []
    for length in lengths:
        costs = [family.times.cost(length) for family in families]
        made += [
            (f"{length:,} tokens: KiB of prefix KV", [f"{family.nbytes(length) / 1024:,.0f}" for family in families]),
            ("full inference, P50 ms", [f"{cost.full:.2f}" for cost in costs]),
            ("hit, P50 ms", [f"{cost.hit:.2f}" for cost in costs]),
            ("full / hit", [f"{cost.full / cost.hit:.1f}×" for cost in costs]),
        ]
    made.append(
        (f"tokens where full inference takes {FULL_SHARE * SLO_MS:g} ms", [f"{one.length:,.0f}" for one in found])
    )
    made.append(("requests/s there, in full", [f"{one.full_rate:.1f}" for one in found]))
    for ratio in REVISITS:
        made.append((f"throughput against full, {ratio:.0%} return", [f"{one.rates[ratio]:.2f}×" for one in found]))
    for ratio in REVISITS[1:]:
        shown = [(max(lengths) / one.length, one.longer[ratio]) for one in found]
        made.append(
            (
                f"longer histories, {ratio:.0%} return",
                [f"> {most:.1f}×" if of is None else f"{of:.2f}×" for most, of in shown],
            )
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two rounds, up to 1,024 tokens")
    parser.add_argument("--rounds", type=int, default=7, help="full inferences of each model and length [7]")
    parser.add_argument("--threads", type=int, default=1, help="threads of the device [1]")
    options = parser.parse_args()
    sys.path.append(str(ROOT))  # the examples are not installed
    torch.set_num_threads(options.threads)
    lengths = LENGTHS[:3] if options.quick else LENGTHS
    families = [Family(name, lengths) for name in FAMILIES]
    measure(
        families, lengths, 2 if options.quick else options.rounds, lambda line: print(line, file=sys.stderr, flush=True)
    )
    print("\n".join(Machine(CPU).describe()))
    print(
        f"{SHAPE.layers} layers, D {SHAPE.dim}, {SHAPE.heads} heads × {SHAPE.dqk}, float32, {options.threads} thread; "
        f"{SUFFIX} suffix behaviours, {CANDIDATES} candidates, {GROWTH} new behaviours of a returning user; "
        f"SLO {SLO_MS:g} ms at P99, {STAGE_DELAY_MS:g} ms from announcement to ranking, {BUS_MS:g} ms for the bus "
        "(assumed)\n"
    )
    print(table([family.name for family in families], rows(families, lengths)))


if __name__ == "__main__":
    main()
