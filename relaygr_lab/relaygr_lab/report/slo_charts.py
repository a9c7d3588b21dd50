"""The charts of the page: each is a title, a subtitle and an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from relaygr_lab.bench.results import DEVICE_WORK, STAGES, Found, Probe, SloReport
from relaygr_lab.charts import Axis, Bar, Point, Series, bar_chart, line_chart
from relaygr_lab.drawing import BLUE, GREEN, GREY, ORANGE, OUTCOME_COLOURS, PINK, RED, SKY
from relaygr_stream.workload.report import OUTCOMES

Chart = tuple[str, str, str]

MODES: Final = {"full": RED, "cache": ORANGE, "relay-hbm": SKY, "relay": BLUE}
STAGE_COLOURS: Final = dict(zip(STAGES.values(), (GREY, SKY, ORANGE, RED, PINK, BLUE), strict=True))
WORK_COLOURS: Final = dict(zip(DEVICE_WORK.values(), (BLUE, RED, GREEN), strict=True))
#: Lines of the tiers' chart: name, colour, whether dashed.
TIERS: Final = {
    "hbm": ("HBM used", BLUE, False),
    "pinned": ("of that, pinned", RED, True),
    "dram": ("DRAM used", SKY, False),
}
MIB: Final = 1 << 20
#: Beside the empty bar of a probe whose requests all failed.
UNANSWERED: Final = "no answers"


def p99(report: SloReport) -> list[Chart]:
    """P99 against rate for each revisit ratio, and against length."""
    charts = []
    given = report.conditions["length"]
    limit = (report.conditions["slo_ms"], "SLO")
    rates = {(one.mode, one.revisit) for one in report.found if one.kind == "rate"}
    at_length = [probe for probe in report.counted if probe.length == given and (probe.mode, probe.revisit) in rates]
    for ratio in sorted({probe.revisit for probe in at_length if probe.mode != "full"}):
        # Full inference reuses nothing, so its curve is the same at every ratio.
        shown = [probe for probe in at_length if probe.mode == "full" or probe.revisit == ratio]
        series = _series(shown, [probe.rate for probe in shown])
        chart = line_chart(series, Axis("requests per second", log=True), Axis("P99, ms", log=True), limit)
        charts.append((f"Against rate, {ratio:.0%} returning users", f"prefixes of {given:,} tokens", chart))
    lengths = [one for one in report.found if one.kind == "length"]
    if lengths:
        one = lengths[0]
        near = [
            probe
            for probe in report.counted
            if probe.rate in one.given and (probe.mode == "full" or probe.revisit == one.revisit)
        ]
        series = _series(near, [float(probe.length) for probe in near])
        chart = line_chart(series, Axis("prefix tokens", log=True), Axis("P99, ms", log=True), limit)
        charts.append(("Against length", f"{given_text(one, ' requests/s')}, {one.revisit:.0%} returning users", chart))
    return charts


def time(report: SloReport) -> list[Chart]:
    """A ranking's time by stage, and device time by kind of work."""
    best = [(one, probe) for one in report.found if (probe := _best(report, one)) is not None]
    stages = [_stages(one, probe.stage_means) for one, probe in best]
    slow = [_stages(one, probe.slow_stages) for one, probe in best]
    work = [
        Bar(
            _name(one),
            [(words, probe.device_ms_per_s.get(name, 0.0) / 10) for name, words in DEVICE_WORK.items()],
            f"{probe.busy:.0%} busy",
        )
        for one, probe in best
    ]
    return [
        (
            "A ranking's time by stage, mean",
            "at the largest value found, from the scheduled send time",
            bar_chart(stages, STAGE_COLOURS, " ms"),
        ),
        ("The same, the slowest 5 %", "what the P99 is made of", bar_chart(slow, STAGE_COLOURS, " ms")),
        (
            "Device time by kind of work",
            "% of one device, at the largest value found",
            bar_chart(work, WORK_COLOURS, " %"),
        ),
    ]


def tiers(report: SloReport) -> list[Chart]:
    """Where prefix KV were found, and the tiers' use over time."""
    hits = []
    for one in report.found:
        probe = _best(report, one)
        if probe is not None and probe.mode != "full":
            total = sum(probe.outcomes.values())
            shares = [
                (words, 100 * probe.outcomes.get(name, 0) / max(1, total))
                for name, words in OUTCOMES.items()
                if name in OUTCOME_COLOURS
            ]
            hits.append(Bar(_name(one), shares, f"{100 - shares[-1][1]:.1f} % hit" if total else UNANSWERED))
    charts = [
        (
            "Where rankings found their prefix KV",
            "% of answers, at the largest value found",
            bar_chart(hits, {OUTCOMES[name]: colour for name, colour in OUTCOME_COLOURS.items()}, " %"),
        )
    ]
    series = []
    for pipeline in dict.fromkeys(one.pipeline for one in report.memory):
        mine = _thinned([one for one in report.memory if one.pipeline == pipeline])
        for name, (words, colour, dashed) in TIERS.items():
            points = [Point(one.at_s, getattr(one, name) / MIB) for one in mine]
            series.append(Series(words, colour, points, dots=False, dashed=dashed))
    budgets = ", ".join(
        f"{name}: {tiers['hbm'] >> 20:,} MiB HBM, {tiers['dram'] >> 20:,} MiB DRAM"
        for name, tiers in report.budgets.items()
    )
    chart = line_chart(series, Axis("seconds since the start"), Axis("MiB"))
    return [*charts, ("HBM and DRAM over time", budgets, chart)]


def given_text(one: Found, unit: str) -> str:
    """The given length or rate, with the range over the repeats."""
    digits = 0 if one.kind == "rate" else 1
    spread = f" ({min(one.given):,.{digits}f}…{max(one.given):,.{digits}f})" if len(set(one.given)) > 1 else ""
    return f"{one.at:,.{digits}f}{unit}{spread}"


def _stages(one: Found, ms: Mapping[str, float]) -> Bar:
    total = sum(ms.values())
    parts = [(words, ms.get(name, 0.0)) for name, words in STAGES.items()]
    return Bar(_name(one), parts, f"{total:.1f} ms" if total else UNANSWERED)


def _series(probes: Sequence[Probe], xs: Sequence[float]) -> list[Series]:
    series = []
    for mode, colour in MODES.items():
        mine = [(probe, x) for probe, x in zip(probes, xs, strict=True) if probe.mode == mode]
        points = [Point(x, probe.p99, hollow=not probe.passed) for probe, x in mine]
        if points:
            series.append(Series(mode, colour, points))
    return series


def _best(report: SloReport, one: Found) -> Probe | None:
    """The probe at the largest value found; without one, the smallest that failed."""
    value = (lambda probe: probe.rate) if one.kind == "rate" else (lambda probe: float(probe.length))
    given = (lambda probe: float(probe.length)) if one.kind == "rate" else (lambda probe: probe.rate)
    mine = [
        probe
        for probe in report.counted
        if probe.mode == one.mode and probe.revisit == one.revisit and given(probe) in one.given
    ]
    passed = [probe for probe in mine if probe.passed]
    if passed:
        return max(passed, key=value)
    return min(mine, key=value, default=None)


def _name(one: Found) -> str:
    return f"{one.mode}, {one.revisit:.0%}, {'rate' if one.kind == 'rate' else 'length'}"


def _thinned(values: Sequence, most: int = 400) -> Sequence:  # type: ignore[type-arg]
    step = max(1, len(values) // most)
    return values[::step]
