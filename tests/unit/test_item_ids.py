"""Item ids within 0…2⁶³ − 1: taken exactly, or refused by name with value and limit, at every entrance alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.errors import DecodeError, Rejected
from relaygr_stream.gateway.bodies import decoded
from relaygr_stream.gateway.messages import JSON, MSGPACK, Format, Rank
from relaygr_stream.history.packed import PLAIN, UPPER, joined, pack, unpack, widths
from relaygr_stream.history.sqlite_store import SqliteStore
from relaygr_stream.models.api import Tokens
from relaygr_stream.settings.schema import Relay
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import decode, encode, validated
from relaygr_stream.wire.history import BLOCK, HistoryReference, digests
from relaygr_stream.wire.messages import (
    CANDIDATE_DTYPES,
    PreInferSignal,
    RankingRequest,
    RequestEvent,
    candidate_fields,
    with_version,
)
from relaygr_stream.workload.logs import read_log
from relaygr_stream.workload.replay import Replay, ReplayOptions
from tests.properties import examples

MOST: Final = 2**63 - 1
NARROW: Final = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
WIDE: Final = [2**32, 2**53 - 1, 2**53, 2**53 + 1, MOST - 1, MOST]
#: What no id is, in lists of Python.
NOT_IDS: Final[list[Any]] = [-1, -(2**31), -(2**63), 2**63, 2**64 - 1, 2**64, 10**30, 0.0, 1.5, 2.0**53, True, False]
TEXTS: Final[list[Any]] = ["", "5", "x", None]
FIELDS: Final[dict[str, Any]] = {"request_id": "r", "user_id": "u"}
IDS: Final = st.lists(st.one_of(st.sampled_from(NARROW + WIDE), st.integers(0, MOST)), min_size=1, max_size=70)


def behaviours(ids: Any) -> Behaviours:
    return Behaviours.from_arrays(ids, [1] * len(ids), range(len(ids)))


def items(found: Behaviours) -> list[int]:
    return [int(each) for each in found.arrays()[0]]


def ranking(prefix: Any, suffix: Any, candidates: Any) -> RankingRequest:
    before, after = behaviours(prefix), behaviours(suffix)
    after = msgspec.structs.replace(after, times=np.arange(100, 100 + len(after)).astype("<i8").tobytes())
    return RankingRequest(
        **FIELDS, prefix=before, suffix=after, **candidate_fields(candidates, msgspec.UNSET, before, after)
    )


def packed_candidates(values: Any) -> bytes:
    packed: bytes = candidate_fields(values, msgspec.UNSET)["candidates"]
    return packed


def candidates(found: RankingRequest) -> list[int]:
    return [int(each) for each in np.frombuffer(found.candidates, CANDIDATE_DTYPES[found.v >= 4])]


# ---- the arrays of a client ----


@given(IDS, IDS, IDS)
@settings(max_examples=examples(200))
def test_ids_travel_exactly_and_small_ones_as_ever(prefix: list[int], suffix: list[int], ranked: list[int]) -> None:
    request = ranking(prefix, suffix, ranked)
    data = encode(validated(request))
    found = decode(RankingRequest, data)
    assert (items(found.prefix), items(found.suffix), candidates(found)) == (prefix, suffix, ranked)
    assert Tokens.from_behaviours(found.prefix).array[0].tolist() == prefix
    small = max(prefix + suffix + ranked) < 2**32
    assert (found.v, found.min_v) == ((1, 0) if small else (4, 4))
    if small:
        assert request.candidates == pack_items(ranked)


@pytest.mark.parametrize("make", [list, tuple, np.array], ids=["list", "tuple", "array"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("bad", NOT_IDS + TEXTS, ids=repr)
def test_arrays_with_another_value_are_refused(bad: Any, place: int, make: Callable[[Any], Any]) -> None:
    values = [5, 6]
    values[place] = bad
    given = make(values)
    if make is np.array and isinstance(bad, bool):
        given = np.array([bad])  # beside an integer numpy makes one of it before anybody sees it
    for take, name in (
        (lambda: behaviours(given), "items"),
        (lambda: packed_candidates(given), "candidates: item ids"),
    ):
        with pytest.raises(ValueError, match=rf"^{name} must be .*within 0…{MOST}, got ") as caught:
            take()
        if make is not np.array:
            assert f"at position {place}" in str(caught.value)


def test_arrays_of_other_shapes_and_types_are_refused_by_name() -> None:
    for bad in ([[1], [2, 3]], [[1]], 7, np.array(["2020"], "M8[D]"), np.array([1, 2], object)):
        with pytest.raises(ValueError, match="candidates: item ids must be"):
            packed_candidates(bad)
    with pytest.raises(ValueError, match="2 items, 1 actions"):  # not one item of 8 bytes
        Behaviours.from_arrays([1, 2], [0], [0])
    assert packed_candidates([]) == b""
    assert candidates(ranking([1], [2], np.array([MOST], np.uint64))) == [MOST]


# ---- bytes that anybody may send ----


@pytest.mark.parametrize("bad", [-1, -(2**63), 2**63, 2**64 - 1])
def test_a_wide_id_beyond_the_largest_is_refused(bad: int) -> None:
    packed = np.array([5, bad % 2**64], np.uint64).tobytes()
    wide = Behaviours(packed, b"\1\1", bytes(16))
    plain = {**FIELDS, "v": 4}
    messages: dict[str, Any] = {
        "items": RequestEvent(**plain, prefix=wide, candidates=1),
        "items ": PreInferSignal(**plain, prefix=wide, admitted_ms=1, life_ms=1.0),
        "items  ": RankingRequest(**plain, prefix=Behaviours(), suffix=wide, candidates=bytes(8)),
        "candidates": RankingRequest(**plain, prefix=Behaviours(), candidates=packed),
    }
    for name, message in messages.items():
        with pytest.raises(
            DecodeError, match=rf"{name.strip()} must be within 0…{MOST}, got -\d+ at position 1"
        ) as caught:
            decode(type(message), encode(message))
        assert caught.value.reason == "invalid"


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_message_that_earlier_readers_would_misread_must_say_so(version: int) -> None:
    whole = ranking([MOST], [MOST], [MOST])
    narrow, small = behaviours([1]), {"candidates": bytes(4), "v": version, "min_v": version}
    messages: list[Any] = [
        RequestEvent(**FIELDS, prefix=behaviours([MOST]), candidates=1, v=version),
        msgspec.structs.replace(whole, suffix=narrow, **small),
        msgspec.structs.replace(whole, prefix=narrow, **small),
    ]
    for message in messages:
        with pytest.raises(DecodeError, match="must state min_v 4"):
            decode(type(message), encode(message))
        later = msgspec.structs.replace(message, v=4, min_v=0)
        if isinstance(later, RankingRequest):
            later = msgspec.structs.replace(later, candidates=bytes(8))
        assert decode(type(message), encode(later)) == later


def test_a_reader_of_before_refuses_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(ranking([MOST], [1], [1]))
    monkeypatch.setattr("relaygr_stream.wire.versions.READ_VERSION", 3)
    with pytest.raises(DecodeError, match="for readers of version 4") as caught:
        decode(RankingRequest, data)
    assert caught.value.reason == "unknown_version"


@pytest.mark.parametrize("size", [0, 1, 3, 5, 7, 9, 12, 16, 20])
def test_items_have_4_or_8_bytes_each(size: int) -> None:
    with pytest.raises(ValueError, match="parallel arrays"):
        Behaviours(bytes(2 * size if size % 4 else size + 1), b"\1\1", bytes(16)).checked(ValueError)


# ---- the gateway ----

HISTORY: Final = {"items": [5], "actions": [1], "times": [1]}


@pytest.mark.parametrize("form", [JSON, MSGPACK], ids=["json", "msgpack"])
@given(IDS, IDS)
@settings(max_examples=examples(60))
def test_the_gateway_takes_ids_exactly(form: Format, prefix: list[int], ranked: list[int]) -> None:
    before, ids = behaviours(prefix), packed_candidates(ranked)
    history: dict[str, Any] = {"items": prefix, "actions": [1] * len(prefix), "times": list(range(len(prefix)))}
    bodies: list[dict[str, Any]] = [{"history": history, "candidates": ranked}]
    if before.wide == (len(ids) > 4 * len(ranked)):
        packed = {"items": before.items, "actions": before.actions, "times": before.times}
        bodies.append({"history": packed, "candidates": ids, "item_bytes": 8 if before.wide else 4})
    for body in bodies:
        rank = decoded(form.encode({"user_id": "u", **body}), form, Rank, Relay())
        assert rank.history
        before = rank.history.behaviours("history")
        request = rank.request("r", "", {"prefix": before, **with_version(msgspec.UNSET, before)})
        found = decode(RankingRequest, encode(validated(request)))
        assert (items(found.prefix), candidates(found)) == (prefix, ranked)
        assert request == msgspec.structs.replace(ranking(prefix, [], ranked), suffix=Behaviours())


@pytest.mark.parametrize("form", [JSON, MSGPACK], ids=["json", "msgpack"])
@pytest.mark.parametrize("bad", NOT_IDS + TEXTS, ids=repr)
def test_the_gateway_refuses_what_a_client_does(form: Format, bad: Any) -> None:
    if form is MSGPACK and isinstance(bad, int) and not -(2**63) <= bad < 2**64:
        pytest.skip("MessagePack has no such number")
    body: dict[str, Any] = {"user_id": "u", "history": HISTORY, "candidates": [5]}
    changes: dict[str, dict[str, Any]] = {
        "candidates": {"candidates": [5, bad]},
        "history.items": {"history": {"items": [5, bad], "actions": [1, 1], "times": [1, 2]}},
        "suffix.items": {"suffix": {"items": [5, bad], "actions": [1, 1], "times": [1, 2]}},
    }
    for place, change in changes.items():
        with pytest.raises(Rejected, match=rf"must be .*within 0…{MOST}, got .* at position 1 of `\$.{place}`"):
            decoded(form.encode({**body, **change}), form, Rank, Relay())


@pytest.mark.parametrize("stated", [4, 8])
def test_packed_ids_of_another_size_than_stated_are_refused(stated: int) -> None:
    """Twice as many items as actions are not half as many large ones."""
    made = behaviours([1, 2]) if stated == 8 else behaviours([2**40, 2**41])
    history = {"items": made.items, "actions": made.actions, "times": made.times}
    body = {"user_id": "u", "history": history, "candidates": [1], "item_bytes": stated}
    with pytest.raises(Rejected, match=rf"history: items.* parallel arrays; \d+ bytes of items \({stated} each"):
        decoded(MSGPACK.encode(body), MSGPACK, Rank, Relay())


# ---- history stores ----


@given(st.lists(IDS, min_size=1, max_size=4))
@settings(max_examples=examples(60))
def test_a_history_in_parts_is_the_history_and_so_are_its_digests(parts: list[list[int]]) -> None:
    async def run() -> None:
        folder = TemporaryDirectory()
        store, whole = SqliteStore(Path(folder.name) / "histories", 20.0), list[int]()
        try:
            for part in parts:
                start = len(whole)
                whole += part
                times = range(start, len(whole))
                reference = await store.append("u", "", Behaviours.from_arrays(part, [1] * len(part), times))
                assert items(await store.read("u", "", 0, 0, len(whole))) == whole
                assert items(await store.read("u", "", 0, start, len(whole))) == part
                assert reference.digest == HistoryReference.from_behaviours(behaviours(whole)).digest
                for at, digest in reference.stated().items():
                    assert digest == HistoryReference.from_behaviours(behaviours(whole[:at])).digest
            assert (await store.replace("u", "", behaviours(parts[0]))).digest == HistoryReference.from_behaviours(
                behaviours(parts[0])
            ).digest
            assert items(await store.read("u", "", 0, 0, 1000)) == parts[0]
        finally:
            await store.close()
            folder.cleanup()

    asyncio.run(run())


@given(IDS, st.booleans())
@settings(max_examples=examples(60))
def test_rows_of_a_store_hold_ids_and_features(ids: list[int], features: bool) -> None:
    table: Any = {"dwell:float32": np.arange(len(ids), dtype="<f4").tobytes()} if features else msgspec.UNSET
    whole = msgspec.structs.replace(behaviours(ids), columns=table)
    columns = {"dwell:float32": 4} if features else {}
    stored = columns | ({UPPER: 4} if max(ids) >= 2**32 else {})
    groups = pack(whole)
    assert [len(group) for group in groups] == [len(ids) * size for size in widths(stored)]
    assert unpack(groups, stored) == whole
    assert len(groups[0]) == PLAIN.itemsize * len(ids)
    assert unpack(pack(whole, wide=True), columns | {UPPER: 4}) == whole


def test_a_digest_does_not_depend_on_how_ids_are_packed() -> None:
    ids = list(range(3 * BLOCK))
    narrow = behaviours(ids)
    loose = msgspec.structs.replace(narrow, items=np.array(ids, "<i8").tobytes())
    lengths = [1, BLOCK, BLOCK + 7, 3 * BLOCK]
    assert loose.wide and digests(loose, lengths) == digests(narrow, lengths)
    grown = behaviours([*ids, MOST])
    assert digests(grown, lengths) == digests(narrow, lengths)
    assert digests(grown, [len(grown)]) != digests(behaviours([*ids, MOST % 2**32]), [len(grown)])


def test_what_a_store_may_answer_has_a_digest_and_is_refused_by_name() -> None:
    """A worker compares digests before anything else, of whatever a store of the user's own returns."""
    times = np.arange(4).astype("<i8").tobytes()
    for broken, error in (
        (Behaviours(bytes(20), bytes(4), times), "parallel arrays"),
        (Behaviours(bytes(31), bytes(4), times), "parallel arrays"),
        (Behaviours(bytes(36), bytes(4), times), "parallel arrays"),
        (Behaviours(np.array([1, 2, -3, 4], "<i8").tobytes(), bytes(4), times), f"within 0…{MOST}, got -3"),
    ):
        assert digests(broken, [4])[4] and len(joined(behaviours([MOST]), broken)) == 5
        with pytest.raises(ValueError, match=error):
            broken.checked(ValueError)


# ---- logs ----


def written(path: Path, ids: list[Any], jsonl: bool) -> Path:
    rows = [("u", each, 1_700_000_000 + at) for at, each in enumerate(ids)]
    if jsonl:
        lines = [json.dumps(dict(zip(("user", "item", "time"), row, strict=True))) for row in rows]
    else:
        lines = ["user,item,time", *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("jsonl", [False, True], ids=["csv", "jsonl"])
@pytest.mark.parametrize("ids", [NARROW, NARROW + WIDE], ids=["narrow", "wide"])
def test_a_log_is_replayed_with_its_ids(ids: list[int], jsonl: bool, tmp_path: Path) -> None:
    log = read_log(written(tmp_path / f"log.{'jsonl' if jsonl else 'csv'}", [*ids, *ids], jsonl))
    assert log.items.tolist() == [*ids, *ids] and not log.item_names
    options = ReplayOptions(min_history=len(ids), suffix=1, candidates=2, requests=1)
    (item,) = Replay(log, options)
    assert items(item.request.prefix) + items(item.request.suffix) == [*ids, *ids][:-1]
    assert item.target is not None and candidates(item.request)[item.target] == ids[-1]
    assert validated(item.request).v == validated(item.event).v == (4 if max(ids) >= 2**32 else 1)


@pytest.mark.parametrize("jsonl", [False, True], ids=["csv", "jsonl"])
@pytest.mark.parametrize("bad", [-1, 2**63, 10**30, 1.5, 2.0**53, 1e300, True], ids=repr)
def test_a_log_names_what_is_no_id(bad: Any, jsonl: bool, tmp_path: Path) -> None:
    path = written(tmp_path / f"log.{'jsonl' if jsonl else 'csv'}", [*range(100), bad], jsonl)
    log = read_log(path, item_ids="number")
    assert log.items.tolist() == list(range(100))
    assert isinstance(bad, bool) or f"within 0…{MOST}" in log.broken_text()
