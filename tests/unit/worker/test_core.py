"""The worker's core, event by event: what it decides, without a broker, a device or a clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.engine.commands import (
    DELEGATED_LANE,
    Answer,
    Cancel,
    LanesLost,
    Measured,
    Prefill,
    PrefillTask,
    Rank,
    RankTask,
    Referred,
    Times,
)
from relaygr_stream.errors import CRASHED, DecodeError
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.models.api import Tokens
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.erase import Erase, user_mark
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import CostModel, Status
from relaygr_stream.wire.refusals import Refusals
from relaygr_stream.worker.core import WorkerCore, WorkerPolicy
from relaygr_stream.worker.effects import (
    CountForward,
    DeadLetter,
    Done,
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
from tests.statuses import lane_statuses, worker_status

NOW, LANE, ITS_LANE = 100.0, 0, 4
NONE = Tokens.zeros(0)
HISTORY = Referred(HistoryReference.from_behaviours(Behaviours.from_arrays([1, 2], [0, 0], [1, 2])), {}, Behaviours())


@dataclass(frozen=True, eq=False)
class Origin:
    record: str = "record"


class World:
    """A core of worker `a`, beside worker `b`, which has room."""

    def __init__(self, *, forward: bool = True, held_bytes: int = 1000, truncates: bool = False) -> None:
        self.now = NOW
        peers = OwnerDirectory(10_000.0, clock=lambda: self.now)
        peers.take(worker_status("a", lane_statuses((LANE,))))
        costs = CostModel(c0=1, c1=0, c2=0, c3=0)
        peers.take(worker_status("b", lane_statuses((ITS_LANE,)), costs=costs, busy_share=0.0))
        policy = WorkerPolicy(forward, life_ms=2000.0, longest_s=60.0, held_bytes=held_bytes, truncates=truncates)
        self.core = WorkerCore("a", policy, peers, self, seed=1)
        self.core.on_lanes(frozenset({LANE}), frozenset())

    def lane_of(self, user_id: str) -> int:
        """The users' own lane."""
        return LANE

    def rank(self, request: str = "r", nbytes: int = 10, referred: Referred | None = None, **more: Any) -> Rank:
        times = Times(self.now, self.now + 1.0, self.now + 1.0, timeout_ms=1000.0)
        more = {"full": False, "origin": Origin(), **more}
        task = RankTask(request, "u", LANE, NONE, NONE, np.zeros(1, np.int64), times, nbytes=nbytes, **more)
        return Rank(task, referred=referred)

    def signal(self, lane: int = LANE, nbytes: int = 10, referred: Referred | None = None) -> Prefill:
        now = self.now
        return Prefill(PrefillTask("s", "u", lane, NONE, now + 1, now + 2, now, nbytes=nbytes), referred)

    def delegated(self, request: str = "r", age_ms: float = 0.0) -> Effects:
        told = Refusals(reasons={"delegated": [request]}, delegates={"b": [request]})
        return self.core.on_notice(told, age_ms, self.now)

    def answer(self, rank: Rank, status: Status = "ok", **measured: Any) -> Effects:
        return self.core.on_answer(Answer(rank, status, detail="why", measured=Measured(**measured)), self.now)


def test_a_ranking_goes_to_the_device_and_its_one_answer_to_its_client() -> None:
    world = World()
    rank = world.rank()
    assert world.core.on_ranking(rank, NOW) == [Submit(rank)]
    (reply,) = world.answer(rank)
    assert isinstance(reply, Reply) and reply.answer.status == "ok" and not reply.declined
    assert world.answer(rank) == [], "no second answer"
    assert world.core.held.nbytes == 10
    assert world.core.on_replied(rank.task.origin, 1.0) == [Done("record")]
    assert world.core.held.nbytes == 0


def test_a_refused_ranking_goes_to_a_worker_with_room_or_is_answered_with_the_reason() -> None:
    world = World()
    rank = world.rank()
    world.core.on_ranking(rank, NOW)
    (forward,) = world.answer(rank, "overloaded")
    assert isinstance(forward, Forward) and forward.lane == ITS_LANE
    assert world.core.on_forwarded(forward) == [CountForward("sent"), Done("record")]
    assert world.core.held.nbytes == 0

    twice = world.rank(hops=2)
    world.core.on_ranking(twice, NOW)
    count, reply = world.answer(twice, "overloaded")
    assert count == CountForward("hops")
    assert isinstance(reply, Reply) and reply.answer.detail == "why; it was forwarded twice"


@pytest.mark.parametrize("forward", [False, True])
def test_what_no_worker_has_done_when_due_gets_idle_time_here_or_is_refused(forward: bool) -> None:
    """With forwarding, as a ranking that was forwarded twice: nobody else is asked."""
    world = World(forward=forward)
    rank = world.rank(hops=2 * forward)
    due = rank.task.times._replace(due=NOW + 0.05)
    rank = rank._replace(task=msgspec.structs.replace(rank.task, times=due))
    world.core.on_ranking(rank, NOW)
    again = world.answer(rank, "overloaded")[-1]
    late = rank._replace(late=True)
    assert again == Submit(late)
    (*_, reply) = world.answer(late, "overloaded")
    assert isinstance(reply, Reply) and reply.answer.status == "overloaded", "no third time"


def test_one_that_gets_no_idle_time_either_is_refused_at_once() -> None:
    world = World(forward=False)
    rank = world.rank()
    due = rank.task.times._replace(due=NOW + 0.05)
    rank = rank._replace(task=msgspec.structs.replace(rank.task, times=due))
    world.core.on_ranking(rank, NOW)
    (reply,) = world.core.on_answer(Answer(rank, "overloaded", detail="why", retry_late=False), NOW)
    assert isinstance(reply, Reply) and reply.answer.detail == "why"


@pytest.mark.parametrize(("forward", "hops"), [(False, 0), (True, 2), (True, 1), (True, 0)])
@pytest.mark.parametrize("whole", [False, True])
def test_one_is_cut_only_where_no_other_worker_has_it_in_time(forward: bool, hops: int, whole: bool) -> None:
    """And where its caller allows that."""
    world = World(forward=forward, truncates=True)
    rank = world.rank(hops=hops)._replace(whole=whole)
    world.core.on_ranking(rank, NOW)
    last = world.answer(rank, "overloaded")[-1]
    if forward and hops < 2:
        assert isinstance(last, Forward)
        return
    if whole:
        assert isinstance(last, Reply)
        return
    late = rank._replace(late=True)
    assert last == Submit(late)
    assert isinstance(world.answer(late, "overloaded")[-1], Reply), "no third time"


@pytest.mark.parametrize(("forward", "cut"), [(False, 0), (True, 5)])
def test_without_forwarding_or_cut_short_it_is_answered_here(forward: bool, cut: int) -> None:
    world = World(forward=forward)
    rank = world.rank()
    world.core.on_ranking(rank, NOW)
    (reply,) = world.answer(rank, "overloaded", truncated_to=cut)
    assert isinstance(reply, Reply) and reply.answer.detail == "why"


def test_a_forward_that_no_broker_takes_is_answered() -> None:
    world = World()
    rank = world.rank()
    world.core.on_ranking(rank, NOW)
    (forward,) = world.answer(rank, "overloaded")
    assert isinstance(forward, Forward)
    count, reply = world.core.on_not_forwarded(forward, 0.5)
    assert count == CountForward("unsent") and isinstance(reply, Reply)


@pytest.mark.parametrize("erased", [False, True])
def test_one_that_its_delegate_does_not_get_is_ranked_here(erased: bool) -> None:
    """It leaves nothing here if its user was erased since it came."""
    world = World()
    world.delegated()
    rank = world.rank()
    (submit,) = world.core.on_ranking(rank, NOW)
    assert isinstance(submit, Submit) and isinstance(submit.command, Rank)
    assert submit.command.pass_to == ITS_LANE
    (forward,) = world.answer(submit.command, "overloaded")
    assert isinstance(forward, Forward) and forward.lane == ITS_LANE
    if erased:
        mark = "0123456789abcdef"
        world.core.on_erased(Erase(id=mark, user=user_mark(mark, rank.task.user_key), sent_ms=1), NOW + 0.1)
    count, again = world.core.on_not_forwarded(forward, 0.5)
    assert count == CountForward("unsent") and isinstance(again, Submit) and isinstance(again.command, Rank)
    assert (again.command.pass_to, again.command.waited_s) == (None, 0.5)
    assert again.command.leaves_nothing is erased
    (reply, release) = world.answer(again.command)
    assert isinstance(reply, Reply) and release == Release("r", ITS_LANE)


def test_a_delegate_is_released_once_its_request_is_answered_here_be_the_notice_late() -> None:
    world = World()
    rank = world.rank()
    world.core.on_ranking(rank, NOW)
    assert len(world.answer(rank)) == 1
    assert world.delegated() == [Release("r", ITS_LANE)]
    assert world.delegated("other") == []
    assert world.core.on_cancel("other", "cancel", NOW) == [
        Release("other", ITS_LANE, "cancel"), Done("cancel"), Submit(Cancel("other")),
    ]  # fmt: skip
    assert world.delegated("old", age_ms=2001.0) == []
    assert world.core.on_cancel("old", "cancel", NOW)[0] == Done("cancel")


def test_a_delegate_whose_life_window_is_over_counts_no_more() -> None:
    world = World()
    world.delegated(age_ms=1500.0)
    world.now += 0.6
    (submit,) = world.core.on_ranking(world.rank(), world.now)
    assert isinstance(submit, Submit) and isinstance(submit.command, Rank) and submit.command.pass_to is None


def test_what_there_is_no_memory_for_is_declined_or_dropped() -> None:
    world = World(held_bytes=15)
    rank = world.rank()
    world.core.on_ranking(rank, NOW)
    (reply,) = world.core.on_ranking(world.rank("second"), NOW)
    assert isinstance(reply, Reply) and reply.declined and reply.answer.status == "overloaded"
    assert list(world.core.in_flight.values()) == [rank]
    done, over = world.core.on_signal(world.signal(), "signal")
    assert done == Done("signal")
    assert isinstance(over, SignalOver) and over.placed.result == "no_memory"


def test_a_signals_memory_counts_until_the_device_has_taken_it() -> None:
    world = World(held_bytes=15)
    signal = world.signal()
    assert world.core.on_signal(signal, "signal") == [Done("signal"), Submit(signal)]
    assert isinstance(world.core.on_signal(world.signal())[0], SignalOver)
    world.core.held.taken = 10
    assert isinstance(world.core.on_signal(world.signal())[0], Submit)


def test_a_suspect_signal_and_cancel_are_done_only_at_their_end() -> None:
    world = World()
    signal = world.signal()
    assert world.core.on_signal(signal) == [Submit(signal)]
    assert world.core.on_cancel("r", "cancel", NOW, suspect=True) == [Submit(Cancel("r"), "cancel")]


def test_a_ranking_waits_for_its_history_and_learns_if_there_is_none() -> None:
    world = World()
    for found in ("history", "none", "late"):
        rank = world.rank(referred=HISTORY)
        assert world.core.on_ranking(rank, NOW) == [Fetch(rank)]
        completed = rank._replace(referred=None)
        if found == "history":
            assert world.core.on_history(rank, completed, NOW) == [Submit(completed)]
        elif found == "none":
            (reply,) = world.core.on_history(rank, Missing("failed", "the store is away"), NOW)
            assert isinstance(reply, Reply)
            assert (reply.answer.status, reply.answer.detail) == ("failed", "the store is away")
        else:
            world.core.on_device_failed("broken", NOW)
            assert world.core.on_history(rank, completed, NOW) == [], "it was answered meanwhile"


def test_a_delegated_ranking_needs_no_history_that_is_not_kept() -> None:
    world = World()
    world.delegated()
    (fetch,) = world.core.on_ranking(world.rank(referred=HISTORY), NOW)
    assert isinstance(fetch, Fetch) and not fetch.stored
    (forward,) = world.core.on_history(fetch.command, Missing("overloaded", "not here"), NOW)
    assert isinstance(forward, Forward) and forward.lane == ITS_LANE


@pytest.mark.parametrize(("lane", "kept"), [(LANE, False), (DELEGATED_LANE, True)])
def test_a_signal_whose_lane_is_lost_while_its_history_is_read_is_dropped(lane: int, kept: bool) -> None:
    world = World()
    signal = world.signal(lane, referred=HISTORY)
    assert world.core.on_signal(signal) == [Fetch(signal)]
    assert world.core.fetching_tokens(lane) == [2]
    assert world.core.on_lanes(frozenset(), frozenset({LANE})) == [Submit(LanesLost(frozenset({LANE})))]
    (effect,) = world.core.on_history(signal, Prefill(signal.task), NOW)
    assert isinstance(effect, Submit if kept else SignalOver)
    assert world.core.fetching_tokens(lane) == []
    assert world.core.held.nbytes == (10 if kept else 0)


@pytest.mark.parametrize(("reason", "status"), [("malformed", "rejected"), (CRASHED, "failed")])
def test_what_cannot_be_read_is_dead_lettered_and_its_sender_told(reason: str, status: str) -> None:
    world, error, origin = World(), DecodeError(reason, "no message"), Origin()
    reject, letter = world.core.on_unreadable("record", error, origin)
    assert isinstance(reject, Reject) and (reject.status, reject.done) == (status, False)
    assert letter == DeadLetter("record", error)
    assert world.core.on_unreadable("record", error) == [letter], "its headers say no way back"


def test_a_request_beyond_the_limits_is_rejected_and_its_delegate_released() -> None:
    world, origin = World(), Origin()
    world.delegated()
    effects = world.core.on_too_much(origin, "r", "r", "too long", NOW)
    assert effects == [Reject(origin, "rejected", "too long", "r"), Release("r", ITS_LANE)]


@given(st.lists(st.sampled_from(["read", "ok", "overloaded", "lost", "sent"]), max_size=60))
def test_every_ranking_is_done_once_and_leaves_no_byte(story: list[str]) -> None:
    """Whatever the device says, whatever brokers take."""
    world, waiting, forwards, done = World(), [], [], 0
    read = 0

    def carry(effects: Effects) -> None:
        nonlocal done
        for effect in effects:
            if isinstance(effect, Submit):
                waiting.append(effect.command)
            elif isinstance(effect, Forward):
                forwards.append(effect)
            elif isinstance(effect, Reply):
                carry(world.core.on_replied(effect.answer.task.origin, 1.0))
            elif isinstance(effect, Done):
                done += 1

    for number, event in enumerate([*story, *["ok"] * 60, *["sent"] * 60]):
        if event == "read":
            read += 1
            if number % 3 == 0:
                world.delegated(f"r{read}")
            carry(world.core.on_ranking(world.rank(f"r{read}"), world.now))
        elif event in ("ok", "overloaded") and waiting:
            status: Status = "ok" if event == "ok" else "overloaded"
            carry(world.answer(waiting.pop(), status))  # type: ignore[arg-type]
        elif event == "sent" and forwards:
            carry(world.core.on_forwarded(forwards.pop()))
        elif event == "lost" and forwards:
            carry(world.core.on_not_forwarded(forwards.pop(), 0.01))
    assert not waiting and not forwards
    assert done == read
    assert (world.core.held.nbytes, world.core.in_flight) == (0, {})
