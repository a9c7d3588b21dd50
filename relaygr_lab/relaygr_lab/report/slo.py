"""The report of `bench slo`, as blocks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from relaygr_lab.bench.modes import FULL, RELAY
from relaygr_lab.bench.results import Found, Ratio, SloReport, Spread
from relaygr_lab.bench.wakes import HOPS
from relaygr_lab.report import slo_charts
from relaygr_lab.report.blocks import Block, Charts, Facts, Lines, Result, Rows, Share, Shares, verdict_rows
from relaygr_stream.workload.report import HIT_WORDS

#: Figures of the RelayGR paper (arXiv 2601.01712), on its own hardware, models and traffic: length and rate stand in
#: its abstract, the hits in a summary of it only.
PAPER: Final = {"length": 1.5, "rate": 3.6, "hits": 0.92}
SUMMARY: Final = "a summary of the paper"


def blocks(report: SloReport) -> list[Block]:
    """The result, its charts, and then what they rest on."""
    slo = report.conditions["slo_ms"]
    return [
        Result(
            result(report),
            f"RelayGR Stream on this machine, ranking P99 ≤ {slo:g} ms, preset {report.conditions['preset']}, "
            f"{len(report.probes)} probes in {report.wall_s:,.0f} s. Everything ran as real processes: broker, "
            "trigger, workers, client.",
        ),
        Shares(_shares(report)),
        Charts(
            "P99",
            partial(slo_charts.p99, report),
            "Filled: passed. Hollow: beyond the SLO, cut short, so at least this.",
        ),
        Charts("Where time goes", partial(slo_charts.time, report)),
        Charts("Tiers", partial(slo_charts.tiers, report)),
        _found(report, f"Largest within the SLO (P99 ≤ {slo:g} ms)"),
        Lines("Remarks", report.remarks),
        verdict_rows(report.verdicts),
        Rows(
            "Beside the paper",
            ("", "RelayGR paper", "here", "at most"),
            paper_rows(report),
            "The paper's figures come from its own hardware, models and traffic. At most: a queue of Poisson arrivals "
            "at these devices.",
        ),
        Facts("Conditions", [(name, str(text)) for name, text in report.conditions["words"].items()]),
    ]


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


def _shares(report: SloReport) -> list[Share]:
    """Each ratio of the relay, and its hits, beside the most that is possible here."""
    shares = [
        Share(
            f"{'traffic' if one.kind == 'rate' else 'length'}, {one.revisit:.0%} returning users",
            ratio_text(one, "×"),
            f"an ideal queue at this device: {one.queue:.2g}× · the paper: {PAPER[one.kind]:g}×",
            one.value or 0.0,
            one.queue,
        )
        for one in sorted(_of_relay(report), key=lambda one: one.kind, reverse=True)
    ]
    admitted, hit = report.hits["admitted"], report.hits["hit"]
    if admitted:
        notes = f"announced: {announced_text(report.hits)} · the paper: {PAPER['hits']:.0%} ({SUMMARY})"
        text, share = f"{hit / admitted:.1%}", hit / admitted
        shares.append(Share("admitted requests that hit", text, notes, share, 1.0, scale=1.0))
    return shares


def _of_relay(report: SloReport) -> list[Ratio]:
    return [one for one in report.ratios if one.mode == RELAY.name]


#: Columns where users are short or long: their P99s at the value found, ms.
KINDS: Final = ("P99 short", "long, ms")


def _found(report: SloReport, title: str) -> Rows:
    kinds = any(one.p99_long is not None or one.p99_short is not None for one in report.found)
    ratios = {(one.kind, one.mode, one.revisit): one for one in report.ratios}
    rows = []
    for one in sorted(report.found, key=lambda one: one.kind, reverse=True):
        ratio = ratios.get((one.kind, one.mode, one.revisit))
        parts = (ratio_text(ratio, "×"), f"{ratio.bound:.2f}×", f"{ratio.work:.2f}×") if ratio else ("", "", "")
        given = slo_charts.given_text(one, " tok" if one.kind == "rate" else "/s")
        ms = ["–" if value is None else f"{value:,.0f}" for value in (one.p99_short, one.p99_long)] if kinds else []
        reasons = (parts[2], "; ".join(one.limits))
        rows.append((one.mode, f"{one.revisit:.0%}", given, value_text(one), *parts[:2], late_text(one), *ms, *reasons))
    heads = ("mode", "revisit", "at", "largest", "× full", "allowed", "late (95 %)", *(KINDS if kinds else ()))
    words = (
        "≥: a lower bound. “Allowed” is the most that the device's time permits by the workers' fitted costs, given "
        "what full inference reached; no measured ratio may exceed it. “Late” is the number of late requests among "
        "those judged at the values, and the upper bound of their true share at 95 % confidence; rather too low, since "
        "passing probes choose the values. “Work” is the cost of full inference over the mode's own; the rest of the "
        "ratio is the gain of working before the ranking request."
    )
    return Rows(title, (*heads, "work", "why not more"), rows, words, prose=True, without=2)


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
    """(name, the paper's figure, this run's, what is possible)."""
    rows = []
    for kind, words in (("length", "longer sequences"), ("rate", "throughput")):
        for ratio in (one for one in _of_relay(report) if one.kind == kind):
            name = f"{words}, revisit {ratio.revisit:.0%}"
            rows.append((name, f"{PAPER[kind]:g}×", ratio_text(ratio, "×"), f"{ratio.queue:.2f}×"))
    admitted, hit = report.hits["admitted"], report.hits["hit"]
    share = f"{hit / admitted:.1%} of {admitted:,}" if admitted else "–"
    rows.append(("admitted requests that hit", f"{PAPER['hits']:.0%} ({SUMMARY})", share, ""))
    if beyond := report.hits.get("admitted_beyond", 0):
        share = f"{report.hits['hit_beyond'] / beyond:.1%} of {beyond:,}"
        rows.append(("  beyond the values found", "–", share, ""))
    rows.append(("announced requests that hit", "–", announced_text(report.hits), ""))
    for words, name in (
        ("bus there and back, P50 / P99", "both"),
        ("  publish → worker's read", "in"),
        ("  engine end → caller", "out"),
        (f"  waking {HOPS} threads, estimate", "wakes"),
    ):
        rows.append((words, "–", spread_text(report.bus[name]), ""))
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
