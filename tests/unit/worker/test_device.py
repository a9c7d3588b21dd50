"""The device thread: what goes in comes out, in order, and every way it can end is seen on the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, cast

import pytest
import torch

from relaygr_stream.cache.copy import Before, CopyEngine, CopyTicket
from relaygr_stream.engine.commands import Answer, Placed, Query, Rank
from relaygr_stream.engine.scheduler import Scheduler
from relaygr_stream.errors import CacheCorruption, CapacityError, DeviceError
from relaygr_stream.worker import device
from relaygr_stream.worker.device import HANDLING_S, DeviceThread, Submitted, take_turn
from tests.unit.cache.worlds import HookedCopy
from tests.unit.engine.worlds import World, Wrapped, look
from tests.waiting import WITHIN_S, Clock, until


class Hanging(Wrapped):
    """A device that one call of extend does not come back from until it is let go."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.entered = threading.Event()
        self.let_go = threading.Event()

    def prefill(self, kv: Any, tokens: Any) -> None:
        self.entered.set()
        assert self.let_go.wait(WITHIN_S)
        self.model.prefill(kv, tokens)


class HeldCopies(CopyEngine):
    """Copies that do not begin until they are let go."""

    def __init__(self, device: torch.device, wake: Callable[[], None]) -> None:
        super().__init__(device, wake)
        self.let_go = threading.Event()

    def submit(
        self, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False, before: Before | None = None
    ) -> CopyTicket:
        def held() -> None:
            assert self.let_go.wait(WITHIN_S)

        return self.enqueue(HookedCopy(dst, src, held), urgent=urgent)


MakeCopier = Callable[[torch.device, Callable[[], None]], CopyEngine]


class Running:
    """A world whose core runs on a device thread; its clock is the real one."""

    def __init__(self, wrap: Callable[[Any], Any] = Wrapped, copier: MakeCopier = CopyEngine) -> None:
        self.answers: list[Answer] = []
        self.arrived = asyncio.Event()
        self.order: list[str] = []
        self.thread = DeviceThread(asyncio.get_running_loop(), self)
        self.world = World(wrap=wrap, copier=lambda device: copier(device, self.thread.wake))

    def on_placed(self, placed: list[Placed]) -> None: ...

    def on_answers(self, answers: list[Answer]) -> None:
        self.order.append("answers")
        self.answers += answers
        self.arrived.set()

    def rank(self, request: str, user: int, length: int = 60) -> None:
        self.world.now = time.monotonic()
        self.thread.submit(Rank(self.world.ranking(request, user, length, timeout=30.0)))

    async def answered(self, count: int) -> None:
        while len(self.answers) < count:
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), WITHIN_S)


@asynccontextmanager
async def running(wrap: Callable[[Any], Any] = Wrapped, copier: MakeCopier = CopyEngine) -> AsyncIterator[Running]:
    made = Running(wrap, copier)
    assert await made.thread.start(lambda: made.world) is made.world
    try:
        yield made
    finally:
        assert await made.thread.stop(10)


async def test_rankings_go_in_and_answers_come_out() -> None:
    async with running() as r:
        for number in range(20):
            r.rank(f"r{number}", number % 3)
        await r.answered(20)
    assert {answer.status for answer in r.answers} == {"ok"}
    assert not r.thread.failed.done()


async def test_commands_are_handled_in_order_and_a_question_after_those_before_it() -> None:
    seen: list[int] = []
    async with running() as r:
        r.thread.submit(*(look(lambda *_, number=number: seen.append(number)) for number in range(100)))
        assert await r.thread.ask(look(lambda *_: len(seen))) == 100
        assert seen == [*range(100)]


async def test_what_needs_no_device_is_answered_while_it_works() -> None:
    async with running(Hanging) as r:
        model = r.world.model
        assert isinstance(model, Hanging)
        r.world.now = time.monotonic()
        passed_on = r.world.ranking("passed on", 1, 60, timeout=30.0)
        r.thread.submit(Rank(passed_on, pass_to=3), Rank(r.world.ranking("infers", 2, 60, timeout=30.0)))
        assert await asyncio.to_thread(model.entered.wait, 10)
        await r.answered(1)
        assert r.answers[0].task is passed_on
        model.let_go.set()
        await r.answered(2)


@pytest.mark.parametrize("turns", range(1, 5))
async def test_what_a_cancelled_question_got_is_given_back(monkeypatch: pytest.MonkeyPatch, turns: int) -> None:
    """Whenever it is cancelled: before the thread took it, or when its reply is on its way."""
    done: list[str] = []

    def take(scheduler: Scheduler, now: float) -> str:
        done.append("taken")
        return "a lease"

    def give_back(scheduler: Scheduler, now: float) -> None:
        done.append("given back")

    monkeypatch.setattr(device, "giving_back", lambda reply: look(give_back) if reply == "a lease" else None)
    async with running() as r:
        question = asyncio.create_task(r.thread.ask(look(take)))
        for _ in range(turns):
            await asyncio.sleep(0)
        question.cancel()
        await asyncio.wait({question})
        await r.thread.ask(Query())  # by now the thread has taken the first question, and the loop has its reply
        await r.thread.ask(Query())
        assert done == (["taken", "given back"] if question.cancelled() else ["taken"])


async def test_what_cannot_be_made_is_told() -> None:
    thread = DeviceThread(asyncio.get_running_loop())

    def make() -> World:
        raise CapacityError("too small")

    with pytest.raises(CapacityError, match="too small"):
        await thread.start(make)
    assert await thread.stop(10)
    assert not thread.failed.done()


async def test_nobody_need_wait_for_the_making() -> None:
    made = Running()
    ready = made.thread.start(lambda: made.world)
    ready.cancel()
    assert await made.thread.stop(10)
    assert not made.thread.failed.done()


async def test_a_core_that_raises_is_told_after_its_answers() -> None:
    async with running() as r:
        r.thread.failed.add_done_callback(lambda _: r.order.append("failed"))

        def fail(scheduler: Scheduler, now: float) -> None:
            raise AssertionError("a bug")

        r.thread.submit(Rank(r.world.ranking("x", 9, 10, timeout=-1.0)), look(fail))
        with pytest.raises(AssertionError, match="a bug"):
            await asyncio.wait_for(asyncio.shield(r.thread.failed), WITHIN_S)
        await asyncio.sleep(0)
        assert r.order == ["answers", "failed"]


async def test_a_device_that_always_fails_ends_the_thread_with_every_answer_given() -> None:
    async with running() as r:
        r.world.model.fail_prefill = 10**6  # type: ignore[attr-defined]
        for number in range(8):
            r.rank(f"r{number}", number)
        with pytest.raises(DeviceError, match="8 times in a row"):
            await asyncio.wait_for(asyncio.shield(r.thread.failed), WITHIN_S)
        assert [answer.status for answer in r.answers] == ["failed"] * 8


async def test_a_failure_that_nobody_looks_at_is_no_warning() -> None:
    async with running() as r:
        r.thread.submit(look(lambda *_: 1 / 0))
        await asyncio.wait({r.thread.failed}, timeout=WITHIN_S)
    assert r.thread.failed.done()


async def test_books_that_do_not_balance_at_the_end_are_told() -> None:
    made = Running()
    await made.thread.start(lambda: made.world)

    def spoil(scheduler: Scheduler, now: float) -> None:
        made.world.now = now
        made.world.signal("r", 1, 60)
        entry = scheduler.pins.entry("r")
        assert entry is not None
        scheduler.cache.pin(entry)  # for no request

    await made.thread.ask(look(spoil))
    assert await made.thread.stop(10)
    with pytest.raises(CacheCorruption, match="requests know of others"):
        made.thread.failed.result()


async def test_stopping_while_busy_finishes_the_step_and_no_more() -> None:
    made = Running(Hanging)
    device = made.world.model
    assert isinstance(device, Hanging)
    await made.thread.start(lambda: made.world)
    made.rank("r1", 1)
    made.rank("r2", 2)
    assert await asyncio.to_thread(device.entered.wait, 10)
    assert not await made.thread.stop(0.05)
    device.let_go.set()
    assert await made.thread.stop(10)
    assert len(made.answers) <= 1
    assert not made.thread.failed.done()


async def test_a_hang_shows_and_idleness_does_not() -> None:
    async with running(Hanging) as r:
        device = r.world.model
        assert isinstance(device, Hanging)
        turns = r.thread.turns
        await until(lambda: r.thread.turns > turns, "idle, and looking around")
        r.rank("r1", 1)
        assert await asyncio.to_thread(device.entered.wait, 10)
        turns, before, started = r.thread.turns, r.thread.stalled_for, time.monotonic()
        await asyncio.sleep(0.1)
        assert r.thread.turns == turns
        took_s = time.monotonic() - started
        assert r.thread.stalled_for - before >= 0.9 * (took_s - 0.05)
        device.let_go.set()
        await r.answered(1)
        await r.thread.ask(Query())
        assert r.thread.turns > turns


async def test_copies_end_without_being_waited_for_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy engine wakes the thread; nobody polls."""
    monkeypatch.setattr("relaygr_stream.worker.device.IDLE_WAIT_S", 600.0)
    async with running(copier=HeldCopies) as r:
        copies, scheduler, resting = r.world.copies, r.world.scheduler, threading.Event()
        assert isinstance(copies, HeldCopies)
        next_timer = scheduler.next_timer

        def noted() -> float | None:
            if scheduler.cache.copying:
                resting.set()  # by what this returns, the thread decides how long it waits
            return next_timer()

        monkeypatch.setattr(scheduler, "next_timer", noted)
        for user in range(2):  # which leave less of HBM free than is kept reclaimable
            r.rank(f"r{user}", user, 180)
        await r.answered(2)
        await until(resting.is_set, "resting while copies are on their way", seconds=30)
        copies.let_go.set()
        await until(lambda: not scheduler.cache.copying, "copied", seconds=30)
        assert scheduler.cache.counters.spilled > 0


def test_a_turn_steps_even_while_commands_keep_coming() -> None:
    """A few hundred signals at once, of a lane that moved, kept rankings from the device until all were handled."""
    clock, handled, steps = Clock(), [], []

    class Slow:
        def handle(self, command: Any, now: float) -> None:
            clock.now += 0.001
            handled.append(command)

        def step(self, now: float, *, rankings_only: bool) -> bool:
            steps.append(len(handled))
            assert rankings_only is bool(inbox)
            return True

        def take_results(self) -> tuple[list[Any], list[Any]]:
            return [], []

    inbox = deque(Submitted(cast(Any, number)) for number in range(300))
    while inbox:
        for turn in take_turn(cast(Scheduler, Slow()), inbox, clock):
            assert turn.error is None
    assert handled == list(range(300))
    assert max(after - before for before, after in pairwise([0, *steps])) <= HANDLING_S / 0.001 + 1
