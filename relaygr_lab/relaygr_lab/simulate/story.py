"""The results of a group, as arrays that can be sent between processes, and estimates for the whole fleet.

Given their lanes, the simulated workers are an independent sample. Errors are estimated from the spread between batches
of workers, since requests on one worker depend on each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt

from relaygr_lab.simulate.fleet import Fleet
from relaygr_lab.simulate.scenario import Request, Scenario
from relaygr_stream.trigger.decision import REASONS
from relaygr_stream.wire.messages import FOUND, MISSES, Status
from relaygr_stream.workload.quantiles import nearest_rank

STATUSES: Final = get_args(Status)
OUTCOMES: Final = FOUND
#: Stands for no status, no outcome or no reason.
NONE: Final = -1
#: Batches of workers whose P99s are compared, and the 97.5 % quantile of Student's t with one degree less.
BATCHES: Final = 10
T_QUANTILE: Final = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}
#: Width of the windows around a fault, and how many good ones in a row count as recovered.
WINDOW_S: Final = 1.0
GOOD_WINDOWS: Final = 3
#: Share of late requests that the SLO allows.
ALLOWED_LATE: Final = 0.01

PER_REQUEST: Final = ("at", "latency_ms", "status", "outcome", "reason", "returning", "long")
PER_WORKER: Final = ("busy", "pinned_bytes", "held_bytes", "hbm_bytes", "dram_bytes")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Story:
    """Arrays with one element per request whose ranking was sent in the measured time, or one per worker."""

    at: Floats  # time of the ranking, in seconds of measured time
    latency_ms: Floats  # infinite without an answer in time
    status: npt.NDArray[np.int8]  # into STATUSES
    outcome: npt.NDArray[np.int8]  # into OUTCOMES
    reason: npt.NDArray[np.int8]  # into REASONS
    returning: npt.NDArray[np.bool_]
    long: npt.NDArray[np.bool_]  # of the traffic's long users
    worker: npt.NDArray[np.int32]
    group: npt.NDArray[np.int32]  # of each worker: groups are independent, workers of one group forward to each other
    forwards: Counter[str]  # refused rankings that were forwarded (`sent`), or why they were not, since the start
    busy: Floats  # share of the measured time that the device worked
    pinned_bytes: Floats  # the most in any status that the lanes' admitted requests had pinned
    held_bytes: Floats  # the most in any status that those, delegates' pins and waiting rankings held
    hbm_bytes: Floats  # used at the end
    dram_bytes: Floats
    cache: Counter[str]  # the caches' counters since the start
    signals: Counter[str]  # signals by result in the measured time
    moved_lanes: int
    dead: int
    taken_over_s: float | None  # seconds from the failure to the new assignment
    cpu_s: float  # CPU seconds of the simulation, all processes
    simulated_s: float


def signals_of(fleet: Fleet) -> Counter[str]:
    """The workers' counters of signals, up to now."""
    found: Counter[str] = Counter()
    for worker in fleet.workers:
        found.update(vars(worker.scheduler.signals.counters))
    return found


def story_of(
    fleet: Fleet,
    scenario: Scenario,
    busy_s: Sequence[float],
    cpu_s: float,
    signals_before: Counter[str] | None = None,
) -> Story:
    """The results of a fleet that has run. busy_s: of each worker's device, in the measured time. signals_before: when
    that began."""
    begin = fleet.start + scenario.warm_s
    measured = [request for request in fleet.requests if request.ranked and request.rank_at >= begin]
    index = {worker.name: number for number, worker in enumerate(fleet.workers)}
    statuses = {name: number for number, name in enumerate(STATUSES)}
    outcomes = {name: number for number, name in enumerate(OUTCOMES)}
    reasons = {name: number for number, name in enumerate(REASONS)}
    home = fleet.first_owners
    cache: Counter[str] = Counter()
    for worker in fleet.workers:
        cache.update(worker.scheduler.cache.counters.as_dict())
    caches = [worker.scheduler.cache for worker in fleet.workers]
    return Story(
        at=np.array([request.rank_at - begin for request in measured], np.float64),
        latency_ms=np.array([request.latency_s * 1e3 for request in measured], np.float64),
        status=np.array([statuses[r.status] if r.status else NONE for r in measured], np.int8),
        outcome=np.array([outcomes[r.outcome] if r.outcome else NONE for r in measured], np.int8),
        reason=np.array([reasons[r.reason] if r.reason else NONE for r in measured], np.int8),
        returning=np.array([request.returning for request in measured], np.bool_),
        long=np.array([request.long for request in measured], np.bool_),
        worker=np.array([index[home[request.lane]] for request in measured], np.int32),
        busy=np.array(busy_s, np.float64) / scenario.seconds,
        pinned_bytes=np.array([worker.most_pinned for worker in fleet.workers], np.float64),
        held_bytes=np.array([worker.most_held for worker in fleet.workers], np.float64),
        hbm_bytes=np.array([each.hbm_used for each in caches], np.float64),
        dram_bytes=np.array([each.dram_used for each in caches], np.float64),
        group=np.zeros(len(fleet.workers), np.int32),
        forwards=fleet.forwards,
        cache=cache,
        signals=signals_of(fleet) - (signals_before or Counter()),
        moved_lanes=fleet.moved_lanes,
        dead=len(fleet.dead),
        taken_over_s=(
            None if fleet.taken_over_at is None or fleet.failed_at is None else fleet.taken_over_at - fleet.failed_at
        ),
        cpu_s=cpu_s,
        simulated_s=fleet.timeline.clock.now,
    )


def joined(stories: Sequence[Story]) -> Story:
    """The results of several groups as one."""
    offsets = np.cumsum([0, *(len(story.busy) for story in stories[:-1])])
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(story, name) for story in stories]) for name in (*PER_REQUEST, *PER_WORKER)
    }
    taken = [story.taken_over_s for story in stories if story.taken_over_s is not None]
    return Story(
        **arrays,
        worker=np.concatenate([story.worker + offset for story, offset in zip(stories, offsets, strict=True)]).astype(
            np.int32
        ),
        group=np.concatenate([story.group + index for index, story in enumerate(stories)]).astype(np.int32),
        forwards=sum((story.forwards for story in stories), Counter()),
        cache=sum((story.cache for story in stories), Counter()),
        signals=sum((story.signals for story in stories), Counter()),
        moved_lanes=sum(story.moved_lanes for story in stories),
        dead=sum(story.dead for story in stories),
        taken_over_s=max(taken) if taken else None,
        cpu_s=sum(story.cpu_s for story in stories),
        simulated_s=max(story.simulated_s for story in stories),
    )


@dataclass(frozen=True)
class Estimate:
    """A value and the half width of its 95 % interval; NaN: too few workers."""

    value: float
    error: float


def percentile(latency_ms: Floats, share: float) -> float:
    """The quantile by nearest rank; infinite at a request without scores; NaN without any request."""
    return nearest_rank(latency_ms, share) if len(latency_ms) else float("nan")


def latencies(story: Story) -> Floats:
    """Milliseconds to the scores; infinite without scores."""
    return np.where(story.status == STATUSES.index("ok"), story.latency_ms, np.inf)


def p99(story: Story, *, long: bool | None = None) -> Estimate:
    """The P99 over all measured requests. long: only long users', or only short ones'."""
    values = latencies(story)
    among = np.ones(len(values), np.bool_) if long is None else story.long == long
    return _estimate(story, percentile(values[among], 0.99), lambda chosen: percentile(values[among & chosen], 0.99))


def is_late(request: Request, now: float, slo_ms: float) -> bool:
    """Whether `late_share` will count this request, whose ranking was sent by now, whatever else happens."""
    if request.status is None:
        return (now - request.rank_at) * 1e3 > slo_ms
    return request.status != "ok" or request.outcome == "truncated" or request.latency_s * 1e3 > slo_ms


def late_share(story: Story, slo_ms: float) -> Estimate:
    """The share of requests without scores of their whole history within the SLO."""
    late = (latencies(story) > slo_ms) | _cut(story)
    return _estimate(story, _mean(late), lambda chosen: _mean(late[chosen]))


def cut_share(story: Story, slo_ms: float) -> float:
    """The share of requests that have scores of their newest behaviours alone (worker.truncate_to) within the SLO."""
    return _mean((latencies(story) <= slo_ms) & _cut(story))


def _cut(story: Story) -> npt.NDArray[np.bool_]:
    return np.equal(story.outcome, OUTCOMES.index("truncated"))


def refused_ms(story: Story) -> float:
    """Within how many milliseconds 99 of 100 requests that got no scores knew it; NaN: all got scores."""
    return percentile(story.latency_ms[story.status != STATUSES.index("ok")], 0.99)


def hit_share(story: Story, *, returning: bool | None = None) -> Estimate:
    """The share of scored requests without full inference. returning: only returning users, or only new ones."""
    among = story.status == STATUSES.index("ok")
    if returning is not None:
        among &= story.returning == returning
    hit = _hits(story.outcome)
    return _estimate(story, _mean(hit[among]), lambda chosen: _mean(hit[among & chosen]))


def _hits(outcomes: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
    return ~np.isin(outcomes, [OUTCOMES.index(name) for name in OUTCOMES if name in MISSES])


def counts(values: npt.NDArray[np.int8], names: Sequence[str]) -> dict[str, int]:
    """Name → count; "none" for NONE."""
    found = Counter(values.tolist())
    named = {name: found[index] for index, name in enumerate(names) if found[index]}
    return named if not found[NONE] else {**named, "none": found[NONE]}


@dataclass(frozen=True)
class Window:
    """One second of rankings."""

    at: float
    requests: int
    p99_ms: float
    late: float
    hits: float


def windows(story: Story, slo_ms: float) -> list[Window]:
    """The results of each second."""
    values = latencies(story)
    numbers = (story.at // WINDOW_S).astype(np.int64)
    found = []
    for number in range(int(numbers.max(initial=-1)) + 1):
        chosen = numbers == number
        scored = chosen & np.isfinite(values)
        found.append(
            Window(
                number * WINDOW_S,
                int(chosen.sum()),
                percentile(values[chosen], 0.99),
                _mean(values[chosen] > slo_ms),
                _mean(_hits(story.outcome[scored])),
            )
        )
    return found


def recovery_s(seconds: Sequence[Window], failed_at: float) -> float | None:
    """Seconds from the failure to the first of GOOD_WINDOWS consecutive good windows; None: there are none.

    A window without requests is neither good nor bad.
    """
    after = [window for window in seconds if window.requests and window.at + WINDOW_S > failed_at]
    for index in range(len(after) - GOOD_WINDOWS + 1):
        if all(window.late <= ALLOWED_LATE for window in after[index : index + GOOD_WINDOWS]):
            return max(0.0, after[index].at - failed_at)
    return None


def _mean(values: npt.NDArray[np.bool_]) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _estimate(story: Story, value: float, of: Callable[[npt.NDArray[np.bool_]], float]) -> Estimate:
    """The value with the interval from the spread between batches: of groups, if there are several; of workers."""
    units = np.arange(len(story.busy)) if not story.group.any() else story.group
    batches = min(BATCHES, int(units.max()) + 1)
    if batches < 2:
        return Estimate(value, float("nan"))
    found = np.array([of((units % batches)[story.worker] == batch) for batch in range(batches)])
    if not np.isfinite(found).all():
        return Estimate(value, float("nan"))
    return Estimate(value, float(T_QUANTILE[batches - 1] * found.std(ddof=1) / np.sqrt(batches)))
