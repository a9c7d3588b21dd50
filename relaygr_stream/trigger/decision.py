"""The decision: is this request at risk, and do its lane's bounds allow a pre-inference?

`decide` reads the event, the owner's statement and the lane's bounds, and changes nothing; `LaneState.admit` books what
was admitted. Never waits. Knows nothing of Kafka.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, Literal, get_args

import msgspec

from relaygr_stream.messages import CostModel, RequestEvent, tenant_key
from relaygr_stream.owners import Claim
from relaygr_stream.settings import Settings
from relaygr_stream.trigger.ledger import LaneLedger, Pending
from relaygr_stream.trigger.load import LoadBucket, OwnerLoads
from relaygr_stream.trigger.risk import FALLBACK_COSTS, charge_ms, prefix_bytes, usable_costs

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
