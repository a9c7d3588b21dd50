"""What goes into the scheduler and what comes out: commands, the tasks they carry, answers.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from relaygr_stream.cache.transit import TransitCommand
from relaygr_stream.models.api import Tokens
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.erase import Erase
from relaygr_stream.wire.features import Values
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import Outcome, Status, split_tenant_key, tenant_key

#: At most this share of a timeout is the answer's way.
REPLY_SHARE: Final = 0.2
#: The lane of signals on other workers' behalf: no lane, so that no trigger's books of a lane change by them.
DELEGATED_LANE: Final = -1


class Keys:
    """Whose a task is. Tenants share neither users nor requests, whatever their ids: the keys (tenant_key) have both.

    request_key: the request, as pins and recent answers name it; user_key: the user, as the cache does.
    """

    __slots__ = ()
    request_key: str
    user_key: str

    @property
    def request_id(self) -> str:
        """The request, as its client and logs name it."""
        return split_tenant_key(self.request_key)[1]

    @property
    def user_id(self) -> str:
        """The user, as the client and logs do."""
        return split_tenant_key(self.user_key)[1]

    @property
    def tenant(self) -> str:
        """Whose both are; "": nobody's."""
        return split_tenant_key(self.request_key)[0]


@dataclass(frozen=True, slots=True)
class Referred:
    """What a command lacks until its history is there: the prefix in tokens, and what was sent beside it."""

    reference: HistoryReference
    user: Mapping[str, bytes]  # the user's features
    suffix: Behaviours


class PrefillTask(Keys, msgspec.Struct, frozen=True, eq=False):  # a frozen dataclass takes 5 µs more
    """An admitted request whose prefix KV is to be ready, and pinned, before its ranking comes."""

    request_key: str
    user_key: str
    lane: int
    tokens: Tokens
    due: float  # when its ranking is expected
    expires: float  # end of the life window
    arrived: float  # when it was read
    nbytes: int = 0  # memory of its tokens
    origin: Any = None  # where it came from; not None: what becomes of it is told. The scheduler does not look at it
    scenario: str = ""  # that memory and device time are charged to, where the worker serves several

    @property
    def charged(self) -> str:
        """Whose bytes its prefix KV are: its tenant's, of this scenario."""
        return tenant_key(self.scenario, self.tenant)


class Times(NamedTuple):
    """When a ranking came, when its scores should leave, and until when they are of use."""

    arrived: float
    due: float  # in time for the SLO, or for its client if that waits for less
    deadline: float  # not before `due`
    timeout_ms: float = 0.0  # from sending on, as its client states it, or the default
    age_ms: float = 0.0  # age at arrival, proven by the log's order (bus/ages.py)
    inbound_ms: float = 0.0  # age at arrival by the sender's clock

    @classmethod
    def from_timeout(
        cls, arrived: float, timeout_ms: float, slo_ms: float, reply_ms: float, age_ms: float, inbound_ms: float = 0.0
    ) -> Times:
        """Scores leave so early that they are with the client within its timeout, and within the SLO if they can be.

        slo_ms: of its scenario. reply_ms: an answer's way to its client. Scores that left at the deadline would come
        late, and under overload most are ready close to it.
        """
        soon_ms = min(slo_ms, timeout_ms)
        due = arrived + (soon_ms - min(reply_ms, REPLY_SHARE * soon_ms) - age_ms) / 1e3
        deadline = arrived + (timeout_ms - min(reply_ms, REPLY_SHARE * timeout_ms) - age_ms) / 1e3
        return cls(arrived, due, deadline, timeout_ms, age_ms, inbound_ms)


class RankTask(Keys, msgspec.Struct, frozen=True, eq=False):
    """A ranking request. It does not change: what becomes of it is in its Answer."""

    request_key: str
    user_key: str
    lane: int
    tokens: Tokens  # the prefix
    suffix: Tokens
    candidates: npt.NDArray[np.int64]
    times: Times
    full: bool  # ignore prefix KV
    client: str = ""  # who asks, as the request says
    nbytes: int = 0  # memory from when it was read until its answer has left
    hops: int = 0  # times it was forwarded, or 1: a hedge
    origin: Any = None  # where its answer goes; the scheduler does not look at it
    features: Values = {}  # of the candidates
    scenario: str = ""  # as of PrefillTask

    @property
    def arrived(self) -> float:
        """When it was read."""
        return self.times.arrived

    @property
    def deadline(self) -> float:
        """When its scores have to leave."""
        return self.times.deadline

    @property
    def due(self) -> float:
        """When its scores should leave."""
        return self.times.due


@dataclass(slots=True)
class Measured:
    """What became of a ranking. Times are those of the process that answers it."""

    outcome: Outcome | None = None  # where the prefix was first found
    started: float = 0.0  # when the device first worked for it
    finished: float = 0.0  # when the device was done with it; 0: it was answered without the device thread
    device_ms: float = 0.0
    score_ms: float = 0.0  # of that, the batch that scored it
    computed_tokens: int = 0
    truncated_to: int = 0  # behaviours that it was cut to, since no worker had all in time; 0: it was not


@dataclass(slots=True)
class Answer:
    """The one typed answer to a ranking."""

    rank: Rank
    status: Status
    scores: npt.NDArray[np.float32] | None = None  # (candidates, tasks)
    detail: str = ""
    measured: Measured = field(default_factory=Measured)
    retry_late: bool = True  # of a refusal: handed in once more, as late (Rank.late), it may be cut or get idle time

    @property
    def task(self) -> RankTask:
        """The request."""
        return self.rank.task


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
    pass_to: int | None = None  # a lane of the worker that computed its prefix KV on this one's behalf
    waited_s: float = 0.0  # seconds since its arrival spent on reading its history, or on a forward that failed
    leaves_nothing: bool = False  # its user was erased meanwhile: it is inferred in scratch
    referred: Referred | None = None  # until its tokens are there
    late: bool = False  # no worker has it done by its due time: it is cut, gets idle time, or is refused
    whole: bool = False  # it is never cut


class Prefill(NamedTuple):
    """Have this admitted request's prefix KV ready, and pinned, in time."""

    task: PrefillTask
    referred: Referred | None = None  # until its tokens are there


class Cancel(NamedTuple):
    """No ranking of this request (its request_key) will come: release what it pins, compute nothing more for it."""

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


class Restore(NamedTuple):
    """Find the prefix KV again that an earlier process left in the DRAM tier's file; returns kept.Restored.

    erases: of users who were erased meanwhile. drop: why nothing is taken; "": what fits is. Nothing else may be in
    DRAM yet.
    """

    erases: Sequence[Erase] = ()
    drop: str = ""


class LanesLost(NamedTuple):
    """Other workers own these lanes now: what is pinned for their requests is released."""

    lanes: frozenset[int]


class Query(NamedTuple):
    """Return a scheduler.Snapshot; of these lanes, what is pinned and asked for."""

    lanes: tuple[int, ...] = ()


#: What Scheduler.handle takes.
Command = Rank | Prefill | Cancel | EraseUser | Restore | LanesLost | Query | TransitCommand
