"""What becomes of a refusal: a forward that keeps key, headers and deadline, or the answer `overloaded`; never both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from relaygr_stream.bus.ages import WAY_MS
from relaygr_stream.engine.commands import Answer, Command, Measured, Rank
from relaygr_stream.engine.forecast import LEAST_WAY_MS
from relaygr_stream.errors import BrokerError
from relaygr_stream.settings.schema import Client, Kafka, Relay, Settings
from relaygr_stream.settings.worker import Worker
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import RankingRequest, ScoreReply, Status
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION, Record
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.worker import replies as outbox
from relaygr_stream.worker import under_way
from relaygr_stream.worker.forwarding import WhyKept
from tests.done import DoneRecords
from tests.unit.worker.made import made_requests
from tests.waiting import until

TOPICS = load_topics(Kafka(partitions=8))
PREFIX = Behaviours.from_arrays([1, 2], [0, 0], [1, 2])
HEADERS = ((HEADER_CORRELATION, b"c"), (HEADER_REPLY_PARTITION, b"1"), ("trace", b"t"))
DEFAULT_TIMEOUT_MS = 900.0
#: Rankings are due when they expire: one that is refused is not tried as late.
SETTINGS = Settings(
    relay=Relay(slo_ms=3.6e6),
    client=Client(timeout_ms=DEFAULT_TIMEOUT_MS),
    worker=Worker(max_timeout_ms=3.6e6, truncate_to=0),
)
#: What a request spends here before it is refused.
SPENT_S = 0.2


class Producer:
    """Keeps what is sent; fails where told to."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes, dict[str, Any]]] = []
        self.error: Exception | None = None
        self.hangs = False
        self.takes_s = 0.0

    async def send_and_wait(self, topic: str, value: bytes, **more: Any) -> int:
        if self.error is not None:
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()
        if self.takes_s:
            await asyncio.sleep(self.takes_s)
        self.sent.append((topic, value, more))
        return 0


class World:
    """Requests between a device, of which a test gives the answers, and two producers; `where`: what forwarding
    says."""

    def __init__(self, where: int | WhyKept) -> None:
        self.scores, self.others = Producer(), Producer()
        self.done = DoneRecords()
        self.device: list[Command] = []
        self.asked: list[tuple[Any, ...]] = []

        def elsewhere(*question: Any) -> int | WhyKept:
            self.asked.append(question)
            return where

        made = made_requests(
            SETTINGS,
            TOPICS,
            (self.scores, self.others),
            SimpleNamespace(prefill_bytes=0, submit=lambda *commands: self.device.extend(commands)),
            SimpleNamespace(version="m", tasks=("click",)),
            reader=self.done,
        )
        self.requests, self.core, self.background, self.registry = made
        self.core._forwarding = SimpleNamespace(elsewhere=elsewhere)  # type: ignore[assignment]

    def ask(self, **fields: Any) -> Record:
        """A ranking comes."""
        request = RankingRequest(
            **{"request_id": "r", "user_id": "u", "prefix": PREFIX, "candidates": pack_items([7]), **fields}
        )
        return self.read(encode(request))

    def read(self, value: bytes) -> Record:
        record = Record(TOPICS.ranking.name, 5, 40, 0, b"u", value, HEADERS)
        self.requests.on_records([record])
        return record

    async def settle(
        self,
        status: Status = "overloaded",
        *,
        as_sent: Callable[[bytes], bytes] = lambda value: value,
        cut: int = 0,
        pass_to: int | None = None,
        **fields: Any,
    ) -> Record:
        """A ranking request as it comes in, and what the device says to it. cut: to so many behaviours, or not (0).
        pass_to: the lane of a worker that has its prefix KV."""
        request = RankingRequest(request_id="r", user_id="u", prefix=PREFIX, candidates=pack_items([7]), **fields)
        record = self.read(as_sent(encode(request)))
        (rank,) = self.device
        assert isinstance(rank, Rank)
        await asyncio.sleep(SPENT_S)
        measured = Measured("truncated" if cut else None, truncated_to=cut or 0)
        rank = rank._replace(pass_to=pass_to)
        self.requests.on_answers([Answer(rank, status, detail="no time", measured=measured)])
        await self.requests.flush(5.0)
        await self.requests.flush(5.0)  # what a forward that failed has left
        return record

    def forwards(self, result: str) -> float:
        return self.registry.get_sample_value("relaygr_forwards_total", {"result": result}) or 0.0

    def reply(self) -> ScoreReply:
        ((_, value, _),) = self.scores.sent
        return decode(ScoreReply, value)


@pytest.mark.parametrize(
    ("sent_ms_ago", "timeout_ms"), [(100.0, 800.0), (None, 800.0), (100.0, 0.0), (None, 0.0), (-300_000.0, 3.6e6)]
)
async def test_a_forward_is_the_request_with_one_hop_more_and_the_time_left(
    sent_ms_ago: float | None, timeout_ms: float
) -> None:
    """By our reading of its age and our clock's count of what it spent here, whatever it says itself."""
    world, begun_ms = World(3), time.time() * 1e3
    sent_ms = 0 if sent_ms_ago is None else int(begun_ms - sent_ms_ago)
    record = await world.settle(sent_ms=sent_ms, timeout_ms=timeout_ms, hops=1)
    ((topic, value, more),) = world.others.sent
    assert topic == TOPICS.ranking.name
    assert more == {"key": b"u", "partition": 3, "headers": HEADERS}
    forwarded, original = decode(RankingRequest, value), decode(RankingRequest, record.value)
    assert forwarded.hops == 2
    assert (forwarded.request_id, forwarded.prefix, forwarded.candidates) == (
        original.request_id,
        original.prefix,
        original.candidates,
    )
    whole = timeout_ms or DEFAULT_TIMEOUT_MS
    spent_ms = time.time() * 1e3 - begun_ms
    assert whole - spent_ms - WAY_MS - 2 <= forwarded.timeout_ms <= whole - SPENT_S * 1e3
    assert begun_ms + SPENT_S * 1e3 - 2 <= forwarded.sent_ms <= time.time() * 1e3 + 1, "it counts from now on"
    assert world.done == [record]
    assert not world.scores.sent
    assert world.forwards("sent") == 1
    ((user, prefix, candidates, hops, left_ms, _),) = world.asked
    assert (user, prefix, candidates, hops) == ("u", 2, 1, 1)
    assert left_ms <= whole - LEAST_WAY_MS - SPENT_S * 1e3


async def test_a_forward_that_no_broker_takes_is_refused_within_its_time() -> None:
    """Its lane has no leader: aiokafka keeps it for kafka.request_timeout_ms, 10 s, and the client waited in vain."""
    world = World(3)
    world.others.hangs = True
    record = await world.settle(timeout_ms=600.0)
    assert world.reply().status == "overloaded"
    assert world.done == [record]
    assert (world.forwards("unsent"), world.forwards("sent")) == (1, 0)


async def test_what_the_broker_does_not_take_is_refused_after_all() -> None:
    world = World(3)
    world.others.error = BrokerError("no leader")
    record = await world.settle()
    assert world.reply().status == "overloaded"
    assert world.done == [record]
    assert (world.forwards("unsent"), world.forwards("sent")) == (1, 0)


async def test_a_request_that_cannot_be_written_again_is_refused_and_ends_nobody() -> None:
    """It decodes, because names of unknown fields are not looked at; read again it would end the next worker, too."""

    def with_a_name_that_is_not_utf8(value: bytes) -> bytes:
        assert value[0] >> 4 == 0x8, "a MessagePack map of up to 15 fields"
        return bytes([value[0] + 1]) + value[1:] + b"\xa2\xff\xfe\x01"

    world = World(3)
    record = await world.settle(as_sent=with_a_name_that_is_not_utf8)
    world.background.check()
    assert world.reply().status == "overloaded"
    assert world.done == [record]
    assert (world.forwards("unsent"), world.forwards("sent")) == (1, 0)


@pytest.mark.parametrize("why", ["hops", "alone", "late"])
async def test_without_another_worker_it_is_refused_once_with_the_reason(why: WhyKept) -> None:
    world = World(why)
    record = await world.settle()
    reply = world.reply()
    assert reply.status == "overloaded"
    assert reply.detail.startswith("no time; ")
    assert world.done == [record]
    assert not world.others.sent
    assert world.forwards(why) == 1


@pytest.mark.parametrize(("timeout_ms", "given_up"), [(100.0, True), (60_000.0, False)])
async def test_an_answer_that_nobody_takes_is_given_up_when_its_client_waits_no_more(
    timeout_ms: float, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One try may take the request timeout; several of them would keep requests, and commits, for a minute."""
    monkeypatch.setattr(outbox, "ANSWER_S", 0.2)
    world, hold = World("alone"), asyncio.Event()

    async def never(*_: Any, **__: Any) -> int:
        await hold.wait()
        return 0

    world.scores.send_and_wait = never  # type: ignore[method-assign]
    settling = asyncio.create_task(world.settle(timeout_ms=timeout_ms))
    if given_up:
        await until(lambda: world.done, "given up")
    else:
        await asyncio.sleep(SPENT_S + 0.6)
        assert not world.done
    hold.set()
    record = await settling
    await until(lambda: world.done == [record], "done")


@pytest.mark.parametrize("status", ["failed", "deadline_exceeded"])
async def test_nothing_else_is_forwarded(status: Status) -> None:
    """A request that failed here might bring down the next worker; one that is late is late everywhere."""
    world = World(3)
    await world.settle(status)
    assert world.reply().status == status
    assert not world.asked
    assert not world.others.sent


async def test_a_forward_that_the_end_cuts_short_is_not_done() -> None:
    """So its lane's next owner reads it again."""
    world = World(3)
    hold = asyncio.Event()

    async def never(*_: Any, **__: Any) -> int:
        await hold.wait()
        return 0

    world.others.send_and_wait = never  # type: ignore[method-assign]
    settling = asyncio.create_task(world.settle())
    await until(lambda: world.requests.under_way.tasks, "on its way")
    world.requests.stop_sending()
    hold.set()  # a forward that goes on would be done
    await settling
    assert not world.done
    assert not world.scores.sent


async def test_an_answer_says_to_how_many_behaviours_it_was_cut() -> None:
    world = World(3)
    await world.settle("ok", cut=1)
    reply = decode(ScoreReply, world.scores.sent[0][1])
    assert (reply.status, reply.outcome, reply.truncated_to) == ("ok", "truncated", 1)
    answers = "relaygr_answers_total"
    assert world.registry.get_sample_value(answers, {"status": "ok", "outcome": "truncated"}) == 1


async def test_a_cut_ranking_that_lost_its_place_is_not_forwarded() -> None:
    """What is left of it does not say how long another worker would take."""
    world = World(3)
    await world.settle("overloaded", cut=1)
    reply = decode(ScoreReply, world.scores.sent[0][1])
    assert (reply.status, reply.outcome, reply.truncated_to) == ("overloaded", None, 0)
    assert world.asked == []


@pytest.mark.parametrize("what", ["declined", "too much", "dead letter"])
async def test_refusals_that_nobody_takes_stop_the_reading(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No byte of them is counted, and each record that is read may add one."""
    monkeypatch.setattr(under_way, "REFUSALS_LIMIT", 2)
    world, hold = World("alone"), asyncio.Event()

    async def wait(*_: Any, **__: Any) -> int:
        await hold.wait()
        return 0

    world.scores.send_and_wait = wait  # type: ignore[method-assign]
    if what == "declined":
        world.core.held.limit = 0
    for _ in range(2):
        assert not world.requests.full
        if what == "dead letter":
            world.read(b"\xc1")
        else:
            world.ask(candidates=pack_items(range(SETTINGS.relay.max_candidates + (what == "too much"))))
    assert world.requests.full
    hold.set()
    await world.requests.flush(5.0)
    assert not world.requests.full


async def test_rankings_are_due_so_much_earlier_as_answers_take_to_the_broker() -> None:
    world = World("alone")
    world.scores.takes_s = 2 * LEAST_WAY_MS / 1e3
    left_s = []
    for _ in range(3):
        record = world.ask()
        (rank,) = world.device
        assert isinstance(rank, Rank)
        left_s.append(rank.task.deadline - rank.task.arrived)
        world.requests.on_answers([Answer(rank, "failed", measured=Measured(finished=time.monotonic()))])
        await world.requests.flush(5.0)
        world.device.clear()
        assert world.done[-1] == record
    assert left_s[0] == pytest.approx((DEFAULT_TIMEOUT_MS - LEAST_WAY_MS) / 1e3)
    assert left_s[0] > left_s[1] > left_s[2]
