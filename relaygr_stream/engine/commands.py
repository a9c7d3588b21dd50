"""What goes into the scheduler and what comes out: commands, the tasks they carry, answers.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from relaygr_stream.cache.entry import Entry
from relaygr_stream.cache.transit import TransitCommand
from relaygr_stream.engine.clients import UNBOOKED, Account
from relaygr_stream.engine.executor import PrefillRun
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.erase import Erase
from relaygr_stream.wire.features import Values
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import Outcome, Status, tenant_key

#: The lane of signals on other workers' behalf: no lane, so that no trigger's books of a lane change by them.
DELEGATED_LANE: Final = -1


class Keys:
    """Whose a task is. Tenants share neither users nor requests, whatever their ids."""

    __slots__ = ()
    request_id: str
    user_id: str
    tenant: str

    @property
    def user_key(self) -> str:
        """The user, as the cache names it."""
        return tenant_key(self.tenant, self.user_id)

    @property
    def request_key(self) -> str:
        """The request, as pins and recent answers name it."""
        return tenant_key(self.tenant, self.request_id)


@dataclass(frozen=True, slots=True)
class Referred:
    """What a task lacks until its history is there: the prefix in tokens, and what was sent beside it."""

    reference: HistoryReference
    user: Mapping[str, bytes]  # the user's features
    suffix: Behaviours


@dataclass(slots=True, eq=False)
class PrefillTask(Keys):
    """An admitted request whose prefix KV is to be ready, and pinned, before its ranking comes."""

    request_id: str
    user_id: str
    lane: int
    tokens: Tokens
    due: float  # when its ranking is expected
    expires: float  # end of the life window
    arrived: float  # when it was read
    tenant: str = ""
    nbytes: int = 0  # memory of its tokens
    origin: Any = None  # where it came from; not None: what becomes of it is told. The scheduler does not look at it
    referred: Referred | None = None  # until its tokens are there


@dataclass(slots=True, eq=False)
class RankTask(Keys):
    """A ranking request on its way to an answer."""

    request_id: str
    user_id: str
    lane: int
    tokens: Tokens  # the prefix
    suffix: Tokens
    candidates: npt.NDArray[np.int64]
    arrived: float
    deadline: float
    full: bool  # ignore prefix KV
    tenant: str = ""
    client: str = ""  # who asks, as the request says
    nbytes: int = 0  # memory from when it was read until its answer has left
    number: int = -1  # the order in which rankings came, from when it is booked
    account: Account = UNBOOKED  # the client's books, once it was admitted
    cost_ms: float = 0.0  # device time, predicted when it came
    infers: bool = False  # some of that is inference of its prefix
    waited_s: float = 0.0  # seconds since its arrival spent on reading its history, or on a forward that failed
    hops: int = 0  # times it was forwarded, or 1: a hedge
    guest: bool = False  # another worker could answer it as well: it was sent on, and finds nothing here
    pass_to: int | None = None  # a lane of the worker that computed its prefix KV on this one's behalf
    origin: Any = None  # where its answer goes; the scheduler does not look at it
    outcome: Outcome | None = None  # where the prefix was first found
    entry: Entry | None = None  # held while set
    region: KVRegion | None = None  # what to score against, once ready
    borrowed: bool = False  # region is the scratch region, to be given back
    started: float = 0.0  # when the device first worked for it
    finished: float = 0.0  # when the device was done with it; 0: it was answered without the device thread
    age_ms: float = 0.0  # age at arrival, proven by the log's order (bus/ages.py)
    inbound_ms: float = 0.0  # age at arrival by the sender's clock
    timeout_ms: float = 0.0  # from sending on, as its client states it, or the default
    expected_ms: float = 0.0  # cost_ms where predictions of its kind have proved good, else 0
    device_ms: float = 0.0
    score_ms: float = 0.0  # of that, the batch that scored it
    computed_tokens: int = 0
    approximate: bool = False  # scored against prefix KV that had been rounded in DRAM
    features: Values = field(default_factory=dict)  # of the candidates
    truncated_to: int = 0  # behaviours that it was cut to, since all would be late; 0: it was not
    referred: Referred | None = None  # until its tokens are there
    answered: bool = False

    def afresh(self, waited_s: float) -> RankTask:
        """The request as it came, to be ranked here after all. waited_s: seconds spent on passing it on."""
        return RankTask(
            self.request_id, self.user_id, self.lane, self.tokens, self.suffix, self.candidates, self.arrived,
            self.deadline, self.full, self.tenant, self.client, self.nbytes, waited_s=self.waited_s + waited_s,
            hops=self.hops, origin=self.origin, age_ms=self.age_ms, inbound_ms=self.inbound_ms,
            timeout_ms=self.timeout_ms, features=self.features, referred=self.referred,
        )  # fmt: skip

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
        self.truncated_to, self.full, self.outcome = size, True, "truncated"


@dataclass(slots=True, eq=False)
class PrefillJob:
    """Prefix KV being computed, slice by slice, for every ranking and admitted request that waits for it."""

    run: PrefillRun
    due: float
    entry: Entry | None = None  # None: into scratch, for one full inference
    signal: PrefillTask | None = None  # of the admitted request that it is for; None: a ranking has come
    joined: bool = False  # a ranking came for it while it was computed
    waiters: list[RankTask] = field(default_factory=list)
    over: bool = False  # completed, failed or cut short; queues drop it when they meet it
    error: str | None = None  # what it failed with
    expected_ms: float = 0.0  # device time, predicted when it was started, uncorrected
    ms: float = 0.0  # device time so far
    started: float = 0.0  # when the device first worked for it
    position: int = 0  # tokens that were there before

    @property
    def pre_infer(self) -> bool:
        """It is for an admitted request, whose ranking had not come when it started."""
        return self.signal is not None

    @property
    def wanted(self) -> bool:
        """A ranking waits for it, or will: that of an admitted request."""
        return bool(self.waiters) or (self.entry is not None and self.entry.pins > 0)


@dataclass(slots=True)
class Answer:
    """The one typed answer to a ranking."""

    task: RankTask
    status: Status
    scores: npt.NDArray[np.float32] | None = None  # (candidates, tasks)
    detail: str = ""


@dataclass(slots=True)
class Placed:
    """What became of a signal's task that has an origin."""

    task: PrefillTask
    result: str  # as `relaygr_signals_total` counts; `unpinned`: its request was over before its copy had come
    started: float = 0.0  # when the device first worked for it; 0: never
    ended: float = 0.0
    device_ms: float = 0.0
    tokens: int = 0  # computed
    completed: bool = True  # its prefix KV is there, or will be


class Rank(NamedTuple):
    """Score this ranking; it gets exactly one answer."""

    task: RankTask


class Prefill(NamedTuple):
    """Have this admitted request's prefix KV ready, and pinned, in time."""

    task: PrefillTask


class Cancel(NamedTuple):
    """No ranking of this request (Keys.request_key) will come: release what it pins, compute nothing more for it."""

    request_key: str


class EraseUser(NamedTuple):
    """Drop this user's prefix KV in both tiers, with its pins. Returns the number of entries.

    found: the users it is about, among those of `known`, who were compared before: that takes a hash of each.
    """

    erase: Erase
    found: Set[str] = frozenset()
    known: Set[str] = frozenset()

    def among(self, users: Iterable[str]) -> list[str]:
        """Those of the users whom it is about."""
        return [*self.found, *filter(self.erase.names, filterfalse(self.known.__contains__, users))]


class LanesLost(NamedTuple):
    """Other workers own these lanes now: what is pinned for their requests is released."""

    lanes: frozenset[int]


class Query(NamedTuple):
    """Return a scheduler.Snapshot; of these lanes, what is pinned and asked for."""

    lanes: tuple[int, ...] = ()


#: What Scheduler.handle takes.
Command = Rank | Prefill | Cancel | EraseUser | LanesLost | Query | TransitCommand
