"""The results of `relaygr bench paper`: one outcome for each setup, mode and repeat, and what the report makes of them.

Rates and lengths are undilated. Times of the bus are real milliseconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

import relaygr_stream
from relaygr_lab.bench.results import Probe, Verdict
from relaygr_lab.paper.plan import Where
from relaygr_lab.paper.setup import Setup
from relaygr_stream.errors import ConfigError

#: What became of signals, of the counters of the workers: how many found prefix KV in HBM, and in DRAM (a reload that a
#: signal starts is DRAM's), how many lacked some tokens, and how many all.
SIGNALS: Final = ("signals", "signal_hbm", "signal_dram", "signal_extended", "signal_computed")


#: What holds prefix KV.
TIERS: Final = ("hbm", "dram")


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One mode in one setup, measured or simulated once: its largest rate within the SLO, or a look at a given rate."""

    setup: Setup
    mode: str
    where: Where = "fleet"
    repeat: int
    length: int  # tokens
    factor: float  # of dilation
    rate: float | None  # the largest that passed; None: none did
    failed: float | None  # the smallest that failed; None: none did
    settled: bool  # both are within the tolerance
    oracle: float  # the largest rate of the oracle queue
    given: float | None = None  # the rate, if it was given; the rest is then of its probe, else of the largest rate's
    p99_ms: float | None = None  # None: no probe
    p99_short: float | None = None  # of short users alone, if there are two kinds
    p99_long: float | None = None
    requests: int = 0
    within: float | None = None  # the share of them that was within the SLO
    outcomes: dict[str, int] = {}  # where rankings found their prefix KV
    decisions: dict[str, int] = {}  # of the trigger, by reason
    signals: dict[str, int] = {}  # by SIGNALS; simulated only
    announced: int = 0
    busy: float = 0.0  # share of the devices' time
    tiers: dict[str, float] = {}  # by TIERS: GiB of prefix KV, all workers together
    probes: list[Probe] = []  # dilated, those set aside among them; fleet only
    bus_ms: list[float] = []  # P50 and P99 of the bus both ways over the passing probes; empty: too few
    code: str = ""  # digest of the package that found it


class Point(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One mode in one setup, over the repeats or seeds."""

    setup: Setup
    mode: str
    where: Where = "fleet"
    length: int
    factor: float
    values: list[float]  # the largest rate of each repeat; 0: none passed
    failed: list[float]  # the smallest failing rate of each repeat
    oracle: float
    repeats: int
    settled: bool  # every repeat found its value; else the value is a lower bound
    given: float | None = None
    p99_ms: list[float] = []  # of each repeat
    p99_short: list[float] = []
    p99_long: list[float] = []
    within: list[float] = []
    outcomes: dict[str, int] = {}  # of all repeats together
    decisions: dict[str, int] = {}
    announced: int = 0
    busy: float = 0.0  # medians of the repeats
    tiers: dict[str, float] = {}
    bus_ms: list[float] = []  # P50 and P99
    reused: list[float] = []  # of each repeat: share of its returning users' signals that found prefix KV
    from_dram: list[float] = []  # the same share that found them in DRAM

    @property
    def value(self) -> float | None:
        """The median; None: nothing passed."""
        return (median(self.values) or None) if self.values else None

    @property
    def ideal(self) -> float:
        """The largest rate of the oracle queue; of a given rate, what of it that could serve."""
        return self.oracle if self.given is None else min(self.given, self.oracle)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The range of the repeats; of one repeat, from the rate that passed to the one that failed."""
        if not any(self.values):
            return None
        if self.repeats > 1:
            return min(self.values), max(self.values)
        return self.values[0], self.failed[0] if self.failed else math.inf

    def shown(self, what: str) -> tuple[float, float, float] | None:
        """Median, least and greatest of what a curve shows."""
        if what == "rate":
            return None if self.value is None else (self.value, *(self.interval or (self.value, self.value)))
        good = [share * (self.given or 0.0) for share in self.within]
        values = {"p99": self.p99_ms, "goodput": good, "hits": self.reused, "dram": self.from_dram}[what]
        return (median(values), min(values), max(values)) if values else None


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """The relay against a baseline at half returning, over the first four lengths."""

    baseline: str
    where: Where
    mean: float  # geometric
    least: float
    most: float
    bound: bool = False  # a rate of the relay is a lower bound, so the mean is


class PaperReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    complete: bool
    conditions: dict[str, Any]
    points: list[Point]
    curves: dict[str, list[list[Any]]]  # curve → [x, revisit, mode, where, what, value, low, high, oracle, settled]
    headline: list[Headline]
    differences: list[list[Any]]  # [mode, setup, what, fleet, simulated, their difference as a share]
    verdicts: list[Verdict]
    remarks: list[str]
    wall_s: float


def points(outcomes: Sequence[Outcome]) -> list[Point]:
    """The outcomes, repeats together."""
    groups: dict[tuple[Setup, str, Where], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault((one.setup, one.mode, one.where), []).append(one)
    return [
        Point(
            setup=setup,
            mode=mode,
            where=where,
            length=some[0].length,
            factor=some[0].factor,
            values=[one.rate or 0.0 for one in some],
            failed=[one.failed for one in some if one.failed is not None],
            oracle=some[0].oracle,
            repeats=len(some),
            settled=all(one.settled for one in some),
            given=some[0].given,
            p99_ms=_known(one.p99_ms for one in some),
            p99_short=_known(one.p99_short for one in some),
            p99_long=_known(one.p99_long for one in some),
            within=_known(one.within for one in some),
            outcomes=summed(one.outcomes for one in some),
            decisions=summed(one.decisions for one in some),
            announced=sum(one.announced for one in some),
            busy=median(one.busy for one in some),
            tiers={name: median(held) for name in TIERS if (held := [one.tiers[name] for one in some if one.tiers])},
            bus_ms=[median(each) for each in zip(*(one.bus_ms for one in some if one.bus_ms), strict=False)],
            reused=_known(_of_signals(one, "signal_hbm", "signal_dram", "signal_extended") for one in some),
            from_dram=_known(_of_signals(one, "signal_dram") for one in some),
        )
        for (setup, mode, where), some in groups.items()
    ]


def summed(counted: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The counts of all of these together."""
    found: Counter[str] = Counter()
    for each in counted:
        found.update(each)
    return dict(found)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _of_signals(one: Outcome, *names: str) -> float | None:
    """Signals with these results as a share of those for returning users, which alone can have them."""
    returning = one.setup.revisit * one.signals.get("signals", 0)
    return sum(one.signals[name] for name in names) / returning if returning else None


#: One line for each outcome, so that a run that was broken off goes on where it was; the run's conditions; and the
#: costs of the real engine, if the run has measured them.
RUN_FILES: Final = ("outcomes.jsonl", "conditions.json", "engine.toml")
#: The same of a complete run, which the next run in the folder leaves alone until it is complete, too.
COMPLETE_FILES: Final = ("outcomes.complete.jsonl", "conditions.complete.json", "engine.complete.toml")


@cache
def digest() -> str:
    """Of the package's sources: a run that is continued after a change has outcomes of two."""
    package = Path(relaygr_stream.__file__).parent
    found = sha256()
    for file in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".c", ".h")):
        found.update(file.read_bytes())
    return found.hexdigest()[:12]


class Record:
    """The outcomes of a run in its folder, written as they come.

    A folder with an unfinished run of the same conditions is continued. only_read: nothing will be added; a complete
    run is read, too. What is there is never written anew. Raises ConfigError for a folder with a run of other
    conditions or of another release, and for one without outcomes that is only read.
    """

    def __init__(self, folder: Path, conditions: dict[str, Any], *, only_read: bool = False) -> None:
        complete = only_read and not (folder / RUN_FILES[0]).exists()
        self._files = [folder / name for name in (COMPLETE_FILES if complete else RUN_FILES)]
        self._file, self._conditions, self.engine_costs = self._files
        self._text = msgspec.json.format(msgspec.json.encode(conditions, order="sorted"), indent=1)
        self.outcomes: list[Outcome] = []
        self.unreadable = 0  # lines
        self._torn = False  # the last line has no end
        folder.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            if not self._conditions.exists() or self._conditions.read_bytes() != self._text:
                raise ConfigError(
                    f"{folder} holds a run of other conditions ({self._conditions.name}); continue that with "
                    f"its own options, name another folder with --out, or remove {self._file.name}"
                )
            self._read()
        if not (only_read or self.outcomes):
            self.engine_costs.unlink(missing_ok=True)  # of a run that ended before its first outcome
        if only_read and not self.outcomes:
            raise ConfigError(f"{folder} holds no outcomes ({RUN_FILES[0]}): there is nothing to report")

    def find(self, setup: Setup, mode: str, where: Where, repeat: int | None = None) -> Outcome | None:
        """What was measured there; repeat: None: in any."""
        for one in self.outcomes:
            if (one.setup, one.mode, one.where) == (setup, mode, where) and repeat in (None, one.repeat):
                return one
        return None

    def add(self, outcome: Outcome) -> None:
        """Write an outcome, with the digest of this code; before the first one the conditions."""
        outcome = msgspec.structs.replace(outcome, code=digest())
        self.outcomes.append(outcome)
        if not self._file.exists():
            self._conditions.write_bytes(self._text)
        with self._file.open("ab") as file:
            file.write(b"\n" * self._torn + msgspec.json.encode(outcome) + b"\n")
        self._torn = False

    def finish(self) -> None:
        """The run is complete: the next one in this folder begins anew, and it can still be reported."""
        if self._file.exists():
            for file, name in zip(self._files, COMPLETE_FILES, strict=True):
                complete = file.with_name(name)
                if file.exists():
                    file.replace(complete)
                else:
                    complete.unlink(missing_ok=True)  # an earlier run's

    def _read(self) -> None:
        text = self._file.read_bytes()
        self._torn = bool(text) and not text.endswith(b"\n")
        for number, line in enumerate(text.splitlines(), 1):
            try:
                self.outcomes.append(msgspec.convert(msgspec.json.decode(line), Outcome))
            except msgspec.ValidationError as error:
                raise ConfigError(
                    f"{self._file}, line {number}, is of another release of relaygr ({error}); name another folder "
                    f"with --out, or remove {self._file.name}"
                ) from error
            except ValueError:  # no JSON: the run was broken off while it wrote
                self.unreadable += 1
