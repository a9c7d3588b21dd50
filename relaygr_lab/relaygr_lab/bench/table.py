"""The run as text for a terminal: a table of results, the paper's figures, and missed targets with causes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from relaygr_lab.bench.judge import BUS_TARGET_MS, HIT_TARGET, PAPER, SUMMARY, unknown
from relaygr_lab.bench.modes import FULL, RELAY
from relaygr_lab.bench.results import Found, Ratio, SloReport, Spread
from relaygr_lab.bench.wakes import HOPS
from relaygr_stream.workload.report import HIT_WORDS


def render_table(report: SloReport) -> RenderableType:
    """Tables, conditions and verdict."""
    faults = [Text(f"✗ {fault}", style="bold red") for fault in report.missed]
    open_ = [Text(f"? {line}", style="bold yellow") for line in unknown(report.ratios)]
    verdict = faults or [Text("✓ every target that was measured is met", style="bold green")]
    words = [Text(f"{name}: {text}", style="dim") for name, text in conditions(report)]
    return Group(Text(result(report), style="bold"), _found(report), _beside_paper(report), *words, *open_, *verdict)


def result(report: SloReport) -> str:
    """What the run found, in a sentence."""
    p99 = f"a P99 of {report.conditions['slo_ms']:g} ms"
    full = [one for one in report.found if one.mode == FULL.name]
    if not any(one.values for one in full):
        return "Full inference was not measured, for lack of time: there is nothing to compare the relay with."
    if not any(one.value for one in full):
        return f"Full inference kept {p99} nowhere, so there is nothing to compare the relay with."
    said = []
    for kind, words in (
        ("rate", "carries {} times the traffic of full inference"),
        ("length", "takes histories {} times as long"),
    ):
        found = [one for one in report.ratios if one.mode == RELAY.name and one.kind == kind and one.value]
        if found:
            ends = sorted(found, key=lambda one: one.value or 0.0)[:: max(1, len(found) - 1)]
            values = " to ".join(f"{one.mark}{one.value:.2g}" for one in ends)
            shares = " to ".join(f"{one.revisit:.0%}" for one in ends)
            said.append(f"{words.format(values)} where {shares} of the requests are by returning users")
    if not said:
        return f"The relay kept {p99} nowhere, or was not run."
    return f"At {p99} the relay {', and '.join(said)}."


def conditions(report: SloReport) -> list[tuple[str, str]]:
    """The conditions of the run, as (name, text)."""
    return [(name, str(text)) for name, text in report.conditions["words"].items()]


def _found(report: SloReport) -> Table:
    slo = report.conditions["slo_ms"]
    table = Table(
        title=f"Largest within the SLO (P99 ≤ {slo:g} ms)", title_justify="left", title_style="bold", box=SIMPLE_HEAD
    )
    table.add_column("mode", no_wrap=True, min_width=10)  # of `relay-hbm`
    kinds = two_kinds(report)
    for name in ("revisit", "at", "largest", "× full", "allowed", "late (95 %)", *(KINDS if kinds else ())):
        table.add_column(name, justify="right", no_wrap=True)
    ratios = {(one.kind, one.mode, one.revisit): one for one in report.ratios}
    for kind in ("rate", "length"):
        for one in report.found:
            if one.kind == kind:
                ratio = ratios.get((one.kind, one.mode, one.revisit))
                last = (late_text(one), *(kinds_text(one) if kinds else ()))
                given = given_text(one, "" if kind == "rate" else "/s")
                table.add_row(one.mode, f"{one.revisit:.0%}", given, value_text(one), *_ratio_cells(ratio), *last)
        table.add_section()
    return table


#: Columns where users are short or long: their P99s at the value found, ms.
KINDS: Final = ("P99 short", "long, ms")


def two_kinds(report: SloReport) -> bool:
    """Whether users are short or long."""
    return any(one.p99_long is not None or one.p99_short is not None for one in report.found)


def kinds_text(one: Found) -> tuple[str, str]:
    """As KINDS."""
    short, long = ("–" if value is None else f"{value:,.0f}" for value in (one.p99_short, one.p99_long))
    return short, long


def value_text(one: Found) -> str:
    """The value found, marked where it is a lower bound, with the range over the repeats."""
    unit = "/s" if one.kind == "rate" else " tok"
    digits = 1 if one.kind == "rate" else 0
    spread = ""
    if len(one.values) > 1 and any(one.values):
        spread = f" ({min(one.values):,.{digits}f}…{max(one.values):,.{digits}f})"
    if not one.values:
        return "not probed"
    if one.value is None:
        return f"{'none' if one.settled else '≥ 0'}{spread}"
    return f"{'' if one.settled else '≥ '}{one.value:,.{digits}f}{unit}{spread}"


def given_text(one: Found, unit: str) -> str:
    """The given length or rate, with the range over the repeats."""
    digits = 0 if one.kind == "rate" else 1
    spread = f" ({min(one.given):,.{digits}f}…{max(one.given):,.{digits}f})" if len(set(one.given)) > 1 else ""
    return f"{one.at:,.{digits}f}{unit}{spread}"


def _ratio_cells(ratio: Ratio | None) -> tuple[str, str]:
    if ratio is None:
        return "", ""
    return ratio_text(ratio), f"{ratio.bound:.2f}"


def ratio_text(ratio: Ratio, unit: str = "") -> str:
    """The ratio, marked where it is a bound, with its range over the repeats."""
    value = "–" if ratio.value is None else f"{ratio.mark}{ratio.value:.2f}{unit}"
    if ratio.low is None or ratio.low == ratio.high:
        return value
    return f"{value} ({ratio.low:.2f}…{'' if ratio.high is None else f'{ratio.high:.2f}'})"


def late_text(one: Found) -> str:
    """The number of late requests, and the upper end of the 95 % interval of their true share."""
    if not one.requests:
        return "–"
    return f"{one.bad}/{one.requests:,} ≤ {one.bad_share[1]:.1%}"


def paper_rows(report: SloReport) -> list[tuple[str, str, str, str]]:
    """(name, the paper's figure, this run's, the target)."""
    rows = []
    for kind, words in (("length", "longer sequences"), ("rate", "throughput")):
        for ratio in report.ratios:
            if ratio.kind == kind and ratio.target is not None:
                name = f"{words}, revisit {ratio.revisit:.0%}"
                rows.append((name, f"{PAPER[kind]:g}×", ratio_text(ratio, "×"), f"≥ {ratio.target:.2f}×"))
    admitted, hit = report.hits["admitted"], report.hits["hit"]
    share = f"{hit / admitted:.1%} of {admitted:,}" if admitted else "–"
    rows.append(("admitted requests that hit", f"{PAPER['hits']:.0%} ({SUMMARY})", share, f"≥ {HIT_TARGET:.0%}"))
    if beyond := report.hits.get("admitted_beyond", 0):
        share = f"{report.hits['hit_beyond'] / beyond:.1%} of {beyond:,}"
        rows.append(("  beyond the values found", "–", share, ""))
    rows.append(("announced requests that hit", "–", announced_text(report.hits), ""))
    rows.append(("bus there and back, P50 / P99", "–", spread_text(report.bus["both"]), f"≤ {BUS_TARGET_MS:g} ms"))
    rows.append(("  publish → worker's read", "–", spread_text(report.bus["in"]), ""))
    rows.append(("  engine end → caller", "–", spread_text(report.bus["out"]), ""))
    rows.append((f"  waking {HOPS} threads, estimate", "–", spread_text(report.bus["wakes"]), ""))
    return rows


def announced_text(hits: Mapping[str, int]) -> str:
    """The hits of all announced rankings, by outcome."""
    announced = hits.get("announced", 0)
    split = {word: hits.get(word, 0) for word in HIT_WORDS.values()}
    found = ", ".join(f"{count:,} {word}" for word, count in split.items())
    return f"{sum(split.values()) / announced:.1%} of {announced:,}: {found}" if announced else "–"


def spread_text(spread: Spread) -> str:
    """P50 / P99 in milliseconds."""
    return " / ".join("–" if value is None else f"{value:.1f}" for value in (spread.p50, spread.p99)) + " ms"


def _beside_paper(report: SloReport) -> Table:
    table = Table(title="Beside the paper", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in ("paper", "here", "aim"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in paper_rows(report):
        table.add_row(*row)
    return table
