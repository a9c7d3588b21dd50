"""Decides what a rollout does next: a pure function of what both groups answered during the step, and of the time.

observed (new, old), seconds in the step ─► stay, next step, done, or back, each with its reason
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from relaygr_stream.ops.status.tally import KINDS, Tally
from relaygr_stream.wire.routes import Figures

#: Answers of a group below which its share of errors, of late answers, its P99 and its scores tell nothing.
MIN_ANSWERS: Final = 200
#: Fewer show that something is wrong with a model that scores nothing at all.
MIN_FAILED: Final = 50
#: By so much the new group's share of answers that failed may be above the old one's, and that of late ones.
MORE_FAILED: Final = 0.01
MORE_LATE: Final = 0.02
#: P99 is known within an interval of 1.5 to 2 (wire/latencies.py), so what is within this factor is no difference.
SLOWER: Final = 2.0
#: A population stability index below 0.1 counts as no change, above 0.25 as another population (Siddiqi, Credit Risk
#: Scorecards). Two samples of one distribution have about 9·(1/n + 1/m) in ten classes: 0.09 with MIN_ANSWERS answers
#: each, if all scores of an answer tell no more than one.
MAX_PSI: Final = 0.25
CLASSES: Final = 10
#: A class without a score counts as half a score.
EMPTY: Final = 0.5
#: A group some of whose lanes have no owner for longer than a rebalance takes.
UNOWNED_S: Final = 30.0
#: Answers without scores that are not for lack of time.
FAILED: Final = ("failed", "rejected")

Scores = Mapping[str, npt.NDArray[np.float32]]
Action = Literal["stay", "next", "done", "back"]


@dataclass(frozen=True)
class Observed:
    """One group during the step. unowned_s: for how long a lane has had no owner. distrusted: prefix KV dropped after a
    deviating audit or scores that are not finite. settled: as tally, since half of the hold, when users who moved have
    prefix KV again. scored: answers that `scores` are of, by task. unread: why answers are not read; "": they are."""

    version: str = ""
    unowned_s: float = 0.0
    distrusted: int = 0
    tally: Tally = field(default_factory=Tally)
    settled: Tally = field(default_factory=Tally)
    scored: int = 0
    scores: Scores = field(default_factory=dict)
    unread: str = ""

    @property
    def failed(self) -> int:
        """Answers that failed or were rejected."""
        return sum(self.tally.answers[status] for status in FAILED)

    def figures(self) -> Figures:
        """For people."""
        return Figures(
            version=self.version,
            answers=self.tally.all,
            errors=self.tally.errors,
            late=_late(self.tally),
            hits=self.tally.hit_rate() or 0.0,
            p99_ms=self.tally.quantile_ms(0.99, *KINDS) or 0.0,
        )


@dataclass(frozen=True)
class StepDecision:
    """What to do. reason: for people; "" where there is nothing to say."""

    action: Action
    reason: str = ""


def decide(
    new: Observed, old: Observed, in_step_s: float, hold_s: float, *, last: bool, warm: bool = True
) -> StepDecision:
    """What becomes of the step. in_step_s: since it began. hold_s: how long a step lasts at least; so much longer it
    waits for users who move next to be `warm`. last: all users are in the new group, and `old` is what its predecessor
    answered before."""
    if (why := next(_objections(new, old), None)) is not None:
        return StepDecision("back", why)
    if in_step_s < hold_s:
        return StepDecision("stay")
    if unread := new.unread or old.unread:
        return StepDecision("stay", f"scores cannot be compared: {unread}")
    if new.tally.all < MIN_ANSWERS:
        return StepDecision("stay", f"waits for {MIN_ANSWERS} answers of the new group; it has {new.tally.all}")
    if not warm and in_step_s < 2 * hold_s:
        return StepDecision("stay", "waits for prefix KV of users who move next")
    return StepDecision("done" if last else "next")


def _objections(new: Observed, old: Observed) -> Iterator[str]:
    """Why the new group must not serve, in words."""
    if new.unowned_s > UNOWNED_S:
        yield f"lanes of the new group have no owner for {new.unowned_s:.0f} s"
    if new.distrusted:
        yield f"{new.distrusted} prefix KV of the new group were dropped after a deviating audit or scores not finite"
    yield from _share("failed or were rejected", new.failed, old.failed, new.tally.all, old.tally.all, MORE_FAILED)
    here, there = new.settled, old.settled
    if here.judged >= MIN_ANSWERS:
        late = _late(here), _late(there), here.judged, there.judged
        yield from _share("had no scores within relay.slo_ms", *late, MORE_LATE)
    for kind, outcomes in KINDS.items():
        counts = [sum(side.tally.outcomes[outcome] for outcome in outcomes) for side in (new, old)]
        now_ms, before_ms = (side.tally.quantile_ms(0.99, kind) for side in (new, old))
        if min(counts) >= MIN_ANSWERS and now_ms and before_ms and now_ms > SLOWER * before_ms:
            yield f"P99 of `{kind}` is {now_ms:.1f} ms, {before_ms:.1f} ms in the old group; the limit is {SLOWER:g}×"
    if min(new.scored, old.scored) >= MIN_ANSWERS:
        yield from _other_scores(new.scores, old.scores)


def _share(what: str, here: int, there: int, of_here: int, of_there: int, more: float) -> Iterator[str]:
    """An objection to answers of which too many are of a kind."""
    before = there / of_there if of_there >= MIN_ANSWERS else 0.0
    if of_here >= MIN_FAILED and here / of_here > before + more:
        yield (
            f"{here} of {of_here} answers of the new group {what}, {before:.1%} of the old group's; "
            f"the limit is {more:.0%} more"
        )


def _late(tally: Tally) -> int:
    """Answers without scores within relay.slo_ms, of those of which workers tell."""
    return tally.judged - tally.within_slo


def _other_scores(new: Scores, old: Scores) -> Iterator[str]:
    yield from other_tasks(new, old)
    for task in sorted(new.keys() & old.keys()):
        distance = psi(old[task], new[task])
        if distance > MAX_PSI:
            yield (
                f"scores of {task!r} have another distribution: population stability index {distance:.2f}, the limit "
                f"is {MAX_PSI:g}; medians {np.median(old[task]):.4g} (old), {np.median(new[task]):.4g} (new)"
            )


def other_tasks(new: Iterable[str], old: Iterable[str]) -> Iterator[str]:
    """An objection to a model that scores other tasks."""
    here, there = sorted(new), sorted(old)
    if here != there:
        yield f"the new model scores {', '.join(here) or 'nothing'}, the old one {', '.join(there)}"


def psi(before: npt.NDArray[np.float32], now: npt.NDArray[np.float32]) -> float:
    """The population stability index Σ (q − p)·ln(q / p) over CLASSES quantiles of `before`; 0 for equal distributions.

    Scores of which many are equal have fewer classes.
    """
    edges = np.unique(np.quantile(before, np.arange(1, CLASSES) / CLASSES))
    p, q = (_shares(np.searchsorted(edges, scores, side="right"), len(edges) + 1) for scores in (before, now))
    return float(np.sum((q - p) * np.log(q / p)))


def _shares(classes: npt.NDArray[np.intp], count: int) -> npt.NDArray[np.float64]:
    found = np.maximum(np.bincount(classes, minlength=count), EMPTY)
    shares: npt.NDArray[np.float64] = found / found.sum()
    return shares
