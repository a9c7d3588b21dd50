"""The run as one self-contained HTML page: no scripts, no fonts, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from relaygr_lab.bench import plots
from relaygr_lab.bench.judge import BUS_TARGET_MS, HIT_TARGET, PAPER, SUMMARY, unknown
from relaygr_lab.bench.results import SloReport
from relaygr_lab.bench.table import (
    KINDS,
    announced_text,
    conditions,
    given_text,
    kinds_text,
    late_text,
    paper_rows,
    ratio_text,
    two_kinds,
    value_text,
)

STYLE: Final = """
:root{color-scheme:light;--ink:#1f2933;--soft:#64748b;--line:#e2e8f0;--good:#0f766e;--bad:#b45309}
*{box-sizing:border-box}body{margin:0;background:#f6f7f9;color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1380px;margin:0 auto;padding:32px 28px 64px}
h1{font-size:26px;margin:0 0 4px;letter-spacing:-.01em}h2{font-size:18px;margin:40px 0 4px}
p{margin:4px 0 14px;max-width:78ch}.soft{color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:14px;margin:22px 0}
.card,figure,.box{background:#fff;border:1px solid var(--line);border-radius:10px}
.card{padding:16px 18px}.card b{display:block;font-size:30px;line-height:1.15;letter-spacing:-.02em}
.card.good b{color:var(--good)}.card.bad b{color:var(--bad)}.card em{font-style:normal;font-weight:600}
.card small{display:block;color:var(--soft);margin-top:4px}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:18px}
figure{margin:0;padding:16px 18px 12px}figcaption{font-weight:600;margin-bottom:2px}
figcaption span{display:block;font-weight:400;color:var(--soft);font-size:13px;margin-bottom:8px}
svg{width:100%;height:auto;display:block}
.box{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:8px 14px;text-align:right;border-top:1px solid var(--line);white-space:nowrap}
thead th{border-top:0;color:var(--soft);font-weight:600;font-size:13px}th:first-child,td:first-child{text-align:left}
td.wide{white-space:normal;text-align:left;min-width:340px;color:var(--soft);font-size:13.5px}
ul{padding-left:20px}li{margin:6px 0;max-width:110ch}dl{display:grid;grid-template-columns:110px 1fr;gap:6px 16px}
dt{color:var(--soft)}dd{margin:0}.none{color:var(--soft)}
@media(max-width:560px){.grid{grid-template-columns:1fr}main{padding:20px 14px}}
"""


def render_page(report: SloReport) -> str:
    """The page."""
    slo = report.conditions["slo_ms"]
    body = [
        "<h1>Same P99: how much longer, how much more</h1>",
        f'<p class="soft">RelayGR Stream on this machine, ranking P99 ≤ {slo:g} ms, preset '
        f"{escape(report.conditions['preset'])}, {len(report.probes)} probes in {report.wall_s:,.0f} s. "
        f"Everything ran as real processes: broker, trigger, workers, client.</p>",
        _cards(report),
        _verdict(report),
        _section(
            "Beside the paper", "The paper's figures come from its own hardware, models and traffic.", _paper(report)
        ),
        _section(
            "What was found",
            "The largest rate or length whose P99 stays within the SLO; ≥: a lower bound. “Allowed” is the most that "
            "the device's time permits by the workers' fitted costs, given what full inference reached; no measured "
            "ratio may exceed it. “Work” is the cost of full inference over the mode's own; the rest of the ratio is "
            "the gain of working before the ranking request. “Late” is the number of late requests among those judged "
            "at the values, and the upper bound of their true share at 95 % confidence; rather too low, since passing "
            "probes choose the values.",
            _found(report),
        ),
        _section(
            "P99", "Filled: passed. Hollow: beyond the SLO, cut short, so at least this.", _grid(plots.p99(report))
        ),
        _section("Where time goes", "", _grid(plots.time(report))),
        _section("Tiers", "", _grid(plots.tiers(report))),
        _section("Conditions", "", _conditions(report)),
    ]
    return page_html("relaygr bench slo", body)


def page_html(title: str, parts: Sequence[str]) -> str:
    """The whole page. parts: HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _cards(report: SloReport) -> str:
    cards = []
    for kind, words in (("length", "longer sequences"), ("rate", "more traffic")):
        for ratio in report.ratios:
            if ratio.kind == kind and ratio.target is not None:
                notes = f"aim ≥ {ratio.target:g}× · allowed {ratio.bound:.2g}× · paper {PAPER[kind]:g}×"
                cards.append(
                    _card(ratio_text(ratio, "×"), f"{words}, revisit {ratio.revisit:.0%}", notes, ratio.reached)
                )
    admitted, hit = report.hits["admitted"], report.hits["hit"]
    if admitted:
        notes = (
            f"aim ≥ {HIT_TARGET:.0%} · paper {PAPER['hits']:.0%} ({SUMMARY}) · announced: {announced_text(report.hits)}"
        )
        cards.append(_card(f"{hit / admitted:.1%}", "of admitted requests hit", notes, hit >= HIT_TARGET * admitted))
    both = report.bus["both"].p99
    if both is not None:
        notes = f"aim ≤ {BUS_TARGET_MS:g} ms · P50 {report.bus['both'].p50:.1f} ms"
        cards.append(_card(f"{both:.1f} ms", "the bus's share, P99", notes, both <= BUS_TARGET_MS))
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(value: str, what: str, notes: str, reached: bool | None) -> str:
    tone = "" if reached is None else "good" if reached else "bad"
    return f'<div class="card {tone}"><b>{escape(value)}</b><em>{escape(what)}</em><small>{escape(notes)}</small></div>'


def _verdict(report: SloReport) -> str:
    parts = [
        f"<h2>{title}</h2><ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
        for title, lines in (
            ("What was missed, and why", report.missed),
            ("What is not known", unknown(report.ratios)),
        )
        if lines
    ]
    return "".join(parts) if report.missed else "<p>Every target that was measured is met.</p>" + "".join(parts)


def _paper(report: SloReport) -> str:
    return table_html(
        ("", "RelayGR paper", "here", "aim"), [[escape(cell) for cell in row] for row in paper_rows(report)]
    )


def _found(report: SloReport) -> str:
    ratios = {(one.kind, one.mode, one.revisit): one for one in report.ratios}
    rows, kinds = [], two_kinds(report)
    for kind in ("rate", "length"):
        for one in report.found:
            if one.kind != kind:
                continue
            ratio = ratios.get((one.kind, one.mode, one.revisit))
            rows.append(
                [
                    escape(one.mode),
                    f"{one.revisit:.0%}",
                    given_text(one, " tokens" if kind == "rate" else "/s"),
                    value_text(one),
                    ratio_text(ratio, "×") if ratio else "",
                    f"{ratio.bound:.2f}×" if ratio else "",
                    f"{ratio.work:.2f}×" if ratio else "",
                    escape(late_text(one)),
                    *(kinds_text(one) if kinds else ()),
                    escape("; ".join(one.limits)),
                ]
            )
    heads = ("mode", "revisit", "given", "largest", "ratio", "allowed", "work", "late (95 %)")
    heads = (*heads, *(KINDS if kinds else ()), "why not more")
    return table_html(heads, rows, wide=True)


def table_html(heads: Sequence[str], rows: Sequence[Sequence[str]], wide: bool = False) -> str:
    """Cells are HTML; wide: the last column is prose."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = ""
    for row in rows:
        *cells, last = row
        end = f'<td class="wide">{last}</td>' if wide else f"<td>{last}</td>"
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}{end}</tr>"
    return f'<div class="box"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _grid(charts: Sequence[tuple[str, str, str]]) -> str:
    figures = "".join(
        f"<figure><figcaption>{escape(title)}<span>{escape(words)}</span></figcaption>{chart}</figure>"
        for title, words, chart in charts
    )
    return f'<div class="grid">{figures}</div>'


def _section(title: str, words: str, content: str) -> str:
    return f'<h2>{escape(title)}</h2><p class="soft">{escape(words)}</p>{content}'


def _conditions(report: SloReport) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in conditions(report))
    return f'<div class="box" style="padding:8px 20px"><dl>{rows}</dl></div>'
