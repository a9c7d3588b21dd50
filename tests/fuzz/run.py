"""Feeds the targets and watches findings, resident memory, and the time of each input, its making included."""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

import psutil
import structlog

from tests.fuzz.checks import Finding
from tests.fuzz.targets import Target, targets

#: Progress is printed, and memory looked at, this often.
REPORT_S: Final = 10.0
MEMORY_EVERY: Final = 1000
#: Of every so many inputs one's time goes into the median; not a multiple of the number of targets.
SAMPLED_EVERY: Final = 97
#: Findings printed whole; there may be thousands of one kind.
SHOWN: Final = 3
MIB: Final = 1 << 20
#: A process that was fed a million small inputs has no reason to hold this much more than after its first thousand.
GROWTH_MIB: Final = 64


@dataclass
class Report:
    """What a run came to; `examples` holds the first inputs of each finding."""

    seed: int
    inputs: int = 0
    findings: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""
    median_s: float = 0.0
    first_mib: float = 0.0
    largest_mib: float = 0.0

    @property
    def grown(self) -> bool:
        """Whether memory rose by more than inputs of this size explain."""
        return self.largest_mib - self.first_mib > GROWTH_MIB

    def __str__(self) -> str:
        lines = [
            f"inputs   {self.inputs:,}",
            f"findings {sum(self.findings.values()):,}",
            f"memory   {self.largest_mib:.0f} MiB at most, {self.first_mib:.0f} after {MEMORY_EVERY:,} inputs",
            f"slowest  {self.slowest_s * 1e3:.1f} ms ({self.slowest}), median {self.median_s * 1e6:.0f} µs",
            f"seed     {self.seed}",
            *(f"{number:>8,} × {what}" for what, number in self.findings.most_common()),
            *self.examples,
        ]
        return "\n".join(lines)


def run(inputs: int, seed: int, only: str = "", *, progress: bool = False) -> Report:
    """So many inputs over all targets in turn; input i of a target depends on nothing but seed, target and i."""
    with ExitStack() as stack:
        chosen = {name: target for name, target in targets(stack).items() if only in name}
        return _run(chosen, inputs, seed, progress=progress)


def _run(chosen: dict[str, Target], inputs: int, seed: int, *, progress: bool) -> Report:
    report, process = Report(seed), psutil.Process()
    reported, sample = time.monotonic(), list[float]()
    names, shown = list(chosen), 0
    for number in range(inputs):
        name = names[number % len(names)]
        took = _feed(chosen[name], name, number // len(names), report)
        if number % SAMPLED_EVERY == 0:
            sample.append(took)
        if took > report.slowest_s:
            report.slowest_s, report.slowest = took, f"{name} {number // len(names)}"
        report.inputs += 1
        if report.inputs % MEMORY_EVERY == 0:
            resident = process.memory_info().rss / MIB
            report.first_mib = report.first_mib or resident
            report.largest_mib = max(report.largest_mib, resident)
            if progress and time.monotonic() > reported + REPORT_S:
                reported = time.monotonic()
                print(f"{report.inputs:,} of {inputs:,}, {resident:.0f} MiB, {sum(report.findings.values())} findings")
                print("".join(report.examples[shown:]), end="", flush=True)  # a run that is ended has told them
                shown = len(report.examples)
    report.median_s = sorted(sample)[len(sample) // 2]
    return report


def _feed(target: Target, name: str, number: int, report: Report) -> float:
    rng = random.Random(f"{report.seed} {name} {number}")
    started = time.thread_time()  # others that run here do not count
    try:
        target(rng)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{name}: {type(error).__name__} at {where.name}:{where.lineno}"
        if isinstance(error, Finding):
            what = f"{name}: {str(error)[:40]}"
        report.findings[what] += 1
        if report.findings[what] <= SHOWN:
            report.examples.append(
                f"--- {name} {number}: {str(error)[:300]}\n{''.join(traceback.format_tb(error.__traceback__)[-3:])}"
            )
    return time.thread_time() - started


def main() -> None:
    """Exit 1 on a finding, or where memory grew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="targets whose name contains this")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    report = run(args.inputs, args.seed, args.only, progress=True)
    print(report)
    sys.exit(1 if report.findings or report.grown else 0)


if __name__ == "__main__":
    main()
