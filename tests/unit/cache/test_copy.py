"""Copies between tiers: they arrive whole, failures arrive too, and nothing waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.cache.copy import CopyEngine, CopyTicket
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.errors import DeviceError
from tests.properties import examples
from tests.waiting import WITHIN_S

CPU = torch.device("cpu")


@pytest.fixture
def engine() -> Iterator[CopyEngine]:
    engine = CopyEngine(CPU)
    yield engine
    engine.close()


def failing_pair() -> tuple[torch.Tensor, torch.Tensor]:
    """A copy that the device refuses: all of the destination's elements are one."""
    return torch.zeros(1).expand(8), torch.ones(8)


class Gate:
    """A wake hook that keeps the lane whose copy it was busy until opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        self.open.wait(WITHIN_S)


def copy_one(engine: CopyEngine, *, urgent: bool = False) -> tuple[CopyTicket, torch.Tensor]:
    target = torch.zeros(8)
    return engine.submit(target, torch.ones(8), urgent=urgent), target


@settings(max_examples=examples(20))
@given(
    copies=st.lists(
        st.tuples(st.integers(1, 5000), st.sampled_from(["spill", "reload", "fail"])), min_size=1, max_size=30
    )
)
def test_all_copies_arrive_whole_and_failures_stay_with_their_own(copies: list[tuple[int, str]]) -> None:
    size = sum(count for count, _ in copies) * 4 + 4096 * len(copies)
    source, target = TierMemory(size, CPU), TierMemory(size, CPU)
    source.buffer.random_(1, 255)
    engine = CopyEngine(CPU)
    tickets = []
    for count, kind in copies:
        here, there = source.arena.allocate(count * 4), target.arena.allocate(count * 4)
        assert here is not None and there is not None
        src, dst = source.view(here, torch.float32), target.view(there, torch.float32)
        if kind == "fail":
            dst = torch.zeros(1).expand(len(src))
        tickets.append((engine.submit(dst, src, urgent=kind == "reload"), dst, src, kind))
    for ticket, dst, src, kind in tickets:
        if kind == "fail":
            with pytest.raises(DeviceError, match="copying between tiers failed"):
                ticket.wait()
        else:
            ticket.wait()
            assert torch.equal(dst.view(torch.uint8), src.view(torch.uint8))
        assert ticket.done()
    engine.close()


def test_a_failure_is_raised_once() -> None:
    woken = threading.Event()
    engine = CopyEngine(CPU, woken.set)
    ticket = engine.submit(*failing_pair())
    assert woken.wait(WITHIN_S)
    with pytest.raises(DeviceError, match="single memory location"):
        ticket.done()
    assert ticket.done()
    ticket.wait()
    engine.close()


def test_every_copy_wakes_from_another_thread_after_it_is_done() -> None:
    seen: list[tuple[int, bool]] = []
    tickets: list[CopyTicket] = []
    submitted = threading.Event()

    def wake() -> None:
        submitted.wait(WITHIN_S)
        seen.append((threading.get_ident(), any(ticket.done() for ticket in tickets)))

    engine = CopyEngine(CPU, wake)
    tickets.append(copy_one(engine)[0])
    submitted.set()
    tickets[0].wait()
    engine.close()
    assert [done for _, done in seen] == [True]
    assert seen[0][0] != threading.get_ident()


def test_an_urgent_copy_does_not_wait_for_the_others() -> None:
    gate = Gate()
    engine = CopyEngine(CPU, gate)
    copy_one(engine)
    assert gate.entered.wait(WITHIN_S)  # the lane of spills is now busy
    queued, _ = copy_one(engine)
    urgent, target = copy_one(engine, urgent=True)
    urgent.wait()
    assert bool(target.all())
    assert not queued.done()
    gate.open.set()
    queued.wait()
    engine.close()


def test_close_finishes_what_is_under_way_and_fails_what_waits() -> None:
    gate, before = Gate(), set(threading.enumerate())
    engine = CopyEngine(CPU, gate)
    first, target = copy_one(engine)
    assert gate.entered.wait(WITHIN_S)
    waiting, _ = copy_one(engine)
    closing = threading.Thread(target=engine.close)
    closing.start()
    with pytest.raises(DeviceError, match="closed before this copy began"):
        waiting.wait()
    gate.open.set()
    closing.join(WITHIN_S)
    assert not closing.is_alive()
    assert first.done() and bool(target.all())
    assert not set(threading.enumerate()) - before
    engine.close()
    with pytest.raises(DeviceError, match="engine is closed"):
        copy_one(engine)[0].wait()


def test_close_says_when_a_copy_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaygr_stream.cache.copy.CLOSE_TIMEOUT_S", 0.05)
    gate = Gate()
    engine = CopyEngine(CPU, gate)
    copy_one(engine)
    assert gate.entered.wait(WITHIN_S)
    with pytest.raises(DeviceError, match=r"has not finished 0\.05 s after close"):
        engine.close()
    monkeypatch.undo()  # on a busy machine the thread takes longer to end
    gate.open.set()
    engine.close()


@pytest.mark.parametrize(
    ("dst", "src"),
    [(torch.zeros(8), torch.zeros(7)), (torch.zeros(8), torch.zeros(8, dtype=torch.float64))],
)
def test_extents_that_do_not_match_are_refused(engine: CopyEngine, dst: torch.Tensor, src: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="copied whole"):
        engine.submit(dst, src)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_on_an_accelerator_come_after_the_work_that_was_submitted_before() -> None:
    device = torch.device("cuda", 0)
    hbm, dram = TierMemory(256 << 20, device), TierMemory(256 << 20, CPU, pinned=True)
    engine = CopyEngine(device)
    matrix = torch.randn(4096, 4096, device=device)
    for round_number in range(1, 4):
        for _ in range(50):  # tens of milliseconds of work that the fill must come after
            torch.mm(matrix, matrix)
        hbm.buffer.fill_(round_number)
        spill = engine.submit(dram.buffer, hbm.buffer)
        spill.wait()
        assert bool((dram.buffer == round_number).all())
        hbm.buffer.zero_()
        reload = engine.submit(hbm.buffer, dram.buffer, urgent=True)
        reload.wait()
        assert bool((hbm.buffer == round_number).all())
    engine.close()
