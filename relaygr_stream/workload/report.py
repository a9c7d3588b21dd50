"""The results of a sent workload: as numbers for a file, as a table, and as a live line."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, TextIO

import msgspec
import structlog
from rich.table import Table

from relaygr_stream.telemetry.printable import SafeConsole, printable
from relaygr_stream.wire.messages import Outcome
from relaygr_stream.workload.driver import DriveSummary
from relaygr_stream.workload.metrics import Quality, QualityMeter

#: Where a ranking found its prefix KV, as text, nearest first.
OUTCOMES: Final = {
    "hbm": "ready in HBM",
    "dram": "in DRAM, reloaded",
    "joined": "still being computed, joined",
    "full": "nowhere: full inference",
    "truncated": "nowhere: newest behaviours alone",
    "withheld": "somewhere or nowhere: workers do not tell (worker.withhold_outcomes)",
}
#: A word for each outcome that is a hit.
HIT_WORDS: Final[dict[Outcome, str]] = {"hbm": "ready", "dram": "reloaded", "joined": "joined"}
LIVE_EVERY_S: Final = 0.25  # on a terminal, where the line is rewritten
LOGGED_EVERY_S: Final = 10.0  # elsewhere, where each line stays

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """The results of a run; `json()` writes exactly these fields."""

    workload: list[str]  # a description of the requests
    notes: list[str]  # remarks for a reader of the numbers
    requests: int  # ranking requests sent
    answered: int  # of those, with scores
    outcomes: dict[str, int]
    admissions: dict[str, int]  # answers by the trigger's decision: `admitted`, or the reason against; "": unknown
    models: list[str]  # versions of the models that scored
    errors: dict[str, int]  # requests without scores, by error class
    error_examples: dict[str, str]  # the first message of each
    announce_errors: dict[str, int]  # request events not published
    k: int
    served: Quality | None  # None: no ranking with a known next item was answered
    chance: Quality | None
    popularity: Quality | None
    latency_ms: dict[str, float]  # p50, p90, p99, max; from the scheduled send time of the ranking request
    sent_late_p99_ms: float | None  # the driver's own delay
    seconds: float
    lines: int | None  # of the log; None for a generated workload
    broken_lines: int | None
    broken_examples: list[str]

    def json(self) -> bytes:
        """The report as indented JSON."""
        return msgspec.json.format(msgspec.json.encode(asdict(self)), indent=2) + b"\n"

    @property
    def complete(self) -> bool:
        """Whether there were requests and all got scores."""
        return self.requests > 0 and self.answered == self.requests


def make_report(
    summary: DriveSummary,
    meter: QualityMeter,
    *,
    workload: list[str],
    notes: list[str],
    models: list[str],
    error_examples: dict[str, str],
    lines: int | None,
    broken_lines: int | None,
    broken_examples: list[str],
) -> PublishReport:
    """The report of a drive's counts and its rankings' quality."""
    quantiles = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    latencies = {name: summary.latency_ms(at) for name, at in quantiles.items()}
    return PublishReport(
        workload=workload,
        notes=notes,
        requests=summary.sent,
        answered=summary.answered,
        outcomes=dict(summary.outcomes.most_common()),
        admissions=dict(summary.admissions.most_common()),
        models=models,
        errors=dict(summary.errors.most_common()),
        error_examples=error_examples,
        announce_errors=dict(summary.announce_errors.most_common()),
        k=meter.k,
        served=meter.served,
        chance=meter.chance,
        popularity=meter.popularity,
        latency_ms={name: value for name, value in latencies.items() if value is not None},
        sent_late_p99_ms=summary.sent_late_ms(0.99),
        seconds=summary.seconds,
        lines=lines,
        broken_lines=broken_lines,
        broken_examples=broken_examples,
    )


def render(report: PublishReport) -> Table:
    """The report as a table of two columns."""
    table = Table(title="relaygr replay", title_justify="left", show_header=False, title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("workload", "\n".join(report.workload))
    if report.lines is not None:
        shown = "".join(f"\n{text}" for text in report.broken_examples)
        table.add_row("lines", f"{report.lines} read, {report.broken_lines} broken and skipped{shown}")
    for note in report.notes:
        table.add_row("note", note)
    if report.models:
        table.add_row("model", ", ".join(report.models))
    table.add_section()
    rate = f" in {report.seconds:.1f} s ({report.answered / report.seconds:.1f}/s)" if report.seconds else ""
    table.add_row("requests", f"{report.requests} sent, {report.answered} answered{rate}")
    for name, text in OUTCOMES.items():
        if count := report.outcomes.get(name, 0):
            table.add_row(f"  {name}", f"{count} ({count / report.answered:.1%})  prefix KV {text}")
    if report.admissions:
        table.add_row("  admission", admission_text(report.admissions))
    for kind, count in report.errors.items():
        table.add_row(f"  {kind}", f"{count} without scores; first: {report.error_examples.get(kind, '')}")
    for kind, count in report.announce_errors.items():
        table.add_row(f"  {kind}", f"{count} request events not published")
    table.add_section()
    for name, value in report.latency_ms.items():
        table.add_row(f"latency {name}", f"{value:.1f} ms")
    if report.sent_late_p99_ms is not None:
        table.add_row(
            "sent late p99", f"{report.sent_late_p99_ms:.1f} ms (the driver's own delay, part of the latency)"
        )
    table.add_section()
    for name in ("hr", "ndcg"):
        compared = [
            f"{getattr(quality, name):.4f} {label}"
            for label, quality in (
                ("served", report.served),
                ("chance", report.chance),
                ("popularity", report.popularity),
            )
            if quality is not None
        ]
        if compared:
            table.add_row(f"{name.upper()}@{report.k}", ", ".join(compared))
    return table


def admission_text(admissions: Mapping[str, int]) -> str:
    """The trigger's decisions, most frequent first: "admitted 90, delegated 10"."""
    return ", ".join(
        f"{reason or 'unknown'} {count:,}" for reason, count in sorted(admissions.items(), key=lambda pair: -pair[1])
    )


def live_line(summary: DriveSummary, meter: QualityMeter, planned: int | None) -> str:
    """The state of a drive in one line."""
    of = f"/{planned}" if planned is not None else ""
    outcomes = ", ".join(f"{name} {summary.outcomes[name]}" for name in OUTCOMES if summary.outcomes[name])
    parts = [f"{summary.sent}{of} sent, {summary.answered} answered" + (f" ({outcomes})" if outcomes else "")]
    if summary.errors:
        parts.append(f"{summary.errors.total()} errors")
    if (p50 := summary.latency_ms(0.5)) is not None and (p99 := summary.latency_ms(0.99)) is not None:
        parts.append(f"P50 {p50:.1f} ms, P99 {p99:.1f} ms")
    if meter.served is not None:
        parts.append(f"HR@{meter.k} {meter.served.hr:.3f}")
    return "; ".join(parts)


class LiveLine:
    """One line on stderr, rewritten in place on a terminal; otherwise a log line every LOGGED_EVERY_S."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._every = LIVE_EVERY_S if self._terminal else LOGGED_EVERY_S
        self._next = time.monotonic() + self._every
        self._width = 0

    def due(self) -> bool:
        """Whether the next line is due; ask first, since computing the text may cost more than writing it."""
        return time.monotonic() >= self._next

    def show(self, text: str) -> None:
        """Replace the line, or log it."""
        self._next = time.monotonic() + self._every
        if self._terminal:
            text = printable(text)[: shutil.get_terminal_size().columns - 1]  # a wrapped line could not be rewritten
            self._stream.write("\r" + text.ljust(self._width))
            self._stream.flush()
            self._width = len(text)
        else:
            log.info("progress", line=text)

    def close(self) -> None:
        """Clear the line, so that further output starts on a new one."""
        if self._terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0


def print_report(report: PublishReport, stream: TextIO | None = None) -> None:
    """Write the table to stdout (or `stream`)."""
    SafeConsole(file=stream).print(render(report))
