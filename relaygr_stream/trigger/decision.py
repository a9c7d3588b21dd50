"""The decision: is this request at risk, and do its lane's bounds allow a pre-inference?

`decide` reads the event, the owner's statement and the lane's bounds, and changes nothing; `LaneState.admit` books what
was admitted. Never waits. Knows nothing of Kafka.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Literal, get_args

import msgspec

from relaygr_stream.settings.schema import Settings
from relaygr_stream.trigger.ledger import LaneLedger, Pending
from relaygr_stream.wire.costs import FALLBACK_COSTS, charge_ms, prefix_bytes, usable_costs
from relaygr_stream.wire.fleet import Claim
from relaygr_stream.wire.messages import CostModel, RequestEvent, tenant_key

# The load bound: token buckets of device milliseconds, one per lane and, behind those, one per owner. A lane's bucket
# keeps it to what its owner grants it; the owner's keeps all lanes of a trigger that it owns to a second of what it
# grants them together, however many they are. Knows nothing of what the device time is spent on.


#: A new bucket holds what this many seconds refill. Not a full burst: triggers restart and hand lanes over, and each
#: time every lane would be owed another burst. One second's refill summed over an owner's lanes is one second of its
#: pre-infer share, whatever the number of lanes.
START_S: Final = 1.0
#: A lane's bucket holds at most what so many seconds refill: what was saved up under a grant that is withdrawn is
#: withdrawn with it. About as long as an owner takes a lane for one that is asked (worker/budgets.py).
LANE_S: Final = 10.0
#: And an owner's: its lanes may save up as much as its device does in a second, which is less than a life window.
OWNER_S: Final = 1.0
#: A rate below this is none: what rounding leaves of a sum of rates that were withdrawn one by one.
LEAST_MS_PER_S: Final = 1e-6


class LoadBucket:
    """Device milliseconds that may still be asked for. Times are seconds of a monotonic clock.

    It holds at most `depth`: what depth_s seconds refill, and never more than burst_ms. Over any interval of dt seconds
    at most burst_ms + rate·dt is taken. A cost above the depth is let through when the bucket is full, and leaves it in
    debt: then the bound is exceeded by (cost - depth), once, and paid back. Without a rate nothing is let through.
    """

    def __init__(self, burst_ms: float, depth_s: float = LANE_S) -> None:
        self._burst_ms = burst_ms
        self._depth_s = depth_s
        self._rate = 0.0
        self._level_ms = 0.0
        self._at_s: float | None = None  # None until the first rate is known

    @property
    def rate(self) -> float:
        """Milliseconds a second that refill it."""
        return self._rate

    @property
    def depth(self) -> float:
        """Device milliseconds that it holds when it is full."""
        return min(self._burst_ms, self._rate * self._depth_s)

    def set_rate(self, ms_per_s: float, now_s: float, more_ms: float = 0.0) -> None:
        """From now on refill at this rate; the first call starts the bucket. more_ms: put in beside that."""
        level = self.level(now_s) + more_ms if self._at_s is not None else ms_per_s * START_S
        self._at_s = now_s
        self._rate = ms_per_s if ms_per_s >= LEAST_MS_PER_S else 0.0
        self._level_ms = min(self.depth, level)

    def level(self, now_s: float) -> float:
        """Device milliseconds available; negative: in debt. Changes nothing."""
        if self._at_s is None:
            return 0.0
        return min(self.depth, self._level_ms + self._rate * max(0.0, now_s - self._at_s))

    def allows(self, cost_ms: float, now_s: float) -> bool:
        """Whether `take` is permitted now. Changes nothing."""
        return self._rate > 0 and self.level(now_s) >= min(cost_ms, self.depth)

    def take(self, cost_ms: float, now_s: float) -> None:
        """Spend; the caller asked `allows` at the same instant."""
        self._level_ms = self.level(now_s) - cost_ms
        self._at_s = now_s


class OwnerLoads:
    """One bucket for each owner of lanes that a trigger decides for; its rate is the sum of theirs."""

    def __init__(self) -> None:
        self._lanes: dict[int, tuple[str, float]] = {}
        self._buckets: dict[str, LoadBucket] = {}
        self._counts: dict[str, int] = {}

    def observe(self, lane: int, owner: str, ms_per_s: float, now_s: float) -> LoadBucket:
        """This lane has this owner, who grants it this rate; returns the owner's bucket."""
        before, known_ms = self._lanes.get(lane, ("", 0.0))
        if before != owner:
            self.lost(lane, now_s)
            self._counts[owner] = self._counts.get(owner, 0) + 1
            known_ms = 0.0
        bucket = self._buckets.get(owner)
        if bucket is None:
            bucket = self._buckets[owner] = LoadBucket(math.inf, OWNER_S)
        self._lanes[lane] = owner, ms_per_s
        new = before != owner
        bucket.set_rate(bucket.rate + ms_per_s - known_ms, now_s, ms_per_s * START_S if new else 0.0)
        return bucket

    def lost(self, lane: int, now_s: float) -> None:
        """Another trigger decides for this lane now, or it has another owner."""
        owner, ms_per_s = self._lanes.pop(lane, ("", 0.0))
        if not owner:
            return
        self._counts[owner] -= 1
        if self._counts[owner]:
            bucket = self._buckets[owner]
            bucket.set_rate(bucket.rate - ms_per_s, now_s)
        else:
            del self._counts[owner], self._buckets[owner]


Reason = Literal[
    "admitted",
    "empty_prefix",
    "too_long",
    "stale",
    "duplicate",
    "no_owner",
    "not_at_risk",
    "over_footprint",
    "over_load",
    "too_late",
]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings a decision depends on."""

    risk_ms: float  # at risk above this
    stale_ms: float
    life_ms: float
    burst_ms: float
    max_prefix_tokens: int

    @classmethod
    def of(cls, settings: Settings) -> Policy:
        """As configured."""
        return cls(
            risk_ms=settings.trigger.risk_fraction * settings.relay.slo_ms,
            stale_ms=settings.trigger.stale_ms,
            life_ms=settings.relay.life_window_ms,
            burst_ms=settings.trigger.load_burst_ms,
            max_prefix_tokens=settings.relay.max_prefix_tokens,
        )


class Decision(msgspec.Struct, frozen=True):  # made for every event; a frozen dataclass takes a microsecond more
    """What was decided and the numbers behind it; those that were not reached are 0."""

    reason: Reason
    tokens: int
    age_ms: float
    predicted_ms: float = 0.0  # ranking in full, the owner's queue included; at risk above Policy.risk_ms
    nbytes: int = 0  # prefix KV
    cost_ms: float = 0.0  # device time that the pre-inference is expected to take

    @property
    def admit(self) -> bool:
        """Whether to send a pre-infer signal."""
        return self.reason == "admitted"


class LaneState:
    """One lane's bounds and its recently admitted requests. loads: of all lanes of this trigger."""

    def __init__(
        self,
        policy: Policy,
        log_end: int,
        keep_s: float,
        now_s: float,
        number: int = 0,
        loads: OwnerLoads | None = None,
    ) -> None:
        self.ledger = LaneLedger(log_end, keep_s, now_s)
        self.bucket = LoadBucket(policy.burst_ms)
        self._number = number
        self._loads = OwnerLoads() if loads is None else loads
        self._owner_bucket: LoadBucket | None = None
        self.costs: CostModel = FALLBACK_COSTS  # as the owner stated them, if they can be reckoned with
        self._life_s = policy.life_ms / 1000.0
        self._recent: OrderedDict[str, float] = OrderedDict()  # tenant_key of request id → when admitted
        self._claim: Claim | None = None

    def observe(self, claim: Claim | None, now_s: float) -> None:
        """Take the present owner's newest claim, if it is news."""
        if claim is not None and claim is not self._claim:
            self.ledger.observe(claim.lane)
            rate = claim.lane.device_ms_per_s
            self.bucket.set_rate(rate, now_s)
            self._owner_bucket = self._loads.observe(self._number, claim.worker.name, rate, now_s)
            self.costs = usable_costs(claim.worker.costs)
            self._claim = claim

    @property
    def owner(self) -> str:
        """Who stated the lane last; empty: nobody yet."""
        return "" if self._claim is None else self._claim.worker.name

    def load_allows(self, cost_ms: float, now_s: float) -> bool:
        """Whether the lane's grant, and its owner's for all lanes of this trigger, leave so much device time."""
        owner = self._owner_bucket
        return owner is not None and self.bucket.allows(cost_ms, now_s) and owner.allows(cost_ms, now_s)

    def load_left_ms(self, now_s: float) -> float:
        """Device milliseconds that the lane may ask for now."""
        owner = self._owner_bucket
        return 0.0 if owner is None else min(self.bucket.level(now_s), owner.level(now_s))

    def charge(self, cost_ms: float, now_s: float) -> None:
        """Take device time from the lane's grant and its owner's."""
        self.bucket.take(cost_ms, now_s)
        if self._owner_bucket is not None:
            self._owner_bucket.take(cost_ms, now_s)

    def admitted_recently(self, request: str, now_s: float) -> bool:
        """Whether this request (tenant_key of its id) was admitted within the life window."""
        at_s = self._recent.get(request)
        return at_s is not None and now_s - at_s <= self._life_s

    def admit(self, event: RequestEvent, decision: Decision, now_s: float) -> Pending:
        """Book an admitted request; what is returned belongs to its signal."""
        while self._recent and now_s - next(iter(self._recent.values())) > self._life_s:
            self._recent.popitem(last=False)
        request = tenant_key(event.tenant, event.request_id)
        self._recent[request] = now_s
        self._recent.move_to_end(request)
        self.charge(decision.cost_ms, now_s)
        return self.ledger.admit(decision.nbytes)


def decide(
    event: RequestEvent, *, policy: Policy, lane: LaneState, owner: Claim | None, age_ms: float, now_s: float
) -> Decision:
    """Whether to pre-infer for this event, and why (not).

    owner: the lane's present owner, None if there is none or it is silent; `lane` has observed it. age_ms: of the
    event. now_s: our monotonic clock. Changes nothing.
    """
    tokens = len(event.prefix)
    unfit = _unfit(event, tokens, policy, lane, age_ms, now_s)
    if unfit is not None:
        return Decision(unfit, tokens, age_ms)
    if owner is None:
        return Decision("no_owner", tokens, age_ms)
    costs = lane.costs
    predicted_ms = costs.full_ms(tokens, event.candidates) + owner.worker.queue_ms
    if predicted_ms <= policy.risk_ms:
        return Decision("not_at_risk", tokens, age_ms, predicted_ms)
    nbytes, cost_ms = prefix_bytes(tokens, owner.worker), charge_ms(costs, tokens, owner.worker)
    reason: Reason = "admitted"
    if not lane.ledger.fits(nbytes):
        reason = "over_footprint"
    elif not lane.load_allows(cost_ms, now_s):
        reason = "over_load"
    elif _wait_ms(owner, now_s) > _time_left_ms(event, policy, age_ms):
        reason = "too_late"
    return Decision(reason, tokens, age_ms, predicted_ms, nbytes, cost_ms)


def _wait_ms(owner: Claim, now_s: float) -> float:
    """What waits at the owner now, if it has worked on since it stated that, up to a quarter of a second ago."""
    return max(0.0, owner.worker.pre_infer_wait_ms - owner.age_ms(now_s))


def _time_left_ms(event: RequestEvent, policy: Policy, age_ms: float) -> float:
    """Until the ranking is expected; where the event does not say, until the end of the life window.

    The owner would not even have begun by then if what waits there takes longer. One that has begun is worth having:
    the ranking joins it, and waits for the rest only.
    """
    return max(0.0, (event.rank_in_ms or policy.life_ms) - age_ms)


def _unfit(
    event: RequestEvent, tokens: int, policy: Policy, lane: LaneState, age_ms: float, now_s: float
) -> Reason | None:
    """Why the event deserves no pre-inference, whoever owns the lane."""
    if tokens == 0:
        return "empty_prefix"
    if tokens > policy.max_prefix_tokens:
        return "too_long"
    if age_ms > policy.stale_ms:
        return "stale"
    return "duplicate" if lane.admitted_recently(tenant_key(event.tenant, event.request_id), now_s) else None
