"""A record's age is bounded by the log's order, so no sender's clock can make fresh events stale."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.bus.producer import Producer
from relaygr_stream.settings import Kafka
from relaygr_stream.topics import apply_topics, load_topics
from relaygr_stream.trigger.log_ends import AgeBounds, LogEnd, LogEnds


def bounds(*samples: tuple[int, float]) -> AgeBounds:
    ages = AgeBounds()
    for offset, at_s in samples:
        ages.sample(LogEnd(offset, at_s, at_s))
    return ages


def test_without_samples_only_negative_ages_are_corrected() -> None:
    assert AgeBounds().clamp(-5.0, 0, 10.0) == 0.0
    assert AgeBounds().clamp(1e9, 0, 10.0) == 1e9


def test_a_clock_five_minutes_behind_makes_no_fresh_event_stale() -> None:
    ages = bounds((10, 99.0), (20, 99.5))
    assert ages.clamp(300_000.0, 20, 100.0) == 500.0
    assert ages.clamp(300_000.0, 15, 100.0) == 1000.0


def test_a_clock_five_minutes_ahead_makes_no_old_event_fresh() -> None:
    ages = bounds((10, 90.0), (20, 99.5))
    assert ages.clamp(-300_000.0, 5, 100.0) == 10_000.0
    assert ages.clamp(-300_000.0, 15, 100.0) == 500.0
    assert ages.clamp(-300_000.0, 20, 100.0) == 0.0


def test_an_age_within_the_bounds_is_believed() -> None:
    assert bounds((10, 90.0), (20, 99.5)).clamp(5_000.0, 15, 100.0) == 5_000.0


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.integers(0, 3)), min_size=1, max_size=40),
    st.sets(st.integers(0, 39)),
    st.floats(0, 0.2),
    st.integers(0, 100),
)
def test_the_true_age_is_never_excluded(
    history: list[tuple[float, int]], sampled: set[int], answer_takes_s: float, pick: int
) -> None:
    ages, now, appended = AgeBounds(), 0.0, [0.0]
    for step, (pause, records) in enumerate(history):
        asked, now = now + pause, now + pause + answer_takes_s
        if step in sampled:
            ages.sample(LogEnd(len(appended), asked, now))
        appended += [now] * records
    offset = pick % len(appended)
    true_ms = (now + 0.5 - appended[offset]) * 1000
    assert abs(ages.clamp(true_ms, offset, now + 0.5) - true_ms) < 1e-6


async def test_the_ends_are_those_of_the_log(embedded_settings: Kafka) -> None:
    await apply_topics(embedded_settings)
    topic = load_topics(embedded_settings).pre_infer.name
    async with LogEnds(embedded_settings, "test") as ends, Producer(embedded_settings, client_id="test") as producer:
        assert await ends.ask(topic, []) == {}
        for _ in range(3):
            await producer.send_and_wait(topic, b"x", partition=2)
        found = await ends.ask(topic, [1, 2])
    assert {lane: end.offset for lane, end in found.items()} == {1: 0, 2: 3}
    assert all(end.asked_s <= end.answered_s for end in found.values())
