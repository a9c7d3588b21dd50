"""The decision: do the bounds of an event's lane and its owner allow a pre-inference?

`decide` reads the event, the owner's status and the lane's bounds, and changes nothing. `LaneState.admit` books an
admitted request. Nothing here waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, get_args

import msgspec

from relaygr_stream.fleet import Claim
from relaygr_stream.settings.schema import Settings
from relaygr_stream.trigger.delegation import NOTICE_MS, Delegation, Place
from relaygr_stream.trigger.ledger import LaneLedger, Pending
from relaygr_stream.trigger.load import KeptAt, LoadBucket, OwnerLoads, Room, stated_wait_ms
from relaygr_stream.wire.messages import CostModel, RequestEvent, prefix_length, prefix_tokens, tenant_key
from relaygr_stream.wire.worker_status import FALLBACK_COSTS, charge_ms, prefix_bytes, usable_costs

Reason = Literal[
    "admitted",
    "empty_prefix",
    "too_long",
    "stale",
    "duplicate",
    "no_owner",
    "over_load",
    "delegated",
]
#: A refused request may be delegated to a worker that has its prefix KV ready within this many times the time until
#: its full inference would be done: until the ranking, plus the inference. More than once, because what else was
#: refused runs in full at the owner, too, and the owner's stated queue shows that late.
#: Simulated at 95 % load, P99 with 1, 1.5, 2, 3 and no bound: 1.9, 2.4, 1.7, 1.3 and 1.4 s.
REFUSED_FACTOR: Final = 3.0
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)
#: What a signal states of a ranking that is due: 0 would mean that nothing is known.
LEAST_RANK_IN_MS: Final = 1.0


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings that decisions depend on; times in milliseconds."""

    stale_ms: float
    life_ms: float
    burst_ms: float
    max_prefix_tokens: int
    delegate: bool = False
    averaging: float = 1.0  # factor of the times over which load is averaged

    @classmethod
    def of(cls, settings: Settings) -> Policy:
        """The policy in these settings."""
        return cls(
            stale_ms=settings.trigger.max_event_age_ms,
            life_ms=settings.relay.life_window_ms,
            burst_ms=settings.relay.life_window_ms,  # of one device: what it computes while a prefix stays pinned
            max_prefix_tokens=settings.relay.max_prefix_tokens,
            delegate=settings.trigger.delegate,
            averaging=settings.relay.averaging,
        )


class Decision(msgspec.Struct, frozen=True):  # made for every event; a frozen dataclass takes a microsecond more
    """A decision and the numbers behind it; numbers that were not needed are 0."""

    reason: Reason
    tokens: int
    age_ms: float
    predicted_ms: float = 0.0  # full inference plus the owner's queue
    nbytes: int = 0  # of the prefix KV
    cost_ms: float = 0.0  # expected device time of the pre-inference
    rank_in_ms: float = 0.0  # time until the expected ranking; 0: unknown
    delegate: Place | None = None  # where the prefix KV is computed for the owner; nbytes and cost_ms are those there

    @property
    def admit(self) -> bool:
        """Whether to send a pre-infer signal to the owner."""
        return self.reason == "admitted"


class _Admitted(NamedTuple):
    at_s: float
    user: str  # tenant_key


class LaneState:
    """What decisions on one lane's events depend on: the policy, its owner, its bounds, its recent requests.

    number: the lane. loads: the owners' buckets of this trigger. delegation:
    finds another worker for what the owner cannot compute in time; None: the owner computes it, or nobody does.
    `claim` is the current owner's newest statement; None: there is no owner, or it is silent.
    """

    def __init__(
        self,
        policy: Policy,
        ledger: LaneLedger,
        number: int = 0,
        loads: OwnerLoads | None = None,
        delegation: Delegation | None = None,
    ) -> None:
        self.policy: Final = policy
        self.number: Final = number
        self.delegation: Final = delegation
        self.claim: Claim | None = None
        self.ledger: Final = ledger
        self._loads = OwnerLoads(policy.averaging, policy.burst_ms) if loads is None else loads
        self._owner_bucket: LoadBucket | None = None
        self.costs: CostModel = FALLBACK_COSTS  # the owner's, if they are usable
        self._recent: OrderedDict[str, _Admitted] = OrderedDict()  # by tenant_key of request id
        self._stated: Claim | None = None  # the newest that any owner made

    def observe(self, claim: Claim | None, now_s: float) -> None:
        """Apply the current owner's newest claim; None: there is no owner, or it is silent."""
        self.claim = claim
        if claim is not None and claim is not self._stated:
            self._owner_bucket = self._loads.observe(claim, self.ledger, now_s)
            self.costs = usable_costs(claim.worker.costs)
            self._stated = claim

    @property
    def owner(self) -> str:
        """The name of the worker that stated the lane last; empty: none yet."""
        return "" if self._stated is None else self._stated.worker.name

    @property
    def _here(self) -> KeptAt:
        """At this owner."""
        return KeptAt(self.owner, 0 if self._stated is None else self._stated.worker.incarnation, delegated=False)

    @property
    def room(self) -> Room:
        """The owner's pinned bytes, all its lanes."""
        return self._loads.room(self.owner)

    def is_full(self, nbytes: int) -> bool:
        """Whether the owner is known to have no room for so many bytes. Changes nothing."""
        room = self.room
        return not self.ledger.on_hold and room.outstanding + nbytes > room.budget

    def load_allows(self, cost_ms: float, now_s: float) -> bool:
        """Whether the owner's bucket allows this much device time."""
        return self._owner_bucket is not None and self._owner_bucket.allows(cost_ms, now_s)

    def load_left_ms(self, now_s: float) -> float:
        """Device milliseconds that may be requested of the owner now."""
        return 0.0 if self._owner_bucket is None else self._owner_bucket.level(now_s)

    def charge(self, cost_ms: float, now_s: float, expected_ms: float) -> None:
        """Spend an average of device time from the owner's bucket. expected_ms: of this very signal."""
        if self._owner_bucket is not None:
            self._owner_bucket.spend(cost_ms, now_s)
            self._loads.sent.of_worker(self.owner, now_s).send(expected_ms, 0, now_s)

    def wait_ms(self, owner: Claim, now_s: float) -> float:
        """Predicted time until the owner has done what it was sent: what it stated, and signals since then."""
        return owner.worker.queue_ms + self._loads.sent.of_worker(owner.worker.name, now_s).ahead(owner, now_s)[0]

    def admitted_recently(self, request: str, now_s: float) -> bool:
        """Whether this request (tenant_key of its id) was admitted within the life window."""
        admitted = self._recent.get(request)
        return admitted is not None and now_s - admitted.at_s <= self.policy.life_ms / 1e3

    @property
    def users(self) -> list[str]:
        """Whose requests were admitted lately (tenant_key)."""
        return [admitted.user for admitted in self._recent.values()]

    def forget(self, users: Set[str]) -> None:
        """Drop the recent requests of these users (tenant_key): a repeated event of theirs counts as a new one."""
        for request in [request for request, admitted in self._recent.items() if admitted.user in users]:
            del self._recent[request]

    def admit(self, event: RequestEvent, decision: Decision, now_s: float) -> Pending:
        """Book an admitted request; returns the ledger's entry for its signal."""
        user, whole_ms = tenant_key(event.tenant, event.user_id), self.costs.pre_infer_ms(decision.tokens)
        here = self._here
        self.charge(decision.cost_ms, now_s, self._loads.expected_ms(user, here.worker, here.incarnation, whole_ms))
        self._note(event, here, now_s)
        return self.ledger.admit(decision.nbytes)

    def delegate(self, event: RequestEvent, decision: Decision, now_s: float) -> None:
        """Book a delegated request: it is charged to the delegate, and the lane's own bounds do not change."""
        place = decision.delegate
        assert place is not None
        self._note(event, KeptAt(place.worker, place.incarnation, delegated=True), now_s)
        self._loads.sent.of_worker(place.worker, now_s).send(decision.cost_ms, decision.nbytes, now_s)

    def _note(self, event: RequestEvent, kept: KeptAt, now_s: float) -> None:
        user = tenant_key(event.tenant, event.user_id)
        self._loads.remember(user, kept)
        while self._recent and now_s - next(iter(self._recent.values())).at_s > self.policy.life_ms / 1e3:
            self._recent.popitem(last=False)
        request = tenant_key(event.tenant, event.request_id)
        self._recent[request] = _Admitted(now_s, user)
        self._recent.move_to_end(request)


class Decide(Protocol):
    """How a trigger decides: `decide`, or what the laboratory compares with it."""

    def __call__(self, event: RequestEvent, lane: LaneState, /, *, age_ms: float, now_s: float) -> Decision:
        """As `decide`."""
        ...


def decide(event: RequestEvent, lane: LaneState, /, *, age_ms: float, now_s: float) -> Decision:
    """Whether to pre-infer for this event, where, and the reason. Changes nothing.

    lane: has observed its owner. age_ms: of the event. now_s: this process's monotonic clock, in seconds.
    """
    policy, owner, tokens = lane.policy, lane.claim, prefix_length(event)
    against = _reason_against(event, tokens, lane, age_ms, now_s)
    if against is not None:
        return Decision(against, tokens, age_ms)
    if owner is None:
        return Decision("no_owner", tokens, age_ms)
    costs = lane.costs
    predicted_ms = costs.full_ms(tokens, event.candidates) + owner.worker.queue_ms
    whole = prefix_tokens(event)
    nbytes, cost_ms = prefix_bytes(whole, owner.worker), charge_ms(costs, tokens, owner.worker)
    left_ms, rank_in_ms = _time_left_ms(event, policy, owner, age_ms)
    reason: Reason = "admitted" if lane.load_allows(cost_ms, now_s) else "over_load"
    if lane.delegation is not None and left_ms >= NOTICE_MS:
        # Before the owner would have the prefix KV: by pre-inference, or by full inference once the ranking came.
        within_ms = lane.wait_ms(owner, now_s) + costs.pre_infer_ms(tokens)
        late = within_ms > left_ms
        # Without a delegate the owner gets the signal all the same: it refuses what it has no room for.
        if reason == "over_load" or lane.is_full(nbytes) or stated_wait_ms(owner, now_s) > left_ms:
            late, within_ms = True, min(policy.life_ms, REFUSED_FACTOR * (left_ms + predicted_ms))
        user = tenant_key(event.tenant, event.user_id)
        place = lane.delegation.place(user, whole, owner, within_ms, now_s, late=late)
        if place is not None:
            return Decision("delegated", tokens, age_ms, predicted_ms, place.nbytes, place.cost_ms, rank_in_ms, place)
    return Decision(reason, tokens, age_ms, predicted_ms, nbytes, cost_ms, rank_in_ms)


def _time_left_ms(event: RequestEvent, policy: Policy, owner: Claim, age_ms: float) -> tuple[float, float]:
    """Time until the expected ranking, and what a signal states of it (0: unknown).

    It is what the event states; else what rankings at the owner usually take; and if that is not known, or so short
    that it decides nothing, the end of the life window. If the owner's queue is longer, the prefill job would not start
    before the ranking. A started job is worth admitting: the ranking joins it and waits only for the rest.
    """
    if event.rank_in_ms:
        left_ms = max(0.0, event.rank_in_ms - age_ms)
        return left_ms, max(LEAST_RANK_IN_MS, left_ms)
    usual_ms = owner.worker.head_start_ms
    return (usual_ms, usual_ms) if usual_ms >= NOTICE_MS else (max(0.0, policy.life_ms - age_ms), 0.0)


def _reason_against(event: RequestEvent, tokens: int, lane: LaneState, age_ms: float, now_s: float) -> Reason | None:
    """Why the event is not worth a pre-inference, whatever the lane's owner; None: it may be."""
    if tokens == 0:
        return "empty_prefix"
    if tokens > lane.policy.max_prefix_tokens:
        return "too_long"
    if age_ms > lane.policy.stale_ms:
        return "stale"
    return "duplicate" if lane.admitted_recently(tenant_key(event.tenant, event.request_id), now_s) else None
