"""One broker of three dies and comes back: every ranking is answered, whatever it led. The client's own parts, in
simulated time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, cast

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.producer import NO_LEADER, Outgoing, Settle
from relaygr_stream.client.answers import Call, ReplyRoute
from relaygr_stream.client.exchange import CHECKS_S, CHECKS_SHARE, Copies, Exchange, Hedges, PacedChecks
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.client.sender import SILENT_S, Sender, TopicWaits
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.telemetry.background import periodically
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import RankingRequest, ScoreReply
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION
from tests.properties import examples
from tests.statuses import lane_statuses, worker_status
from tests.unit.client_peers import request, scored

T = TypeVar("T")
BROKERS, LANES = 3, 12
HEDGE_S, TIMEOUT_S = 0.2, 3.0
ACK_S, ANSWER_S, STATUS_S = 0.002, 0.02, 0.25
#: The broker dies, is fenced, is back; the last request is made.
DIES_S, FENCED_S, BACK_S, LAST_S = 2.0, 5.0, 14.0, 16.0
#: Meanwhile the client's own process stands still once: answers that come then are read at its end.
STALLS_S = (4.3, 4.95)


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is to be done."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(_Jumps(self))

    def time(self) -> float:
        return self.now


class _Jumps(selectors.SelectSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        self._loop.now += timeout or 0.0
        return super().select(0)


def in_simulated_time(what: Callable[[], Awaitable[T]]) -> T:
    async def run() -> T:
        return await what()

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(run())


class World:
    """Three brokers, each worker's lanes spread over them, and what the client knows. dead: the broker that dies; what
    it acknowledged and no worker has read is lost. slow: other requests, whose answers are slow, use up the budget of
    hedges. replicated: others lead its lanes once it is fenced."""

    def __init__(
        self, dead: int, workers: int, replies: tuple[int, int], slow: bool, replicated: bool, seed: int
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.start_s = self.loop.time()
        self.dead, self.workers, self.replies, self.slow, self.replicated = dead, workers, replies, slow, replicated
        self.held: list[Callable[[], None]] = []  # what is delivered once the broker is back
        clock = self.loop.time
        self.owners = OwnerDirectory(1000.0, clock=clock)
        self.sender = Sender(self, "brokers", clock)  # type: ignore[arg-type]
        self.route = ReplyRoute("scores", replies, TopicWaits(self.sender, "scores"), clock=clock)
        self.hedges = Hedges(
            self.owners,
            50.0,
            seed=seed,
            waits=TopicWaits(self.sender, "ranking"),
            clock=clock,
        )
        self.metrics = ClientMetrics(CollectorRegistry())
        self.calls: dict[bytes, Call] = {}

    def at_s(self) -> float:
        return self.loop.time() - self.start_s

    def away(self, partition: int) -> bool:
        """Whether no broker takes or brings what is of this partition."""
        return partition % BROKERS == self.dead and DIES_S <= self.at_s() < self.led_s

    @property
    def led_s(self) -> float:
        return FENCED_S if self.replicated else BACK_S

    async def answers(self, broker: int, within_s: float) -> bool:
        return broker != self.dead or not DIES_S <= self.at_s() < BACK_S

    def throttled_s(self, topic: str, partition: int) -> float:
        return 0.0

    def broker_of(self, topic: str, partition: int) -> int:
        """As a client knows it: a dead broker leads on until it is fenced."""
        if partition % BROKERS != self.dead or self.at_s() < FENCED_S:
            return partition % BROKERS
        return (partition + 1) % BROKERS if self.replicated else NO_LEADER if self.at_s() < BACK_S else self.dead

    def send_now(self, topic: str, key: bytes, value: bytes, headers: Any, partition: int, settled: Settle) -> bool:
        reply_to = int(dict(headers)[HEADER_REPLY_PARTITION])

        def arrive() -> None:
            if self.away(partition):
                self.held.append(arrive)
            else:
                settled(0)
                self.loop.call_later(ANSWER_S, self.answer, key, dict(headers)[HEADER_CORRELATION], reply_to, partition)

        self.loop.call_later(ACK_S, arrive)
        return True

    def answer(self, key: bytes, copy: bytes, reply_to: int, lane: int) -> None:
        if self.away(reply_to) or self.away(lane):  # the answer is lost, or the request was, before it was read
            return
        if STALLS_S[0] < self.at_s() < STALLS_S[1]:
            self.loop.call_at(self.start_s + STALLS_S[1], self.answer, key, copy, reply_to, lane)
            return
        self.route.received(reply_to)
        call = self.calls[key]
        if not call.reply.done():
            call.on_reply(copy, scored(request(int(key))))

    async def states(self) -> None:
        while True:
            for number in range(self.workers):
                lanes = lane_statuses(range(number, LANES, self.workers))
                self.owners.take(worker_status(f"w{number}", lanes, sent_ms=int(1e3 * self.loop.time())))
            if self.at_s() >= self.led_s:
                for arrive in self.held:
                    arrive()
                self.held.clear()
            while self.slow and self.hedges.spend():
                pass
            await asyncio.sleep(STATUS_S)

    async def rank(self, number: int, lane: int) -> ScoreReply | None:
        made: RankingRequest = request(number)
        call = self.calls[b"%d" % number] = Call(b"c", made.request_id, self.loop.create_future())
        message = Outgoing(b"%d" % number, encode(made))
        copies = Copies(self.sender, self.route, "ranking", made, message)
        try:
            async with asyncio.timeout(FENCED_S + TIMEOUT_S if self.replicated else TIMEOUT_S):
                return await Exchange(call, lane, copies, self.hedges, HEDGE_S, self.metrics).run()
        except TimeoutError:
            return None

    async def run(self, every_s: float) -> list[float]:
        """When those requests were made that got no answer."""
        background = asyncio.gather(self.states(), periodically(SILENT_S, self.sender.probe, "ask"))
        await asyncio.sleep(STATUS_S)
        calls: list[tuple[float, asyncio.Task[ScoreReply | None]]] = []
        while self.at_s() < LAST_S:
            number = len(calls)
            calls.append((self.at_s(), asyncio.create_task(self.rank(number, 7 * number % LANES))))
            await asyncio.sleep(every_s)
        answers = await asyncio.gather(*(call for _, call in calls))
        background.cancel()
        return [when for (when, _), answer in zip(calls, answers, strict=True) if answer is None]


class Unacknowledged:
    """A sender; no broker takes what is for lane 1. named: reply partitions of what was sent."""

    def __init__(self) -> None:
        self.named: list[int] = []

    def send(self, topic: str, message: Outgoing, *, partition: int, settled: Any, **_: Any) -> None:
        self.named.append(int(dict(message.headers)[HEADER_REPLY_PARTITION]))
        settled(BrokerUnavailable("away") if partition == 1 else None)


async def test_a_copy_that_no_broker_has_says_nothing_of_its_reply_partition() -> None:
    sender, route = Unacknowledged(), ReplyRoute("scores", [5, 7])
    made = request()
    copies = Copies(sender, route, "ranking", made, Outgoing(b"u", encode(made)))  # type: ignore[arg-type]
    for lane in (0, 1, 2):
        copies.send(lane, b"c", hedge=lane > 0, settled=lambda error: None)
    assert sender.named == [5, 7, 7]


async def test_why_a_copy_did_not_leave_is_known_when_the_call_has_ended_before() -> None:
    """A busy loop may have the deadline first."""
    made, route = request(), ReplyRoute("scores", [5])
    copies = Copies(Unacknowledged(), route, "ranking", made, Outgoing(b"u", encode(made)))  # type: ignore[arg-type]
    call = Call(b"c", made.request_id, asyncio.get_running_loop().create_future())
    exchange = Exchange(call, 1, copies, Hedges(OwnerDirectory(1e3), 50.0), 0, ClientMetrics(CollectorRegistry()))
    run = asyncio.create_task(exchange.run())
    await asyncio.sleep(0)
    run.cancel()
    await asyncio.wait({run})
    assert isinstance(exchange.why_unsent(50.0), BrokerUnavailable)


@settings(max_examples=examples(40))
@given(
    st.integers(0, 2),
    st.integers(1, 4),
    st.permutations(range(3)),
    st.sampled_from([0.05, 0.31, (DIES_S - STATUS_S - ANSWER_S / 2) / 10, DIES_S - STATUS_S - ANSWER_S / 2]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_every_request_is_answered(
    dead: int, workers: int, replies: list[int], every_s: float, slow: bool, replicated: bool, seed: int
) -> None:
    """Whatever the broker led: lanes, the reply partition, both; also the request that it has just acknowledged, where
    the client sends too few others to find it silent."""
    assume(replicated or every_s < 1)

    async def lost() -> list[float]:
        return await World(dead, workers, (replies[0], replies[1]), slow, replicated, seed).run(every_s)

    assert in_simulated_time(lost) == []


def test_checks_of_a_thousand_waiting_calls_take_a_tenth_of_the_time() -> None:
    """More were due than there is time: each comes in its turn, one that raises holds up none, and a lone one runs at
    once."""

    async def world() -> None:
        loop = cast(SimulatedLoop, asyncio.get_running_loop())
        checks, checked, check_s = PacedChecks(loop.time), list[int](), 1e-4

        def check(number: int) -> None:
            loop.now += check_s
            checked.append(number)
            if number % 100 == 7:
                raise RuntimeError("a defect")

        loop.set_exception_handler(lambda *_: None)
        checks.add(partial(check, 0))
        assert checked == [0]
        began_s = loop.now
        for number in range(1, 1000):
            loop.call_later(0.2 + 1e-6 * number, checks.add, partial(check, number))
        while len(checked) < 1000:
            await asyncio.sleep(0.05)
            spent_s = check_s * (len(checked) - 1)
            assert spent_s <= CHECKS_SHARE * (loop.now - began_s) + CHECKS_S + check_s
        assert checked == list(range(1000))
        assert loop.now - began_s < 0.2 + 1.1 * 1000 * check_s / CHECKS_SHARE
        await asyncio.sleep(1.0)
        checks.add(partial(check, 1000))
        assert checked[-1] == 1000

    in_simulated_time(world)
