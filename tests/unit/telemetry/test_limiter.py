from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from relaygr_stream.telemetry.limiter import MAX_KINDS, LibraryLines, LogLimiter, flush_limiters
from tests.retained import retained
from tests.waiting import Clock


class Lines:
    """Collects what was written."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.seen.append((event, fields))

    @property
    def events(self) -> list[str]:
        return [event for event, _ in self.seen]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_first_lines_pass_and_the_rest_is_counted(clock: Clock) -> None:
    write, limiter = Lines(), LogLimiter(first=3, interval_s=10, clock=clock)
    for number in range(100):
        limiter.limited(write, "malformed")("dead letter", offset=number)
    assert write.seen == [("dead letter", {"offset": n}) for n in range(3)]
    limiter.flush()
    assert len(write.seen) == 3, "the interval is not over"
    clock.now += 10
    limiter.flush()
    assert write.seen[3:] == [("more of these: dead letter", {"held_back": 97, "interval_s": 10})]
    limiter.flush()
    assert len(write.seen) == 4, "told once"


def test_the_next_interval_starts_with_the_count_of_the_last(clock: Clock) -> None:
    write, limiter = Lines(), LogLimiter(first=1, interval_s=10, clock=clock)
    for _ in range(3):
        limiter.limited(write, "a")("x")
    clock.now += 11
    limiter.limited(write, "a")("x")
    assert write.events == ["x", "more of these: x", "x"]
    assert write.seen[1][1]["held_back"] == 2


def test_kinds_do_not_share_a_limit(clock: Clock) -> None:
    write, limiter = Lines(), LogLimiter(first=1, clock=clock)
    for kind in ("a", "b", "a", "b"):
        limiter.limited(write, kind)(kind)
    assert write.events == ["a", "b"]


def test_nothing_held_back_needs_no_summary(clock: Clock) -> None:
    write, limiter = Lines(), LogLimiter(first=5, clock=clock)
    limiter.limited(write, "a")("x")
    limiter.flush(all_windows=True)
    assert write.events == ["x"]


def test_every_limiter_is_flushed_at_the_end(clock: Clock) -> None:
    write, limiter = Lines(), LogLimiter(first=1, clock=clock)
    for _ in range(4):
        limiter.limited(write, "a")("x")
    flush_limiters(all_windows=True)
    assert write.seen[-1] == ("more of these: x", {"held_back": 3, "interval_s": 10.0})


def test_many_kinds_do_not_grow_memory_for_ever(clock: Clock) -> None:
    write, limiter = Lines(), LogLimiter(clock=clock)
    for number in range(5000):
        clock.now += 1.0
        limiter.limited(write, f"kind {number}")("x")
    assert retained(limiter, str) <= MAX_KINDS + 10
    assert len(write.seen) == 5000
    for number in range(5000):  # within one interval
        limiter.limited(write, f"kind {number}")("x")
    assert retained(limiter, str) <= MAX_KINDS + 10


def test_threads_lose_no_count(clock: Clock) -> None:
    write, limiter = Lines(), LogLimiter(first=10, clock=clock)

    def work() -> None:
        for _ in range(500):
            limiter.limited(write, "a")("x")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    limiter.flush(all_windows=True)
    assert write.events.count("x") == 10
    assert write.seen[-1][1]["held_back"] == 1990


def test_a_librarys_lines_are_limited_inside_another_program_and_no_others(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    limiter = LogLimiter(first=3, interval_s=10, clock=clock)
    lines = LibraryLines(limiter)
    library, own = logging.getLogger("some.library.part"), logging.getLogger("somebody")
    lines.attach("some.library")
    lines.attach("some.library")
    for node in range(1000):
        library.error("Unable to connect to node %s", node)
        own.error("mine %s", node)
    assert sum(record.name == "somebody" for record in caplog.records) == 1000
    assert sum(record.name == "some.library.part" for record in caplog.records) == 3
    clock.now += 10
    limiter.flush()
    assert caplog.messages[-1] == "more of these: Unable to connect to node %s (997 in 10 s)"
    library.removeFilter(lines)
