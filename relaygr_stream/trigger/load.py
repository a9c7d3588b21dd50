"""What an owner's lanes share: device time and pinned bytes, and what was asked for since their statuses.

A token bucket of device milliseconds for each owner of lanes limits all its lanes of this trigger together to one
second of its grants. There is none for each lane: that would refuse more, the more lanes there are.

Pinned bytes are one room of all the owner's lanes, whichever trigger has them. What other triggers sent since the
owner's status is unknown here; the owner refuses what it has no room for (engine/signals.py).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Final, NamedTuple

from relaygr_stream.fleet import Books, Claim, SentSignals
from relaygr_stream.trigger.ledger import LaneLedger
from relaygr_stream.wire.messages import WorkerStatus

#: An owner's bucket holds at most the refill of this many seconds, and a new one holds that: its lanes together save at
#: most one second of its device time, which is less than a life window.
OWNER_S: Final = 1.0
#: A lower rate counts as zero: it is the rounding error of a sum of rates that were withdrawn one by one.
MIN_MS_PER_S: Final = 1e-6
#: Device time of a returning user's signal where its prefix KV are kept, as a share of that of the whole prefix: a few
#: new behaviours beside hundreds, and a fixed time. An assumption: workers state averages over all users.
NEW_SHARE: Final = 0.1
#: Users of whom it is remembered where their last signal went: about as many prefix KV as a fleet's tiers hold; 60 MB.
MOST_USERS: Final = 200_000
#: Characters of their keys together, which a sender chooses, of up to 4 bytes each: 100 a user.
MOST_CHARACTERS: Final = 100 * MOST_USERS


class LoadBucket:
    """A token bucket of device milliseconds. Times are seconds of a monotonic clock.

    It holds at most `depth`: the refill of depth_s seconds, and never more than burst_ms. Over any interval of dt
    seconds at most burst_ms + rate·dt is spent. A cost above the depth is allowed when the bucket is full, and leaves
    it in debt: the bound is exceeded once, by (cost - depth), and the refill repays it. Without a rate nothing is
    allowed. A new one is full.
    """

    def __init__(self, burst_ms: float, depth_s: float = OWNER_S) -> None:
        self._burst_ms = burst_ms
        self._depth_s = depth_s
        self._rate = 0.0
        self._level_ms = 0.0
        self._at_s: float | None = None  # None until the first rate is known

    @property
    def rate(self) -> float:
        """Its refill, in milliseconds per second."""
        return self._rate

    @property
    def depth(self) -> float:
        """Device milliseconds in a full bucket."""
        return min(self._burst_ms, self._rate * self._depth_s)

    def set_rate(self, ms_per_s: float, now_s: float, more_ms: float = 0.0) -> None:
        """Refill at this rate from now on; the first call starts the bucket. more_ms: added once."""
        level = self.level(now_s) + more_ms if self._at_s is not None else math.inf
        self._at_s = now_s
        self._rate = ms_per_s if ms_per_s >= MIN_MS_PER_S else 0.0
        self._level_ms = min(self.depth, level)

    def level(self, now_s: float) -> float:
        """Device milliseconds available; negative: debt. Changes nothing."""
        if self._at_s is None:
            return 0.0
        return min(self.depth, self._level_ms + self._rate * max(0.0, now_s - self._at_s))

    def allows(self, cost_ms: float, now_s: float) -> bool:
        """Whether `spend` is permitted now. Changes nothing."""
        return self._rate > 0 and self.level(now_s) >= min(cost_ms, self.depth)

    def spend(self, cost_ms: float, now_s: float) -> None:
        """Spend device milliseconds; the caller asked `allows` at the same instant."""
        self._level_ms = self.level(now_s) - cost_ms
        self._at_s = now_s


class KeptAt(NamedTuple):
    """Where a user's last signal went, and the prefix KV are, unless they have left that worker's tiers."""

    worker: str
    incarnation: int  # of the worker: a later one has none of it
    delegated: bool  # it was not the owner of the user's lane

    def is_at(self, worker: str, incarnation: int) -> bool:
        """Whether this worker, since this start of it, has them."""
        return (self.worker, self.incarnation) == (worker, incarnation)


class Room(NamedTuple):
    """Pinned bytes of an owner: what it has, or will have by this trigger's signals, and what it may have."""

    outstanding: int
    budget: int


class OwnerLoads:
    """One bucket for each owner of this trigger's lanes, at the sum of its lanes' rates, and one room for their bytes;
    and what was sent to whom.

    averaging: factor of OWNER_S. burst_ms: the most that a bucket holds.
    """

    def __init__(self, averaging: float = 1.0, burst_ms: float = math.inf) -> None:
        self._averaging = averaging
        self._burst_ms = burst_ms
        self._lanes: dict[int, tuple[str, float]] = {}
        self._buckets: dict[str, LoadBucket] = {}
        self._ledgers: dict[str, dict[int, LaneLedger]] = {}  # by owner and lane
        self._stated: dict[str, WorkerStatus] = {}  # the owners' newest statuses that were applied
        #: Signals to each worker, whether or not it owns lanes of this trigger.
        self.sent: Final[Books[SentSignals]] = Books(SentSignals)
        self._kept: OrderedDict[str, KeptAt] = OrderedDict()  # by tenant_key: who is erased must be found
        self._characters = 0  # of its keys

    def observe(self, claim: Claim, ledger: LaneLedger, now_s: float) -> LoadBucket:
        """Note a lane's owner and what it grants; returns the owner's bucket. ledger: the lane's."""
        lane, owner, ms_per_s = claim.lane.lane, claim.worker.name, claim.lane.device_ms_per_s
        before, known_ms = self._lanes.get(lane, ("", 0.0))
        if before != owner:
            self.remove(lane, now_s)
            known_ms = 0.0
        bucket = self._buckets.get(owner)
        if bucket is None:
            bucket = self._buckets[owner] = LoadBucket(self._burst_ms, self._averaging * OWNER_S)
        self._lanes[lane] = owner, ms_per_s
        ledgers = self._ledgers.setdefault(owner, {})
        ledgers[lane] = ledger
        ledger.observe(claim.lane)
        self._stated[owner] = claim.worker
        new = before != owner
        bucket.set_rate(bucket.rate + ms_per_s - known_ms, now_s, self._averaging * ms_per_s * OWNER_S if new else 0.0)
        return bucket

    def remove(self, lane: int, now_s: float) -> None:
        """Remove a lane that has another owner now, or that another trigger decides for."""
        owner, ms_per_s = self._lanes.pop(lane, ("", 0.0))
        if not owner:
            return
        del self._ledgers[owner][lane]
        if self._ledgers[owner]:
            bucket = self._buckets[owner]
            bucket.set_rate(bucket.rate - ms_per_s, now_s)
        else:
            del self._ledgers[owner], self._buckets[owner], self._stated[owner]

    def room(self, owner: str) -> Room:
        """The owner's pinned bytes. All its lanes of this trigger have observed its newest status."""
        ledgers = self._ledgers.get(owner, {})
        lanes = self._stated[owner].lanes if ledgers else ()
        held = (ledgers[each.lane].outstanding if each.lane in ledgers else each.pinned_bytes for each in lanes)
        return Room(sum(held), sum(each.budget_bytes for each in lanes))

    def kept(self, user: str) -> KeptAt | None:
        """Where the last signal of a user (tenant_key) went; None: that is not remembered."""
        return self._kept.get(user)

    def expected_ms(self, user: str, worker: str, incarnation: int, whole_ms: float) -> float:
        """Device time of a user's signal there, where the whole prefix takes whole_ms."""
        kept = self.kept(user)
        return NEW_SHARE * whole_ms if kept is not None and kept.is_at(worker, incarnation) else whole_ms

    def remember(self, user: str, kept: KeptAt) -> None:
        """Note where a user's signal goes."""
        self.forget(user)
        self._kept[user] = kept
        self._characters += len(user)
        while len(self._kept) > MOST_USERS or self._characters > MOST_CHARACTERS:
            self._characters -= len(self._kept.popitem(last=False)[0])

    @property
    def users(self) -> list[str]:
        """Those of whom something is remembered (tenant_key)."""
        return list(self._kept)

    def forget(self, user: str) -> None:
        """Drop what is remembered of a user (tenant_key)."""
        if self._kept.pop(user, None) is not None:
            self._characters -= len(user)


def stated_wait_ms(owner: Claim, now_s: float) -> float:
    """The owner's pre-infer queue now: the stated one less the time since, at most one status interval."""
    return max(0.0, owner.worker.pre_infer_wait_ms - owner.age_ms(now_s))
