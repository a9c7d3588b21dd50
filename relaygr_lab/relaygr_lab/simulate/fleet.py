"""A simulated fleet: the bus, the group protocol and the clients around triggers and workers.

event ─► trigger ─► signal ─► worker ◄─ ranking ◄─┐
                                ├─► answer ─► client │
                                └─► refused: a peer's lane, by its status

Every message has a latency, and a process reads in order. A dead worker is silent; its lanes' messages wait in their
logs until the group notices and the real assignor gives the lanes to others. Workers forward within their group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import tee
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from relaygr_lab.policies import decider
from relaygr_lab.simulate.bus import Paths
from relaygr_lab.simulate.routes import Routes
from relaygr_lab.simulate.scenario import Group, Request, Scenario, Sent
from relaygr_lab.simulate.timeline import Timeline
from relaygr_lab.simulate.worker import SimulatedWorker
from relaygr_stream.bus.balance import MemberClaim, assign_lanes
from relaygr_stream.engine.commands import (
    DELEGATED_LANE,
    Answer,
    Prefill,
    PrefillTask,
    Rank,
    RankTask,
    Times,
)
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.models.api import ROWS, Tokens
from relaygr_stream.trigger.core import Delegate, Signal, TriggerCore
from relaygr_stream.trigger.decision import Policy
from relaygr_stream.trigger.delegation import FLUSH_S, Delegation
from relaygr_stream.trigger.sent import SentBooks
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.messages import RequestEvent, WorkerStatus, tenant_key
from relaygr_stream.wire.refusals import Refusals
from relaygr_stream.worker.core import WorkerCore, WorkerPolicy
from relaygr_stream.worker.effects import CountForward, Done, Effect, Forward, Release, Reply, Submit
from relaygr_stream.worker.forwarding import time_left_ms
from relaygr_stream.workload.users import Part
from relaygr_stream.workload.visits import Arrival, arrivals, on_one_lane

Deliver = Callable[[SimulatedWorker, float], None]

#: Status intervals before the first event, so that triggers know the owners; run_trigger waits as long.
START_STATUSES: Final = 2


class Lane:
    """One lane's signals and its owner. backlog: messages that arrived while it had no live owner."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.read = 0  # the owner's position in them
        self.owner: SimulatedWorker | None = None
        self.backlog: list[Deliver] = []
        self.ranking: dict[Sent, SimulatedWorker] = {}  # read, and not done, by the worker that read it


class Asked(NamedTuple):
    """What a request asks for. scenario: that it is charged to, where workers serve several."""

    slo_ms: float
    candidates: npt.NDArray[np.int64]
    scenario: str = ""

    @classmethod
    def of(cls, slo_ms: float, candidates: int, scenario: str = "") -> Asked:
        """So many candidates."""
        return cls(slo_ms, np.zeros(candidates, np.int64), scenario)


class Fleet:
    """One group's workers, lanes, triggers and clients. Call `run` once; `requests` then hold the results.

    requests: in place of those of the scenario's traffic.
    """

    def __init__(
        self,
        scenario: Scenario,
        group: Group,
        timeline: Timeline | None = None,
        requests: Iterator[Arrival] | None = None,
    ) -> None:
        settings = scenario.settings
        self._scenario = scenario
        self._settings = settings
        seeds = np.random.SeedSequence([scenario.seed, group.index]).spawn(4)
        self._rng = np.random.default_rng(seeds[0])
        self._ends = np.random.default_rng(seeds[3])  # which requests are never ranked: the same for every policy
        self.timeline = timeline or Timeline()
        # What all workers know of each other is equal; each has its own books of what it sent to whom.
        self._peers = OwnerDirectory(settings.client.silence_ms, clock=self.timeline.clock)
        self._home: dict[str, int] = {}  # the lane of each user who asked
        count = group.size * scenario.lanes_per_worker
        names = [f"w{group.first + index}" for index in range(group.size)]
        self._owned: dict[str, frozenset[int]] = assign_lanes(count, {name: MemberClaim() for name in names})
        back = scenario.answers or scenario.bus
        self._paths = {name: Paths(scenario.bus, back, self._rng) for name in names}
        self.first_owners = {number: name for name, numbers in self._owned.items() for number in numbers}
        self.lanes = [Lane(self._paths[self.first_owners[number]]) for number in range(count)]
        choices = int(self._rng.integers(2**31))
        self._routes = Routes(scenario.route, choices)
        self.workers = [
            self._make_worker(self._make_core(name, choices + index), int(seed))
            for index, (name, seed) in enumerate(zip(names, seeds[1].generate_state(group.size), strict=True))
        ]
        self._by_name = {worker.name: worker for worker in self.workers}
        for number, name in self.first_owners.items():
            self.lanes[number].owner = self._by_name[name]
        for name, owned in self._owned.items():
            self._by_name[name].core.on_lanes(owned, frozenset())
        # The triggers of all lanes are one core: they share only the owner directory, which is equal in all.
        self._owners = OwnerDirectory(settings.trigger.max_status_age_ms, clock=self.timeline.clock)
        delegation = Delegation(self._owners, SentBooks(), count, seed=scenario.seed + group.index)
        self._trigger = TriggerCore(Policy.from_settings(settings), self._owners, decider(scenario.policy), delegation)
        for number in range(count):
            self._trigger.take_lane(number)
        self.start = START_STATUSES * settings.worker.status_interval_ms / 1e3
        part = Part(group.first * scenario.lanes_per_worker, count, scenario.workers * scenario.lanes_per_worker)
        self._arrivals = requests or arrivals(scenario.traffic, part, int(seeds[2].generate_state(1)[0]))
        if scenario.hot:
            self._arrivals = on_one_lane(self._arrivals, scenario.hot)
        self.requests: list[Request] = []
        self.forwards: Counter[str] = Counter()  # `sent`, or why a refused ranking was not
        self._announces_at = 0.0  # when the client sends the events that it has gathered
        self._zeros = bytes(settings.relay.max_prefix_tokens)
        self._sequence = np.zeros((ROWS, settings.relay.max_prefix_tokens), np.int8)
        self._suffix = self._tokens(scenario.traffic.suffix)
        self._asks = Asked.of(settings.relay.slo_ms, scenario.traffic.candidates)
        self.failed_at: float | None = None
        self.taken_over_at: float | None = None
        self.moved_lanes = 0
        self.dead: list[SimulatedWorker] = []
        self._dying = group.dead

    def _make_core(self, name: str, seed: int) -> WorkerCore:
        return WorkerCore(name, WorkerPolicy.from_settings(self._settings), self._peers, self, seed)

    def lane_of(self, user_id: str) -> int:
        """The lane of a user who asked."""
        return self._home[user_id]

    def _make_worker(self, core: WorkerCore, seed: int) -> SimulatedWorker:
        answered, scenario = partial(self._answered, core.name), self._scenario
        return SimulatedWorker(core, self._settings, scenario.costs, self.timeline, seed, answered, scenario.policy)

    def ahead(self) -> Iterator[Arrival]:
        """The requests that are to come, which come all the same."""
        self._arrivals, ahead = tee(self._arrivals)
        return ahead

    def run(self) -> None:
        """Run until every client has its answer or has timed out."""
        timeline, until = self.timeline, self.begin()
        timeline.run(until)
        last = max((request.rank_at for request in self.requests), default=until)
        timeline.run(max(until, last) + self._settings.client.timeout_ms / 1e3)

    def begin(self) -> float:
        """Schedule what happens; returns when the last request begins."""
        scenario, timeline = self._scenario, self.timeline
        until = self.start + scenario.warm_s + scenario.seconds
        for worker in self.workers:
            self._state_every(worker, float(self._rng.random()) * self._settings.worker.status_interval_ms / 1e3)
        self._next_event(until)
        if scenario.failure is not None and self._dying:
            timeline.at(self.start + scenario.warm_s + scenario.failure.at, self._fail)
        return until

    # ---- requests ----

    def _next_event(self, until: float) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None and self.start + arrival.at < until:
            self.timeline.at(self.start + arrival.at, partial(self._event, arrival, until))

    def _event(self, arrival: Arrival, until: float, now: float) -> None:
        """A request begins: its event is gathered, its ranking comes later."""
        self._next_event(until)
        request = Request(
            len(self.requests), now, self.start + arrival.rank_at, arrival.user, arrival.life, arrival.lane,
            arrival.prefix, arrival.returning, arrival.long, float(self._ends.random()) >= self._scenario.unranked,
        )  # fmt: skip
        self.requests.append(request)
        if self._scenario.mode == "relay":
            if now >= self._announces_at:  # as one client's: events wait for each other
                self._announces_at = now + self._settings.client.announce_linger_ms / 1e3
            self.timeline.at(self._announces_at, partial(self._announce, request))
        self.timeline.at(request.rank_at, partial(self._rank if request.ranked else self._give_up, request))

    def _announce(self, request: Request, now: float) -> None:
        """The client hands a request event to the broker."""
        self.timeline.at(self.lanes[request.lane].paths.to_trigger.arrival(now), partial(self._decide, request))

    def _decide(self, request: Request, now: float) -> None:
        """The trigger reads the request's event."""
        event = RequestEvent(
            request_id=request.name,
            user_id=request.user_id,
            prefix=Behaviours(actions=self._zeros[: request.prefix]),  # the decision uses only the length
            candidates=len(self._asked(request).candidates),
            rank_in_ms=self._scenario.traffic.delay.median_ms,
        )
        effect = self._trigger.on_event(request.lane, event, (now - request.at) * 1e3, now)
        request.reason = effect.decision.reason
        lane = self.lanes[request.lane]
        if isinstance(effect, Delegate):
            assert effect.decision.delegate is not None
            to = self.lanes[effect.decision.delegate.lane]
            signal = partial(self._signal, request, now, DELEGATED_LANE)
            self.timeline.at(to.paths.to_worker.arrival(now), partial(self._arrive, to, signal))
            flushed = now + FLUSH_S * float(self._rng.random())
            self.timeline.at(flushed, partial(self._tell, lane, effect))
        elif isinstance(effect, Signal):
            at = lane.paths.to_worker.arrival(now)
            self.timeline.at(at, partial(self._arrive, lane, partial(self._signal, request, now, request.lane)))

    def _tell(self, lane: Lane, effect: Delegate, now: float) -> None:
        """The trigger tells the lane's owner which worker has the prefix KV of a request."""
        told = self._trigger.on_delegated(effect, None, now)
        key = tenant_key(told.tenant, told.request_id)
        refusals = Refusals(reasons={told.reason: [key]}, delegates={told.delegate: [key]})
        notice = partial(self._notice, refusals, now)
        self.timeline.at(lane.paths.to_worker.arrival(now), partial(self._arrive, lane, notice))

    def _notice(self, refusals: Refusals, sent: float, worker: SimulatedWorker, now: float) -> None:
        self._carry(worker, worker.core.on_notice(refusals, (now - sent) * 1e3, now), now)

    def _rank(self, request: Request, now: float) -> None:
        """The client sends the ranking request."""
        lane, hops = self._routes.place(request, self._owned)
        self._send(Sent(request, lane, now, self._settings.client.timeout_ms, hops), now)

    def _give_up(self, request: Request, now: float) -> None:
        """The client leaves its request without a ranking, and cancels what it announced."""
        if self._scenario.mode == "relay":
            self._send_cancel(self.lanes[request.lane], request.name, now)

    def _send_cancel(self, lane: Lane, request_key: str, now: float) -> None:
        cancel = partial(self._cancel, request_key)
        self.timeline.at(lane.paths.to_worker.arrival(now), partial(self._arrive, lane, cancel))

    def _send(self, sent: Sent, now: float) -> None:
        lane = self.lanes[sent.lane]
        self.timeline.at(lane.paths.to_worker.arrival(now), partial(self._arrive, lane, partial(self._ranking, sent)))

    def _arrive(self, lane: Lane, message: Deliver, now: float) -> None:
        """Deliver a message to the lane's owner, or keep it for the next one."""
        if lane.owner is None or not lane.owner.alive:
            lane.backlog.append(message)
        else:
            message(lane.owner, now)

    def _signal(self, request: Request, admitted: float, lane: int, worker: SimulatedWorker, now: float) -> None:
        if lane != DELEGATED_LANE:
            self.lanes[lane].read += 1
        age = now - admitted
        task = PrefillTask(
            request.name,
            request.user_id,
            lane,
            self._tokens(request.prefix),
            due=max(now, request.at + self._scenario.traffic.delay.median_ms / 1e3),
            expires=now + self._settings.relay.life_window_ms / 1e3 - age,
            arrived=now,
            scenario=self._asked(request).scenario,
        )
        self._carry(worker, worker.core.on_signal(Prefill(task)), now)

    def _ranking(self, sent: Sent, worker: SimulatedWorker, now: float) -> None:
        request, age_ms = sent.request, (now - sent.at) * 1e3
        asked = self._asked(request)
        task = RankTask(
            request.name,
            request.user_id,
            sent.lane,
            self._tokens(request.prefix),
            self._suffix,
            asked.candidates,
            Times.from_timeout(now, sent.timeout_ms, asked.slo_ms, worker.core.way.ms, age_ms),
            full=self._scenario.mode == "full",
            hops=sent.hops,
            origin=sent,
            scenario=asked.scenario,
        )
        self._home[request.user_id] = request.lane
        self.lanes[sent.lane].ranking[sent] = worker
        self._carry(worker, worker.core.on_ranking(Rank(task), now), now)

    def _asked(self, request: Request) -> Asked:
        """What the request asks for."""
        del request
        return self._asks

    def _tokens(self, length: int) -> Tokens:
        """A history of that length. All are views of one array, which compare in a microsecond: only sequences of one
        user are compared, and each continues the one before."""
        return Tokens(self._sequence[:, :length])  # type: ignore[arg-type]

    # ---- what the workers' cores decide ----

    def _answered(self, name: str, answers: list[Answer], now: float) -> None:
        worker = self._by_name[name]
        for answer in answers:
            self._carry(worker, worker.core.on_answer(answer, now), now)

    def _carry(self, worker: SimulatedWorker, effects: Iterable[Effect], now: float) -> None:
        """Carry these out; what is sent is acknowledged at once."""
        for effect in effects:
            if isinstance(effect, Submit):
                worker.submit(effect.command)
            elif isinstance(effect, Reply):
                way_ms = self._reply(effect.answer, now) * 1e3
                self._carry(worker, worker.core.on_replied(effect.answer.task.origin, way_ms), now)
            elif isinstance(effect, Forward):
                task, sent = effect.answer.task, effect.answer.task.origin
                self._send(Sent(sent.request, effect.lane, now, time_left_ms(task, now), sent.hops + 1), now)
                self._carry(worker, worker.core.on_forwarded(effect), now)
            elif isinstance(effect, Release):
                self._send_cancel(self.lanes[effect.lane], effect.request_key, now)
            elif isinstance(effect, Done):
                self._done(worker, effect.record)
            elif isinstance(effect, CountForward):
                self.forwards[effect.result] += 1

    def _reply(self, answer: Answer, now: float) -> float:
        """An answer leaves for its client; returns the seconds that it takes."""
        sent: Sent = answer.task.origin
        request = sent.request
        request.answers += 1
        self._routes.answered(request)
        comes = self.lanes[sent.lane].paths.to_client.arrival(now)
        latency_s = comes - request.rank_at
        if request.status is None and latency_s <= self._settings.client.timeout_ms / 1e3:
            request.status = answer.status
            request.outcome = answer.measured.outcome if answer.status == "ok" else None
            request.latency_s = latency_s
            request.hops = sent.hops
        return comes - now

    def _done(self, worker: SimulatedWorker, record: Sent | None) -> None:
        """A record's offset may be committed; only rankings are read again."""
        if record is not None and self.lanes[record.lane].ranking.get(record) is worker:
            del self.lanes[record.lane].ranking[record]

    def _cancel(self, request_key: str, worker: SimulatedWorker, now: float) -> None:
        self._carry(worker, worker.core.on_cancel(request_key, None, now), now)

    # ---- statements ----

    def _state_every(self, worker: SimulatedWorker, first: float) -> None:
        pause = self._settings.worker.status_interval_ms / 1e3

        def state(now: float) -> None:
            if worker.alive:
                positions = {number: self.lanes[number].read for number in self._owned[worker.name]}
                worker.state(positions, self._publish)
                self.timeline.at(now + pause, state)

        self.timeline.at(first, state)

    def _publish(self, status: WorkerStatus, now: float) -> None:
        if self._rng.random() >= self._scenario.status_loss:
            self.timeline.at(self._paths[status.name].to_trigger.arrival(now), partial(self._take, status))

    def _take(self, status: WorkerStatus, now: float) -> None:
        """Triggers and peers read a status."""
        del now
        self._owners.take(status)
        self._peers.take(status)

    # ---- faults ----

    def _fail(self, now: float) -> None:
        """Kill some workers; the group's coordinator notices when their sessions expire."""
        self.failed_at = now
        self.dead = [self.workers[index] for index in self._rng.choice(len(self.workers), self._dying, replace=False)]
        for worker in self.dead:
            worker.die()
        kafka = self._settings.kafka
        # A session counts from its last heartbeat; the other members get the new assignment at their next one.
        silent = float(self._rng.random()) * kafka.heartbeat_interval_ms
        notice = float(self._rng.random()) * kafka.heartbeat_interval_ms
        self.timeline.at(now + (kafka.session_timeout_ms - silent + notice) / 1e3, self._rebalance)

    def _rebalance(self, now: float) -> None:
        """Assign the lanes to the live workers, which read on from the committed offsets."""
        self.taken_over_at = now
        self._assign([worker.name for worker in self.workers if worker.alive], now)

    def _assign(self, members: Iterable[str], now: float) -> None:
        """Assign the lanes to these workers; what others own they lose."""
        former = {name: self._owned.get(name, frozenset()) for name in members}
        claims = {name: MemberClaim(tuple(sorted(owned)), 1) for name, owned in former.items()}
        self._owned = {**dict.fromkeys(self._owned, frozenset()), **assign_lanes(len(self.lanes), claims)}
        for name, before in former.items():
            for number in sorted(self._owned[name] - before):
                self._hand_over(number, self._by_name[name], now)

    def _hand_over(self, number: int, worker: SimulatedWorker, now: float) -> None:
        lane = self.lanes[number]
        self.moved_lanes += 1
        before, lane.owner = lane.owner, worker
        moved, none = frozenset([number]), frozenset[int]()
        if before is not None and before.alive:
            self._carry(before, before.core.on_lanes(none, moved), now)
        self._carry(worker, worker.core.on_lanes(moved, none), now)
        # Offsets are committed up to the first unanswered ranking, so unanswered rankings are read again.
        again: list[Deliver] = [partial(self._ranking, sent) for sent in lane.ranking]
        lane.ranking.clear()
        backlog, lane.backlog = lane.backlog, []
        for message in [*again, *backlog]:
            message(worker, now)
