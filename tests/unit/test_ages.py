"""A record's age is bounded by the log's order, so no sender's clock can make fresh events stale."""

from __future__ import annotations

import asyncio
import random
import re

import pytest
from aiokafka import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.bus import ages as bus_ages
from relaygr_stream.bus.ages import WAY_MS, AgeBounds, LogEnd, LogEnds, SenderLag, now_ms, stated_age_ms
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import BrokerUnavailable
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import load_topics
from tests.bus import insides


def bounds(*samples: tuple[int, float], lag_ms: float | None = None) -> AgeBounds:
    """lag_ms: how much older than it is a fresh record has stated to be."""
    lag = SenderLag()
    if lag_ms is not None:
        lag.seen(lag_ms, 99.0)
    ages = AgeBounds(lag)
    for offset, at_s in samples:
        ages.sample(LogEnd(offset, at_s, at_s))
    return ages


def age_ms(ages: AgeBounds, stated_ms: float | None, offset: int, now_s: float = 100.0) -> float:
    return ages.age(stated_ms, offset, now_s).sure_ms


@pytest.mark.parametrize("stated_ms", [None, -5.0, 0.0, 300_000.0])
def test_nothing_is_old_without_samples(stated_ms: float | None) -> None:
    assert 0.0 <= age_ms(bounds(), stated_ms, 0) <= WAY_MS


@pytest.mark.parametrize("behind_ms", [60, 100, 150, 200, 250, 300, 340, 500, 300_000])
@pytest.mark.parametrize("timeout_ms", [100.0, 200.0])
def test_a_clock_that_is_behind_makes_no_fresh_record_late(behind_ms: float, timeout_ms: float) -> None:
    """Of clocks 100 to 340 ms behind, up to 62 % of the rankings were expired on arrival."""
    rng, ages, now, sampled = random.Random(1), AgeBounds(SenderLag()), 1000.0, 1000.0
    for offset in range(1000):
        now += rng.expovariate(100)
        while sampled <= now:
            ages.sample(LogEnd(offset, sampled, sampled + 0.002))
            sampled += 0.252
        age = ages.age(4.0 + behind_ms, offset, now)
        assert age.sure_ms <= WAY_MS
        assert age.clock_off or (behind_ms < 400 and age.stated_ms <= 4.0 + behind_ms)


def test_a_log_that_begins_anew_makes_no_fresh_record_old() -> None:
    """Its broker's disk was lost, or its topic made again: for 3.75 s, everything was taken for 3.8 s old."""
    ages = bounds(*((1000 + n, 96.0 + n / 4) for n in range(16)))
    assert age_ms(ages, 4.0, 1020) == 4.0
    assert age_ms(ages, 4.0, 0, 100.1) == 4.0, "seen by the record itself"
    ages = bounds(*((1000 + n, 96.0 + n / 4) for n in range(16)))
    ages.sample(LogEnd(0, 100.0, 100.0))
    assert age_ms(ages, 4.0, 3, 100.1) == 4.0, "seen by the sample"


def test_a_clock_that_is_ahead_makes_no_old_record_fresh() -> None:
    ages = bounds((10, 90.0), (20, 99.5))
    assert age_ms(ages, -300_000.0, 5) == 10_000.0
    assert age_ms(ages, -300_000.0, 15) == 500.0
    assert age_ms(ages, -300_000.0, 20) == 0.0


def test_a_backlog_is_as_old_as_stated_less_what_clocks_lag() -> None:
    """A lane that was another's has no samples, and what waited there is old: the other lanes' senders tell."""
    assert age_ms(bounds(lag_ms=40.0), 5_040.0, 7) == 5_000.0
    assert age_ms(bounds(lag_ms=340.0), 5_040.0, 7) == 4_700.0
    assert age_ms(bounds((10, 90.0), (20, 99.5), lag_ms=0.0), 5_000.0, 15) == 5_000.0
    assert age_ms(bounds((10, 90.0), (20, 99.5), lag_ms=0.0), 50_000.0, 15) == 10_000.0, "no sample was older"


def test_what_clocks_lag_is_forgotten() -> None:
    lag = SenderLag()
    lag.seen(300_000.0, 0.0)
    lag.seen(30.0, 400.0)
    assert lag.most_ms(401.0) == 300_000.0
    lag.seen(20.0, 701.0)
    assert lag.most_ms(702.0) == 30.0
    assert lag.most_ms(2000.0) is None


@pytest.mark.parametrize("stated", [1, 2**53 - 1, 1_000_000, "eleven minutes ago"])
def test_one_sender_with_an_absurd_clock_moves_nobody_elses_expiry(stated: int | str) -> None:
    """One message that said 1970 kept everything that others had waiting in backlogs from expiring, for ten minutes."""
    sent_ms = stated if isinstance(stated, int) else now_ms() - 660_000
    lag = SenderLag()
    fresh, backlog = AgeBounds(lag), AgeBounds(lag)
    fresh.sample(LogEnd(10, 99.9, 99.9))
    age_ms(fresh, 40.0, 10)
    before = age_ms(backlog, 5_040.0, 7)
    absurd = fresh.age(stated_age_ms(sent_ms), 11, 100.0)
    assert absurd.clock_off
    assert absurd.sure_ms <= 100.0 + 1e-6, "nor does its own fresh message expire"
    assert age_ms(backlog, 5_040.0, 8) == pytest.approx(before) == pytest.approx(5_000.0)


@given(
    st.lists(st.tuples(st.floats(0.01, 1), st.integers(0, 3)), min_size=1, max_size=40),
    st.sets(st.integers(0, 39)),
    st.floats(0, 0.2),
    st.lists(st.floats(-400_000, 400_000), min_size=1, max_size=4),
)
def test_no_age_is_above_the_true_one_however_clocks_are_off(
    history: list[tuple[float, int]], sampled: set[int], answer_takes_s: float, behind_ms: list[float]
) -> None:
    """But for the way that any message may take; once every sender was seen fresh."""
    lag = SenderLag()
    for behind in behind_ms:
        lag.seen(behind, 0.0)
    ages, now, appended = AgeBounds(lag), 0.0, [0.0]
    for step, (pause, records) in enumerate(history):
        asked, now = now + pause, now + pause + answer_takes_s
        if step in sampled:
            ages.sample(LogEnd(len(appended), asked, now))
        appended += [now] * records
    for offset, at in enumerate(appended):
        true_ms = (now + 0.5 - at) * 1000
        age = age_ms(ages, true_ms + behind_ms[offset % len(behind_ms)], offset, now + 0.5)
        assert age <= true_ms + WAY_MS + 1e-6


async def test_a_broker_that_is_silent_keeps_no_answer_of_others_back(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One partition without a leader once stopped the samples of all."""
    monkeypatch.setattr(bus_ages, "ANSWER_S", 3.0)  # the others answer within it on a crowded machine, too
    await apply_topics(embedded_settings)
    topic = load_topics(embedded_settings).pre_infer.name
    async with LogEnds(embedded_settings, "test") as ends:
        await ends.ask(topic, range(4))
        consumer = insides.renewed(ends).client
        cluster = insides.cluster(consumer)
        leader_of, end_offsets = cluster.leader_for_partition, consumer.end_offsets
        asked: list[int] = []

        async def answer(partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
            asked.extend(partition.partition for partition in partitions)
            if any(partition.partition == 3 for partition in partitions):
                await asyncio.Event().wait()
            return dict(await end_offsets(partitions))

        cluster.leader_for_partition = lambda p: -1 if p.partition == 3 else leader_of(p)
        consumer.end_offsets = answer
        for _ in range(3):
            assert set(await ends.ask(topic, range(4))) == {0, 1, 2}
        assert asked.count(3) == 1, "what is silent is not asked again and again"
        with pytest.raises(BrokerUnavailable, match=f"where {re.escape(topic)} ends"):
            await ends.ask(topic, [3])

        async def know(partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
            return dict.fromkeys(partitions, 7)

        consumer.end_offsets = know
        other = load_topics(embedded_settings).ranking.name  # of the same leader; the first may be silent as it is gone
        assert set(await ends.ask(other, [3])) == {3}


async def test_the_ends_are_those_of_the_log(embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bus_ages, "ANSWER_S", 20.0)
    await apply_topics(embedded_settings)
    topic = load_topics(embedded_settings).pre_infer.name
    async with LogEnds(embedded_settings, "test") as ends, Producer(embedded_settings, client_id="test") as producer:
        assert await ends.ask(topic, []) == {}
        for _ in range(3):
            await producer.send_and_wait(topic, b"x", partition=2)
        found = await ends.ask(topic, [1, 2])
    assert {lane: end.offset for lane, end in found.items()} == {1: 0, 2: 3}
    assert all(end.asked_s <= end.answered_s for end in found.values())


def test_fresh_records_teach_what_clocks_lag() -> None:
    """Their excess over what the log's order proves, from every lane of a process; old records teach nothing."""
    lag = SenderLag()
    fresh, backlog, old = AgeBounds(lag), AgeBounds(lag), AgeBounds(lag)
    for offset, at_s in ((10, 99.5), (20, 99.9)):
        fresh.sample(LogEnd(offset, at_s, at_s))
    assert age_ms(backlog, 5_040.0, 7) == WAY_MS, "no lag is known yet"
    fresh.age(400.0, 15, 100.0)  # at least 100 ms old by the log, at most 500
    assert lag.most_ms(100.0) == pytest.approx(300.0)
    assert age_ms(backlog, 5_040.0, 7) == pytest.approx(4_740.0)
    old.sample(LogEnd(10, 90.0, 90.0))
    old.age(9_999.0, 15, 100.0)
    assert lag.most_ms(100.0) == pytest.approx(300.0)


@pytest.mark.parametrize(
    ("stated_ms", "shown_ms", "off"),
    [
        (None, 2_000.0, False),
        (3_000.0, 3_000.0, False),
        (1_950.0, 2_000.0, False),
        (4_050.0, 4_000.0, False),
        (1_850.0, 2_000.0, True),
        (4_150.0, 2_000.0, True),
    ],
    ids=["not stated", "within the bounds", "just below", "just above", "too young", "too old"],
)
def test_a_stated_age_is_shown_within_the_bounds_unless_its_clock_is_off(
    stated_ms: float | None, shown_ms: float, off: bool
) -> None:
    """The log says that the record is 2 to 4 s old."""
    age = bounds((10, 96.0), (20, 98.0)).age(stated_ms, 15, 100.0)
    assert (age.stated_ms, age.clock_off) == (shown_ms, off)


def test_a_record_read_again_at_the_same_place_keeps_what_is_known_of_its_lane() -> None:
    ages = bounds((10, 96.0), (20, 98.0), lag_ms=0.0)
    for _ in range(2):
        assert age_ms(ages, 3_000.0, 15) == 3_000.0
        assert age_ms(ages, 9_000.0, 15) == 4_000.0
    ages.sample(LogEnd(20, 99.0, 99.0))
    assert age_ms(ages, 9_000.0, 15) == 4_000.0, "a log that did not grow is the same log"
