"""The results of `relaygr bench paper`: one outcome for each setup, mode and repeat, and what the report makes of them.

Rates and lengths are undilated. Times of the bus are real milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import msgspec

from relaygr_stream.errors import ConfigError
from relaygr_stream.lab.bench.results import Probe
from relaygr_stream.lab.paper.plan import Setup


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The search for one mode's largest rate within the SLO."""

    setup: Setup
    mode: str
    repeat: int
    length: int  # tokens
    factor: float  # of dilation
    rate: float | None  # the largest that passed; None: none did
    failed: float | None  # the smallest that failed; None: none did
    settled: bool  # both are within the tolerance
    oracle: float  # the largest rate of the oracle queue
    probes: list[Probe]  # dilated, those set aside among them
    bus_ms: list[float]  # P50 and P99 of the bus both ways over the passing probes; empty: too few

    @property
    def passing(self) -> list[Probe]:
        """The probes that count and passed."""
        return [probe for probe in self.probes if probe.passed and not probe.set_aside]

    @property
    def best(self) -> Probe | None:
        """The passing probe with the largest rate."""
        return max(self.passing, key=lambda probe: probe.rate, default=None)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One mode in one setup, over the repeats."""

    setup: Setup
    mode: str
    length: int
    factor: float
    values: list[float]  # of each repeat that found one
    failed: list[float]  # the smallest failing rate of each repeat
    oracle: float
    repeats: int
    settled: bool  # every repeat found its value; else the value is a lower bound

    @property
    def value(self) -> float | None:
        """The median; None: nothing passed."""
        return median(self.values) if self.values else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The range of the repeats; of one repeat, from the rate that passed to the one that failed."""
        if not self.values:
            return None
        if self.repeats > 1:
            return min(self.values), max(self.values)
        return self.values[0], self.failed[0] if self.failed else math.inf


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A target and what became of it."""

    target: str
    found: str
    state: Literal["met", "missed", "not allowed", "not measured"]


class PaperReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    complete: bool
    conditions: dict[str, Any]
    points: list[Point]
    curves: dict[str, list[list[Any]]]  # curve → [x, revisit, mode, value, low, high, oracle]
    headline: dict[str, list[float]]  # baseline → geometric mean, least, greatest over the grid at half returning
    verdicts: list[Verdict]
    remarks: list[str]
    wall_s: float


def points(outcomes: Sequence[Outcome]) -> list[Point]:
    """The outcomes, repeats together."""
    groups: dict[tuple[Setup, str], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.setup, one.mode), []).append(one)
    return [
        Point(
            setup=setup,
            mode=mode,
            length=some[0].length,
            factor=some[0].factor,
            values=[one.rate for one in some if one.rate is not None],
            failed=[one.failed for one in some if one.failed is not None],
            oracle=some[0].oracle,
            repeats=len(some),
            settled=all(one.settled for one in some),
        )
        for (setup, mode), some in groups.items()
    ]


#: One line for each outcome, so that a run that was broken off goes on where it was.
OUTCOMES_FILE: Final = "outcomes.jsonl"
CONDITIONS_FILE: Final = "conditions.json"


class Record:
    """The outcomes of a run in its folder, written as they come.

    A folder with an unfinished run of the same conditions is continued. Raises ConfigError for one with other
    conditions.
    """

    def __init__(self, folder: Path, conditions: dict[str, Any]) -> None:
        self._file = folder / OUTCOMES_FILE
        self.outcomes: list[Outcome] = []
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / CONDITIONS_FILE
        text = msgspec.json.format(msgspec.json.encode(conditions, order="sorted"), indent=1)
        if self._file.exists() and written.exists():
            if written.read_bytes() != text:
                raise ConfigError(
                    f"{folder} holds an unfinished run of other conditions ({written.name}); continue that with "
                    f"its own options, name another folder with --out, or remove {self._file.name}"
                )
            self._read()
        written.write_bytes(text)

    def has(self, setup: Setup, mode: str, repeat: int) -> bool:
        """Whether this was measured."""
        return any((one.setup, one.mode, one.repeat) == (setup, mode, repeat) for one in self.outcomes)

    def add(self, outcome: Outcome) -> None:
        """Write an outcome."""
        self.outcomes.append(outcome)
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(outcome) + b"\n")

    def finish(self) -> None:
        """The run is complete: the next one in this folder begins anew."""
        self._file.unlink(missing_ok=True)

    def _read(self) -> None:
        for line in self._file.read_bytes().splitlines():
            try:
                self.outcomes.append(msgspec.json.decode(line, type=Outcome))
            except msgspec.MsgspecError:
                break  # the run was broken off while it wrote
        self._file.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in self.outcomes))
