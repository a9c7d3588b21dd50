"""The decision: is this request at risk, and do its lane's bounds allow a pre-inference?

`decide` reads the event, the owner's status and the lane's bounds, and changes nothing. `LaneState.admit` books an
admitted request. Nothing here waits.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Literal, get_args

import msgspec

from relaygr_stream.settings.schema import Settings
from relaygr_stream.trigger.ledger import LaneLedger, Pending
from relaygr_stream.wire.fleet import Claim
from relaygr_stream.wire.messages import CostModel, RequestEvent, prefix_length, tenant_key
from relaygr_stream.wire.worker_status import FALLBACK_COSTS, charge_ms, prefix_bytes, usable_costs

# The load bound: token buckets of device milliseconds, one for each lane and one for each owner of lanes. A lane's
# bucket limits it to its owner's grant. An owner's bucket limits all its lanes of this trigger together to one second
# of its grants, however many lanes there are.

#: A new bucket holds the refill of this many seconds. Not a full burst: triggers restart and hand lanes over, and each
#: time every lane would get another burst. One second's refill summed over an owner's lanes is one second of its
#: pre-infer share, whatever the number of lanes.
START_S: Final = 1.0
#: A lane's bucket holds at most the refill of this many seconds, so that savings shrink with the grant. It is about as
#: long as an owner counts a lane as in use after its last request (worker/budgets.py).
LANE_S: Final = 10.0
#: An owner's bucket holds at most the refill of this many seconds: its lanes together save at most one second of its
#: device time, which is less than a life window.
OWNER_S: Final = 1.0
#: A lower rate counts as zero: it is the rounding error of a sum of rates that were withdrawn one by one.
MIN_MS_PER_S: Final = 1e-6


class LoadBucket:
    """A token bucket of device milliseconds. Times are seconds of a monotonic clock.

    It holds at most `depth`: the refill of depth_s seconds, and never more than burst_ms. Over any interval of dt
    seconds at most burst_ms + rate·dt is spent. A cost above the depth is allowed when the bucket is full, and leaves
    it in debt: the bound is exceeded once, by (cost - depth), and the refill repays it. Without a rate nothing is
    allowed.
    """

    def __init__(self, burst_ms: float, depth_s: float = LANE_S) -> None:
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
        level = self.level(now_s) + more_ms if self._at_s is not None else ms_per_s * START_S
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


class OwnerLoads:
    """One bucket for each owner of this trigger's lanes; its rate is the sum of its lanes' rates."""

    def __init__(self) -> None:
        self._lanes: dict[int, tuple[str, float]] = {}
        self._buckets: dict[str, LoadBucket] = {}
        self._counts: dict[str, int] = {}

    def observe(self, lane: int, owner: str, ms_per_s: float, now_s: float) -> LoadBucket:
        """Note a lane's owner and the rate it grants; returns the owner's bucket."""
        before, known_ms = self._lanes.get(lane, ("", 0.0))
        if before != owner:
            self.remove(lane, now_s)
            self._counts[owner] = self._counts.get(owner, 0) + 1
            known_ms = 0.0
        bucket = self._buckets.get(owner)
        if bucket is None:
            bucket = self._buckets[owner] = LoadBucket(math.inf, OWNER_S)
        self._lanes[lane] = owner, ms_per_s
        new = before != owner
        bucket.set_rate(bucket.rate + ms_per_s - known_ms, now_s, ms_per_s * START_S if new else 0.0)
        return bucket

    def remove(self, lane: int, now_s: float) -> None:
        """Remove a lane that has another owner now, or that another trigger decides for."""
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
    """The settings that decisions depend on; times in milliseconds."""

    risk_ms: float  # at risk above this
    stale_ms: float
    life_ms: float
    burst_ms: float
    max_prefix_tokens: int

    @classmethod
    def of(cls, settings: Settings) -> Policy:
        """The policy in these settings."""
        return cls(
            risk_ms=settings.trigger.risk_share * settings.relay.slo_ms,
            stale_ms=settings.trigger.stale_ms,
            life_ms=settings.relay.life_window_ms,
            burst_ms=settings.trigger.load_burst_ms,
            max_prefix_tokens=settings.relay.max_prefix_tokens,
        )


class Decision(msgspec.Struct, frozen=True):  # made for every event; a frozen dataclass takes a microsecond more
    """A decision and the numbers behind it; numbers that were not needed are 0."""

    reason: Reason
    tokens: int
    age_ms: float
    predicted_ms: float = 0.0  # full inference plus the owner's queue; at risk above Policy.risk_ms
    nbytes: int = 0  # of the prefix KV
    cost_ms: float = 0.0  # expected device time of the pre-inference

    @property
    def admit(self) -> bool:
        """Whether to send a pre-infer signal."""
        return self.reason == "admitted"


class LaneState:
    """One lane's bounds and its recently admitted requests.

    log_end, keep_s, now_s: as for LaneLedger. number: the lane. loads: the owners' buckets of this trigger.
    """

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
        self.costs: CostModel = FALLBACK_COSTS  # the owner's, if they are usable
        self._life_s = policy.life_ms / 1000.0
        self._recent: OrderedDict[str, float] = OrderedDict()  # tenant_key of request id → when admitted
        self._claim: Claim | None = None

    def observe(self, claim: Claim | None, now_s: float) -> None:
        """Apply the current owner's newest claim, if it has changed."""
        if claim is not None and claim is not self._claim:
            self.ledger.observe(claim.lane)
            rate = claim.lane.device_ms_per_s
            self.bucket.set_rate(rate, now_s)
            self._owner_bucket = self._loads.observe(self._number, claim.worker.name, rate, now_s)
            self.costs = usable_costs(claim.worker.costs)
            self._claim = claim

    @property
    def owner(self) -> str:
        """The name of the worker that stated the lane last; empty: none yet."""
        return "" if self._claim is None else self._claim.worker.name

    def load_allows(self, cost_ms: float, now_s: float) -> bool:
        """Whether both the lane's bucket and its owner's allow this much device time."""
        owner = self._owner_bucket
        return owner is not None and self.bucket.allows(cost_ms, now_s) and owner.allows(cost_ms, now_s)

    def load_left_ms(self, now_s: float) -> float:
        """Device milliseconds that the lane may request now."""
        owner = self._owner_bucket
        return 0.0 if owner is None else min(self.bucket.level(now_s), owner.level(now_s))

    def charge(self, cost_ms: float, now_s: float) -> None:
        """Spend device time from the lane's bucket and its owner's."""
        self.bucket.spend(cost_ms, now_s)
        if self._owner_bucket is not None:
            self._owner_bucket.spend(cost_ms, now_s)

    def admitted_recently(self, request: str, now_s: float) -> bool:
        """Whether this request (tenant_key of its id) was admitted within the life window."""
        at_s = self._recent.get(request)
        return at_s is not None and now_s - at_s <= self._life_s

    def admit(self, event: RequestEvent, decision: Decision, now_s: float) -> Pending:
        """Book an admitted request; returns the ledger's entry for its signal."""
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
    """Whether to pre-infer for this event, and the reason. Changes nothing.

    owner: the lane's current owner, None if there is none or it is silent; `lane` has observed it. age_ms: of the
    event. now_s: this process's monotonic clock, in seconds.
    """
    tokens = prefix_length(event)
    against = _reason_against(event, tokens, policy, lane, age_ms, now_s)
    if against is not None:
        return Decision(against, tokens, age_ms)
    if owner is None:
        return Decision("no_owner", tokens, age_ms)
    costs = lane.costs
    predicted_ms = costs.full_ms(tokens, event.candidates) + owner.worker.queue_ms
    if predicted_ms <= policy.risk_ms:
        return Decision("not_at_risk", tokens, age_ms, predicted_ms)
    nbytes, cost_ms = prefix_bytes(event.context_tokens + tokens, owner.worker), charge_ms(costs, tokens, owner.worker)
    reason: Reason = "admitted"
    if not lane.ledger.fits(nbytes):
        reason = "over_footprint"
    elif not lane.load_allows(cost_ms, now_s):
        reason = "over_load"
    elif _wait_ms(owner, now_s) > _time_left_ms(event, policy, age_ms):
        reason = "too_late"
    return Decision(reason, tokens, age_ms, predicted_ms, nbytes, cost_ms)


def _wait_ms(owner: Claim, now_s: float) -> float:
    """The owner's pre-infer queue now: the stated one less the time since, at most one status interval."""
    return max(0.0, owner.worker.pre_infer_wait_ms - owner.age_ms(now_s))


def _time_left_ms(event: RequestEvent, policy: Policy, age_ms: float) -> float:
    """Time until the expected ranking; if the event does not state it, until the end of the life window.

    If the owner's queue is longer, the prefill job would not start before the ranking. A started job is worth
    admitting: the ranking joins it and waits only for the rest.
    """
    return max(0.0, (event.rank_in_ms or policy.life_ms) - age_ms)


def _reason_against(
    event: RequestEvent, tokens: int, policy: Policy, lane: LaneState, age_ms: float, now_s: float
) -> Reason | None:
    """Why the event is not worth a pre-inference, whatever the lane's owner; None: it may be."""
    if tokens == 0:
        return "empty_prefix"
    if tokens > policy.max_prefix_tokens:
        return "too_long"
    if age_ms > policy.stale_ms:
        return "stale"
    return "duplicate" if lane.admitted_recently(tenant_key(event.tenant, event.request_id), now_s) else None
