"""What the live sample makes of records, in whichever order the topics are read."""

from __future__ import annotations

import msgspec
import pytest

from relaygr_stream.bus.ages import WAY_MS, now_ms
from relaygr_stream.cli.explain_table import as_table, summary
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.telemetry.printable import render_plain
from relaygr_stream.trigger.decision import Policy
from relaygr_stream.trigger.explain import Shadow
from relaygr_stream.wire.behaviours import MAX_TIME_MS, Behaviours
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.features import FeatureTables
from relaygr_stream.wire.messages import Outcome, PreInferSignal, RequestEvent, ScoreReply, Status, Timings
from relaygr_stream.wire.records import HEADER_KIND, Record
from relaygr_stream.wire.refusals import KIND, Refusal, encode_refusals
from relaygr_stream.wire.topic_files import load_topics
from tests.unit.trigger.parts import behaviours, event, lane_status, worker_status

TOKENS = 25
LANE = 3


def record(value: bytes, offset: int = 0, kind: str = "") -> Record:
    return Record("t", LANE, offset, 0, b"u", value, ((HEADER_KIND, kind.encode()),) if kind else ())


@pytest.mark.parametrize("signal_first", [False, True])
def test_a_lane_s_first_event_is_decided_on_alike_whichever_topic_is_read_first(signal_first: bool) -> None:
    settings = Settings()
    topics = load_topics(settings.kafka)
    directory = OwnerDirectory(silence_ms=10_000)
    directory.take(worker_status(lane_status(lane=LANE)))
    shadow = Shadow(Policy.from_settings(settings), topics, directory, [LANE])
    signal = PreInferSignal(request_id="r", user_id="u", prefix=behaviours(TOKENS), admitted_ms=1, life_ms=2000.0)
    reading = [(shadow.on_events, encode(event(TOKENS))), (shadow.on_signals, encode(signal))]
    for read, value in reversed(reading) if signal_first else reading:
        read([record(value)])
    (row,) = shadow.explanations()
    assert row.reason == "admitted"
    assert row.signalled


@pytest.mark.parametrize("ahead_ms", [-7_200_000, 7_200_000])
def test_a_sender_whose_clock_is_off_is_explained_as_the_trigger_decides(ahead_ms: int) -> None:
    settings = Settings()
    directory = OwnerDirectory(silence_ms=10_000)
    directory.take(worker_status(lane_status(lane=LANE)))
    shadow = Shadow(Policy.from_settings(settings), load_topics(settings.kafka), directory, [LANE])
    shadow.on_events([record(encode(msgspec.structs.replace(event(TOKENS), sent_ms=now_ms() + ahead_ms)))])
    (row,) = shadow.explanations()
    assert row.reason == "admitted"
    assert row.age_ms <= WAY_MS


def test_a_user_s_features_are_a_token_in_the_bytes_of_event_and_signal() -> None:
    settings, columns = Settings(), FeatureTables(user={"age": b"\0\0\0\0"})
    directory = OwnerDirectory(silence_ms=10_000)
    directory.take(worker_status(lane_status(lane=LANE)))
    shadow = Shadow(Policy.from_settings(settings), load_topics(settings.kafka), directory, [LANE])
    signal = PreInferSignal(
        request_id="r1", user_id="u", prefix=behaviours(30), admitted_ms=1, life_ms=2000.0, columns=columns
    )
    shadow.on_events([record(encode(event(30, "r1", columns=columns)))])
    shadow.on_signals([record(encode(signal))])
    shadow.on_events([record(encode(event(30, "r2")), 1)])
    assert [(row.nbytes, row.outstanding_bytes) for row in shadow.explanations()] == [(400, 0), (300, 400)]


def test_a_delegated_request_is_explained_with_the_running_triggers_delegate() -> None:
    """Its own choice among delegates is random, as the running trigger's is; it looks at a few lanes, all owned."""
    settings = Settings(kafka=Kafka(partitions=4))
    topics = load_topics(settings.kafka)
    directory = OwnerDirectory(silence_ms=10_000)
    directory.take(worker_status(lane_status(lane=LANE, budget=0)))
    for number, name in enumerate(("w2", "w3")):
        other = worker_status(lane_status(lane=number), name=name)
        directory.take(msgspec.structs.replace(other, delegated_bytes=1 << 20))
    shadow = Shadow(Policy.from_settings(settings), topics, directory, [LANE])
    for number in range(20):
        told = Refusal(str(number), "delegated", "", "w3")
        shadow.on_events([record(encode(event(TOKENS, str(number), rank_in_ms=300.0)), number)])
        shadow.on_signals([record(encode_refusals([told]), number, KIND)])
    rows = shadow.explanations()
    assert {(row.reason, row.delegate, row.signalled) for row in rows} == {("delegated", "w3", True)}
    assert list(as_table(rows).columns[-3].cells) == ["delegated to w3"] * 20


def test_what_the_trigger_skips_or_dead_letters_is_not_explained() -> None:
    settings = Settings()
    shadow = Shadow(
        Policy.from_settings(settings), load_topics(settings.kafka), OwnerDirectory(silence_ms=10_000), [LANE]
    )
    untimely = Behaviours(bytes(4), bytes(1), MAX_TIME_MS.to_bytes(8, "little"))
    shadow.on_events(
        [
            record(encode(event(TOKENS, "kind")), 0, "of a later release"),
            record(encode(event(TOKENS, "lane", "u1")), 1),
            record(encode(RequestEvent(request_id="time", user_id="u", prefix=untimely, candidates=0)), 2),
            record(encode(event(TOKENS, "good")), 3),
        ]
    )
    assert [row.request_id for row in shadow.explanations()] == ["good"]


def answered(
    request_id: str, status: Status, worker: str, worker_ms: float = 1.0, outcome: Outcome | None = None
) -> Record:
    timings = Timings(worker_ms=worker_ms)
    reply = ScoreReply(request_id=request_id, status=status, outcome=outcome, worker=worker, timings=timings)
    return record(encode(reply))


def test_a_ranking_that_a_busy_device_refused_or_was_late_with_is_said_to_be_overload_s_doing() -> None:
    """Of a request's answers the first with scores counts; one that does not tell its worker is the lane's owner's."""
    settings = Settings()
    directory = OwnerDirectory(silence_ms=10_000)
    directory.take(worker_status(lane_status(lane=LANE), name="busy", busy_share=0.99))
    directory.take(worker_status(lane_status(lane=LANE + 1), name="idle", busy_share=0.3))
    shadow = Shadow(Policy.from_settings(settings), load_topics(settings.kafka), directory, [LANE])
    slo_ms = settings.relay.slo_ms
    answers: dict[str, tuple[list[Record], tuple[str | None, bool]]] = {
        "refused": ([answered("refused", "overloaded", "busy")], ("overloaded", True)),
        "withheld": ([answered("withheld", "overloaded", "")], ("overloaded", True)),
        "expired": ([answered("expired", "deadline_exceeded", "busy")], ("deadline_exceeded", True)),
        "late": ([answered("late", "ok", "busy", slo_ms + 1)], ("late", True)),
        "slow": ([answered("slow", "ok", "idle", slo_ms + 1)], ("late", False)),
        "alone": ([answered("alone", "overloaded", "idle")], ("overloaded", False)),
        "gone": ([answered("gone", "overloaded", "gone")], ("overloaded", True)),  # silent: the lane's owner counts
        "wrong": ([answered("wrong", "rejected", "busy")], ("rejected", False)),
        "hedged": ([answered("hedged", "overloaded", "busy"), answered("hedged", "ok", "idle")], ("ok", False)),
        "twice": ([answered("twice", "ok", "busy"), answered("twice", "overloaded", "busy")], ("ok", False)),
        "cut": ([answered("cut", "ok", "busy", outcome="truncated")], ("truncated", True)),
        "cut and late": ([answered("cut and late", "ok", "busy", slo_ms + 1, "truncated")], ("late", True)),
        "none": ([], (None, False)),
    }
    shadow.answers.on_records([record(b"no answer")])
    for number, (name, (records, _)) in enumerate(answers.items()):
        shadow.answers.on_records(records)  # before the event is read, too
        shadow.on_events([record(encode(event(TOKENS, name)), number)])
    found = shadow.explanations()
    assert {row.request_id: (row.answer, row.overload) for row in found} == {
        name: expected for name, (_, expected) in answers.items()
    }
    assert "overload: busy devices refused 6 of 12 rankings, or were late with them, and cut 1 to" in summary(found)
    shown = render_plain(as_table(found), 300)
    assert shown.count(": overload") == 7
    assert "late: overload" in shown
