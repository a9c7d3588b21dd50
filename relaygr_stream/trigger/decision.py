"""The decision: is an event pre-inferred, and where?

What has a prefix, is neither too long nor stale, and did not come before goes to its lane's owner, which bounds what is
pinned and computes it in idle time; or to a delegate, if the owner would be too late. `decide` changes nothing,
`LaneState` books. Nothing here waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, get_args

import msgspec

from relaygr_stream.fleet import Ahead, Claim
from relaygr_stream.settings.schema import Settings
from relaygr_stream.trigger.delegation import NOTICE_MS, Delegation, Place
from relaygr_stream.trigger.sent import KeptAt, SentBooks, stated_wait_ms
from relaygr_stream.wire.messages import CostModel, RequestEvent, prefix_length, prefix_tokens, tenant_key
from relaygr_stream.wire.worker_status import FALLBACK_COSTS, Room, prefix_bytes, usable_costs

Reason = Literal[
    "admitted",
    "empty_prefix",
    "too_long",
    "stale",
    "duplicate",
    "no_owner",
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
    max_prefix_tokens: int
    delegate: bool = False

    @classmethod
    def from_settings(cls, settings: Settings) -> Policy:
        """The policy in these settings."""
        return cls(
            stale_ms=settings.trigger.max_event_age_ms,
            life_ms=settings.relay.life_window_ms,
            max_prefix_tokens=settings.relay.max_prefix_tokens,
            delegate=settings.trigger.delegate,
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
    """What decisions on one lane's events depend on: the policy, its owner, its recent requests.

    sent: what this trigger sent to whom. delegation: finds another worker for what the owner cannot compute in time;
    None: the owner computes it, or nobody does. `claim` is the current owner's newest statement; None: there is no
    owner, or it is silent.
    """

    def __init__(self, policy: Policy, sent: SentBooks | None = None, delegation: Delegation | None = None) -> None:
        self.policy: Final = policy
        self.delegation: Final = delegation
        self.claim: Claim | None = None
        self.costs: CostModel = FALLBACK_COSTS  # the owner's, if they are usable
        self._sent = SentBooks() if sent is None else sent
        self._recent: OrderedDict[str, _Admitted] = OrderedDict()  # by tenant_key of request id
        self._stated: Claim | None = None  # the newest that any owner made

    def observe(self, claim: Claim | None) -> None:
        """Apply the current owner's newest claim; None: there is no owner, or it is silent."""
        self.claim = claim
        if claim is not None and claim is not self._stated:
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

    def ahead(self, owner: Claim, now_s: float) -> Ahead:
        """What the owner has before it, by this trigger's signals."""
        return self._sent.signals.of_worker(owner.worker.name, now_s).ahead(owner, now_s)

    def cost_ms(self, user: str, tokens: int) -> float:
        """Expected device time at the owner of pre-inference for a user (tenant_key)."""
        here = self._here
        return self._sent.expected_ms(user, here.worker, here.incarnation, self.costs.pre_infer_ms(tokens))

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

    def send(self, user: str, decision: Decision, now_s: float) -> None:
        """Book a signal for a user (tenant_key) that goes to the owner, or to the decision's delegate."""
        place = decision.delegate
        at = self._here if place is None else KeptAt(place.worker, place.incarnation, delegated=True)
        books = self._sent.signals.of_worker(at.worker, now_s)
        books.send(decision.cost_ms, decision.nbytes, now_s, delegated=at.delegated)
        self._sent.remember(user, at)

    def book(self, event: RequestEvent, decision: Decision, now_s: float) -> None:
        """Book a request whose signal is sent: a repeated event of it counts no more."""
        user = tenant_key(event.tenant, event.user_id)
        self.send(user, decision, now_s)
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
    predicted_ms = lane.costs.full_ms(tokens, event.candidates) + owner.worker.queue_ms
    user, whole = tenant_key(event.tenant, event.user_id), prefix_tokens(event)
    nbytes, cost_ms = prefix_bytes(whole, owner.worker), lane.cost_ms(user, tokens)
    left_ms, rank_in_ms = _time_left_ms(event, policy, owner, age_ms)
    if lane.delegation is not None and left_ms >= NOTICE_MS:
        ahead = lane.ahead(owner, now_s)
        # Before the owner would have the prefix KV: by pre-inference, or by full inference once the ranking came.
        within_ms = owner.worker.queue_ms + ahead.ms + cost_ms
        late = within_ms > left_ms
        room = Room.from_status(owner.worker)
        # Without a delegate the owner gets the signal all the same: it refuses what it has no room for.
        if room.pinned + ahead.own_bytes + nbytes > room.budget or stated_wait_ms(owner, now_s) > left_ms:
            late, within_ms = True, min(policy.life_ms, REFUSED_FACTOR * (left_ms + predicted_ms))
        place = lane.delegation.place(user, whole, owner, within_ms, now_s, late=late)
        if place is not None:
            return Decision("delegated", tokens, age_ms, predicted_ms, place.nbytes, place.cost_ms, rank_in_ms, place)
    return Decision("admitted", tokens, age_ms, predicted_ms, nbytes, cost_ms, rank_in_ms)


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
    """Why the event is not pre-inferred, whatever the lane's owner; None: it may be."""
    if tokens == 0:
        return "empty_prefix"
    if tokens > lane.policy.max_prefix_tokens:
        return "too_long"
    if age_ms > lane.policy.stale_ms:
        return "stale"
    return "duplicate" if lane.admitted_recently(tenant_key(event.tenant, event.request_id), now_s) else None
