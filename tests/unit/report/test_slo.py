from __future__ import annotations

import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from relaygr_lab.bench.cells import Cell
from relaygr_lab.bench.modes import CACHE, FULL, RELAY
from relaygr_lab.bench.results import STAGES, SloReport
from relaygr_lab.bench.search import Search
from relaygr_lab.charts import Axis, Bar, Point, Series, bar_chart, draw_bars, draw_lines, line_chart
from relaygr_lab.report import slo_charts
from relaygr_lab.report.blocks import page as html_page
from relaygr_lab.report.blocks import render
from relaygr_lab.report.slo import blocks, paper_rows, result

from relaygr_stream.telemetry.printable import render_plain
from tests.browser import browser
from tests.unit.bench.reports import cell, repeated, report


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts take most of a page's time: tests of the stack alone draw them."""
    if not request.node.get_closest_marker("stack"):
        for name in ("line_chart", "bar_chart"):
            monkeypatch.setattr(slo_charts, name, lambda *_: "")


#: The ground behind a chart, and its words.
COLOURS = """const style = (each) => getComputedStyle(document.querySelector(each));
const [panel, words] = ['figure', 'svg text'].map(style);
return [panel.backgroundColor, words.fill]"""
VOID = {"meta", "br", "hr", "img", "input"}


def page_of(report: SloReport) -> str:
    return html_page("relaygr bench slo", blocks(report))


def shown(report: SloReport, width: int = 200) -> str:
    """On a terminal."""
    return render_plain(render(blocks(report)), width)


class Balance(HTMLParser):
    """Fails on tags that do not match; keeps every attribute seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def well_formed(text: str) -> Balance:
    """Assert that all elements are closed in their order."""
    balance = Balance()
    balance.feed(text)
    balance.close()
    assert balance.open == []
    return balance


@pytest.mark.stack
def test_the_page_is_whole_and_refers_to_nothing_outside() -> None:
    page = page_of(report())
    balance = well_formed(page)
    assert not re.search(r"https?://|//[a-z]|@import|url\((?!#)|<script|<link|<iframe", page)
    assert not {"src", "srcset", "data"} & {name for name, _ in balance.attributes}
    assert all((value or "").startswith("#") for name, value in balance.attributes if name.endswith("href"))
    for words in ("3.00×", "Beside the paper", "P99", "HBM and DRAM over time"):
        assert words in page


def test_the_result_is_the_first_sentence_of_page_and_terminal() -> None:
    cells = [cell(FULL, 10.0, 11.5), cell(RELAY, 30.0, 34.0), cell(RELAY, 40.0, 46.0, revisit=0.9)]
    said = "At a P99 of 50 ms the relay carries 3 to 4 times the traffic of full inference where 0% to 90% of the"
    assert f"<main><h1>{said}" in page_of(report(cells))
    assert shown(report(cells), 400).startswith(said)
    assert "takes histories 3 times as long where 50%" in result(report())
    relay = repeated(RELAY, 30.0)
    relay.searches[-1].failed = None
    assert "carries ≥ 3 times" in result(report([cell(FULL, 10.0, 11.5), relay]))
    assert result(report([cell(FULL, 10.0, 11.5)])) == "The relay kept a P99 of 50 ms nowhere, or was not run."
    assert result(report([repeated(FULL, None), cell(RELAY, 30.0, 34.0)])).startswith("Full inference kept a P99 of")
    full = Cell("rate", FULL, 0.0, 512, 1.2)
    full.searches.append(Search(guess=10.0, low=0.5, high=1000.0, tolerance=1.2))
    unprobed = report([full, cell(RELAY, 30.0, 34.0)])
    assert result(unprobed).startswith("Full inference was not measured, for lack of time")
    assert "not probed" in shown(unprobed)


@pytest.mark.stack
def test_a_probe_without_answers_has_no_hits_and_no_time() -> None:
    none = dict.fromkeys(STAGES, 0.0)
    relay = cell(RELAY, 30.0, 34.0)
    late: dict[str, Any] = {"bad": 100, "outcomes": {}, "stage_means": none, "slow_stages": none}
    relay.probes = [msgspec.structs.replace(one, **late) for one in relay.probes]
    page = page_of(report([cell(FULL, 10.0, 11.5), relay]))
    assert "% hit" not in page and page.count("no answers") >= 3


@pytest.mark.stack
def test_charts_stand_before_reasons() -> None:
    page = page_of(report(remarks=["a reason"]))
    places = [
        page.index(words)
        for words in ("<h1>", "box bars", "<svg", "Largest within the SLO", "a reason", "Beside the paper")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize(("queue", "tone"), [(3.2, "near"), (5.0, "part"), (9.0, "far")])
def test_a_bars_colour_is_by_what_is_possible_and_not_by_an_aim(queue: float, tone: str) -> None:
    made = report([cell(FULL, 10.0, 11.5), cell(RELAY, 30.0, 34.0)], hits={"admitted": 0, "hit": 0})
    (ratio,) = made.ratios
    made = report(ratios=[msgspec.structs.replace(ratio, queue=queue, bound=99.0)], hits={"admitted": 0, "hit": 0})
    page = page_of(made)
    assert re.findall(r'class="bar (\w+)"', page) == [tone]
    assert f"an ideal queue at this device: {queue:.2g}×" in page
    (bar, possible), top = re.findall(r'(?:width|left):([\d.]+)%"></[iu]>', page), max(queue, 3.0)
    assert (float(bar), float(possible)) == pytest.approx((100 * 3.0 / top, 100 * queue / top), abs=0.1)


@pytest.mark.stack
async def test_the_page_fits_a_telephone_and_the_dark(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page_of(report()), encoding="utf-8")
    async with browser(tmp_path) as shown:
        await shown.go((tmp_path / "page.html").as_uri())
        colours = set()
        for width in (1280, 390):
            for dark in (False, True):
                await shown.show_as(width, dark=dark)
                assert await shown.run("return document.documentElement.scrollWidth") <= width
                boxes = "return [...document.querySelectorAll('%s')].map((each) => each.getBoundingClientRect().%s)"
                assert all(0 < right <= width for right in await shown.run(boxes % ("figure", "right")))
                assert min(await shown.run(boxes % ("svg text", "height"))) > 7  # a wide chart moves in its panel
                colours.add(tuple(await shown.run(COLOURS)))
        assert len(colours) == 2
        for ground, ink in colours:
            assert ground != ink
        assert await shown.console() == []


def test_hostile_text_stays_text() -> None:
    made = report(remarks=["<script>alert(1)</script>"])
    made.conditions["words"]["command"] = "relaygr bench slo --out '<b>&'"
    page = page_of(made)
    well_formed(page)
    assert "<script>" not in page
    assert "&lt;b&gt;&amp;" in page


def test_hits_are_stated_of_all_announced_beside_the_admitted() -> None:
    hits = {"admitted": 80, "hit": 76, "announced": 100, "ready": 60, "reloaded": 12, "joined": 4}
    made = report(hits=hits)
    said = "76.0% of 100: 60 ready, 12 reloaded, 4 joined"
    assert ("announced requests that hit", "–", said, "") in paper_rows(made)
    assert f"announced: {said}" in page_of(made)
    assert said in shown(made)


def test_p99s_of_short_and_long_users_have_columns_where_there_are_both() -> None:
    assert "P99 short" not in shown(report())
    assert "P99 short" not in page_of(report())
    kinds = cell(RELAY, 30.0, 34.0)
    kinds.probes[0] = msgspec.structs.replace(kinds.probes[0], p99_short=11.0, p99_long=43.0)
    kinds.probes[1] = msgspec.structs.replace(kinds.probes[1], p99_short=12.0, p99_long=99.0)
    made = report([cell(FULL, 10.0, 11.5), kinds])
    assert [(one.p99_short, one.p99_long) for one in made.found] == [(None, None), (11.0, 43.0)]
    text, page = shown(made), page_of(made)
    well_formed(page)
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == [RELAY.name]]
    assert "P99 short" in text and row[-2:] == ["11", "43"]
    assert "P99 short" in page and "<td>11</td><td>43</td>" in page


def test_bounds_and_ranges_of_values_are_on_the_page_as_in_the_terminal() -> None:
    relay = repeated(RELAY, 30.0, 36.0, 24.0)
    relay.searches[-1].failed = None
    made = report([cell(FULL, 20.0, 23.0), relay])
    for text in (shown(made), page_of(made)):
        assert "≥ 30.0/s (24.0…36.0)" in text
        assert "≥ 1.50× (1.20…1.80)" in text
        assert "not known, unsettled: relay" in text


def test_hits_beyond_the_values_found_have_a_row() -> None:
    beyond = {"admitted_beyond": 50, "hit_beyond": 30}
    made = report(hits={"admitted": 80, "hit": 76, **beyond})
    assert ("  beyond the values found", "–", "60.0% of 50", "") in paper_rows(made)
    assert not [row for row in paper_rows(report()) if "beyond" in row[0]]


def test_the_papers_hits_are_said_to_be_a_digests() -> None:
    assert "92% (a summary of the paper)" in shown(report())
    assert "92% (a summary of the paper)" in page_of(report())


def test_a_run_in_which_nothing_passed_has_a_page_and_a_table() -> None:
    empty = cell(FULL, 10.0, 11.5)
    empty.searches[0].passed = None
    made = report([empty], memory=[], hits={"admitted": 0, "hit": 0})
    well_formed(page_of(made))
    assert "no rate kept the SLO" in shown(made, 120)


def drawn(draw: Callable[[Axes], None]) -> Any:
    """Its artists answer with arrays, which the stubs of matplotlib do not tell."""
    axes = Figure().subplots()
    draw(axes)
    return axes


@pytest.mark.stack
def test_points_lie_within_the_drawing_and_hollow_ones_are_hollow() -> None:
    points = [Point(0.5, 3.0), Point(900.0, 8000.0, hollow=True)]
    series, x, y = [Series("a < b", "#000000", points)], Axis("x", log=True), Axis("y", log=True)
    axes = drawn(lambda axes: draw_lines(axes, series, x, y, (50.0, "SLO")))
    (dots,) = axes.collections
    assert dots.get_offsets().tolist() == [[0.5, 3.0], [900.0, 8000.0]]
    assert dots.get_facecolor().tolist() == [[0, 0, 0, 1], [1, 1, 1, 1]]
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert left < 0.5 and right > 900
    assert low < 3 and high > 8000
    drawing = line_chart(series, x, y, (50.0, "SLO"))
    well_formed(drawing)
    assert "a &lt; b" in drawing and "SLO" in drawing


@pytest.mark.stack
@pytest.mark.parametrize("value", [0.0, 1e-9, 7.0])
def test_a_single_value_can_be_drawn(value: float) -> None:
    for log in (False, True):
        well_formed(line_chart([Series("s", "#000", [Point(value, value)])], Axis("x", log=log), Axis("y", log=log)))
    well_formed(bar_chart([Bar("b", [("part", value)], mark=value)], {"part": "#000"}))


def test_charts_without_values_say_so() -> None:
    for drawing in (line_chart([], Axis("x"), Axis("y")), bar_chart([], {})):
        assert "Nothing was measured" in drawing


def test_without_matplotlib_the_page_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = page_of(report())
    well_formed(page)
    assert "extra `plot`" in page and "<svg" not in page


@pytest.mark.stack
def test_bars_are_as_long_as_their_amounts_and_stand_behind_each_other() -> None:
    bars = [Bar("one", [("p", 10.0), ("q", 1.0)]), Bar("two", [("p", 5.0)], mark=7.0)]
    axes = drawn(lambda axes: draw_bars(axes, bars, {"p": "#000000", "q": "#ffffff"}))
    assert [(patch.get_x(), patch.get_width()) for patch in axes.patches] == [(0, 10), (0, 5), (10, 1), (5, 0)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]
    assert [list(line.get_xdata()) for line in axes.lines] == [[7.0, 7.0]]


def test_every_mode_is_drawn_at_its_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slo_charts, "line_chart", lambda series, *_: ", ".join(line.name for line in series))
    cells = [cell(FULL, 10.0, 11.5), cell(RELAY, 20.0, 23.0)]
    cells += [cell(mode, 30.0, 34.0, revisit=0.9) for mode in (CACHE, RELAY)]
    charts = {title: names for title, _, names in slo_charts.p99(report(cells))}
    assert charts == {
        "Against rate, 0% returning users": "full, relay",
        "Against rate, 90% returning users": "full, cache, relay",
    }
