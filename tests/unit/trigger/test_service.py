"""The trigger process on real topics: what it signals, what it skips, what it never loses."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.dead_letter import HEADER_DIGEST
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import BrokerError, BrokerUnavailable, ConfigError, TopicError
from relaygr_stream.ops.brokers.local import local_broker
from relaygr_stream.settings.schema import Kafka, Relay, Settings
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.trigger import lane as lane_module
from relaygr_stream.trigger import service
from relaygr_stream.trigger.outbox import Outbox, SignalSending
from relaygr_stream.trigger.service import run_trigger
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import PreInferSignal, with_version
from relaygr_stream.wire.records import (
    HEADER_DETAIL,
    HEADER_ORIGIN_OFFSET,
    HEADER_ORIGIN_PARTITION,
    HEADER_ORIGIN_TOPIC,
    HEADER_REASON,
)
from relaygr_stream.wire.refusals import decode_refusals
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.worker.books import Decisions
from tests.unit.trigger.parts import event
from tests.unit.trigger.processes import WIDE_BOUNDS, RunningTrigger, peer_on, trigger_on, user_on
from tests.waiting import WITHIN_S, until


async def committed(kafka: Kafka, topic: str, lane: int) -> int | None:
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka.bootstrap, group_id=f"{kafka.prefix}trigger")
    await consumer.start()
    try:
        offset: int | None = await consumer.committed(TopicPartition(topic, lane))
        return offset
    finally:
        await consumer.stop()


async def test_the_owner_is_told_why_a_request_was_not_admitted(embedded_settings: Kafka) -> None:
    """And the lane goes on: what tells it has its place in the books of the lane's signals."""
    async with peer_on(embedded_settings) as peer, trigger_on(embedded_settings) as trigger:
        sent = {"admitted": [], "empty_prefix": [], "too_long": []}  # type: ignore[var-annotated]
        for number in range(30):
            reason, tokens = list(zip(sent, (25, 0, 5000), strict=True))[number % 3]
            sent[reason].append(f"r{number}")
            await peer.publish(event(tokens, f"r{number}", f"u{number}"))
        reasons = Decisions(60_000.0)
        await until(lambda: trigger.decided == 30 and len(peer.signals) == 10, "all decided, 10 signalled")
        told: dict[str, str] = {}

        def all_told() -> bool:
            for record in peer.others:
                reasons.note(decode_refusals(record.value), 0.0, 0.0)
            peer.others.clear()
            told.update({each: reason for ids in sent.values() for each in ids if (reason := reasons.admission(each))})
            return len(told) == 20

        await until(all_told, "all refusals told")
        assert told == {each: reason for reason, ids in sent.items() if reason != "admitted" for each in ids}
        await peer.publish(event(25, "last", "u1"))
        await until(lambda: "last" in peer.signalled, "the lane of refusals admits again")


async def test_a_trigger_that_stops_tells_owners_what_it_has_gathered(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FLUSH_S", 3600.0)  # nothing is told meanwhile
    reasons = Decisions(60_000.0)
    async with peer_on(embedded_settings) as peer:
        async with trigger_on(embedded_settings) as trigger:
            await peer.publish(event(0, "r", "u"))
            await until(lambda: trigger.decisions("empty_prefix"))
            assert not peer.others
        await until(lambda: peer.others, "told at the end")
        reasons.note(decode_refusals(peer.others[0].value), 0.0, 0.0)
    assert reasons.admission("r") == "empty_prefix"


async def test_a_request_is_signalled_on_its_users_lane(kafka_settings: Kafka) -> None:
    settings = msgspec.structs.replace(kafka_settings, commit_interval_ms=100)
    async with peer_on(settings) as peer, trigger_on(settings, relay=Relay(life_window_ms=1234)) as trigger:
        sent = msgspec.structs.replace(event(25, "r-1", "u-1"), sent_ms=now_ms(), rank_in_ms=80.0)
        before = now_ms()
        await peer.publish(sent)
        await until(lambda: peer.signals)
        (record,) = peer.signals
        signal = decode(PreInferSignal, record.value)
        assert record.key == b"u-1"
        assert record.lane == lane_of("u-1", peer.topics.lanes)
        assert (signal.request_id, signal.user_id, signal.prefix) == ("r-1", "u-1", sent.prefix)
        assert signal.life_ms == 1234.0
        assert 0 < signal.rank_in_ms <= 80.0, "from the decision on"
        assert before - 1 <= signal.admitted_ms <= now_ms()
        assert trigger.decisions("admitted") == 1
    assert await committed(settings, peer.topics.retrieval.name, record.lane) == 1


async def test_item_ids_of_64_bits_are_signalled_as_they_came(embedded_settings: Kafka) -> None:
    ids = [*range(23), 2**53 + 1, 2**63 - 1]
    async with peer_on(embedded_settings) as peer, trigger_on(embedded_settings):
        asked = event(25, "r", "u")
        wide = Behaviours.from_arrays(ids, [1] * 25, range(25))
        await peer.publish(msgspec.structs.replace(asked, prefix=wide, **with_version(msgspec.UNSET, wide)))
        await until(lambda: peer.signals, "signalled")
        signal = decode(PreInferSignal, peer.signals[0].value)
        assert (signal.v, signal.min_v, signal.prefix.arrays()[0].tolist()) == (4, 4, ids)


async def test_what_is_not_worth_it_is_skipped_counted_and_committed(embedded_settings: Kafka) -> None:
    async with peer_on(embedded_settings) as peer:
        async with trigger_on(embedded_settings, relay=Relay(max_prefix_tokens=100, life_window_ms=60_000)) as trigger:
            for number, tokens in enumerate((0, 101, 25, 25)):
                request_id = "same" if tokens == 25 else str(number)
                await peer.publish(event(tokens, request_id, "u"))
            await until(lambda: trigger.decisions("duplicate"))
            for reason in ("empty_prefix", "too_long", "admitted", "duplicate"):
                assert trigger.decisions(reason) == 1, reason
        await until(lambda: peer.signalled == ["same"])
        lane = lane_of("u", peer.topics.lanes)
        assert await committed(embedded_settings, peer.topics.retrieval.name, lane) == 4


async def test_bad_events_become_dead_letters_and_the_lane_moves_on(kafka_settings: Kafka) -> None:
    async with peer_on(kafka_settings) as peer, trigger_on(kafka_settings) as trigger:
        lane = 3
        user, stranger = user_on(lane, peer.topics.lanes), user_on(lane + 1, peer.topics.lanes)
        inputs = [
            (b"\xc1garbage", "malformed"),
            (b"\x81\xa1v\x07", "unknown_version"),
            (encode(event(25, "r", stranger)), "invalid"),
        ]
        offsets = [await peer.publish_raw(value, lane, b"key") for value, _ in inputs]
        await peer.publish(event(25, "good", user))
        await until(lambda: peer.signalled == ["good"] and len(peer.letters) == len(inputs))
        # Each is sent by itself: they may come in any order.
        letters = sorted(peer.letters, key=lambda letter: int(dict(letter.headers)[HEADER_ORIGIN_OFFSET]))
        for letter, offset, (value, reason) in zip(letters, offsets, inputs, strict=True):
            headers = dict(letter.headers)
            assert (letter.key, letter.value) == (b"key", b"")
            assert hashlib.sha256(value).hexdigest().encode() in headers[HEADER_DIGEST]
            assert headers[HEADER_REASON] == reason.encode()
            assert headers[HEADER_ORIGIN_TOPIC] == peer.topics.retrieval.name.encode()
            assert headers[HEADER_ORIGIN_PARTITION] == b"3"
            assert headers[HEADER_ORIGIN_OFFSET] == str(offset).encode()
            assert trigger.count("dead_letters_total", reason=reason) == 1
        assert b"belongs on partition 4 of 8, the event came on 3" in dict(letters[2].headers)[HEADER_DETAIL]


async def test_without_an_owner_nothing_is_signalled(embedded_settings: Kafka) -> None:
    async with peer_on(embedded_settings) as peer:
        async with trigger_on(embedded_settings) as trigger:
            peer.read_to.pop(3)  # the peer claims the other lanes only
            await until(lambda: trigger.count("lanes_with_owner") == len(peer.read_to), "all but lane 3 have an owner")
            await peer.publish(event(25, "r", user_on(3, peer.topics.lanes)))
            await until(lambda: trigger.decisions("no_owner") == 1)
        assert peer.signals == []


@pytest.mark.parametrize("skew_s", [-300, 300])
async def test_a_senders_clock_decides_nothing(skew_s: int, embedded_settings: Kafka) -> None:
    bounds = msgspec.structs.replace(WIDE_BOUNDS, max_event_age_ms=3000)  # a quarter of it is between two samples
    async with peer_on(embedded_settings) as peer, trigger_on(embedded_settings, trigger=bounds) as trigger:
        sent = 0

        async def refused(clamped: int) -> float:
            """How many events were not admitted until the ages of so many were bounded."""
            nonlocal sent
            while trigger.count("ages_clamped_total") < clamped:
                assert sent < 1000
                skewed = msgspec.structs.replace(event(25, str(sent), str(sent)), sent_ms=now_ms() + 1000 * skew_s)
                await peer.publish(skewed)
                sent += 1
                await asyncio.sleep(0.05)
            await until(lambda: trigger.decided == sent)
            return sent - trigger.decisions("admitted")

        # Only a sample of the logs' ends bounds the ages of later events. Before the first one, events may be stale.
        early = await refused(1)
        assert await refused(21) == early


async def test_events_that_waited_for_a_trigger_are_stale(embedded_settings: Kafka) -> None:
    async with peer_on(embedded_settings) as peer:
        for number in range(5):
            old = msgspec.structs.replace(event(25, str(number), str(number)), sent_ms=now_ms() - 60_000)
            await peer.publish(old)
        async with trigger_on(embedded_settings) as trigger:
            await until(lambda: trigger.decisions("stale") == 5)
            await peer.publish(msgspec.structs.replace(event(25, "new", "u"), sent_ms=now_ms()))
            await until(lambda: peer.signalled == ["new"])


@pytest.mark.stack
async def test_stopping_loses_no_event_and_repeats_none(kafka_settings: Kafka) -> None:
    total = 600
    # The second trigger gets the lanes when the first one's session has ended: what waited until then is not stale.
    bounds = msgspec.structs.replace(WIDE_BOUNDS, max_event_age_ms=60_000)
    async with peer_on(kafka_settings) as peer:
        async with trigger_on(kafka_settings, trigger=bounds) as first:
            events = [event(25, str(number), str(number)) for number in range(total)]
            publishing = asyncio.gather(*(peer.publish(event) for event in events))
            await until(lambda: first.decided)
            await first.stop()  # in the middle
            early = first.decided
        await publishing
        async with trigger_on(kafka_settings, trigger=bounds) as second:
            await until(lambda: early + second.decided >= total)
        assert early + second.decided == total
        admitted = first.decisions("admitted") + second.decisions("admitted")
        # A signal that a busy broker does not take within its time is given up, and counted.
        sent = admitted - first.count("signals_failed_total") - second.count("signals_failed_total")
        assert sent > 0
        await until(lambda: len(peer.signalled) == sent)
        assert len(set(peer.signalled)) == sent


@pytest.mark.stack
async def test_two_triggers_share_the_lanes_and_hand_them_over(kafka_settings: Kafka) -> None:
    async with peer_on(kafka_settings) as peer, trigger_on(kafka_settings) as first:
        async with trigger_on(kafka_settings) as second:
            await until(lambda: first.count("lanes") == second.count("lanes") == peer.topics.lanes / 2)
            # A lane that has just moved is decided on once its new trigger has heard of its owner.
            await until(lambda: all(each.count("lanes_with_owner") == each.count("lanes") for each in (first, second)))
            for number in range(40):
                await peer.publish(event(25, str(number), str(number)))
            await until(lambda: first.decisions("admitted") + second.decisions("admitted") == 40)
            assert first.decisions("admitted") > 0
            assert second.decisions("admitted") > 0
        await until(lambda: first.count("lanes") == peer.topics.lanes)
        await until(lambda: len(peer.signalled) >= 40)
    assert sorted(peer.signalled) == sorted(str(number) for number in range(40))


@pytest.mark.stack
async def test_a_broker_that_was_away_is_worked_with_again(tmp_path: Path) -> None:
    async with local_broker("embedded", folder=tmp_path) as broker:
        kafka = broker.kafka_settings(
            Kafka(prefix="away.", partitions=2, request_timeout_ms=2000, session_timeout_ms=3000)
        )
        async with peer_on(kafka) as peer, trigger_on(kafka) as trigger:
            broker.stop()
            await until(trigger.context.why_not_ready)
            assert trigger.context.why_not_live() is None
            await broker.start()
            await apply_topics(kafka)  # the embedded broker forgets them
            await until(lambda: trigger.ready)
            number = 0
            while not peer.signals:  # the owner is heard of again a moment later
                assert number < 200
                with suppress(BrokerError):  # the peer's own producer may still be connecting
                    await peer.publish(event(25, str(number), "u"))
                number += 1
                await asyncio.sleep(0.1)


async def test_at_the_start_a_missing_broker_or_topic_is_an_error(
    embedded_settings: Kafka, unused_tcp_port: int
) -> None:
    with pytest.raises(TopicError, match="missing on the cluster"):
        await RunningTrigger(Settings(kafka=embedded_settings)).task
    nowhere = msgspec.structs.replace(embedded_settings, bootstrap=f"127.0.0.1:{unused_tcp_port}")
    with pytest.raises(BrokerUnavailable, match="no Kafka broker answers"):
        await RunningTrigger(Settings(kafka=nowhere)).task


# The embedded broker makes a missing topic anew when it is written to.
@pytest.mark.parametrize("broker", [pytest.param("kafka", marks=pytest.mark.kafka)], indirect=True)
async def test_while_dead_letters_cannot_be_sent_every_lane_goes_on_uncommitted(kafka_settings: Kafka) -> None:
    async with peer_on(kafka_settings, letters=False) as peer, trigger_on(kafka_settings) as trigger:
        admin = AIOKafkaAdminClient(bootstrap_servers=kafka_settings.bootstrap)
        await admin.start()
        try:
            await admin.delete_topics([dead_letter := peer.topics.dead_letter.name])

            async def deleted() -> bool:
                return dead_letter not in await admin.list_topics()

            await until(deleted, "deleted")
            lane, user = 3, user_on(3, peer.topics.lanes)
            await peer.publish_raw(b"\xc1", lane)
            await peer.publish(event(25, "behind", user))
            await peer.publish(event(25, "beside", user_on(lane + 1, peer.topics.lanes)))
            await until(lambda: sorted(peer.signalled) == ["behind", "beside"])
            assert trigger.count("dead_letters_waiting") == 1
            retrieval = peer.topics.retrieval.name
            await until(lambda: "dead letters wait" in (trigger.context.why_not_ready() or ""), "readiness tells")
            assert not await committed(kafka_settings, retrieval, lane)
            await apply_topics(kafka_settings)
            await until(lambda: trigger.count("dead_letters_waiting") == 0)
        finally:
            await admin.close()
    assert await committed(kafka_settings, retrieval, lane) == 2


async def test_an_event_larger_than_dead_letters_may_be_holds_up_nothing(embedded_settings: Kafka) -> None:
    """Brokers may take more than the files say; the letter was then refused for ever, and so was the lane."""
    async with peer_on(embedded_settings) as peer, trigger_on(embedded_settings):
        lane, user = 3, user_on(3, peer.topics.lanes)
        async with Producer(embedded_settings, client_id="large", max_bytes=4 << 20) as producer:
            await producer.send_and_wait(peer.topics.retrieval.name, bytes(3 << 20), partition=lane)
        await peer.publish(event(25, "behind", user))
        await until(lambda: peer.signalled == ["behind"] and len(peer.letters) == 1)
        assert dict(peer.letters[0].headers)[HEADER_REASON] == b"oversized"
        assert b"value 3145728 bytes" in dict(peer.letters[0].headers)[HEADER_DIGEST]
    assert await committed(embedded_settings, peer.topics.retrieval.name, lane) == 2


async def test_a_trigger_refuses_a_dead_letter_topic_that_would_hold_up_its_lanes(tmp_path: Path) -> None:
    """It would try for ever to dead-letter an event that its topic takes and that of dead letters does not."""
    for file in (Path(__file__).parents[3] / "topics").glob("*.toml"):
        text = file.read_text(encoding="utf-8")
        if file.stem == "retrieval":
            text = re.sub(r"max_message_bytes = \S+", "max_message_bytes = 4_000_000", text)
        (tmp_path / file.name).write_text(text, encoding="utf-8")
    settings = Settings(kafka=Kafka(bootstrap="127.0.0.1:1", topics_dir=str(tmp_path)))
    context = ProcessContext(settings, asyncio.Event(), CollectorRegistry())
    with pytest.raises(
        ConfigError, match=r"relaygr\.retrieval takes messages of 4000000 bytes, relaygr\.dead-letter of 2097152"
    ):
        await run_trigger(context)


@pytest.mark.stack
async def test_a_lane_that_cannot_go_on_stops_no_other_and_holds_no_memory(
    embedded_settings: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue grew until the trigger read no lane any more, lost all of them, and the next one did the same."""
    monkeypatch.setattr(service, "BACKLOG_LIMIT", 10)
    monkeypatch.setattr(lane_module, "EVENTS_PER_TURN", 1)
    stuck, lanes = 3, load_topics(embedded_settings).lanes
    send = Outbox.send

    async def hung(outbox: Outbox, lane: int, sending: Sequence[SignalSending]) -> None:
        if lane == stuck and sending:
            await asyncio.Event().wait()
        await send(outbox, lane, sending)

    monkeypatch.setattr(Outbox, "send", hung)
    soon = msgspec.structs.replace(WIDE_BOUNDS, max_event_age_ms=1000)
    async with peer_on(embedded_settings) as peer, trigger_on(embedded_settings, trigger=soon) as trigger:
        await peer.publish_raw(b"\xc1", stuck)
        for number in range(30):
            await peer.publish(event(25, f"stuck{number}", user_on(stuck, lanes)))
        await until(lambda: trigger.decisions("stale") == 29, "what waited is skipped, and more is read")
        await until(lambda: len(peer.letters) == 1, "what cannot be read is a dead letter all the same")
        async with asyncio.timeout(WITHIN_S):
            while not peer.signals:  # on a crowded machine an event may be stale before it is read
                await peer.publish(event(25, f"r{now_ms()}", user_on(stuck + 1, lanes)))
                await asyncio.sleep(0.05)
