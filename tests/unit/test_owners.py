"""Who owns a lane: later incarnations, the newer of two claims, silence by our own clock."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from relaygr_stream.fleet import (
    DROP_AFTER_S,
    FORGET_S,
    FULL_SHARE,
    Books,
    Claim,
    OwnerDirectory,
    SentRankings,
    SentSignals,
)
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.signature import Signer
from relaygr_stream.wire.worker_status import StatusReader, rising_ms
from relaygr_stream.worker.metrics import WorkerMetrics
from tests.statuses import lane_statuses, worker_status

SILENCE_MS = 3000.0


class World:
    """A directory with a clock that stands still until told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.reader, self._registry = StatusReader(), CollectorRegistry()
        metrics = WorkerMetrics(self._registry)
        self.directory = OwnerDirectory(SILENCE_MS, metrics, clock=lambda: self.now, reader=self.reader)

    @property
    def unreadable(self) -> float | None:
        return self._registry.get_sample_value("relaygr_statuses_unreadable_total")

    def owner(self, lane: int) -> str | None:
        claim = self.directory.owner(lane)
        return None if claim is None else f"{claim.worker.name}#{claim.worker.incarnation}"


def status(name: str, lanes: tuple[int, ...], incarnation: int = 1, **changes: Any) -> WorkerStatus:
    return worker_status(name, lane_statuses(lanes), incarnation=incarnation, **changes)


def record(value: bytes | None, name: str = "b") -> Record:
    return Record("worker-status", 0, 7, 0, name.encode(), value, ())


def test_a_lane_has_the_owner_that_claims_it() -> None:
    world = World()
    world.directory.take(status("a", (0, 1)))
    world.directory.take(status("b", (2,)))
    assert [world.owner(lane) for lane in range(4)] == ["a#1", "a#1", "b#1", None]
    assert set(world.directory.workers()) == {"a", "b"}


def test_of_two_claims_the_newer_in_the_topic_counts_whatever_the_senders_clocks_say() -> None:
    world = World()
    world.directory.take(status("a", (0,), sent_ms=10_000))
    world.directory.take(status("b", (0,), sent_ms=1))
    assert world.owner(0) == "b#1"
    world.directory.take(status("a", (0,), sent_ms=10_001))
    assert world.owner(0) == "a#1"


def test_a_lane_given_up_falls_to_the_newest_of_those_who_still_claim_it() -> None:
    world = World()
    for name in ("a", "b", "c"):
        world.directory.take(status(name, (0,)))
    world.directory.take(status("c", ()))
    assert world.owner(0) == "b#1"
    world.directory.take(status("b", (), state="stopped"))
    assert world.owner(0) == "a#1"
    world.directory.take(status("a", ()))
    assert world.owner(0) is None


def test_only_a_serving_worker_owns_lanes() -> None:
    for state in ("starting", "draining", "stopped"):
        world = World()
        world.directory.take(status("a", (0,)))
        world.directory.take(status("a", (0,), state=state))
        assert world.owner(0) is None, state


def test_the_later_incarnation_of_a_name_wins_for_good() -> None:
    world = World()
    world.directory.take(status("a", (0, 1), incarnation=1))
    world.directory.take(status("a", (1,), incarnation=2))
    assert (world.owner(0), world.owner(1)) == (None, "a#2")
    world.directory.take(status("a", (0, 1), incarnation=1))
    assert (world.owner(0), world.owner(1)) == (None, "a#2")


def test_a_silent_one_gives_way_even_to_an_earlier_incarnation() -> None:
    """It ran on a clock that was ahead; its successor has not read so far back."""
    world = World()
    world.directory.take(status("a", (0,), incarnation=9))
    world.directory.take(status("a", (0,), incarnation=2))
    assert world.owner(0) == "a#9"
    world.now += 1e3
    world.directory.take(status("a", (0,), incarnation=2))
    assert world.owner(0) == "a#2"


def test_a_later_incarnation_that_never_serves_takes_nothing() -> None:
    for state in ("starting", "draining", "stopped"):
        world = World()
        world.directory.take(status("a", (0,), incarnation=1))
        world.directory.take(status("a", (), incarnation=2, state=state))
        assert world.owner(0) == "a#1"
        world.directory.take(status("a", (0,), incarnation=1))
        assert world.owner(0) == "a#1"
        fresh = World()  # one that hears the later first
        fresh.directory.take(status("a", (), incarnation=2, state=state))
        fresh.directory.take(status("a", (0,), incarnation=1))
        assert fresh.owner(0) == "a#1"
        fresh.directory.take(status("a", (0,), incarnation=2))
        assert fresh.owner(0) == "a#2"


def test_a_start_after_a_crash_counts_once_the_crashed_one_is_silent() -> None:
    world = World()
    world.directory.take(status("a", (0,), incarnation=1))
    world.now += SILENCE_MS / 1000 + 0.001
    world.directory.take(status("a", (), incarnation=2, state="starting"))
    assert world.directory.workers()["a"].incarnation == 2


def test_names_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (StatusReader(4).most_names, StatusReader(10_000).most_names) == (1000, 20_000)
    world = World()
    monkeypatch.setattr(world.reader, "most_names", 10)
    for number in range(100):
        world.now += 0.001
        world.directory.take(status(f"w{number}", (number % 4,)))
        assert len(world.directory.workers()) <= 10
    assert set(world.directory.workers()) == {f"w{number}" for number in range(90, 100)}
    assert [world.owner(lane) for lane in range(4)] == ["w96#1", "w97#1", "w98#1", "w99#1"]


def test_a_silent_owner_owns_nothing_until_it_speaks_again() -> None:
    world = World()
    world.directory.take(status("a", (0,), sent_ms=9_999_999_999_999))  # its clock does not matter
    world.now += SILENCE_MS / 1000
    assert world.owner(0) == "a#1"
    claim = world.directory.owner(0)
    assert claim is not None
    assert claim.age_ms(world.now) == SILENCE_MS
    world.now += 0.001
    assert world.owner(0) is None
    assert world.directory.workers() == {}
    world.directory.take(status("a", (0,)))
    assert world.owner(0) == "a#1"


def test_unreadable_statuses_are_counted_and_skipped() -> None:
    world = World()
    good = status("a", (0,))
    lane = good.lanes[0]
    nonsense = [
        msgspec.structs.replace(good, name="b", queue_ms=float("nan")),
        msgspec.structs.replace(good, name="b", bytes_per_token=0),
        msgspec.structs.replace(good, name="b", alloc_bytes=0),
        msgspec.structs.replace(good, name="b", busy_share=1.01),
        msgspec.structs.replace(good, name="b", busy_share=float("nan")),
        msgspec.structs.replace(good, name="b", lanes=(msgspec.structs.replace(lane, pinned_bytes=-1),)),
        msgspec.structs.replace(good, name="b", lanes=(msgspec.structs.replace(lane, pre_infer_offset=-1),)),
    ]
    world.directory.on_records(
        [record(encode(good), "a"), record(b"\xc1"), record(b""), *(record(encode(bad)) for bad in nonsense)]
    )
    assert world.unreadable == 2 + len(nonsense)
    assert world.owner(0) == "a#1"


def test_a_worker_that_nobody_understands_does_not_flood_the_log() -> None:
    """While versions are mixed, every client reads four such statuses a second from every new worker."""
    world = World()
    with capture_logs() as lines:
        for _ in range(100):
            world.directory.on_records([record(b"\xc1")])
    assert world.unreadable == 100
    assert 1 <= len(lines) <= 10
    assert all(line["event"] == "worker status unreadable" for line in lines)


def test_workers_of_long_ago_are_forgotten() -> None:
    world = World()
    world.directory.take(status("a", (0,)))
    world.directory.take(status("b", (0,)))
    world.now += DROP_AFTER_S + 1
    world.directory.take(status("a", (1,)))
    world.directory.take(status("c", (2,)))
    # b was the owner of lane 0 and is forgotten: an earlier incarnation would be taken as new.
    world.directory.take(status("b", (3,), incarnation=0))
    assert world.owner(3) == "b#0"
    assert world.owner(0) is None


@pytest.mark.parametrize("far_s", [29.0, 45.0, 59.0, 90.0, 3600.0])
@pytest.mark.parametrize("everywhere", [False, True], ids=["its sender's", "all"])
def test_a_clock_that_was_ahead_for_ten_seconds_silences_nobody_afterwards(everywhere: bool, far_s: float) -> None:
    """Its statuses went on to state that time, and were refused until it was over."""
    true_s, elapsed_s = 1.7e9, 0.0
    ahead_s = 0.0
    signer = Signer("0123456789abcdef0123")
    reader = StatusReader(64, signer, wall=lambda: true_s + (ahead_s if everywhere else 0.0))
    owners = OwnerDirectory(3000.0, clock=lambda: elapsed_s, reader=reader)
    sent_ms = 0
    unowned = []
    for step in range(240):
        true_s, elapsed_s = 1.7e9 + step / 4, step / 4
        ahead_s = far_s if 10 <= elapsed_s < 20 else 0.0
        sent_ms = rising_ms(sent_ms, int((true_s + ahead_s) * 1e3))
        value = encode(status("w", (0,), sent_ms=sent_ms))
        headers = signer.sign("worker-status", b"w", value, [])
        owners.on_records([Record("worker-status", 0, step, 0, b"w", value, tuple(headers))])
        if owners.owner(0) is None:
            unowned.append(elapsed_s)
    assert all(10 <= at < 24 for at in unowned), unowned


def test_what_was_sent_is_forgotten_with_a_worker_that_is_looked_at_no_more() -> None:
    signals, rankings = Books(SentSignals), Books(SentRankings)
    claim = Claim(status("a", (0,)), status("a", (0,)).lanes[0], 100.0)
    signals.of_worker("a", 100.0).send(30.0, 7, 100.0, delegated=True)
    signals.of_worker("a", 100.0).send(20.0, 5, 100.0, delegated=False)
    assert signals.of_worker("a", 100.0).ahead(claim, 100.0) == pytest.approx((50.0, 5, 7))
    rankings.of_worker("a", 100.0).advance(status("a", (0,), busy_share=0.0), 1.0, 100.0)
    rankings.of_worker("a", 100.0).send(85.0)
    assert rankings.of_worker("a", 100.0).ahead_ms == pytest.approx(85.0 / FULL_SHARE)
    for name, at in (("b", 100.0 + FORGET_S), ("c", 101.0 + FORGET_S)):
        signals.of_worker(name, at)
        rankings.of_worker(name, at)
    assert signals.of_worker("a", 200.0).ahead(claim, 200.0) == (0.0, 0, 0)
    assert rankings.of_worker("a", 200.0).ahead_ms == math.inf, "nothing is known of its time to spare"
