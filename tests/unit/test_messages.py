"""Every message survives the wire; nothing hostile gets through as anything but DecodeError."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.errors import DecodeError
from relaygr_stream.wire.behaviours import MAX_TIME_MS, Behaviours, pack_items
from relaygr_stream.wire.codec import MAX_MESSAGE_BYTES, Message, decode, encode
from relaygr_stream.wire.messages import (
    Cancel,
    CostModel,
    LaneStatus,
    PreInferSignal,
    RankingRequest,
    RequestEvent,
    RequestEventInPlace,
    ScoreReply,
    Timings,
    WorkerStatus,
)
from relaygr_stream.wire.versions import MAX_DETAIL, READ_VERSION, SCHEMA_VERSION
from tests.properties import examples

KINDS: list[Any] = [RequestEvent, PreInferSignal, RankingRequest, Cancel, ScoreReply, WorkerStatus]

ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=256)
labels = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=128)
unix_ms = st.integers(0, 2**53 - 1)
millis = st.floats(0, 3.6e6)
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def behaviours(draw: st.DrawFn, min_size: int = 0, first_ms: int = 1 - MAX_TIME_MS) -> Behaviours:
    size = draw(st.integers(min_size, 20))
    items = draw(st.lists(st.integers(0, 2**32 - 1), min_size=size, max_size=size))
    actions = draw(st.lists(st.integers(0, 255), min_size=size, max_size=size))
    times = sorted(draw(st.lists(st.integers(first_ms, MAX_TIME_MS - 1), min_size=size, max_size=size)))
    return Behaviours.from_arrays(np.array(items, np.int64), np.array(actions, np.int64), np.array(times, np.int64))


@st.composite
def rankings(draw: st.DrawFn) -> RankingRequest:
    prefix = draw(behaviours())
    last = int(prefix.arrays()[2][-1]) if len(prefix) else 1 - MAX_TIME_MS
    return RankingRequest(
        request_id=draw(ids),
        user_id=draw(ids),
        prefix=prefix,
        suffix=draw(behaviours(first_ms=last)),
        candidates=pack_items(draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))),
        sent_ms=draw(unix_ms),
        timeout_ms=draw(millis),
        mode=draw(st.sampled_from(["auto", "full"])),
        hops=draw(st.integers(0, 2)),
        tenant=draw(labels),
        client_id=draw(labels),
    )


@st.composite
def replies(draw: st.DrawFn) -> ScoreReply:
    tasks = tuple(draw(st.lists(st.text("abc", min_size=1), min_size=1, max_size=3)))
    return ScoreReply(
        request_id=draw(ids),
        status=draw(st.sampled_from(["ok", "deadline_exceeded", "overloaded", "rejected", "failed"])),
        outcome=draw(st.sampled_from([None, "hbm", "dram", "joined", "full", "truncated"])),
        scores=draw(st.binary(min_size=8, max_size=8)) * len(tasks),
        tasks=tasks,
        admission=draw(st.text(max_size=64)),
        timings=draw(
            st.builds(
                Timings,
                inbound_ms=finite,
                queued_ms=finite,
                device_ms=finite,
                worker_ms=finite,
                computed_tokens=st.integers(0, 2**53),
            )
        ),
    )


lane_statuses = st.builds(
    LaneStatus,
    lane=st.integers(0, 9999),
    budget_bytes=st.integers(0, 2**62),
    pinned_bytes=st.integers(0, 2**62),
    pre_infer_offset=st.integers(0, 2**62),
)
statuses = st.builds(
    WorkerStatus,
    v=st.just(SCHEMA_VERSION),
    name=ids,
    incarnation=st.integers(0, 2**63),
    host=st.text("ab."),
    pid=st.integers(0, 2**22),
    sent_ms=unix_ms,
    state=st.sampled_from(["starting", "serving", "draining", "stopped"]),
    lanes=st.lists(lane_statuses, max_size=3).map(tuple),
    costs=st.builds(CostModel, c0=finite, c1=finite, c2=finite, c3=finite),
    bytes_per_token=st.integers(1, 2**40),
    alloc_bytes=st.integers(1, 2**40),
    queue_ms=finite,
    pre_infer_wait_ms=finite,
    head_start_ms=finite,
    model_version=st.text("ab"),
    counters=st.dictionaries(st.text("ab"), finite, max_size=3),
)
events = st.builds(
    RequestEvent,
    v=st.just(SCHEMA_VERSION),
    request_id=ids,
    user_id=ids,
    prefix=behaviours(),
    candidates=st.integers(0, 1_000_000),
    sent_ms=unix_ms,
    rank_in_ms=millis,
    tenant=labels,
)
signals = st.builds(
    PreInferSignal,
    v=st.just(SCHEMA_VERSION),
    request_id=ids,
    user_id=ids,
    prefix=behaviours(min_size=1),
    admitted_ms=unix_ms,
    life_ms=millis,
    rank_in_ms=millis,
    tenant=labels,
)
messages: st.SearchStrategy[Message] = st.one_of(events, signals, rankings(), replies(), statuses)


VERDICTS = ("a message", "malformed", "unknown_version", "invalid")


def kind_of(message: Message) -> Any:
    return type(message)


def verdict(kind: Any, data: bytes) -> str:
    try:
        decode(kind, data)
    except DecodeError as error:
        return error.reason
    return "a message"


@given(messages)
def test_a_message_survives_the_wire(message: Message) -> None:
    assert decode(kind_of(message), encode(message)) == message


@given(messages)
def test_a_foreign_client_reads_a_message_as_a_plain_map_and_can_write_it_again(message: Message) -> None:
    plain = msgpack.unpackb(encode(message))
    assert plain["v"] == SCHEMA_VERSION
    assert decode(kind_of(message), msgpack.packb(plain)) == message


def test_a_foreign_client_writes_a_request_event_by_the_documented_layout() -> None:
    data = msgpack.packb(
        {
            "v": 1,
            "request_id": "r-1",
            "user_id": "u-7",
            "prefix": {
                "items": (5).to_bytes(4, "little") + (6).to_bytes(4, "little"),
                "actions": bytes([1, 2]),
                "times": (1_700_000_000_000).to_bytes(8, "little") + (1_700_000_000_500).to_bytes(8, "little"),
            },
            "candidates": 100,
            "a_field_of_a_later_client": {"nested": [1, 2]},
        }
    )
    event = decode(RequestEvent, data)
    items, actions, times = event.prefix.arrays()
    assert items.tolist() == [5, 6]
    assert actions.tolist() == [1, 2]
    assert times.tolist() == [1_700_000_000_000, 1_700_000_000_500]
    assert (event.sent_ms, event.rank_in_ms) == (0, 0.0)


@given(events, st.integers(0, 2**32))
def test_an_event_read_in_place_is_the_event_and_its_faults_the_same(event: RequestEvent, seed: int) -> None:
    data = encode(event)
    in_place = decode(RequestEventInPlace, data)
    assert encode(in_place) == data
    assert len(in_place.prefix) == len(event.prefix)
    signal = PreInferSignal(
        request_id="r", user_id="u", prefix=in_place.prefix, admitted_ms=1, life_ms=2.0, rank_in_ms=in_place.rank_in_ms
    )
    assert encode(signal) == encode(msgspec.structs.replace(signal, prefix=event.prefix))
    damaged = bytearray(data)
    damage = random.Random(seed)
    for _ in range(damage.randint(1, 4)):
        damaged[damage.randrange(len(damaged))] = damage.randrange(256)
    assert verdict(RequestEventInPlace, bytes(damaged)) == verdict(RequestEvent, bytes(damaged))


@given(messages, st.integers(0, 2**32))
def test_a_damaged_message_is_a_message_or_a_decode_error(message: Message, seed: int) -> None:
    data = bytearray(encode(message))
    damage = random.Random(seed)
    for _ in range(damage.randint(1, 4)):
        data[damage.randrange(len(data))] = damage.randrange(256)
    data = data[: damage.randint(0, len(data))] if damage.random() < 0.3 else data
    for kind in KINDS:
        assert verdict(kind, bytes(data)) in VERDICTS


@given(st.binary(max_size=200), st.sampled_from(KINDS))
def test_any_bytes_are_a_message_or_a_decode_error(data: bytes, kind: Any) -> None:
    assert verdict(kind, data) in VERDICTS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "data",
    [
        None,
        b"",
        b"\xc1",
        b"\x80",
        b"\x90",
        b"\x91" * 100_000,
        b"\x81\xa1v" * 100_000 + b"\x01",
        b"\x82\xa1v\x01\xa1x" + b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x82\xa1v\x01\xa6prefix\xdf\xff\xff\xff\xff",
        b"\x81\xa7user_id\xa2\xff\xff",
    ],
)
def test_hostile_bytes_are_malformed_and_cost_no_memory(kind: Any, data: bytes | None) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError) as caught:
            decode(kind, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.reason == "malformed"
    assert peak < 2_000_000


def test_an_oversized_message_is_not_decoded() -> None:
    with pytest.raises(DecodeError, match="the limit is 10") as caught:
        decode(RequestEvent, b"\x91" * 11, 10)
    assert caught.value.reason == "oversized"
    with pytest.raises(DecodeError) as caught:
        decode(RequestEvent, bytes(MAX_MESSAGE_BYTES + 1))
    assert caught.value.reason == "oversized"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", [0, READ_VERSION + 1, -1, 2**63])
def test_another_version_says_so_whatever_its_shape(kind: Any, version: int) -> None:
    with pytest.raises(DecodeError, match=f"schema version {version}, .*this program reads {READ_VERSION}") as caught:
        decode(kind, msgpack.packb({"v": version, "prefix": "of another shape"}))
    assert caught.value.reason == "unknown_version"


def plain_ranking(**changes: Any) -> bytes:
    at = np.array([10, 20], "<i8").tobytes()
    two = {"items": bytes(8), "actions": bytes(2), "times": at}
    fields = {"v": 1, "request_id": "r", "user_id": "u", "prefix": two, "candidates": bytes(8)}
    return bytes(msgpack.packb(fields | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"candidates": b""}, "invalid"),
        ({"candidates": bytes(5)}, "invalid"),
        ({"prefix": {"items": bytes(4)}}, "invalid"),
        ({"prefix": {"items": bytes(3)}}, "invalid"),
        ({"prefix": {"items": bytes(8), "actions": bytes(2), "times": np.array([2, 1], "<i8").tobytes()}}, "invalid"),
        (
            {"suffix": {"items": bytes(4), "actions": bytes(1), "times": np.array([19], "<i8").tobytes()}},
            "invalid",
        ),
        ({"prefix": {"items": "text"}}, "malformed"),
        ({"prefix": None}, "malformed"),
        ({"user_id": ""}, "malformed"),
        ({"user_id": "x" * 257}, "malformed"),
        ({"user_id": 7}, "malformed"),
        ({"sent_ms": -1}, "malformed"),
        ({"sent_ms": 2**53}, "malformed"),
        ({"sent_ms": 1.5}, "malformed"),
        ({"timeout_ms": -1}, "malformed"),
        ({"timeout_ms": float("nan")}, "malformed"),
        ({"timeout_ms": float("inf")}, "malformed"),
        ({"hops": 3}, "malformed"),
        ({"tenant": "a\0b"}, "malformed"),
        ({"tenant": "a\n"}, "malformed"),
        ({"tenant": "\x9b"}, "malformed"),
        ({"tenant": "x" * 129}, "malformed"),
        ({"client_id": "\x1b[2J"}, "malformed"),
        ({"client_id": "x" * 129}, "malformed"),
        ({"mode": "x" * 65}, "malformed"),
        ({"min_v": -1}, "malformed"),
        ({"v": True}, "malformed"),
        ({"v": "1"}, "malformed"),
    ],
)
def test_a_contradictory_request_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    assert decode(RankingRequest, plain_ranking()).user_id == "u"
    with pytest.raises(DecodeError) as caught:
        decode(RankingRequest, plain_ranking(**changes))
    assert caught.value.reason == reason


def test_a_signal_without_behaviours_and_ragged_scores_are_invalid() -> None:
    signal = PreInferSignal(request_id="r", user_id="u", prefix=Behaviours(), admitted_ms=1, life_ms=1)
    with pytest.raises(DecodeError, match="at least one behaviour"):
        decode(PreInferSignal, encode(signal))
    with pytest.raises(DecodeError, match="not a multiple of a row of 8"):
        decode(ScoreReply, encode(ScoreReply(request_id="r", status="ok", scores=bytes(12), tasks=("a", "b"))))


@given(behaviours(), st.integers(0, 20), st.integers(0, 20))
def test_a_slice_holds_the_behaviours_asked_for(all_of: Behaviours, start: int, stop: int) -> None:
    part = all_of.slice(start, stop)
    assert len(part) == len(range(len(all_of))[start:stop])
    for column in range(3):
        assert part.arrays()[column].tolist() == all_of.arrays()[column][start:stop].tolist()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (([-1], [0], [0]), "items must be within 0…9223372036854775807, got -1 at"),
        (([2**63], [0], [0]), "items must be within"),
        (([1], [256], [0]), "actions must be within 0…255"),
        (([1.5], [0], [0]), "items must be integers within 0…9223372036854775807, got 1.5 at"),
        (([[1]], [0], [0]), "one-dimensional"),
        (([1, 2], [0], [0]), "parallel arrays"),
        (([1, 2], [0, 0], [5, 4]), "behaviour 1 is at 4 after 5"),
    ],
)
def test_packing_values_that_do_not_fit_is_a_value_error(arrays: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Behaviours.from_arrays(*arrays)


@settings(max_examples=examples(20))
@given(st.integers(0, 3000), st.integers(0, 500))
def test_costs_follow_their_formula(n: int, m: int) -> None:
    costs = CostModel(c0=1.0, c1=0.5, c2=0.25, c3=0.125)
    assert costs.full_ms(n, m) == 1.0 + 0.5 * n + 0.25 * n * n + 0.125 * n * m
    assert costs.pre_infer_ms(n) == costs.full_ms(n, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_times_of_an_answer_are_finite(value: float) -> None:
    """One that is not would spoil whatever is summed from it."""
    reply = msgspec.to_builtins(ScoreReply(request_id="r", status="failed"), builtin_types=(bytes,))
    reply["timings"]["device_ms"] = value
    with pytest.raises(DecodeError, match="device_ms"):
        decode(ScoreReply, msgpack.packb(reply))


def test_a_detail_does_not_carry_the_message() -> None:
    with pytest.raises(DecodeError) as refused:
        decode(ScoreReply, msgpack.packb({"request_id": "r", "status": "x" * 100_000}))
    assert len(refused.value.detail) <= MAX_DETAIL


@pytest.mark.parametrize(
    ("arrays", "counts"),
    [(([1, 2], [1], [1, 2]), "2 items, 1 actions and 2 times"), (([], [1], []), "0 items, 1 actions and 0 times")],
)
def test_arrays_of_several_lengths_are_told_in_rows(arrays: tuple[Any, Any, Any], counts: str) -> None:
    with pytest.raises(ValueError, match=f"got {counts}"):
        Behaviours.from_arrays(*arrays)
    with pytest.raises(ValueError, match=r"got 6 bytes of items \(4 each\), 1 actions and 1 times"):
        Behaviours(bytes(6), bytes(1), bytes(8)).checked(ValueError)
