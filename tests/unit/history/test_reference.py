"""References to histories: their digests, and the rules of messages that carry one."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.errors import DecodeError
from relaygr_stream.wire import versions
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import Message, decode, encode, validated
from relaygr_stream.wire.history import MAX_POSITIONS, HistoryReference, digests
from relaygr_stream.wire.messages import PreInferSignal, RankingRequest, RequestEvent, with_version
from tests.unit.history.behaviours import history

lengths = st.integers(0, 300)


def written_out(behaviours: Behaviours) -> bytes:
    """The digest as docs/reference/protocol.md defines it."""
    n, table = len(behaviours), sorted(behaviours.table.items())
    layout = ",".join(f"{key}={len(data) // n}" for key, data in table) if n else ""
    state = blake2b(layout.encode(), digest_size=16).digest()
    for at in range(0, n, 64):
        part = behaviours.slice(at, min(n, at + 64))
        rows = part.items + part.actions + part.times + b"".join(part.table[key] for key, _ in table)
        state = blake2b(state + rows, digest_size=16).digest()
    return state


@given(st.lists(lengths, min_size=1), st.booleans())
def test_digests_are_those_of_the_documentation(wanted: list[int], features: bool) -> None:
    whole = history(max(wanted), features=features)
    found = digests(whole, wanted)
    assert found.keys() == set(wanted)
    for at in wanted:
        if at or not whole.table:
            assert found[at] == written_out(whole.slice(0, at))


@given(lengths, lengths, st.booleans())
def test_a_digest_goes_on_from_the_last_whole_block(first: int, more: int, features: bool) -> None:
    first, stop = first + 1, first + 1 + more
    whole, boundary = history(stop, features=features), first - first % 64
    state = digests(whole, [boundary])[boundary]
    assert digests(whole.slice(boundary, stop), [stop], boundary, state) == digests(whole, [stop])


@given(st.integers(1, 200), st.data())
def test_any_change_changes_the_digest(length: int, data: st.DataObject) -> None:
    whole = history(length, features=True)
    parts = {name: bytearray(getattr(whole, name)) for name in ("items", "actions", "times")}
    name = data.draw(st.sampled_from(sorted(parts)))
    at = data.draw(st.integers(0, len(parts[name]) - 1))
    parts[name][at] ^= 1 << data.draw(st.integers(0, 7))
    changed = Behaviours(columns=whole.columns, **{each: bytes(value) for each, value in parts.items()})
    assert digests(changed, [length]) != digests(whole, [length])


def test_columns_and_their_widths_are_part_of_the_digest() -> None:
    plain, same = history(8), history(8)
    with_column = Behaviours(plain.items, plain.actions, plain.times, {"a:int32": bytes(32)})
    other_name = Behaviours(plain.items, plain.actions, plain.times, {"b:int32": bytes(32)})
    assert len({HistoryReference.from_behaviours(each).digest for each in (plain, same, with_column, other_name)}) == 3


def test_a_reference_states_its_newest_positions_and_none_beyond_its_length() -> None:
    found = HistoryReference.from_behaviours(history(200), 3, range(0, 300, 2))
    assert sorted(found.stated()) == list(range(200 - 2 * MAX_POSITIONS, 201, 2))
    beyond = msgspec.structs.replace(found, length=190)
    assert max(beyond.stated()) == 190
    assert found.stated()[198] == HistoryReference.from_behaviours(history(198)).digest
    assert found.stated()[200] == found.digest


# ---- messages ----

REFERENCE = HistoryReference.from_behaviours(history(100), 7, [60, 90])
NO_PREFIX: dict[str, Any] = {"request_id": "r", "user_id": "u", "prefix": Behaviours()}
MESSAGES: list[Message] = [
    RequestEvent(**NO_PREFIX, candidates=5, **with_version(REFERENCE)),
    PreInferSignal(**NO_PREFIX, admitted_ms=1, life_ms=5.0, **with_version(REFERENCE)),
    RankingRequest(**NO_PREFIX, candidates=bytes(4), **with_version(REFERENCE)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_with_a_reference_survives_the_wire(message: Any) -> None:
    data = encode(validated(message))
    assert decode(type(message), data) == message
    assert len(data) < 400  # a prefix of 100 behaviours has 1,300 bytes


@pytest.mark.parametrize("key", ["", "k" * 73])
def test_a_column_that_no_receiver_accepts_is_refused_by_its_sender(key: str) -> None:
    """A gateway accepted it, and each such event became a dead letter."""
    prefix = msgspec.structs.replace(history(1), columns={key: bytes(4)})
    with pytest.raises(msgspec.ValidationError):
        validated(RequestEvent(request_id="r", user_id="u", prefix=prefix, candidates=1))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_an_older_reader_refuses_it_by_its_version(message: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "READ_VERSION", 1)
    with pytest.raises(DecodeError) as refused:
        decode(type(message), encode(message))
    assert refused.value.reason == "unknown_version"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prefix": {"items": bytes(4), "actions": bytes(1), "times": bytes(8)}}, "invalid"),
        ({"v": 1, "min_v": 1}, "invalid"),
        ({"v": 1, "min_v": 0}, "invalid"),
        ({"v": 3, "min_v": 1}, "invalid"),
        ({"history": {"length": 0, "digest": bytes(16)}}, "malformed"),
        ({"history": {"length": 5, "digest": bytes(15)}}, "malformed"),
        ({"history": {"length": 5}}, "malformed"),
        ({"history": {"length": 5, "digest": bytes(16), "positions": bytes(20 * 33)}}, "malformed"),
        ({"history": {"length": 5, "digest": bytes(16), "positions": bytes(30)}}, "invalid"),
        ({"history": 7}, "malformed"),
        ({"history": "x" * 65}, "malformed"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_reference_that_is_none_is_refused(message: Any, change: dict[str, Any], reason: str) -> None:
    with pytest.raises(DecodeError) as refused:
        decode(type(message), msgpack.packb({**msgpack.unpackb(encode(message)), **change}))
    assert refused.value.reason == reason
