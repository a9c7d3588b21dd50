"""The trigger's rules for its lanes: events and statements go in, effects come out.

    event ─► on_event ─► Signal | Delegate | Skip          what became of a Delegate ─► on_delegated

Knows no Kafka, no event loop and no clock: the caller passes the time, carries the effects out, and reports what became
of them. The trigger process (lane.py, outbox.py), the simulator, `relaygr explain` and the tests run the same core.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final, NamedTuple

from relaygr_stream.errors import BrokerUnavailable, MessageTooLarge
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.trigger.decision import Decide, Decision, LaneState, Policy, decide
from relaygr_stream.trigger.delegation import Delegation
from relaygr_stream.trigger.sent import SentBooks
from relaygr_stream.wire.messages import PreInferSignal, RequestEvent, prefix_length, prefix_tokens, tenant_key
from relaygr_stream.wire.refusals import Refusal
from relaygr_stream.wire.worker_status import prefix_bytes

#: Reasons that no owner is told: there is none, or the request was admitted before.
NOT_REPORTED: Final = frozenset({"no_owner", "duplicate"})


class Signal(NamedTuple):
    """Effect: send the event's signal to the lane of `pre-infer`."""

    lane: int
    event: RequestEvent
    decision: Decision


class Delegate(NamedTuple):
    """Effect: send the event's signal to `decision.delegate`. owner: of the event's lane."""

    lane: int
    event: RequestEvent
    decision: Decision
    owner: str


class Skip(NamedTuple):
    """Effect: send nothing. owner: is to be told `refusal`; empty: nobody is."""

    lane: int
    event: RequestEvent
    decision: Decision
    owner: str

    @property
    def refusal(self) -> Refusal:
        """What the owner is told."""
        return Refusal(self.event.request_id, self.decision.reason, self.event.tenant)


Effect = Signal | Delegate | Skip


class TriggerCore:
    """Decides on the events of the lanes that it has taken, and books what it decides.

    owners: who owns which lane, and what they state; the caller feeds it. delegation: finds delegates, where the policy
    delegates; None: nothing is delegated.
    """

    def __init__(
        self, policy: Policy, owners: OwnerDirectory, decide: Decide = decide, delegation: Delegation | None = None
    ) -> None:
        self.policy: Final = policy
        self._owners = owners
        self._decide = decide
        self.sent: Final = SentBooks() if delegation is None else delegation.sent
        self.delegation: Final = delegation if policy.delegate else None
        self._lanes: dict[int, LaneState] = {}

    # ---- lanes ----

    def take_lane(self, lane: int) -> None:
        """Decide on this lane's events from now on."""
        self._lanes[lane] = LaneState(self.policy, self.sent, self.delegation)

    def leave_lane(self, lane: int) -> None:
        """Another trigger decides on this lane's events."""
        del self._lanes[lane]

    def observe(self, lane: int) -> LaneState:
        """The state of a taken lane, with its owner's newest statement applied."""
        state = self._lanes[lane]
        state.observe(self._owners.owner(lane))
        return state

    @property
    def owned(self) -> int:
        """How many of the taken lanes have an owner."""
        return sum(self._owners.owner(lane) is not None for lane in self._lanes)

    # ---- users ----

    def users(self) -> list[str]:
        """Those of whom something is remembered (tenant_key)."""
        return [*self.sent.users, *(user for state in self._lanes.values() for user in state.users)]

    def forget(self, users: Set[str]) -> None:
        """Drop what is remembered of these users (tenant_key)."""
        for user in users:
            self.sent.forget(user)
        for state in self._lanes.values():
            state.forget(users)

    # ---- events ----

    def on_event(self, lane: int, event: RequestEvent, age_ms: float, now_s: float) -> Effect:
        """Decide on an event of a taken lane, and book the decision. age_ms: since it was sent."""
        return self.book(lane, event, self.decide(lane, event, age_ms, now_s), now_s)

    def decide(self, lane: int, event: RequestEvent, age_ms: float, now_s: float) -> Decision:
        """The decision on an event; books nothing."""
        return self._decide(event, self.observe(lane), age_ms=age_ms, now_s=now_s)

    def book(self, lane: int, event: RequestEvent, decision: Decision, now_s: float) -> Effect:
        """Book a decision that `decide` has just made; returns what is to be done."""
        state = self._lanes[lane]
        if decision.admit or decision.delegate is not None:
            state.book(event, decision, now_s)
        if decision.admit:
            return Signal(lane, event, decision)
        if decision.delegate is not None:
            return Delegate(lane, event, decision, state.owner)
        return Skip(lane, event, decision, "" if decision.reason in NOT_REPORTED else state.owner)

    # ---- what became of the effects ----

    def on_signalled(self, lane: int, signal: PreInferSignal, event: RequestEvent | None, now_s: float) -> None:
        """Book a signal that another trigger sent. event: the signal's, if it has been decided on here; one that comes
        later must not count as a duplicate."""
        state = self.observe(lane)
        if (owner := state.claim) is None:
            return
        tokens, user = prefix_length(signal), tenant_key(signal.tenant, signal.user_id)
        nbytes, cost_ms = prefix_bytes(prefix_tokens(signal), owner.worker), state.cost_ms(user, tokens)
        decision = Decision("admitted", tokens, 0.0, nbytes=nbytes, cost_ms=cost_ms)
        if event is None:
            state.send(user, decision, now_s)
        else:
            state.book(event, decision, now_s)

    def on_delegated(
        self, effect: Delegate, error: BaseException | None, now_s: float, *, tried: bool = True
    ) -> Refusal:
        """A broker has the delegated signal; error: none has. Returns what the owner is told.

        Without its delegate in it, the owner infers the ranking in full. tried: this very signal was sent, so that the
        error says something of its lane.
        """
        event, place = effect.event, effect.decision.delegate
        assert place is not None
        if error is None:
            return Refusal(event.request_id, "delegated", event.tenant, place.worker)
        # A message that is too large says nothing of others; a refusal is of the topic; a broker that is away has some
        # of its lanes.
        if tried and self.delegation is not None and not isinstance(error, MessageTooLarge):
            self.delegation.not_sent(now_s, place.lane if isinstance(error, BrokerUnavailable) else None)
        return Refusal(event.request_id, "delegated", event.tenant)
