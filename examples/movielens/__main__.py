"""All of it: train, evaluate offline, check, serve through Kafka, compare, and what length buys; ends with the table.

    python -m examples.movielens --data FILE [--quick] [--no-train]

With CHECK=1 in the environment it exits 1 and names the bounds not kept. --no-train uses the checkpoint in --out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from relaygr_lab.drawing import INSTALL, can_draw
from relaygr_lab.verdicts import judged

from examples.movielens.conform import deviation_from_float64
from examples.movielens.data import Histories, History, Ints, check_same_rows, exit_code, read_histories
from examples.movielens.evaluate import (
    ENOUGH_USERS,
    LENGTHS,
    SHORT,
    Floats,
    Gain,
    Quality,
    by_group,
    ndcg,
    offline_ranks,
    paired_gain,
    quality,
)
from examples.movielens.recipe import Recipe
from examples.movielens.serve import WAYS, Latency, Served, latencies, rank_all, running, settings_for
from examples.movielens.train import parse, train
from examples.movielens.training import PROGRESS_FILE
from relaygr_stream.models.loading import load_checkpoint
from relaygr_stream.settings.schema import Settings

#: Candidates and requests per length of the latencies.
LATENCY_CANDIDATES: Final = 500
LATENCY_REQUESTS: Final = 40

#: Published on MovieLens-1M, leave-one-out, whole catalogue: HR@10, NDCG@10. The first three with all 1,000,209
#: ratings (meta-recsys/generative-recommenders), the last two on SASRec's file (gSASRec-pytorch).
PUBLISHED: Final = {
    "HSTU-large, with times": Quality(0.3294, 0.1893),
    "HSTU, with times": Quality(0.3097, 0.1720),
    "SASRec, all ratings": Quality(0.2853, 0.1603),
    "gSASRec, SASRec's file": Quality(0.3003, 0.1726),
    "SASRec-BCE, SASRec's file": Quality(0.2392, 0.1259),
}
#: Bounds: quality of a whole run on MovieLens-1M; equality of served and offline ranks on any data.
LEAST_QUALITY: Final = Quality(0.28, 0.16)
MOVIELENS_1M: Final = (6040, 3416)  # users, items of SASRec's file
SAME_RANK: Final = 0.999
NDCG_APART: Final = 1e-4
FLOAT64_APART: Final = 1e-4


@dataclass
class Report:
    """What a run found."""

    data: Histories
    offline: Ints
    deviation: float
    checked: bool
    served: list[Served] = field(default_factory=list)
    served_users: int = 0
    latencies: list[Latency] = field(default_factory=list)
    lengths: dict[str, dict[int, Floats]] = field(default_factory=dict)

    @property
    def is_movielens_1m(self) -> bool:
        """Whether the data is the published figures' own."""
        return (len(self.data.users), len(self.data.names)) == MOVIELENS_1M


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser("movielens", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--no-train", action="store_true", help="use the checkpoint in --out")
    parser.add_argument("--serve-users", type=int, default=0, help="users ranked through Kafka (0: all; --quick: 300)")
    options, recipe = parse(parser, arguments)
    torch.set_num_threads(options.threads)
    return exit_code(lambda: run(options, recipe))


def run(options: argparse.Namespace, recipe: Recipe) -> int:
    """Every step in order. Raises DataError or RelayError."""
    data = read_histories(options.data)
    if not options.no_train:
        step(f"train {recipe.epochs} epochs (Ctrl-C stops; the same command goes on)")
        train(data, recipe, options.out, resume=(options.out / PROGRESS_FILE).exists())
    model = load_checkpoint(options.out)
    check_same_rows(options.out, data)
    longest = model.config.max_positions - 1
    step(f"rank the test item of {len(data.users)} users among {len(data.names)} items, offline; with the last n only")
    ranks = offline_ranks(model, data, longest, options.out)
    report = Report(
        data,
        offline=ranks["test"],
        deviation=deviation_from_float64(model, data.users[:20], longest),
        checked=model_check(options.out, len(data.names), longest),
        lengths=by_group(data, {int(name): ndcg(found) for name, found in ranks.items() if name != "test"}),
    )
    print(quality(report.offline))
    users = data.users[: options.serve_users or (300 if options.quick else len(data.users))]
    report.served_users = len(users)
    step(f"serve {len(users)} users through Kafka: with the relay, then in full")
    asyncio.run(serve(report, users, options.out, longest, requests=LATENCY_REQUESTS // (2 if options.quick else 1)))
    return finish(report, options, recipe)


async def serve(report: Report, users: Sequence[History], out: Path, longest: int, requests: int) -> None:
    """Fill in what is measured through Kafka."""
    items = len(report.data.names)
    async with running(settings_for(out, items, longest, threads=1), out) as pipeline:
        for mode in ("auto", "full"):
            report.served.append(await rank_all(pipeline.client, users, items, longest, mode))
        some = np.random.default_rng(0).permutation(items)[:LATENCY_CANDIDATES]
        lengths = [length for length in LENGTHS if length <= longest]
        report.latencies = await latencies(pipeline.client, report.data.users, lengths, some, requests)


def model_check(out: Path, items: int, longest: int) -> bool:
    """`relaygr model check` on the checkpoint; prints its table. Returns whether every property holds."""
    settings = {"model.checkpoint": out, "relay.max_prefix_tokens": longest, "relay.max_candidates": items}
    flags = [text for name, value in settings.items() for text in ("--set", f"{name}={value}")]
    step("relaygr model check " + " ".join(flags))
    return (
        subprocess.run([sys.executable, "-m", "relaygr_stream", "model", "check", *flags], check=False).returncode == 0
    )


def finish(report: Report, options: argparse.Namespace, recipe: Recipe) -> int:
    """Print the tables, write report.json and the picture; returns the exit code."""
    quick = " (--quick)" if options.quick else ""
    print(table(report))
    (options.out / "report.json").write_text(json.dumps(as_json(report, recipe), indent=2), encoding="utf-8")
    if not can_draw():
        print(INSTALL)
    elif report.lengths:
        from examples.movielens.picture import draw  # noqa: PLC0415

        picture = options.out / "length.svg"
        draw(
            picture, report.lengths, report.latencies, slo_ms=Settings().relay.slo_ms, title=f"What length buys{quick}"
        )
        print(f"picture: {picture}")
    return int(judged(bounds_not_kept(report, judge_quality=not options.quick)))


def bounds_not_kept(report: Report, *, judge_quality: bool) -> list[str]:
    """Of this run, with both figures."""
    broken = [] if report.checked else ["relaygr model check found a property that does not hold"]
    if report.deviation > FLOAT64_APART:
        broken.append(f"scores are {report.deviation:.1e} from float64; bound: at most {FLOAT64_APART:g}")
    offline = report.offline[: report.served_users]
    for one in report.served:
        apart = abs(one.quality.ndcg - quality(offline).ndcg)
        if one.same(offline) < SAME_RANK:
            broken.append(
                f"{one.mode}: {one.same(offline):.2%} of users have the offline rank; bound: at least {SAME_RANK:.1%}"
            )
        if apart > NDCG_APART:
            broken.append(f"{one.mode}: NDCG@10 differs by {apart:.1e}; bound: at most {NDCG_APART:g}")
    found = quality(report.offline)
    if judge_quality and report.is_movielens_1m and (found.hr < LEAST_QUALITY.hr or found.ndcg < LEAST_QUALITY.ndcg):
        broken.append(f"{found}; bound: {LEAST_QUALITY}")
    return broken


def table(report: Report) -> str:
    """The tables that a run ends with."""
    lines = ["", f"{'':36} {'HR@10':>7} {'NDCG@10':>8} {'same rank':>10} {'hits':>12}"]
    found, offline = quality(report.offline), report.offline[: report.served_users]
    lines.append(f"{f'offline, {len(report.offline):,} users':36} {found.hr:7.4f} {found.ndcg:8.4f}")
    if report.served_users < len(report.offline):
        part = quality(offline)
        lines.append(f"{f'offline, the {len(offline):,} users served':36} {part.hr:7.4f} {part.ndcg:8.4f}")
    for one in report.served:
        hits = f"{one.hits:,} of {len(offline):,}"
        lines.append(
            f"{WAYS[one.mode]:36} {one.quality.hr:7.4f} {one.quality.ndcg:8.4f} {one.same(offline):10.2%} {hits:>12}"
        )
        lines.append(f"    prefix KV: {counts(one.outcomes)}; no answer: {counts(one.errors)}; {one.seconds:.0f} s")
        if one.missed:
            lines.append(f"    without a hit, by the trigger's decision: {counts(one.missed)}")
    if report.is_movielens_1m:
        lines += [f"{name + ' (published)':36} {one.hr:7.4f} {one.ndcg:8.4f}" for name, one in PUBLISHED.items()]
    lines.append(f"largest deviation from float64: {report.deviation:.1e}")
    for name, curve in report.lengths.items():
        count = len(next(iter(curve.values())))
        lines += ["", f"{name}{'' if count >= ENOUGH_USERS else ': too few to conclude from'}"]
        lines.append(f"{'last n':>8} {'NDCG@10':>8}   against {SHORT}, paired 95 % interval")
        for length, values in curve.items():
            gain = f"   {paired_gain(values, curve[SHORT])}" if SHORT in curve and length != SHORT else ""
            lines.append(f"{length:8,} {values.mean():8.4f}{gain}")
    lines += ["", f"latency at the client, {LATENCY_CANDIDATES} candidates, ms: P50 and P99"]
    lines.append(f"{'last n':>8} {'full inference':>18} {'relay (hit)':>18} {'hits':>10}")
    for at in report.latencies:
        lines.append(
            f"{at.length:8,} {at.full[0]:9.1f} {at.full[1]:8.1f} {at.relay[0]:9.1f} {at.relay[1]:8.1f} "
            f"{f'{at.hits} of {at.requests}':>10}"
        )
    return "\n".join([*lines, ""])


def counts(found: Counter[str]) -> str:
    """Names and counts on one line."""
    return ", ".join(f"{name} {count:,}" for name, count in sorted(found.items())) or "none"


def as_json(report: Report, recipe: Recipe) -> dict[str, Any]:
    """The report's figures."""
    curves = {
        name: {str(length): float(values.mean()) for length, values in curve.items()}
        for name, curve in report.lengths.items()
    }
    gains: dict[str, dict[str, Gain]] = {
        name: {str(length): paired_gain(values, curve[SHORT]) for length, values in curve.items()}
        for name, curve in report.lengths.items()
        if SHORT in curve
    }
    return {
        "recipe": asdict(recipe),
        "users": len(report.data.users),
        "items": len(report.data.names),
        "offline": quality(report.offline)._asdict(),
        "served": [
            one.quality._asdict()
            | {"mode": one.mode, "same_rank": one.same(report.offline[: report.served_users])}
            | {"outcomes": dict(one.outcomes), "missed": dict(one.missed), "errors": dict(one.errors)}
            for one in report.served
        ],
        "ndcg_by_length": curves,
        "gain_against_50": {
            name: {length: gain._asdict() for length, gain in one.items()} for name, one in gains.items()
        },
        "latency_ms": [asdict(one) for one in report.latencies],
    }


def step(text: str) -> None:
    """Announce a step."""
    print(f"\n— {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
