"""One ranking request in flight: sent on its user's lane, and on another worker's lane if that lane does not answer.

Each copy has a correlation id of its own, and the first scores count.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Set
from functools import partial
from typing import Any, Final, Literal

import msgspec

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.producer import Outgoing
from relaygr_stream.client.answers import Call, ReplyRoute
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.client.sender import STUCK_S, Sender, Settled, Waits, may_be_lost
from relaygr_stream.errors import BrokerError, DeadlineExceeded, RelayError
from relaygr_stream.fleet import OwnerDirectory, better_of_two, draw_sample
from relaygr_stream.telemetry.clocks import Clock
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import RankingRequest, ScoreReply, WorkerStatus
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION

#: The share of requests whose owner is alive that may be hedged, and the most hedges at once after a quiet time.
#: Hedging the slowest twentieth bounds the tail at a few percent more load (Dean & Barroso, The Tail at Scale).
SLOW_SHARE: Final = 0.05
SLOW_BURST: Final = 20.0
#: While all workers are silent, their last statuses count for this long: a dead broker is fenced within 9 s by default
#: (`broker.session.timeout.ms`), and until then a topic of three copies accepts no messages.
LAST_STATUS_MS: Final = 15_000.0
#: Lanes of each worker, drawn at random, that a slow call considers for a copy; for each it looks up how long the
#: broker has acknowledged nothing. With one of three brokers away, one draw in 81 has only lanes of that one.
LANES_LOOKED_AT: Final = 4
#: Until STUCK_S have passed, a broker that has not acknowledged a send for this share of the time between copies gets
#: no copy, if another one can have it.
LATE_SHARE: Final = 0.5

#: Calls without an answer check, for at most this share of the time, whether to send a copy. A check takes 30 µs and
#: more: a thousand calls that wait for a busy fleet would take half of their client's time, and be later still.
CHECKS_SHARE: Final = 0.1
#: Checks follow each other for this long, and then pause.
CHECKS_S: Final = 0.002


class PacedChecks:
    """Runs the checks of a client's slow calls, in order, for at most CHECKS_SHARE of the time. clock: seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due = deque[Callable[[], None]]()
        self._free_s = -math.inf  # when earlier looks leave time
        self._timer: asyncio.TimerHandle | None = None

    def add(self, check: Callable[[], None]) -> None:
        """Run it now, or once earlier ones leave time."""
        self._due.append(check)
        if self._timer is None:
            self._run_in(self._free_s - self._clock())

    def _run_in(self, pause_s: float) -> None:
        if pause_s > 0:
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._run)
        else:
            self._run()

    def _run(self) -> None:
        began_s, self._timer = self._clock(), None
        try:
            while self._due and self._clock() - began_s < CHECKS_S:
                self._due.popleft()()
        finally:
            now_s = self._clock()
            self._free_s = now_s + (now_s - began_s) * (1 / CHECKS_SHARE - 1)
            if self._due:
                self._run_in(self._free_s - now_s)


class Hedges:
    """Chooses the lane of a hedge: a copy of a request, sent to another worker that is alive and has time.

    That worker runs full inference, which is unbudgeted device time. So slow answers are hedged within a budget, and
    busy workers get no hedges. Where only the lane's broker is away, its owner gets the copy on another lane, and a hit
    remains one.

    busy_ms: a worker with a longer queue gets no hedges. waits: tells how long a lane's broker has acknowledged
    nothing; None: each acknowledges. silence_ms: how long to listen before an owner that has not stated itself counts
    as silent.
    """

    def __init__(
        self,
        owners: OwnerDirectory,
        busy_ms: float,
        seed: int | None = None,
        waits: Waits | None = None,
        silence_ms: float = 0.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self._all_known_s = clock() + silence_ms / 1000.0
        self._owners = owners
        self._busy_ms = busy_ms
        self._waits = waits
        self._random = random.Random(seed)
        self._slow = SLOW_BURST
        self.checks: Final = PacedChecks(clock)

    def _waits_s(self, lanes: Collection[int]) -> Mapping[int, float]:
        return dict.fromkeys(lanes, 0.0) if self._waits is None else self._waits.waits_s(lanes)

    def request(self) -> None:
        """Add one request's share to the budget."""
        self._slow = min(SLOW_BURST, self._slow + SLOW_SHARE)

    def why_unreachable(self, lane: int) -> Literal["silent", "unsent"] | None:
        """Why a request on this lane would not reach its owner; None: it may.

        silent: its owner states nothing, and other workers do. unsent: its broker acknowledges nothing.
        """
        if self._owners.owner(lane, self._max_age_ms) is None and self._owner_known(lane) and self._any_serves():
            return "silent"
        return "unsent" if self._waits_s([lane])[lane] > STUCK_S else None

    def _owner_known(self, lane: int) -> bool:
        return self._clock() >= self._all_known_s or self._owners.owner(lane, math.inf) is not None

    def broker_of(self, lane: int) -> int | None:
        """The broker that leads the lane; None: not known."""
        return None if self._waits is None else self._waits.broker_of(lane)

    def may_be_lost(self, lane: int, broker: int | None) -> bool:
        """Whether a copy that this broker of the lane has acknowledged may be lost."""
        return may_be_lost(self._waits, lane, broker)

    def other_lane(self, home: int, tried: Collection[int], reached: Collection[int], late_s: float) -> int | None:
        """A lane whose owner is alive and has time, and was not asked; None if there is none.

        home: the user's lane. tried: lanes that copies were sent on. reached: those of them whose brokers have a copy.
        Neither has lanes whose copy, or its answer, may be lost.
        late_s: a lane whose broker has acknowledged nothing for this long gets the copy only if no other can.
        A dead broker is noticed after half a second, and by then all copies would have been sent: so lanes whose
        broker acknowledges are preferred, and on these the owner of a lane that was not reached counts as not asked.
        """
        claim = self._owners.owner(home, self._max_age_ms)
        owner = None if claim is None else claim.worker
        free = self._with_time(owner, but=self._owners_of(reached))
        if not free:  # no other worker has time, as in a fleet of one: its lanes' brokers need not be looked at
            return None
        waits_s = self._waits_s({lane for _, lanes in free for lane in lanes}.difference(tried))

        def choices(patience_s: float, but: Collection[str] = ()) -> list[tuple[WorkerStatus, list[int]]]:
            """These workers without some, and lanes of theirs that wait no longer."""
            fit = {lane for lane, waiting_s in waits_s.items() if waiting_s <= patience_s}
            left = ((status, [lane for lane in lanes if lane in fit]) for status, lanes in free)
            return [(status, lanes) for status, lanes in left if lanes and status.name not in but]

        found = choices(late_s) or choices(STUCK_S, self._owners_of(tried))
        if not found:
            return None
        for status, lanes in found:
            if owner is not None and status.name == owner.name:
                return self._random.choice(lanes)
        # Only the queues are compared, so that two idle workers have equal chances.
        (_, lanes), *_ = better_of_two([(s.queue_ms, lanes) for s, lanes in found], self._random)
        return self._random.choice(lanes)

    def _owners_of(self, lanes: Iterable[int]) -> set[str]:
        """The names of the workers that own these lanes."""
        owners = (self._owners.owner(lane, self._max_age_ms) for lane in lanes)
        return {claim.worker.name for claim in owners if claim is not None}

    def _with_time(self, owner: WorkerStatus | None, *, but: Collection[str]) -> list[tuple[WorkerStatus, list[int]]]:
        """Some workers with time, and some of the lanes of each.

        owner: of the user's lane; the request is due there, however long its queue is. but: names of those that are out
        of the question.
        """
        looked_at = [
            status
            for status in self._owners.sample_workers(self._random, self._max_age_ms)
            if status.state == "serving" and status.queue_ms <= self._busy_ms
        ]
        if owner is not None:
            looked_at = [owner, *(status for status in looked_at if status.name != owner.name)]
        left = (each for each in looked_at if each.name not in but)
        return [(each, [lane.lane for lane in draw_sample(each.lanes, self._random, LANES_LOOKED_AT)]) for each in left]

    @property
    def may_spend(self) -> bool:
        """Whether the budget has a slow hedge left."""
        return self._slow >= 1

    def spend(self) -> bool:
        """Take one slow hedge from the budget; False if the budget is used up."""
        if not self.may_spend:
            return False
        self._slow -= 1
        return True

    @property
    def _max_age_ms(self) -> float | None:
        """How old a status may be; None: the directory's own bound. If all workers are silent, the topic has stopped,
        not the workers, so their last statuses count for longer."""
        return None if self._owners.speaking else LAST_STATUS_MS

    def _any_serves(self) -> bool:
        statuses = self._owners.workers(self._max_age_ms).values()
        return any(status.state == "serving" and status.lanes for status in statuses)


#: Copies in all: one on the user's lane and two on others. If three fail, the cause is not one worker.
MAX_ATTEMPTS: Final = 3
#: Copies follow each other after client.hedge_ms, or after this share of the call's timeout if that is shorter. So
#: MAX_ATTEMPTS copies fit into every call, and the last one has as much time for its answer as the others had. Without
#: it, a timeout of client.hedge_ms or less would leave a call no copy.
HEDGE_SHARE: Final = 1 / MAX_ATTEMPTS


class Copies:
    """Sends copies of one ranking request: the first unchanged, later ones with the time left; with one hop on another
    lane than its own."""

    def __init__(
        self,
        sender: Sender,
        route: ReplyRoute,
        topic: str,
        request: RankingRequest,
        message: Outgoing,
    ) -> None:
        self._sender = sender
        self._route = route
        self._topic = topic
        self._request = request
        self._message = message
        self._reply_to = route.choose()  # the reply partition of the last copy
        self._replies: dict[int, tuple[int, int | None]] = {}  # lane → that of its last copy, and the broker of that
        self._began_s = route.clock()
        self._sent_s: float | None = None  # when the last copy was sent
        self._unanswered: Counter[int] = Counter()  # reply partition → copies that the brokers have

    def answer_may_be_lost(self, lane: int) -> bool:
        """Whether that to the last copy on this lane may be."""
        return lane in self._replies and self._route.may_be_lost(*self._replies[lane])

    def send(self, lane: int, correlation: bytes, *, hedge: bool, settled: Settled) -> Coroutine[Any, Any, None] | None:
        """Send a copy. None: that is done; else what is returned goes on with it.

        `settled` is called once, possibly before this returns.
        """
        if again := self._sent_s is not None:
            self._reply_to = self._route.choose_again(self._unanswered, self._sent_s)
        reply_to, value = self._reply_to, self._message.value
        self._replies[lane] = reply_to, self._route.broker_of(reply_to)
        self._sent_s = self._route.clock()

        def done(error: BrokerError | None) -> None:
            self._unanswered[reply_to] += error is None
            settled(error)

        if hedge or again:  # the worker measures the copy's age from now on, so it gets the time that is left
            spent_ms = (self._sent_s - self._began_s) * 1000
            left_ms = max(1.0, self._request.timeout_ms - spent_ms)
            hops = 1 if hedge else self._request.hops
            value = encode(msgspec.structs.replace(self._request, hops=hops, sent_ms=now_ms(), timeout_ms=left_ms))
        headers = [
            (HEADER_CORRELATION, correlation),
            (HEADER_REPLY_PARTITION, str(reply_to).encode()),
            *self._message.headers,
        ]
        try:
            return self._sender.send(
                self._topic,
                Outgoing(self._message.key, value, headers),
                partition=lane,
                patience_s=self._request.timeout_ms / 1000,
                settled=done,
            )
        except Exception as error:  # a defect, too, ends the call with its cause, not with its deadline
            done(error if isinstance(error, BrokerError) else BrokerError(repr(error)))
            return None


def between_copies_s(hedge_ms: float, timeout_ms: float) -> float:
    """Seconds between the copies of a call with this timeout; 0: no hedges."""
    return min(hedge_ms, HEDGE_SHARE * timeout_ms) / 1000


class Exchange:
    """Runs one call: sends the first copy, hedges while there is no answer.

    hedge_s: seconds between copies; 0: no hedges.
    """

    def __init__(
        self, call: Call, lane: int, copies: Copies, hedges: Hedges, hedge_s: float, metrics: ClientMetrics
    ) -> None:
        self._call = call
        self._copies = copies
        self._hedges = hedges
        self._hedge_s = hedge_s
        self._metrics = metrics
        self._lane = lane
        self._tried: list[int] = []
        self._reached: dict[int, int | None] = {}  # lane → the broker that has acknowledged a copy
        self._sending: list[asyncio.Task[None]] = []  # copies for which there was no room at once
        self._errors: list[BrokerError] = []  # of copies that no broker has
        self._timer: asyncio.TimerHandle | None = None

    async def run(self) -> ScoreReply:
        """Send and return the answer. Raises BrokerError if no copy could be sent; a cancelled run stops sending."""
        self._hedges.request()
        if not (self._hedge_s and (why := self._hedges.why_unreachable(self._lane)) and self._hedge(why, set())):
            self._attempt(self._lane)
        self._rearm()
        try:
            return await self._call.reply
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for sending in self._sending:
                sending.cancel()

    def why_unsent(self, timeout_ms: float) -> RelayError | None:
        """Why no copy has left until its time was over; None: one has, or is on its way to a broker."""
        if len(self._tried) > len(self._errors) + sum(not sending.done() for sending in self._sending):
            return None
        late = DeadlineExceeded(f"not sent within {timeout_ms:g} ms: this process, or its producer, is behind")
        return self._errors[-1] if self._errors else late

    def _attempt(self, lane: int) -> None:
        copy = self._call.new_copy(len(self._tried))
        self._tried.append(lane)
        rest = self._copies.send(lane, copy, hedge=lane != self._lane, settled=partial(self._settled, lane, copy))
        if rest is not None:
            self._sending.append(asyncio.create_task(rest))

    def _settled(self, lane: int, copy: bytes, error: BrokerError | None) -> None:
        """The send of a copy has completed; after an error, try another lane at once if there is one."""
        if error is None:
            self._reached[lane] = self._hedges.broker_of(lane)
            return
        self._errors.append(error)
        if not self._call.reply.done():
            if self._hedge_s:
                self._hedge("unsent", self._lost())
            self._call.on_copy_failed(copy, error)

    def _rearm(self) -> None:
        if self._hedge_s and len(self._tried) < MAX_ATTEMPTS:
            self._timer = asyncio.get_running_loop().call_later(self._hedge_s, self._hedges.checks.add, self._slow)

    def _slow(self) -> None:
        """No answer yet: send a hedge. It counts against the budget unless the owner, the lane's broker or that of the
        answer is gone."""
        if self._call.reply.done():
            return
        last, lost = self._tried[-1], self._lost()
        self._hedge(self._hedges.why_unreachable(last) or ("unsent" if last in lost else "slow"), lost)
        self._rearm()

    def _lost(self) -> set[int]:
        """The lanes whose copy that a broker has, or the answer to it, may be lost with a broker."""
        looks, reached = self._hedges.may_be_lost, self._reached
        copies = {lane for lane, broker in reached.items() if looks(lane, broker)}
        return copies | {lane for lane in self._tried if self._copies.answer_may_be_lost(lane)}

    def _hedge(self, reason: str, lost: Set[int]) -> bool:
        """lost: as of `_lost`."""
        if len(self._tried) >= MAX_ATTEMPTS:
            return False
        if reason == "slow" and not self._hedges.may_spend:  # before the search: in a slow fleet every call comes here
            return False
        tried = {self._lane, *self._tried} - lost
        lane = self._hedges.other_lane(self._lane, tried, self._reached.keys() - lost, LATE_SHARE * self._hedge_s)
        if lane is None or (reason == "slow" and not self._hedges.spend()):
            return False
        self._metrics.hedges.labels(reason).inc()
        self._attempt(lane)
        return True
