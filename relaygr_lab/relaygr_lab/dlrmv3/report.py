"""The results of `relaygr bench dlrmv3`, as in report.json; what they mean, and the table."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from relaygr_lab.bench.modes import CACHE, FULL, RELAY
from relaygr_stream.wire.messages import HITS
from relaygr_stream.workload.quantiles import nearest_rank

#: Bound: the least share of what the costs of the run allow.
LEAST_SHARE: Final = 0.85
ENGINE: Final = "engine"
NOTE: Final = (
    "Not an MLPerf result and not verified by MLCommons; the closed division does not allow reuse across queries "
    "(modes cache, relay, engine). The name MLPerf is MLCommons'."
)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of LoadGen. Times are milliseconds."""

    mode: str
    qps: float
    queries: int
    valid: bool  # as LoadGen says
    p99_ms: float
    outcomes: dict[str, int]  # where prefix KV were found
    errors: dict[str, int]  # queries without scores, which LoadGen counts as late
    late: int  # queries behind the SLO, or without scores
    heads_ms: tuple[float, float] | None = None  # 1 % and 50 % of the head starts; None: nothing was announced
    off_ms: tuple[float, float]  # 50 % and 99 % of how late LoadGen issued against its schedule
    others_cores: float | None = None  # that other processes used
    folder: str  # with LoadGen's logs

    @property
    def ranked(self) -> int:
        """Queries that were asked; fewer than `queries` where so many were late that the run was ended early."""
        return sum(self.outcomes.values()) + sum(self.errors.values())

    @property
    def verdict(self) -> str:
        """LoadGen's, in words."""
        if self.valid:
            return "VALID"
        early = f", ended after {self.ranked}" if self.ranked < self.queries else ""
        return f"INVALID: {self.late} late{early}"

    @property
    def hits(self) -> float:
        """Share of the answered queries that found prefix KV."""
        answered = sum(self.outcomes.values())
        return sum(self.outcomes.get(one, 0) for one in HITS) / answered if answered else 0.0


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A mode's result: the run with the largest rate that LoadGen calls VALID."""

    mode: str
    best: Run | None  # None: none was VALID
    settled: bool  # a larger rate, within the tolerance, was INVALID; else the rate is a lower bound
    oracle_qps: float | None  # of a queue at one device, without a bus
    calibrated_qps: float = 0.0  # with which the search began: the oracle queue's, as slow as requests one at a time
    least_qps: float = 0.0  # below which the budget pays for no run
    why: str | None = None  # no run was VALID


class Reached(msgspec.Struct, frozen=True):
    """A value against what is allowed. exact: it is no upper bound; settled: no lower bound."""

    name: str
    reached: float
    allowed: float
    by: str
    exact: bool
    settled: bool

    @property
    def share(self) -> float:
        """Of what is allowed."""
        return self.reached / self.allowed

    @property
    def kept(self) -> bool | None:
        """Whether the share is at least LEAST_SHARE; None where the search leaves it open."""
        kept = self.share >= LEAST_SHARE
        return kept if (self.exact if kept else self.settled) else None

    def __str__(self) -> str:
        bound = ("" if self.exact else "at most ") + ("" if self.settled else "at least ")
        return f"{self.name}: {bound}{self.reached:.2f} of {self.allowed:.2f} ({self.by}): {self.share:.2f}"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of a bench."""

    note: str = NOTE
    conditions: dict[str, Any]
    reductions: dict[str, str]
    slo_ms: float
    runs: list[Run]
    found: list[Found]
    costs: dict[str, float]
    full_ms: float  # mean device time of a request by the costs, in full
    reused_ms: float  # and with prefix KV of earlier visits
    quotient: float  # one over the other
    kv_user_bytes: float  # prefix KV of a user, mean
    wall_s: float

    def qps(self, mode: str) -> float | None:
        """The mode's largest rate."""
        best = next((one.best for one in self.found if one.mode == mode), None)
        return None if best is None else best.qps

    def reached(self) -> list[Reached]:
        """What the run's costs allow, and what of it was reached; without a mode that had no VALID rate."""
        rates = {one.mode: one for one in self.found if one.best is not None}
        full, cache, relay = (rates.get(mode.name) for mode in (FULL, CACHE, RELAY))
        found = []
        if full and cache:
            reached = _best(cache) / _best(full)
            found.append(
                Reached("cache ÷ full", reached, self.quotient, "costs of this run", full.settled, cache.settled)
            )
        if relay and relay.oracle_qps:
            found.append(
                Reached("relay, queries/s", _best(relay), relay.oracle_qps, "oracle queue", True, relay.settled)
            )
        return found

    def without_rate(self) -> list[str]:
        """Why a mode has none, a line each."""
        return [f"{one.mode}: no rate was VALID: {one.why}" for one in self.found if one.best is None]

    def broken(self) -> list[str]:
        """Bounds not kept, and modes without a rate."""
        return self.without_rate() + [
            f"{one}; bound: at least {LEAST_SHARE:g}" for one in self.reached() if one.kept is False
        ]


def render(report: Report) -> RenderableType:
    """The table, conditions, and what was reached."""
    table = Table(
        title=f"Largest rate that LoadGen calls VALID (P99 ≤ {report.slo_ms:g} ms)",
        title_justify="left", title_style="bold", box=SIMPLE_HEAD,
    )  # fmt: skip
    for name in ("mode", "QPS", "÷ full", "P99 ms", "hits", "oracle queue", "share of it", "head start"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    full = report.qps(FULL.name)
    for one in report.found:
        best = one.best
        oracle = "–" if one.oracle_qps is None else f"{one.oracle_qps:.1f}"
        if best is None:
            table.add_row(one.mode, "none", "–", "–", "–", oracle, "–", "–")
            continue
        table.add_row(
            one.mode,
            f"{'' if one.settled else '≥ '}{best.qps:.1f}",
            f"{best.qps / full:.2f}×" if full else "–",
            f"{best.p99_ms:.1f}",
            f"{best.hits:.1%}",
            oracle,
            f"{best.qps / one.oracle_qps:.2f}" if one.oracle_qps else "–",
            "–" if best.heads_ms is None else f"{best.heads_ms[1]:.0f} ms",
        )
    words = report.reductions | report.conditions | {
        "device time": f"{report.full_ms:.1f} ms in full, {report.reused_ms:.1f} ms with prefix KV: "
        f"{report.quotient:.2f} times less",
        "prefix KV of a user": f"{report.kv_user_bytes / (1 << 20):.1f} MiB",
    }  # fmt: skip
    return Group(
        Text(report.note, style="bold"),
        table,
        *(Text(f"{name}: {text}", style="dim") for name, text in words.items()),
        *(Text(str(one), style="bold") for one in (*report.reached(), *report.without_rate())),
    )


def _best(found: Found) -> float:
    return found.best.qps if found.best else 0.0


def spread(values: list[float], *quantiles: float) -> tuple[float, ...]:
    """Quantiles of the values, by nearest rank; zeros without any."""
    return tuple(round(nearest_rank(values, q), 3) if values else 0.0 for q in quantiles)
