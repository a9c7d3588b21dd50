"""The run as one self-contained HTML page: no scripts, no fonts, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final

from relaygr_lab.bench import plots
from relaygr_lab.bench.judge import PAPER, SUMMARY, unknown
from relaygr_lab.bench.modes import RELAY
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
    result,
    two_kinds,
    value_text,
)

STYLE: Final = """
:root{color-scheme:light dark;--ground:#f6f7f9;--panel:#fff;--ink:#1f2933;--soft:#64748b;--line:#e2e8f0;--near:#0f766e;
--part:#0072b2;--far:#b45309;--blue:#0072b2;--red:#b91c1c}
@media(prefers-color-scheme:dark){:root{--ground:#12161c;--panel:#1b2129;--ink:#e5e9ef;--soft:#9aa7b8;--line:#313a46;
--near:#2dbdae;--part:#56b4e9;--far:#f0a040;--blue:#4f83f1;--red:#f87171}}
*{box-sizing:border-box}body{margin:0;background:var(--ground);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1380px;margin:0 auto;padding:32px 28px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 8px;letter-spacing:-.01em;max-width:44ch;text-wrap:balance}
h2{font-size:18px;margin:40px 0 4px}p{margin:4px 0 14px;max-width:78ch}.soft{color:var(--soft)}
figure,.box{background:var(--panel);border:1px solid var(--line);border-radius:10px}
.bars{padding:10px 18px 14px;margin:22px 0}.bar{display:grid;grid-template-columns:15em 1fr;gap:2px 16px;padding:9px 0}
.bar+.bar{border-top:1px solid var(--line)}.bar b{font-size:17px}.bar small{color:var(--soft)}
.track{position:relative;height:20px;margin:3px 0;background:var(--ground);border-radius:4px}
.track i{position:absolute;inset:0 auto 0 0;border-radius:4px;background:var(--part)}
.near .track i{background:var(--near)}.far .track i{background:var(--far)}
.track u{position:absolute;top:-3px;bottom:-3px;width:3px;margin-left:-1px;background:var(--ink)}
.key i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin:0 .3em 0 .9em;background:var(--part)}
.key .near{background:var(--near)}.key .far{background:var(--far)}.key u{display:inline-block;width:3px;height:1em;
vertical-align:-.15em;margin:0 .4em 0 .9em;background:var(--ink)}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(440px,1fr));gap:18px}
figure{margin:0;padding:16px 18px 12px;overflow-x:auto}figcaption{font-weight:600;margin-bottom:2px}
figcaption span{display:block;font-weight:400;color:var(--soft);font-size:13px;margin-bottom:8px}
svg{width:100%;height:auto;display:block}svg text{fill:currentColor}
.box{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:8px 14px;text-align:right;border-top:1px solid var(--line);white-space:nowrap}
thead th{border-top:0;color:var(--soft);font-weight:600;font-size:13px}th:first-child,td:first-child{text-align:left}
.wide th:last-child,.wide td:last-child{white-space:normal;
text-align:left;min-width:340px;color:var(--soft);font-size:13.5px}
ul{padding-left:20px}li{margin:6px 0;max-width:110ch}dl{display:grid;grid-template-columns:110px 1fr;gap:6px 16px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}.none{color:var(--soft)}
@media(max-width:560px){svg{min-width:440px}.grid,.bar{grid-template-columns:minmax(0,1fr)}main{padding:20px 14px}
h1{font-size:22px}th,td{padding:8px 9px}td:first-child{white-space:normal}
.wide td:last-child{min-width:560px}}
"""
#: From these shares of what is possible a bar is green, and blue; below it is orange.
NEAR: Final = 0.8
PART: Final = 0.5


def render_page(report: SloReport) -> str:
    """The page: the result, its charts, and then what they rest on."""
    body = [
        f"<h1>{escape(result(report))}</h1>",
        f'<p class="soft">RelayGR Stream on this machine, ranking P99 ≤ {report.conditions["slo_ms"]:g} ms, preset '
        f"{escape(report.conditions['preset'])}, {len(report.probes)} probes in {report.wall_s:,.0f} s. "
        f"Everything ran as real processes: broker, trigger, workers, client.</p>",
        _beside_possible(report),
        _section(
            "P99", "Filled: passed. Hollow: beyond the SLO, cut short, so at least this.", _grid(plots.p99(report))
        ),
        _section("Where time goes", "", _grid(plots.time(report))),
        _section("Tiers", "", _grid(plots.tiers(report))),
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
        _verdict(report),
        _section(
            "Beside the paper", "The paper's figures come from its own hardware, models and traffic.", _paper(report)
        ),
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


def _beside_possible(report: SloReport) -> str:
    """A bar for each ratio of the relay, and for its hits, beside the most that is possible here."""
    ratios = [
        one for kind in ("rate", "length") for one in report.ratios if one.kind == kind and one.mode == RELAY.name
    ]
    scale = max((max(one.value or 0.0, one.queue) for one in ratios), default=1.0) or 1.0
    bars = []
    for one in ratios:
        words = f"{'traffic' if one.kind == 'rate' else 'length'}, {one.revisit:.0%} returning users"
        notes = f"an ideal queue at this device: {one.queue:.2g}× · the paper: {PAPER[one.kind]:g}×"
        if one.target is not None:
            notes += f" · aim: {one.target:.2f}×"
        bars.append(_bar(words, ratio_text(one, "×"), notes, one.value or 0.0, one.queue, scale))
    admitted, hit = report.hits["admitted"], report.hits["hit"]
    if admitted:
        notes = f"announced: {announced_text(report.hits)} · the paper: {PAPER['hits']:.0%} ({SUMMARY})"
        bars.append(_bar("admitted requests that hit", f"{hit / admitted:.1%}", notes, hit / admitted, 1.0, 1.0))
    key = (
        f'<p class="soft key">Measured, of what is possible:<i class="near"></i>at least {NEAR:.0%}<i></i>at least '
        f'{PART:.0%}<i class="far"></i>less<u></u>possible</p>'
    )
    return f'<div class="box bars">{key}{"".join(bars)}</div>' if bars else ""


def _bar(what: str, value: str, notes: str, length: float, possible: float, scale: float) -> str:
    """length, possible, scale: of the bar, of the most that is possible, of the whole track."""
    share = length / possible if possible else 1.0
    tone = "near" if share >= NEAR else "part" if share >= PART else "far"
    return (
        f'<div class="bar {tone}"><div>{escape(what)}<br><b>{escape(value)}</b></div>'
        f'<div><div class="track"><i style="width:{100 * length / scale:.1f}%"></i>'
        f'<u style="left:{100 * min(1.0, possible / scale):.1f}%"></u></div><small>{escape(notes)}</small></div></div>'
    )


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
        body += f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
    kind = ' class="wide"' if wide else ""
    return f'<div class="box"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


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
