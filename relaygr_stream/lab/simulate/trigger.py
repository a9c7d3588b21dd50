"""The triggers of a simulated fleet: the real owner directory, ledgers, buckets and decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relaygr_stream.lab.simulate.scenario import Request
from relaygr_stream.lab.simulate.timeline import Timeline
from relaygr_stream.lab.workload.traffic import Traffic
from relaygr_stream.settings.schema import Settings
from relaygr_stream.trigger.decision import Decide, LaneState, Policy, decide
from relaygr_stream.trigger.delegation import Delegation, Place
from relaygr_stream.trigger.ledger import Pending
from relaygr_stream.trigger.load import OwnerLoads
from relaygr_stream.trigger.service import RECONCILE_S
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.fleet import OwnerDirectory
from relaygr_stream.wire.messages import RequestEvent, WorkerStatus
from relaygr_stream.wire.topic_files import TopicSet


class SimulatedTrigger:
    """The triggers of all lanes as one object: they share only the owner directory, which is equal in all."""

    def __init__(
        self,
        settings: Settings,
        topics: TopicSet,
        lanes: int,
        traffic: Traffic,
        timeline: Timeline,
        decide: Decide = decide,
        seed: int = 0,
    ) -> None:
        policy = Policy.of(settings)
        self._decide = decide
        self._timeline = timeline
        self._traffic = traffic
        self._owners = OwnerDirectory(settings.trigger.max_status_age_ms, clock=timeline.clock)
        now = timeline.clock.now
        keep_s = topics.pre_infer.retention_ms / 1e3
        loads = OwnerLoads(policy.averaging)
        delegation = Delegation(self._owners, loads, lanes, seed) if policy.delegate else None
        self._lanes = [LaneState(policy, 0, keep_s, now, lane, loads, delegation) for lane in range(lanes)]
        self._zeros = bytes(4 * settings.relay.max_prefix_tokens)

    def take(self, status: WorkerStatus) -> None:
        """Apply a worker's status that has arrived."""
        self._owners.take(status)

    def consider(self, request: Request, now: float) -> Pending | Place | None:
        """Decide on a request whose event has arrived, and book it.

        Returns the ledger's entry of its signal, or the delegate; None: there is no signal.
        """
        state = self._lanes[request.lane]
        state.observe(self._owners.owner(request.lane), now)
        event = RequestEvent(
            request_id=request.name,
            user_id=request.user_id,
            prefix=Behaviours(items=self._zeros[: 4 * request.prefix]),  # the decision uses only the length
            candidates=self._traffic.candidates,
            rank_in_ms=self._traffic.delay.median_ms,
        )
        decision = self._decide(event, state, age_ms=(now - request.at) * 1e3, now_s=now)
        request.reason = decision.reason
        if decision.delegate is not None:
            state.delegate(event, decision, now)
            return decision.delegate
        return state.admit(event, decision, now) if decision.admit else None

    def acknowledged(self, lane: int, pending: Pending, offset: int, now: float) -> None:
        """Note that the signal is in the lane's log."""
        self._lanes[lane].ledger.acknowledged(pending, offset, now)

    def reconcile_every_second(self, ends: Callable[[], Sequence[int]]) -> None:
        """Compare the ledgers every second with the ends of the lanes' signal logs."""

        def reconcile(now: float) -> None:
            for state, end in zip(self._lanes, ends(), strict=True):
                state.ledger.reconcile(end, now)
            self._timeline.at(now + RECONCILE_S, reconcile)

        self._timeline.at(self._timeline.clock.now + RECONCILE_S, reconcile)
