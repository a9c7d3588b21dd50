"""The trigger's rules for its lanes: events, statements and acknowledgements go in, effects come out.

    event ─► on_event ─► Signal | Delegate | Skip
    what became of a Signal ─► on_acknowledged | on_not_sent          of a Delegate ─► on_delegated
    the end of a lane's signal log ─► on_log_end

Knows no Kafka, no event loop and no clock: the caller passes the time, carries the effects out, and reports what became
of them. The trigger process (lane.py, outbox.py), the simulator, `relaygr explain` and the tests run the same core.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Final, NamedTuple

from relaygr_stream.errors import BrokerUnavailable, MessageTooLarge
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.trigger.decision import Decide, Decision, LaneState, Policy, decide
from relaygr_stream.trigger.delegation import Delegation
from relaygr_stream.trigger.ledger import LaneLedger, Pending
from relaygr_stream.trigger.load import OwnerLoads
from relaygr_stream.wire.messages import PreInferSignal, RequestEvent, prefix_length, prefix_tokens
from relaygr_stream.wire.refusals import Refusal
from relaygr_stream.wire.worker_status import charge_ms, prefix_bytes

#: Reasons that no owner is told: there is none, or the request was admitted before.
NOT_REPORTED: Final = frozenset({"no_owner", "duplicate"})


class Signal(NamedTuple):
    """Effect: send the event's signal to the lane of `pre-infer`. pending: its entry in the lane's ledger."""

    lane: int
    event: RequestEvent
    decision: Decision
    pending: Pending


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


class Bounds(NamedTuple):
    """The footprint of some lanes: pinned bytes counted and granted, and lanes on hold (ledger.py)."""

    outstanding_bytes: int
    budget_bytes: int
    on_hold: int


class TriggerCore:
    """Decides on the events of the lanes that it has taken, and books what it decides.

    owners: who owns which lane, and what they state; the caller feeds it. keep_s: how long the signal logs keep a
    signal, in seconds. delegation: finds delegates, where the policy delegates; None: nothing is delegated.
    """

    def __init__(
        self,
        policy: Policy,
        owners: OwnerDirectory,
        keep_s: float,
        decide: Decide = decide,
        delegation: Delegation | None = None,
    ) -> None:
        self.policy: Final = policy
        self._owners = owners
        self._keep_s = keep_s
        self._decide = decide
        self.loads: Final = OwnerLoads(policy.averaging, policy.burst_ms) if delegation is None else delegation.loads
        self.delegation: Final = delegation if policy.delegate else None
        self._lanes: dict[int, LaneState] = {}

    # ---- lanes ----

    def take_lane(self, lane: int, log_end: int, now_s: float) -> None:
        """Decide on this lane's events from now on. log_end: where its signal log ends."""
        ledger = LaneLedger(log_end, self._keep_s, now_s)
        self._lanes[lane] = LaneState(self.policy, ledger, lane, loads=self.loads, delegation=self.delegation)

    def leave_lane(self, lane: int, now_s: float) -> None:
        """Another trigger decides on this lane's events, taken or not. Outcomes of its signals are ignored from now."""
        self._lanes.pop(lane, None)
        self.loads.remove(lane, now_s)

    def observe(self, lane: int, now_s: float) -> LaneState:
        """The state of a taken lane, with its owner's newest statement applied, to the owner's other lanes, too."""
        state, claim = self._lanes[lane], self._owners.owner(lane)
        if claim is not None and claim is not state.claim:
            for each in claim.worker.lanes:
                if (other := self._lanes.get(each.lane)) is not None:
                    other.observe(self._owners.owner(each.lane), now_s)
        state.observe(claim, now_s)
        return state

    def bounds(self, lanes: Iterable[int] | None = None) -> Bounds:
        """The footprint of these taken lanes; None: of all."""
        ledgers = [self._lanes[lane].ledger for lane in (self._lanes if lanes is None else lanes)]
        return Bounds(
            sum(ledger.outstanding for ledger in ledgers),
            sum(ledger.budget for ledger in ledgers),
            sum(ledger.on_hold for ledger in ledgers),
        )

    # ---- users ----

    def users(self) -> list[str]:
        """Those of whom something is remembered (tenant_key)."""
        return [*self.loads.users, *(user for state in self._lanes.values() for user in state.users)]

    def forget(self, users: Set[str]) -> None:
        """Drop what is remembered of these users (tenant_key)."""
        for user in users:
            self.loads.forget(user)
        for state in self._lanes.values():
            state.forget(users)

    # ---- events ----

    def on_event(self, lane: int, event: RequestEvent, age_ms: float, now_s: float) -> Effect:
        """Decide on an event of a taken lane, and book the decision. age_ms: since it was sent."""
        return self.book(lane, event, self.decide(lane, event, age_ms, now_s), now_s)

    def decide(self, lane: int, event: RequestEvent, age_ms: float, now_s: float) -> Decision:
        """The decision on an event; books nothing."""
        return self._decide(event, self.observe(lane, now_s), age_ms=age_ms, now_s=now_s)

    def book(self, lane: int, event: RequestEvent, decision: Decision, now_s: float) -> Effect:
        """Book a decision that `decide` has just made; returns what is to be done."""
        state = self._lanes[lane]
        if decision.admit:
            return Signal(lane, event, decision, state.admit(event, decision, now_s))
        if decision.delegate is not None:
            state.delegate(event, decision, now_s)
            return Delegate(lane, event, decision, state.owner)
        return Skip(lane, event, decision, "" if decision.reason in NOT_REPORTED else state.owner)

    # ---- what became of the effects ----

    def on_acknowledged(self, lane: int, pending: Pending, offset: int, now_s: float, batch: int | None = None) -> None:
        """A broker has the signal at this offset. batch: the first offset of its batch; None: a batch of one."""
        if (state := self._counting(lane, pending)) is not None:
            state.ledger.acknowledged(pending, offset, now_s, batch)

    def on_not_sent(self, lane: int, pending: Pending, now_s: float, *, taken: bool) -> None:
        """No broker has acknowledged the signal. taken: by the producer, so that it may be in the log all the same."""
        if (state := self._counting(lane, pending)) is None:
            return
        if taken:
            state.ledger.failed(pending, now_s)
        else:
            state.ledger.withdrawn(pending)

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

    def notice(self, lane: int) -> Pending | None:
        """Count a record of refusals on the lane's signal log: it takes an offset there, and no bytes of the owner's.
        None: the lane has been left."""
        state = self._lanes.get(lane)
        return None if state is None else state.ledger.admit(0)

    def on_foreign(
        self,
        lane: int,
        offset: int,
        now_s: float,
        signal: PreInferSignal | None = None,
        event: RequestEvent | None = None,
    ) -> None:
        """Book a record that another trigger wrote to the lane's signal log; signal None: it is no signal.

        event: the signal's, if it has been decided on here; one that comes later must not count as a duplicate.
        """
        state = self.observe(lane, now_s)  # first: it fills the lane's bucket
        if signal is None:
            pending = state.ledger.admit(0)
        else:
            tokens, owner = prefix_length(signal), state.claim
            nbytes = 0 if owner is None else prefix_bytes(prefix_tokens(signal), owner.worker)
            cost_ms = 0.0 if owner is None else charge_ms(state.costs, tokens, owner.worker)
            if event is not None:
                pending = state.admit(event, Decision("admitted", tokens, 0.0, nbytes=nbytes, cost_ms=cost_ms), now_s)
            else:
                state.charge(cost_ms, now_s, cost_ms)
                pending = state.ledger.admit(nbytes)
        state.ledger.acknowledged(pending, offset, now_s)

    def on_log_end(self, lane: int, log_end: int, asked_s: float, now_s: float) -> int:
        """Compare a lane's ledger with the end of its signal log, as asked for at asked_s.

        Returns how many signals the log has lost.
        """
        if lane not in self._lanes:
            return 0
        lost = self._lanes[lane].ledger.reconcile(log_end, asked_s)
        self.observe(lane, now_s)
        return lost

    def _counting(self, lane: int, pending: Pending) -> LaneState | None:
        """The lane's state, if its ledger counts the signal: the lane may have been left meanwhile."""
        state = self._lanes.get(lane)
        return state if state is not None and state.ledger.counts(pending) else None
