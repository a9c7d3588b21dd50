"""How close the engine comes to the machine: every time beside its floor, all measured in one run.

    python relaygr_lab/benchmarks/engine.py [--device cpu|cuda|npu] [--quick] [--json FILE]
        CHECK=1: non-zero, bounds not kept

Floor of an operation: its multiply-adds, SiLU and conversions, each at its own measured peak, or the bytes of weights
and K/V at the measured bandwidth, whichever takes longer; norms and sums come for nothing. On a CPU the peaks are those
of loops in registers and the bandwidth that of reading, elsewhere those of a matrix product and a copy. All are
measured anew beside every figure. The prefix KV of a ranking is never in the processor's caches when it comes.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Final, get_args

import numpy as np
import torch
from engine_copies import copies
from engine_load import EngineLoad
from engine_report import Report
from engine_turns import behind_a_pause, both_dtypes, recorded, threads
from floors import Cost, Floors, Machine, Work, dtype_name
from judge import judge

from relaygr_stream import settings
from relaygr_stream.models.api import ScoreInput
from relaygr_stream.models.devices import select_device
from relaygr_stream.models.kv import KVRegion

#: Where the bounds below are judged: prefix tokens, candidates.
PREFIX: Final = 2048
CANDIDATES: Final = 64
EXTENSION: Final = 64  # tokens by which a cached prefix is extended
HIT_OF_FLOOR: Final = 1.3
HIT_PREFIXES: Final = (2048, 8192)
PREFILL_OF_FLOOR: Final = 0.85
PREFILL_PREFIXES: Final = (2048, 16384)
EXTENSION_OF_WHOLE: Final = 0.10
#: A further token costs no more at the longest prefix than at the shortest, with room for what other processes take.
LINEAR: Final = 1.15
#: Relative in float32; root mean square error against the float32 truth in half precision, whose own
#: uncertainty over some hundred scores is a few percent.
EXACT: Final = 1e-5
NO_FURTHER: Final = 1.10
#: Rankings that wait together: (prefix tokens, suffix, candidates), as different as requests are.
RAGGED: Final = ((2048, 0, 64), (512, 16, 32), (1408, 8, 128), (256, 0, 96), (3000, 32, 64), (700, 4, 48), (64, 0, 64))


class EngineBench:
    """All figures of one dtype."""

    def __init__(self, load: EngineLoad, machine: Machine, report: Report, options: argparse.Namespace) -> None:
        self.load = load
        self.machine = machine
        self.report = report
        self.options = options
        self.dtype = load.dtype

    def run(self) -> None:
        self.report.head(f"{dtype_name(self.dtype)}: prefill and score")
        hits = [self.prefix(tokens) for tokens in self.options.prefix]
        self.linearity([hit for hit, _ in hits])
        ratios = [ratio for _, ratio in hits]
        growing = all(later > earlier for earlier, later in itertools.pairwise(ratios))
        self.judge(growing, f"full / hit: {', '.join(f'{ratio:.1f}' for ratio in ratios)}; bound: grows with length")
        self.ragged()

    def prefix(self, prefix: int) -> tuple[float, float]:
        """One prefix length: infer it, extend it, rank on it. Seconds of the first hit, and full / hit."""
        load, kv = self.load, self.load.region(prefix + EXTENSION)
        history, more = load.tokens(prefix), load.tokens(EXTENSION)

        def infer() -> None:
            kv.length = 0
            load.model.prefill(kv, history)

        def append() -> None:
            kv.length = prefix
            load.model.prefill(kv, more)

        cost = load.extend_cost(0, prefix)
        whole, floors = self.measure(f"prefill {prefix}", infer, cost)
        if prefix in PREFILL_PREFIXES and load.device.type == "cpu":
            share = floors.seconds(cost) / whole
            self.judge(
                share >= PREFILL_OF_FLOOR,
                f"prefill {prefix}: {share:.0%} of the floor's rate; bound: at least {PREFILL_OF_FLOOR:.0%}",
            )
        extension, _ = self.measure(f"extend {prefix} by {EXTENSION}", append, load.extend_cost(prefix, EXTENSION))
        share = extension / whole
        self.report.note(self.dtype, "extension / recomputing", f"{share:.1%}", share=share)
        if prefix == PREFIX:
            self.judge(
                share <= EXTENSION_OF_WHOLE,
                f"extending {prefix} by {EXTENSION}: {share:.1%} of the whole; bound: at most {EXTENSION_OF_WHOLE:.1%}",
            )
        kv.length = prefix
        hits = [self.hit(kv, candidates, whole, cost) for candidates in self.options.candidates]
        return hits[0]

    def hit(self, kv: KVRegion, candidates: int, whole: float, whole_cost: Cost) -> tuple[float, float]:
        """Ranking on a hit. Its seconds, and full inference / hit."""
        load, prefix = self.load, kv.length
        one = load.ranking(kv, candidates)
        alike, cost = load.alike(one), load.score_cost(one)
        name = f"score {candidates} on a hit of {prefix}"
        took, floors = self.measure(name, lambda: load.model.score([next(alike)]), cost)
        # Full inference is extend, then score: what a worker does without a prefix KV.
        ratio, floor = (whole + took) / took, floors.seconds(cost)
        at_floor = (floors.seconds(whole_cost) + floor) / floor
        self.report.note(
            self.dtype, f"full inference / {name}", f"{ratio:.1f} (of the floors: {at_floor:.1f})",
            ratio=ratio, of_floors=at_floor,
        )  # fmt: skip
        if prefix in HIT_PREFIXES and candidates == CANDIDATES and load.device.type == "cpu":
            self.judge(
                took <= HIT_OF_FLOOR * floor, f"{name}: {took / floor:.2f} × its floor; bound: at most {HIT_OF_FLOOR:g}"
            )
        return took, ratio

    def linearity(self, hits: list[float]) -> None:
        """Cost per token from each prefix length to the next: linear where it stays."""
        prefixes = self.options.prefix
        if len(hits) < 2:
            return
        slopes = np.diff(hits) / np.diff(prefixes) * 1e6
        text = ", ".join(f"{slope:.2f} up to {prefix}" for slope, prefix in zip(slopes, prefixes[1:], strict=True))
        growth = float(slopes.max() / slopes[0])
        name = f"score {self.options.candidates[0]} on a hit, µs per further prefix token"
        self.report.note(self.dtype, name, f"{text}; dearest / first {growth:.2f}", growth=growth)
        self.judge(
            growth <= LINEAR, f"a hit's further token: {growth:.2f} × the cost of the first; bound: at most {LINEAR:g}"
        )

    def ragged(self) -> None:
        """Waiting rankings of different lengths as one batch, against one after the other; and their scores."""
        load = self.load
        batch = []
        for prefix, suffix, candidates in RAGGED:
            kv = load.region(prefix)
            load.model.prefill(kv, load.tokens(prefix))
            batch.append(load.ranking(kv, candidates, suffix))

        def one_by_one() -> None:
            for one in batch:
                load.model.score([one])

        together, apart = self.machine.race((lambda: load.model.score(batch), one_by_one), 2 * self.options.seconds)
        name = f"ragged batch of {len(batch)}: one by one / together"
        self.report.note(self.dtype, name, f"{apart / together:.2f}", ratio=apart / together)
        self.judge(apart > together, f"a ragged batch: {together / apart:.2f} × the time one by one; bound: below 1")
        self.measure(f"score a ragged batch of {len(batch)}", lambda: load.model.score(batch), load.batch_cost(batch))
        self.exactness(batch)

    def exactness(self, batch: list[ScoreInput]) -> None:
        """Scores of a batch against those of each ranking alone."""
        model = self.load.model
        together = torch.cat([scores.cpu() for scores in model.score(batch)])
        alone = torch.cat([model.score([one])[0].cpu() for one in batch])
        deviation = float((together - alone).abs().max() / alone.abs().max())
        if self.dtype == torch.float32:
            self.report.note(self.dtype, "batch against alone", f"{deviation:.1e} relative", deviation=deviation)
            self.judge(deviation <= EXACT, f"a batch changes scores by {deviation:.1e}; bound: at most {EXACT:.0e}")
            return
        truth = self.truth(batch)
        errors = [float((scores - truth).square().mean().sqrt()) for scores in (together, alone)]
        text = f"root mean square error to float32: {errors[0]:.2e} in the batch, {errors[1]:.2e} alone"
        self.report.note(self.dtype, "batch against alone", text, batch=errors[0], alone=errors[1])
        self.judge(
            errors[0] <= NO_FURTHER * errors[1],
            f"a batch: {errors[0] / errors[1]:.2f} × as far from float32; bound: at most {NO_FURTHER:g}",
        )

    def truth(self, batch: list[ScoreInput]) -> torch.Tensor:
        """The same rankings by the float32 model, on the same K and V."""
        exact = EngineLoad(self.load.shape, self.load.device, torch.float32).model
        scores = []
        for one in batch:
            kv = KVRegion(exact.layout, one.kv.storage.float(), one.kv.capacity, one.kv.length)
            scores += exact.score([ScoreInput(kv, one.suffix, one.candidates)])
        return torch.cat([part.cpu() for part in scores])

    def measure(self, name: str, work: Work, cost: Cost) -> tuple[float, Floors]:
        took, floors = self.machine.beside(work, self.dtype, self.options.seconds)
        self.report.figure(self.dtype, name, took, cost, floors)
        return took, floors

    def judge(self, holds: bool, what: str) -> None:
        self.report.check(holds, f"{dtype_name(self.dtype)}: {what}")


def facts(machine: Machine, options: argparse.Namespace) -> None:
    for line in machine.describe():
        print(line)
    print(
        f"model     {options.layers} layers, D {options.dim}, {options.heads} heads × {options.width}, random weights"
    )
    for dtype in options.dtype:
        floors = machine.floors(getattr(torch, dtype), options.seconds)
        share = machine.product_share(getattr(torch, dtype), options.seconds)
        print(
            f"peak      {floors.peak / 1e9:,.0f} GFLOP/s {dtype} (torch's product reaches {share:.0%}), memory "
            f"{floors.bandwidth / 1e9:.1f} GB/s"
        )
    transfers = machine.transfers(options.seconds)
    if transfers is not None:
        print(f"transfer  {transfers[0] / 1e9:.1f} GB/s to the device, {transfers[1] / 1e9:.1f} GB/s to the host")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu, cuda[:N] or npu[:N]")
    parser.add_argument(
        "--dtype", nargs="+", default=["bfloat16", "float32"], choices=("float32", "bfloat16", "float16")
    )
    parser.add_argument("--kernels", default="auto", choices=get_args(settings.Kernels), help="as worker.kernels")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of one operator; a worker's default is 1")
    parser.add_argument("--prefix", type=int, nargs="+", default=[512, 2048, 8192, 16384], help="prefix tokens, rising")
    parser.add_argument("--candidates", type=int, nargs="+", default=[64, 512], help="candidates of a ranking")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64, help="query, key and value width per head")
    parser.add_argument("--seconds", type=float, default=1.5, help="time spent on each figure, floors included")
    parser.add_argument("--quick", action="store_true", help="bfloat16, prefixes of 512 and 2048 tokens: 30 seconds")
    parser.add_argument("--json", type=Path, help="write the figures and the bounds not kept to this file")
    options = parser.parse_args()
    if options.quick:
        options.dtype, options.prefix = ["bfloat16"], [512, PREFIX]
    return options


def main() -> list[str]:
    options = parse()
    torch.set_num_threads(options.threads)
    device = select_device(options.device)
    machine, report = Machine(device), Report()
    shape = settings.Model(
        layers=options.layers, dim=options.dim, heads=options.heads, dqk=options.width, dv=options.width
    )
    facts(machine, options)
    loads = [EngineLoad(shape, device, getattr(torch, name), options.kernels) for name in options.dtype]
    for load in loads:
        EngineBench(load, machine, report, options).run()
    if device.type == "cpu":
        print("\nin turns", flush=True)
        both_dtypes(loads, machine, report, PREFIX, options.seconds)
        for load in loads:
            threads(load, machine, report, PREFIX, options.seconds)
            behind_a_pause(load, machine, report, PREFIX, options.seconds)
    elif device.type == "cuda":
        print("\nin turns", flush=True)
        for load, prefix in itertools.product(loads, options.prefix):
            recorded(load, machine, report, prefix, options.seconds)
    copies(EngineLoad(shape, device, getattr(torch, options.dtype[0])), machine, report, options.seconds)
    print()
    if options.json:
        found = {"machine": machine.describe(), "figures": report.figures, "broken": report.broken}
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return report.broken


if __name__ == "__main__":
    judge(main)
