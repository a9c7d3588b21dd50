"""The worker's rules for what it reads: rankings, signals, cancels, notices and answers go in, effects come out.

    ranking ─► on_ranking ─► Submit | Fetch | Reply | Forward         signal ─► on_signal ─► Submit | Fetch | SignalOver
    its history ─► on_history ─► Submit | Reply | Forward             answer ─► on_answer ─► Reply | Forward
    what became of a Forward ─► on_forwarded | on_not_forwarded       of a Reply ─► on_replied ─► Done

Knows no Kafka, no event loop, no device and no clock: the caller passes the time, carries the effects out in their
order, and reports what became of them. The worker process (requests.py), the simulator and the tests run the same core.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, Final

from relaygr_stream.engine.commands import DELEGATED_LANE, Answer, Cancel, LanesLost, Placed, Prefill, Rank, RankTask
from relaygr_stream.engine.forecast import AnswerWay
from relaygr_stream.errors import CRASHED, DecodeError
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.erase import Erase
from relaygr_stream.wire.messages import Status
from relaygr_stream.wire.refusals import Refusals
from relaygr_stream.worker.books import Decisions, HeldBytes
from relaygr_stream.worker.effects import (
    CountForward,
    DeadLetter,
    Done,
    Effect,
    Effects,
    Fetch,
    Forward,
    Missing,
    Reject,
    Release,
    Reply,
    SignalOver,
    Submit,
)
from relaygr_stream.worker.forwarding import WHY, Forwarding, Homes


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    """What the settings say of a worker's rules."""

    forward: bool
    life_ms: float  # the life window: what the trigger told counts for so long
    longest_s: float  # the longest timeout granted
    held_bytes: int  # of rankings without an answer, and signals not taken
    truncates: bool = False  # what no worker has in time may be cut to its newest behaviours

    @classmethod
    def from_settings(cls, settings: Settings) -> WorkerPolicy:
        """As configured."""
        worker, relay = settings.worker, settings.relay
        return cls(
            worker.forward, relay.life_window_ms, worker.max_timeout_ms / 1e3, worker.max_waiting_bytes,
            bool(worker.truncate_to),
        )  # fmt: skip


class WorkerCore:
    """The rules of one worker, and its books of what it has read and not answered. Each ranking gets one Reply or goes
    to another worker.

    name: the worker's. peers: what the others state; the caller feeds it. homes: the users' own lanes. An origin, of a
    ranking's task, has the `record` that is done with its answer.
    """

    def __init__(
        self,
        name: str,
        policy: WorkerPolicy,
        peers: OwnerDirectory,
        homes: Homes,
        seed: int | None = None,
    ) -> None:
        self.name: Final = name
        self._policy = policy
        self._forwarding = Forwarding(name, peers, homes, seed)
        self._decisions = Decisions(policy.life_ms)
        self._lanes: frozenset[int] = frozenset()
        self.held: Final = HeldBytes(policy.held_bytes)
        self.way: Final = AnswerWay()
        self.in_flight: Final[dict[Any, Rank]] = {}  # rankings without an answer, by origin
        self._fetching: defaultdict[int, list[int]] = defaultdict(list)  # tokens of signals that wait for it, by lane
        self._erased: list[tuple[float, Erase]] = []  # users lately erased, for rankings that come back to be ranked

    def on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> Effects:
        """Handle a change of the lanes that this worker owns."""
        self._lanes = self._lanes - lost | gained
        return [Submit(LanesLost(lost))] if lost else []

    def on_erased(self, erase: Erase, now: float) -> None:
        """A user is to leave nothing here: neither by what is read now, nor by what comes back."""
        kept = [(at, each) for at, each in self._erased if at > now - self._policy.longest_s]
        self._erased = [*kept, (now, erase)]

    def fetching_tokens(self, lane: int) -> list[int]:
        """The prefix lengths of a lane's signals that wait for their history: read, and not yet pinned."""
        return self._fetching.get(lane, [])

    # ---- what is read ----

    def on_ranking(self, rank: Rank, now: float) -> Effects:
        """A ranking: to the device, with its history; to its delegate, if that alone has what it needs."""
        task, effects = rank.task, Effects()
        if not (task.hops or task.full) and (name := self._decisions.delegate(task.request_key, now)):
            lane = self._forwarding.lane_of_delegate(name, (task.due - now) * 1e3)
            rank = rank._replace(pass_to=lane)
            if lane is None:
                effects.append(CountForward("delegate_gone"))
        if not self.held.ranking(task.origin, task.nbytes):
            why = f"requests of {self.held.nbytes >> 20} MiB wait for their answers (worker.max_waiting_bytes)"
            return [*effects, self._reply(Answer(rank, "overloaded", detail=why), declined=True)]
        return [*effects, self._take(rank)]

    def on_signal(self, command: Prefill, record: Any = None) -> Effects:
        """A signal, our own or on another worker's behalf. record: is done at once, because a ranking whose signal is
        lost with the process runs in full; None: when the signal is over."""
        task = command.task
        self._decisions.admitted(task.request_key, delegated=task.lane == DELEGATED_LANE)
        done: Effects = [] if record is None else [Done(record)]
        if not self.held.signal(task.nbytes):
            return [*done, SignalOver(Placed(task, "no_memory", completed=False))]
        if command.referred is None:
            return [*done, Submit(command)]
        self._fetching[task.lane].append(command.referred.reference.length)
        return [*done, Fetch(command)]

    def on_cancel(self, request_key: str, record: Any, now: float, *, suspect: bool = False) -> Effects:
        """A client's cancel. suspect: it may end this worker, and is done only when the device has taken it."""
        command = Cancel(request_key)
        effects = self._release(request_key, now, record)
        return [*effects, Submit(command, record)] if suspect else [*effects, Done(record), Submit(command)]

    def on_notice(self, refusals: Refusals, age_ms: float, now: float) -> Effects:
        """What the trigger decided on requests, so long ago; one that was answered here needs its delegate no more."""
        return [
            effect
            for key in self._decisions.note(refusals, age_ms, now)
            if self._decisions.is_answered(key)
            for effect in self._release(key, now)
        ]

    def on_too_much(
        self, origin: Any, request_key: str, request_id: str, detail: str, now: float, scenario: str = ""
    ) -> Effects:
        """A well-formed ranking beyond the limits: rejected. scenario: as of a task."""
        reject = Reject(origin, "rejected", detail, request_id, scenario=scenario)
        return [reject, *self._answered(request_key, now)]

    def on_unreadable(self, record: Any, error: DecodeError, origin: Any = None) -> Effects:
        """A record that is no message, or ends workers: dead-lettered, and answered where its headers allow that."""
        status: Status = "failed" if error.reason == CRASHED else "rejected"
        reject: Effects = [] if origin is None else [Reject(origin, status, str(error), done=False)]
        return [*reject, DeadLetter(record, error)]

    def on_history(self, command: Rank | Prefill, found: Rank | Prefill | Missing, now: float) -> Effects:
        """The history of a Fetch. found: the command with its tokens, or why there are none."""
        if isinstance(command, Prefill):
            return self._on_signal_history(command, found)
        if command.task.origin not in self.in_flight:  # it was answered meanwhile
            return []
        if isinstance(found, Missing):
            return self.on_answer(Answer(command, found.status, detail=found.detail), now)
        return [Submit(found)]

    def _on_signal_history(self, command: Prefill, found: Rank | Prefill | Missing) -> Effects:
        task = command.task
        assert command.referred is not None
        self._fetching[task.lane].remove(command.referred.reference.length)
        if isinstance(found, Missing) or not (task.lane in self._lanes or task.lane == DELEGATED_LANE):
            self.held.signal_over(task.nbytes)
            return [SignalOver(Placed(task, "no_history", completed=False))]
        return [Submit(found)]

    def _take(self, rank: Rank) -> Effect:
        """Rank it here. What its delegate has need not be read here, too."""
        self.in_flight[rank.task.origin] = rank
        return Submit(rank) if rank.referred is None else Fetch(rank, stored=rank.pass_to is None)

    # ---- answers ----

    def on_answer(self, answer: Answer, now: float) -> Effects:
        """The device's answer; a ranking that has its answer already gets no second. One that was refused goes to the
        worker that has its prefix KV, or to one that is in time."""
        task = answer.task
        if self.in_flight.pop(task.origin, None) is None:  # it was answered here when the device failed
            return []
        if answer.status == "overloaded":  # its delegate keeps the prefix KV: the ranking goes there, or is repeated
            return self._refused(answer, now)
        reply = self._reply(answer)
        return [reply] if task.hops or task.full else [reply, *self._answered(task.request_key, now)]

    def on_device_failed(self, detail: str, now: float) -> Effects:
        """Answer all that is in flight, so that the lanes' next owners do not read it again: it may be the cause."""
        answers = [Answer(rank, "failed", detail=detail) for rank in self.in_flight.values()]
        return [effect for answer in answers for effect in self.on_answer(answer, now)]

    def _refused(self, answer: Answer, now: float) -> Effects:
        rank, task = answer.rank, answer.task
        if rank.pass_to is not None:
            return [Forward(answer, rank.pass_to)]
        effects, why = Effects(), ""
        # One that was cut has been refused everywhere in full.
        if self._policy.forward and not answer.measured.truncated_to:
            lane = self._elsewhere(task, task.due - now, now)
            if isinstance(lane, int):
                return [Forward(answer, lane)]
            effects, why = [CountForward(lane)], f"; {WHY[lane]}"
        cut = self._policy.truncates and not rank.whole
        if answer.retry_late and not rank.late and (cut or task.due < task.deadline):
            return [*effects, self._take(rank._replace(late=True))]
        return [*effects, self._reply(replace(answer, detail=answer.detail + why))]

    def _elsewhere(self, task: RankTask, left_s: float, now: float) -> Any:
        lengths = len(task.tokens), len(task.candidates)
        return self._forwarding.elsewhere(task.user_id, *lengths, task.hops, left_s * 1e3, now)

    def _reply(self, answer: Answer, *, declined: bool = False) -> Reply:
        return Reply(answer, self._decisions.admission(answer.task.request_key), declined)

    def on_replied(self, origin: Any, way_ms: float) -> Effects:
        """A broker has the answer, or it is given up, so long after the device was done with it."""
        self.way.add(way_ms)
        self.held.release(origin)
        return [Done(origin.record)]

    def on_forwarded(self, forward: Forward) -> Effects:
        """A broker has taken the ranking."""
        task, to_delegate = forward.answer.task, forward.answer.rank.pass_to is not None
        if to_delegate:
            self._decisions.passed_on(task.request_key)
        self.held.release(task.origin)
        return [CountForward("delegate" if to_delegate else "sent"), Done(task.origin.record)]

    def on_not_forwarded(self, forward: Forward, tried_s: float) -> Effects:
        """No broker took it in this time. One that was refused here gets that answer; any other is ranked here."""
        rank = forward.answer.rank
        if rank.pass_to is None:
            return [CountForward("unsent"), self._reply(forward.answer)]
        rank = rank._replace(pass_to=None, waited_s=rank.waited_s + tried_s)  # no delay of the device
        if any(at > rank.task.arrived and erase.names(rank.task.user_key) for at, erase in self._erased):
            rank = rank._replace(leaves_nothing=True)
        return [CountForward("unsent"), self._take(rank)]

    # ---- delegates: workers that computed prefix KV on this one's behalf (trigger/delegation.py) ----

    def _answered(self, request_key: str, now: float) -> Effects:
        """The request has its final answer from here: its delegate, also one that is told later, pins for nothing."""
        self._decisions.answered(request_key)
        return self._release(request_key, now)

    def _release(self, request_key: str, now: float, cancel: Any = None) -> Effects:
        """Have released what a delegate pins for this request, unless a ranking went there."""
        name = self._decisions.drop_delegate(request_key, now)
        lane = self._forwarding.lane_of_delegate(name) if name else None
        return [] if lane is None else [Release(request_key, lane, cancel)]
