"""A ranking in the scheduler: its request, and what each room of the engine knows of it.

task      the request, which does not change
booking   admission.py   place, account, predicted device time
held      residents.py   what it holds until it is answered
measured  rankings.py    what its answer tells
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from relaygr_stream.cache.entry import Entry
from relaygr_stream.engine.clients import UNBOOKED, Account
from relaygr_stream.engine.commands import Measured, PrefillTask, Rank
from relaygr_stream.engine.executor import PrefillRun
from relaygr_stream.models.api import ScoreInput

#: A ranking behind others must be done within this share of its time. Under overload whatever is accepted is the last
#: that fits, so that without it each error of a prediction, and the answer's way back, makes accepted rankings late.
#: One that was not even begun by then is given up (admission.py: overdue).
QUEUED_DEADLINE_FRACTION: Final = 0.9


@dataclass(slots=True)
class Booking:
    """What admission has booked for a ranking. Times are milliseconds of device time, predicted when it came."""

    number: int = -1  # the order in which rankings were booked
    account: Account = UNBOOKED
    nbytes: int = 0
    cost_ms: float = 0.0
    expected_ms: float = 0.0  # cost_ms where predictions of its kind have proved good, else 0
    infers: bool = False  # some of that is inference of its prefix
    guest: bool = False  # another worker could answer it as well: it was sent on, and finds nothing here


@dataclass(slots=True)
class Held:
    """What a ranking holds, until it is placed anew or answered."""

    entry: Entry | None = None
    scored: ScoreInput | None = None  # what is to be scored, once it is ready
    borrowed: bool = False  # it has the scratch region, to be given back


class Ranking:
    """A ranking that waits for its answer. tokens, suffix, full: the task's, unless it was cut or its user erased."""

    __slots__ = (
        "answered", "begin_by", "booking", "came", "deadline", "due", "full", "held", "late", "measured", "rank",
        "suffix", "task", "tokens",
    )  # fmt: skip

    def __init__(self, rank: Rank) -> None:
        task, times = rank.task, rank.task.times
        self.rank = rank
        self.task = task
        self.tokens = task.tokens
        self.suffix = task.suffix
        self.full = task.full or rank.leaves_nothing
        self.due = times.due  # once it is late, its deadline
        self.deadline = times.deadline
        #: When it should have been begun: a refusal is then with its client within the SLO.
        self.begin_by = times.arrived + QUEUED_DEADLINE_FRACTION * (times.due - times.arrived)
        #: From when its delay counts: its arrival, without what was spent before the scheduler had it.
        self.came = times.arrived + rank.waited_s
        self.late = False  # it cannot be done when due: it gets the time that others leave
        self.booking = Booking()
        self.held = Held()
        self.measured = Measured()
        self.answered = False

    def is_late(self) -> None:
        """It is not done when due, and need not be any more."""
        self.late, self.due = True, self.deadline

    def keep_newest(self, size: int) -> None:
        """Rank with the newest `size` ≥ 1 behaviours alone, as a history of their own, apart from all prefix KV.

        The user's features stay before them.
        """
        whole, context = self.tokens.followed_by(self.suffix), self.tokens.context
        newest = whole.slice(max(context, len(whole) - size), len(whole))
        kept = whole.slice(0, context).followed_by(newest)
        kept.array[2, context] = 0  # the first gap: nothing is before it
        prefix = len(kept) - min(size, len(self.suffix))
        self.tokens, self.suffix = kept.slice(0, prefix), kept.slice(prefix, len(kept))
        self.measured.truncated_to, self.full, self.measured.outcome = size, True, "truncated"


@dataclass(slots=True, eq=False)
class PrefillJob:
    """Prefix KV being computed, slice by slice, for every ranking and admitted request that waits for it."""

    run: PrefillRun
    due: float
    entry: Entry | None = None  # None: into scratch, for one full inference
    signal: PrefillTask | None = None  # of the admitted request that it is for; None: a ranking has come
    joined: bool = False  # a ranking came for it while it was computed
    waiters: list[Ranking] = field(default_factory=list)
    over: bool = False  # completed, failed or cut short; queues drop it when they meet it
    error: str | None = None  # what it failed with
    expected_ms: float = 0.0  # device time, predicted when it was started, uncorrected
    ms: float = 0.0  # device time so far
    started: float = 0.0  # when the device first worked for it
    position: int = 0  # tokens that were there before
    account: Account = UNBOOKED  # that its time is charged to while no ranking waits for it

    @property
    def scenario(self) -> str:
        """Of the first request that it is for."""
        of = self.signal if self.signal is not None else next((each.task for each in self.waiters), None)
        return "" if of is None else of.scenario

    @property
    def pre_infer(self) -> bool:
        """It is for an admitted request, whose ranking had not come when it started."""
        return self.signal is not None

    @property
    def wanted(self) -> bool:
        """A ranking waits for it, or will: that of an admitted request."""
        return bool(self.waiters) or (self.entry is not None and self.entry.pins > 0)
