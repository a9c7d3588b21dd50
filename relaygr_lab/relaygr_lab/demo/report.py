"""The result of a demo run: its numbers, their table, and the verdict behind the exit code."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from relaygr_stream.wire.messages import WITHHELD, Outcome
from relaygr_stream.workload.metrics import DEFAULT_K, Quality
from relaygr_stream.workload.quantiles import quantile, quantile_name
from relaygr_stream.workload.report import HIT_WORDS, OUTCOMES, admission_text

#: Largest relative difference of relayed and full scores, in float32.
MAX_DEVIATION: Final = 1e-5
#: Least share of the admitted requests that must find their prefix KV.
MIN_HIT_SHARE: Final = 0.95
#: From so many requests on, shares are judged as they are. Among fewer, one miss is a large share: they are judged by
#: how likely a good relay shows as little.
ENOUGH: Final = 100
UNLIKELY: Final = 0.01
QUANTILES: Final = (0.5, 0.9, 0.99, 0.999)

#: Results of pre-infer signals, as text: how prefix KV became ready before the ranking.
PREPARED_WORDS: Final = {
    "computed": "computed",
    "extended": "extended",
    "hbm": "in HBM already",
    "dram": "reloaded from DRAM",
    "joined": "joined another",
}


@dataclass(kw_only=True)
class DemoResult:
    """The numbers of one run. Latencies are in milliseconds, from sending the ranking request to its scores."""

    relay_ms: Sequence[float]  # of each answered request
    outcomes: Sequence[Outcome]  # of each answered request, in the same order
    full_ms: Sequence[float]  # of the same requests, sent again for full inference
    requests: int  # in all phases
    announced: int  # of those, with a request event: the relay's
    answered: int
    errors: dict[str, int] = field(default_factory=dict)  # requests without scores, by type of error
    admissions: dict[str, int] = field(default_factory=dict)  # the relay's answers by the trigger's reason; "": unknown
    admitted: int  # requests the trigger admitted
    admitted_hits: int  # of those, answered from a prefix hit: hbm, dram or joined
    admitted_found: dict[str, int] = field(default_factory=dict)  # the same by outcome
    prepared: dict[str, int] = field(default_factory=dict)  # pre-infer signals by result; PREPARED_WORDS
    reloaded: int = 0  # prefix KV reloaded from DRAM, for a signal or a ranking
    spilled: int = 0  # prefix KV spilled to DRAM
    audits: int  # rankings that workers scored both ways
    audit_share: float = 1.0  # of their hits that workers are to audit
    audit_deviation: float  # largest relative deviation they found
    compared: int  # requests whose relayed and full scores the client compared
    deviation: float  # largest relative deviation it found
    quality: Mapping[str, Quality] = field(default_factory=dict)  # of the same requests: by phase, popularity, chance
    model: str  # e.g. "HSTU, 4 layers, random weights (seed 7)"
    broker: str
    device: str
    wall_s: float
    processes: dict[str, int | None] = field(default_factory=dict)  # exit code by process; None: still running
    notes: Sequence[str] = ()  # remarks for a reader of the numbers


def hit_share(result: DemoResult) -> float | None:
    """Share of the admitted requests that were answered from a prefix hit; None when none was admitted."""
    return result.admitted_hits / result.admitted if result.admitted else None


def verdict(result: DemoResult) -> list[str]:
    """The faults of the run, one sentence each; empty if the relay kept its promises."""
    return [*_faults(result), *(text for text, is_fault in _judged(result) if is_fault), *_endings(result)]


def unjudged(result: DemoResult) -> list[str]:
    """What the run was too short to judge, one sentence each."""
    return [text for text, is_fault in _judged(result) if not is_fault]


def render_table(result: DemoResult) -> RenderableType:
    """The run as tables of latencies, rankings and counts, and the verdict."""
    faults = verdict(result)
    judged = [Text(f"✗ {fault}", style="bold red") for fault in faults] or [
        Text("✓ every request answered, relayed scores equal full inference", style="bold green")
    ]
    ranked = [_rankings(result)] if result.quality else []
    few = [Text(f"· not judged, too few requests: {text}") for text in unjudged(result)]
    return Group(_latencies(result), *ranked, _counts(result), *judged, *few)


def _faults(result: DemoResult) -> Iterator[str]:
    if result.requests == 0:
        yield "no request was sent"
    elif missing := result.requests - result.answered:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result.errors.items()))
        yield f"{missing} of {result.requests} requests got no scores ({kinds or 'without an error'})"
    for what, deviation in (("an audited", result.audit_deviation), ("a relayed", result.deviation)):
        # `not … <=`, so that NaN is a fault, too.
        if not deviation <= MAX_DEVIATION:
            yield f"{what} score deviates from full inference by {deviation:.2g} (limit {MAX_DEVIATION:g})"
    if result.compared < 1:
        yield "no request was scored both ways by the client, so nothing was compared"


def _judged(result: DemoResult) -> Iterator[tuple[str, bool]]:
    """What falls short, and whether that is a fault: whether a good relay seldom shows it in so many requests."""
    hits = sum(result.outcomes.count(outcome) for outcome in HIT_WORDS)
    if result.audits < 1:
        none = (1 - result.audit_share) ** hits
        yield "no worker audited a score; raise worker.audit_share or run longer", hits > 0 and none < UNLIKELY
    share = hit_share(result)
    if share is None:
        decided = sum(count for reason, count in result.admissions.items() if reason)
        silent = not decided and _at_most(0, result.announced) < UNLIKELY
        yield "the trigger admitted no request", result.announced >= ENOUGH or silent
    elif share < MIN_HIT_SHARE:
        text = (
            f"{result.admitted_hits} of {result.admitted} admitted requests ({share:.1%}) were answered from a prefix "
            f"hit; at least {MIN_HIT_SHARE:.0%} should be"
        )
        yield text, result.admitted >= ENOUGH or _at_most(result.admitted_hits, result.admitted) < UNLIKELY


def _at_most(hits: int, of: int) -> float:
    """How likely a relay with just MIN_HIT_SHARE has at most so many hits (binomial)."""
    p = MIN_HIT_SHARE
    return sum(math.comb(of, k) * p**k * (1 - p) ** (of - k) for k in range(hits + 1))


def _endings(result: DemoResult) -> Iterator[str]:
    for name, code in sorted(result.processes.items()):
        if code is None:
            yield f"{name} did not stop on SIGTERM"
        elif code:
            yield f"{name} ended with exit code {code}"


def _latencies(result: DemoResult) -> Table:
    same = ", same requests" if len(result.relay_ms) == len(result.full_ms) else ""
    table = Table(title=f"Ranking latency{same}", title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for name in ("relay, ms", "full inference, ms", "full / relay"):
        table.add_column(name, justify="right")
    for q in QUANTILES:
        relay, full = quantile(result.relay_ms, q), quantile(result.full_ms, q)
        if relay is None and full is None:
            continue
        ratio = f"{full / relay:.2f}×" if relay and full else "–"
        table.add_row(quantile_name(q), _ms(relay), _ms(full), ratio)
    table.add_row("answers", f"{len(result.relay_ms):,}", f"{len(result.full_ms):,}", "")
    return table


def _rankings(result: DemoResult) -> Table:
    title = "Where the true next item is ranked, same requests"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("ranked by", no_wrap=True)
    for name in (f"in the first {DEFAULT_K}", f"NDCG@{DEFAULT_K}"):
        table.add_column(name, justify="right")
    for name, quality in result.quality.items():
        table.add_row(name, f"{quality.hr:.1%}", f"{quality.ndcg:.3f}")
    return table


def _counts(result: DemoResult) -> Table:
    table = Table(show_header=False)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("requests", f"{result.requests:,}", f"in {result.wall_s:.0f} s")
    table.add_row("  answered", f"{result.answered:,}", _share(result.answered, result.requests))
    table.add_row("  by the relay", f"{len(result.outcomes):,}", "where each found its prefix KV:")
    found: Counter[str] = Counter(result.outcomes)
    for outcome, words in OUTCOMES.items():
        if outcome in ("truncated", WITHHELD) and not found[outcome]:  # on a quiet machine there are none
            continue
        share = _share(found[outcome], len(result.outcomes))
        table.add_row(f"    {outcome}", f"{found[outcome]:,}", f"{share}  {words}")
    for kind, count in sorted(result.errors.items()):
        table.add_row(f"  {kind}", f"{count:,}", f"{_share(count, result.requests)}  no scores")
    if result.admissions:
        table.add_row("admission", "", admission_text(result.admissions))
    table.add_row(
        "admitted", f"{result.admitted:,}", f"{_share(result.admitted, result.announced)}  of those announced"
    )
    split = _split(result.admitted_found) if result.admitted_found else ""
    share = _share(result.admitted_hits, result.admitted)
    table.add_row("  prefix hits", f"{result.admitted_hits:,}", f"{share}  of those admitted{split}")
    hits = sum(found[outcome] for outcome in HIT_WORDS)
    table.add_row("announced hits", f"{hits:,}", f"{_share(hits, result.announced)}  of all announced{_split(found)}")
    if result.prepared:
        ways = ", ".join(f"{result.prepared.get(name, 0):,} {words}" for name, words in PREPARED_WORDS.items())
        made = f"what made them ready: {ways} (warm-up included)"
        table.add_row("pre-infers", f"{sum(result.prepared.values()):,}", made)
    table.add_row("DRAM tier", f"{result.reloaded:,}", f"reloads to HBM, {result.spilled:,} spills from it")
    table.add_section()
    table.add_row(
        "audited by workers", f"{result.audits:,}", f"largest relative deviation {result.audit_deviation:.2g}"
    )
    table.add_row("compared by client", f"{result.compared:,}", f"largest relative deviation {result.deviation:.2g}")
    table.add_section()
    for name, text in (("model", result.model), ("device", result.device), ("broker", result.broker)):
        table.add_row(name, "", text)
    for note in result.notes:
        table.add_row("note", "", note)
    return table


def _split(found: Mapping[str, int]) -> str:
    return ": " + ", ".join(f"{found.get(outcome, 0):,} {word}" for outcome, word in HIT_WORDS.items())


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"
