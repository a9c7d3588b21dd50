"""The results of a run of the bench, as in the JSON report, from which table and page are made.

Times are milliseconds unless named otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Final, Literal

import msgspec

from relaygr_lab.bench.statistics import QUANTILE, bad_share_bounds, passes
from relaygr_stream.workload.quantiles import quantile

#: The stages of a ranking, in order; their times add up to its latency.
STAGES: Final[dict[str, str]] = {
    "sent_late": "client: sent behind schedule",
    "inbound": "bus: publish → worker's read",
    "queued": "worker: waits for the device",
    "device": "device: computes",
    "between": "device: works for others in between",
    "outbound": "bus: engine end → caller",
}
#: Kinds of device work, by the names of the workers' counters.
DEVICE_WORK: Final[dict[str, str]] = {
    "pre_infer_ms": "pre-inference and extension",
    "full_ms": "full inference",
    "ranking_ms": "suffix and candidates",
}
#: A longer delay of a sleeping process means that the machine stood still: some processes share the cores in turns of a
#: few milliseconds, so none waits this long for its turn.
STALL_MS: Final = 50.0


class Spread(msgspec.Struct, frozen=True):
    """Quantiles of a time; None if there are fewer values than 1 / (1 - q)."""

    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The quantiles of these values, by nearest rank."""
        return cls(quantile(values, 0.5), quantile(values, 0.99))


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one probe: traffic of one mode at one rate and length."""

    mode: str
    revisit: float
    length: int
    rate: float  # requested, in requests per second
    repeat: int
    started_s: float  # since the run began
    seconds: float
    requests: int  # judged ones; those of the warm-up are excluded
    bad: int  # without scores within the SLO
    cut_short: bool  # ended early because it could no longer pass
    p50: float | None  # of all judged requests, from the scheduled send time; without scores: the timeout
    p99: float  # nearest rank; a lower bound if cut short
    p99_short: float | None = None  # of short users alone, if there are two kinds
    p99_long: float | None = None
    stages: dict[str, Spread]  # of answered requests, by STAGES
    stage_means: dict[str, float]
    slow_stages: dict[str, float]  # the same means over the slowest answered requests, one in twenty
    slow_outcomes: dict[str, int]  # where those found their prefix KV
    errors: dict[str, int]
    outcomes: dict[str, int]
    announced: int
    admitted: int
    admitted_hits: int
    decisions: dict[str, int]  # of the trigger, by reason; warm-up included
    others_cores: float | None  # mean CPU cores used by other processes; None: unknown
    cores_busy: float | None = None  # share of all cores' time that was used by any process
    set_aside: bool = False  # disturbed by other processes, and repeated
    stalled_ms: float | None = None  # largest delay of a process that only sleeps; None: unknown
    device_ms_per_s: dict[str, float]  # by DEVICE_WORK, all workers together; warm-up included
    workers: int = 1
    sent: float | None = None  # judged requests per second that came: of a log's stretch, which has its own rate
    cut: float = 0.0  # share of them with scores of their newest behaviours alone within the SLO
    refused_p99: float | None = None  # of those without scores, from the scheduled send time; None: all had some
    device_late: float | None = None  # lateness of emulated devices, as a share of their busy time; None: real devices

    @property
    def passed(self) -> bool:
        """Whether its P99 is within the SLO."""
        return not self.cut_short and passes(self.requests, self.bad)

    @property
    def within(self) -> float:
        """Share with scores of the whole history within the SLO."""
        return 1 - self.bad / self.requests if self.requests else 0.0

    @property
    def stalled(self) -> bool:
        """Whether the machine stood still for at least STALL_MS."""
        return self.stalled_ms is not None and self.stalled_ms >= STALL_MS

    @property
    def busy(self) -> float:
        """Busy share of the devices."""
        return sum(self.device_ms_per_s.values()) / 1e3 / self.workers


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one cell's searches: the largest rate or length within the SLO."""

    kind: Literal["rate", "length"]
    mode: str
    revisit: float
    given: list[float]  # of each repeat: the length at which the rate was searched, or the rate for a length
    values: list[float]  # of each repeat that had a probe; 0: none passed
    settled: bool  # every repeat reached the tolerance
    bound: float  # the upper bound from the device's capacity
    requests: int  # judged at the found values, all repeats together, whether the probe passed
    bad: int
    limits: list[str]  # why a larger value fails, as text
    p99_short: float | None = None  # at the found values, median of the repeats; None: users are of one kind
    p99_long: float | None = None

    @property
    def at(self) -> float:
        """The median of the given values."""
        return median(self.given)

    @property
    def value(self) -> float | None:
        """The median over the repeats; None if nothing passed in most of them."""
        return (median(self.values) or None) if self.values else None

    @property
    def bad_share(self) -> tuple[float, float]:
        """95 % interval of the share of requests beyond the SLO at the found values."""
        return bad_share_bounds(self.requests, self.bad)


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A mode against full inference, at the same SLO."""

    kind: Literal["rate", "length"]
    mode: str
    revisit: float
    value: float | None
    low: float | None  # smallest of mode over largest of full, over the repeats
    high: float | None  # None beside `low`: full inference carried nothing in a repeat
    bound: float  # upper bound from the device's capacity, given full inference's value
    queue: float  # largest ratio with which a simulated queue at the device keeps the SLO, given the same
    work: float  # cost of full inference ÷ the mode's cost: saved device time, without the gain of working ahead
    least: bool = False  # the mode's value is a lower bound, so the ratio is
    most: bool = False  # that of full inference is, so the ratio is an upper bound

    @property
    def mark(self) -> str:
        """Before the value."""
        return {(True, False): "≥ ", (False, True): "≤ ", (True, True): "? "}.get((self.least, self.most), "")


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the judge says of one figure (report/judge.py)."""

    what: str
    found: str  # what is reached, of what is possible
    bound: str  # below which it is not kept
    state: Literal["reached", "below", "not measured"]


class Memory(msgspec.Struct, frozen=True):
    """Tiers at one moment, all workers together."""

    at_s: float
    pipeline: str
    hbm: int
    pinned: int
    dram: int


class SloReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    conditions: dict[str, Any]
    probes: list[Probe]
    found: list[Found]
    ratios: list[Ratio]
    costs: dict[str, float]  # c0…c3 of T_full, as fitted at the end
    memory: list[Memory]
    budgets: dict[str, dict[str, int]]  # pipeline → tier → bytes
    #: in, out, both and wakes (see wakes.py) per request, over the relay's probes up to the values found
    bus: dict[str, Spread]
    #: In the same probes: admitted, and of those answered from prefix KV (hit); announced, and of all of those answered
    #: from prefix KV that were ready, reloaded or joined; in the relay's other probes: admitted_beyond, hit_beyond.
    #: Older reports lack all but the first two.
    hits: dict[str, int]
    verdicts: list[Verdict]
    remarks: list[str]  # what ended the run early
    wall_s: float
    quantile: float = QUANTILE

    @property
    def counted(self) -> list[Probe]:
        """The probes that were not set aside."""
        return [probe for probe in self.probes if not probe.set_aside]
