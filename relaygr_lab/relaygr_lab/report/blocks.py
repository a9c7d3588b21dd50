"""The blocks of a report: each shows itself on a page, self-contained HTML that loads nothing, and on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from relaygr_lab.bench.results import Verdict

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


class Block:
    """A part of a report."""

    def html(self) -> str:
        """On the page; "": not there."""
        raise NotImplementedError

    def shown(self) -> list[RenderableType]:
        """On a terminal; empty: on the page alone."""
        return []


@dataclass(frozen=True)
class Result(Block):
    """The first sentence, and on the page what it rests on."""

    sentence: str
    words: str

    def html(self) -> str:
        """The page's heading."""
        return f'<h1>{escape(self.sentence)}</h1><p class="soft">{escape(self.words)}</p>'

    def shown(self) -> list[RenderableType]:
        """The sentence."""
        return [Text(self.sentence, style="bold")]


@dataclass(frozen=True)
class Rows(Block):
    """A table. prose: its last column is long text. terminal: there, too, without so many of its last columns."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: str = ""
    prose: bool = False
    terminal: bool = True
    without: int = 0

    def html(self) -> str:
        """With a heading, if it has a title; nothing without rows."""
        if not self.rows:
            return ""
        head, *body = (
            f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
            for tag, cells in (("th", self.heads), *(("td", row) for row in self.rows))
        )
        kind = ' class="wide"' if self.prose else ""
        table = f"<table{kind}><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"
        return f'{_heading(self.title, self.words)}<div class="box">{table}</div>'

    def shown(self) -> list[RenderableType]:
        """Numbers to the right; prose folds."""
        if not (self.rows and self.terminal):
            return []
        table = Table(title=self.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        columns = len(self.heads) - self.without
        for number, head in enumerate(self.heads[:columns]):
            folds = self.prose and number == len(self.heads) - 1
            table.add_column(head, justify="left" if number == 0 or folds else "right", no_wrap=not folds)
        for row in self.rows:
            table.add_row(*row[:columns])
        return [table]


@dataclass(frozen=True)
class Lines(Block):
    """Sentences."""

    title: str
    lines: Sequence[str]

    def html(self) -> str:
        """A list; nothing without lines."""
        items = "".join(f"<li>{escape(line)}</li>" for line in self.lines)
        return f"{_heading(self.title)}<ul>{items}</ul>" if items else ""

    def shown(self) -> list[RenderableType]:
        """One line each."""
        return [Text(f"· {line}") for line in self.lines]


@dataclass(frozen=True)
class Facts(Block):
    """Names and what is so. terminal: there, too."""

    title: str
    facts: Sequence[tuple[str, str]]
    terminal: bool = True

    def html(self) -> str:
        """A list of both."""
        rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in self.facts)
        return f'{_heading(self.title)}<div class="box" style="padding:8px 20px"><dl>{rows}</dl></div>'

    def shown(self) -> list[RenderableType]:
        """One line each."""
        return [Text(f"{name}: {text}", style="dim") for name, text in self.facts if self.terminal]


@dataclass(frozen=True)
class Charts(Block):
    """Charts beside each other, on the page alone. draw: (title, words, SVG) of each."""

    title: str
    draw: Callable[[], Iterable[tuple[str, str, str]]]
    words: str = ""

    def html(self) -> str:
        """A grid."""
        figures = "".join(
            f"<figure><figcaption>{escape(title)}<span>{escape(words)}</span></figcaption>{chart}</figure>"
            for title, words, chart in self.draw()
        )
        return f'{_heading(self.title, self.words)}<div class="grid">{figures}</div>'


@dataclass(frozen=True)
class Share:
    """A value beside the most that is possible. notes: below it."""

    what: str
    text: str
    notes: str
    value: float
    possible: float
    scale: float = 0.0  # of the whole bar; 0: the most of all

    def html(self, scale: float) -> str:
        """A bar, coloured by the share that is reached."""
        share = self.value / self.possible if self.possible else 1.0
        tone = "near" if share >= NEAR else "part" if share >= PART else "far"
        scale = self.scale or scale
        return (
            f'<div class="bar {tone}"><div>{escape(self.what)}<br><b>{escape(self.text)}</b></div>'
            f'<div><div class="track"><i style="width:{100 * self.value / scale:.1f}%"></i>'
            f'<u style="left:{100 * min(1.0, self.possible / scale):.1f}%"></u></div>'
            f"<small>{escape(self.notes)}</small></div></div>"
        )


@dataclass(frozen=True)
class Shares(Block):
    """Bars, on the page alone."""

    shares: Sequence[Share]

    def html(self) -> str:
        """With a key; nothing without bars."""
        if not self.shares:
            return ""
        scale = max((max(one.value, one.possible) for one in self.shares if not one.scale), default=0.0) or 1.0
        key = (
            f'<p class="soft key">Measured, of what is possible:<i class="near"></i>at least {NEAR:.0%}<i></i>at least '
            f'{PART:.0%}<i class="far"></i>less<u></u>possible</p>'
        )
        return f'<div class="box bars">{key}{"".join(one.html(scale) for one in self.shares)}</div>'


def verdict_rows(verdicts: Sequence[Verdict]) -> Rows:
    """What the judge found."""
    rows = [(one.what, one.found or one.state) for one in verdicts]
    return Rows("What is reached, of what is possible", ("", "reached"), rows, prose=True)


def page(title: str, blocks: Sequence[Block]) -> str:
    """One HTML page."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(block.html() for block in blocks)}</main></body></html>\n"
    )


def render(blocks: Sequence[Block]) -> RenderableType:
    """For a terminal."""
    return Group(*(part for block in blocks for part in block.shown()))


def _heading(title: str, words: str = "") -> str:
    soft = f'<p class="soft">{escape(words)}</p>' if words else ""
    return f"<h2>{escape(title)}</h2>{soft}" if title else ""
