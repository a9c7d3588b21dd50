"""Feature columns: the schema, their packed form, and the errors that name a column."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from relaygr_stream.cache.entry import Coverage, Entry
from relaygr_stream.client import RelayClient
from relaygr_stream.engine.commands import Rank
from relaygr_stream.engine.ranking import Ranking
from relaygr_stream.errors import ConfigError, DecodeError, Rejected
from relaygr_stream.handover.wire import Offer, token_bytes
from relaygr_stream.models.api import USER_ACTION, Tokens
from relaygr_stream.settings.schema import Kafka, Relay, Settings
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import check_features, decode, encode
from relaygr_stream.wire.features import NO_FEATURES, FeatureColumn, FeatureSchema, FeatureTables
from relaygr_stream.wire.messages import PreInferSignal, RankingRequest, RequestEvent
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION, Record
from relaygr_stream.worker.intake import Intake, IntakeLimits, TooMuch
from tests.unit.client_peers import responder_on
from tests.waiting import until

VECTORS = json.loads((Path(__file__).parents[2] / "docs/reference/protocol-vectors.json").read_text(encoding="utf-8"))
SCHEMA = FeatureSchema(
    (
        FeatureColumn(name="age", of="user", dtype="int32"),
        FeatureColumn(name="interests", of="user", dtype="float32", width=3),
        FeatureColumn(name="dwell_s", of="behaviour", dtype="float32"),
        FeatureColumn(name="place", of="behaviour", dtype="int64"),
        FeatureColumn(name="shop", of="candidate", dtype="int64"),
        FeatureColumn(name="affinity", of="cross", dtype="float32", width=2),
    )
)
ROUTE = ((HEADER_CORRELATION, b"c"), (HEADER_REPLY_PARTITION, b"0"))


def history(start: int, dwell: list[float], place: list[int]) -> Behaviours:
    n = len(dwell)
    plain = Behaviours.from_arrays(range(start, start + n), [1] * n, range(start * 1000, (start + n) * 1000, 1000))
    tables = SCHEMA.pack({"dwell_s": dwell, "place": place}, {"behaviour": n})
    return msgspec.structs.replace(plain, columns=tables["behaviour"])


def request() -> RankingRequest:
    user = SCHEMA.pack({"age": 31, "interests": [0.5, -1.0, 2.0]}, {"user": 1})["user"]
    candidate = SCHEMA.pack({"shop": [7, -8], "affinity": [[0.1, 0.2], [0.3, 0.4]]}, {"candidate": 2})["candidate"]
    return RankingRequest(
        request_id="r",
        user_id="u",
        prefix=history(1, [1.5, 2.5, 0.0], [1 << 40, -2, 3]),
        suffix=history(9, [9.0], [4]),
        candidates=pack_items([5, 6]),
        columns=FeatureTables(SCHEMA.digest, user, candidate),
    )


def intake(schema: FeatureSchema = SCHEMA) -> Intake:
    return Intake(IntakeLimits(Relay(), 1000.0, 1, 1 << 20), features=schema)


def ranking(value: bytes, schema: FeatureSchema = SCHEMA) -> Any:
    desk, record = intake(schema), Record("ranking", 0, 0, 0, b"u", value, ROUTE)
    return desk.ranking(record, desk.route(record), time.monotonic()).task


def changed(*path: str, **columns: Any) -> bytes:
    """The request with these columns of the map at `path` replaced, or without them (None)."""
    message = msgpack.unpackb(encode(request()))
    at = message
    for name in path:
        at = at[name]
    for key, data in columns.items():
        at[key.replace("__", ":")] = data
    for key in [key for key, data in at.items() if data is None]:
        del at[key]
    return bytes(msgpack.packb(message))


# ---- the schema ----


def test_the_digest_is_the_documented_one_whatever_the_order() -> None:
    stated = VECTORS["features"]
    schema = FeatureSchema(msgspec.convert(stated["columns"], list[FeatureColumn]))
    facts = sorted([one["of"], one["name"], one["dtype"], one["width"]] for one in stated["columns"])
    text = json.dumps(facts, separators=(",", ":")).encode()
    assert schema.digest == stated["digest"] == hashlib.blake2b(text, digest_size=8).hexdigest()
    assert FeatureSchema(reversed(SCHEMA.columns)) == SCHEMA != schema


@pytest.mark.parametrize("changes", [{"name": "ages"}, {"of": "cross"}, {"dtype": "int32"}, {"width": 2}])
def test_another_column_is_another_digest(changes: dict[str, Any]) -> None:
    first, *others = SCHEMA.columns
    assert FeatureSchema([msgspec.structs.replace(first, **changes), *others]) != SCHEMA


def test_a_table_size_is_no_part_of_the_digest() -> None:
    first, *others = SCHEMA.columns
    assert FeatureSchema([msgspec.structs.replace(first, rows=9), *others]) == SCHEMA


def test_a_name_stands_for_one_column() -> None:
    with pytest.raises(ValueError, match="'age' stands there twice"):
        FeatureSchema([*SCHEMA.columns, FeatureColumn(name="age", of="cross", dtype="float32")])


def test_a_schema_is_read_from_a_file_and_errors_name_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode({"layers": 3, "features": SCHEMA.columns}))
    assert FeatureSchema.read(file) == SCHEMA
    file.write_text('{"features": [{"name": "a b", "of": "user", "dtype": "int32"}]}')
    with pytest.raises(ConfigError, match=r"config\.json.*name"):
        FeatureSchema.read(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        FeatureSchema.read(tmp_path / "none.json")


# ---- packing ----


@pytest.mark.parametrize(
    ("values", "rows", "error"),
    [
        ({"age": 1}, {"user": 1}, "'interests' .user, float32, width 3. is missing"),
        ({"age": 1, "interests": [1, 2]}, {"user": 1}, "'interests'.* has shape .2,."),
        ({"age": 1.5, "interests": [1, 2, 3]}, {"user": 1}, "'age'.* must be integers, got float64"),
        ({"age": 1 << 31, "interests": [1, 2, 3]}, {"user": 1}, "'age'.* must be within -2147483648…2147483647"),
        ({"age": 1, "interests": [1, 2, np.nan]}, {"user": 1}, "'interests'.* not finite"),
        ({"age": 1, "interests": [1, 2, 1e39]}, {"user": 1}, "'interests'.* not finite"),
        ({"age": 1, "interests": ["1", "2", "3"]}, {"user": 1}, "'interests'.* must be numbers"),
        ({"size": 1}, {"user": 1}, "'size' is unknown; the schema has age, interests"),
        ({"shop": [1]}, {"user": 1}, "'shop' is of candidate; this takes age, interests"),
        ({"dwell_s": [1.0], "place": [1, 2]}, {"behaviour": 2}, "'dwell_s'.* has shape"),
    ],
)
def test_a_sender_is_told_which_column_is_wrong(values: Any, rows: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        SCHEMA.pack(values, rows)


def test_a_table_without_rows_needs_no_values() -> None:
    assert SCHEMA.pack({}, {"behaviour": 0}) == {"behaviour": {}}


columns = st.lists(
    st.builds(
        FeatureColumn,
        name=st.from_regex(r"[a-z]{1,3}", fullmatch=True),
        of=st.sampled_from(("user", "behaviour", "candidate", "cross")),
        dtype=st.sampled_from(("int32", "int64", "float32")),
        width=st.integers(1, 3),
    ),
    unique_by=lambda one: one.name,
    max_size=9,
)


@given(columns, st.integers(0, 5), st.integers(1, 4), st.data())
def test_values_survive_message_and_words(declared: list[FeatureColumn], n: int, m: int, data: st.DataObject) -> None:
    schema = FeatureSchema(declared)
    rows = {"user": 1, "behaviour": n, "candidate": m}
    values: dict[str, Any] = {}
    for one in schema.columns:
        elements = {"allow_nan": False, "allow_infinity": False} if one.dtype == "float32" else {}
        shape = (rows[one.table], one.width)
        values[one.name] = data.draw(hnp.arrays(one.dtype, shape, elements=elements))
    tables = schema.pack(values, rows)  # type: ignore[arg-type]
    plain = Behaviours.from_arrays([1] * n, [2] * n, range(n))
    request = RankingRequest(
        request_id="r",
        user_id="u",
        prefix=msgspec.structs.replace(plain, columns=tables["behaviour"]),
        candidates=pack_items(range(m)),
        columns=FeatureTables(schema.digest, tables["user"], tables["candidate"]),
    )
    task = ranking(encode(request), schema)
    context = schema.context_tokens
    assert len(task.tokens) == context + n
    behaviours = task.tokens.slice(context, context + n)
    found = behaviours.features("behaviour", schema) | dict(task.features)
    if context:
        assert task.tokens.array[:3, 0].tolist() == [0, USER_ACTION, 0]
        found |= task.tokens.slice(0, 1).features("user", schema)
    assert found.keys() == values.keys()
    for name, array in found.items():
        assert array.dtype == values[name].dtype
        assert array.tobytes() == values[name].tobytes(), name


@given(st.integers(0, 4), st.integers(0, 4))
def test_slices_keep_each_behaviours_row(start: int, length: int) -> None:
    whole = history(1, [1.0, 2.0, 3.0, 4.0], [1, 2, 3, 4])
    part = whole.slice(start, min(4, start + length)).checked(ValueError)
    taken = np.frombuffer(part.table["dwell_s:float32"], "<f4").tolist()
    assert taken == [1.0, 2.0, 3.0, 4.0][start : start + length]


# ---- a worker ----


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (changed("columns", "user", age__int32=None), "column 'age' .user, int32, width 1. is missing"),
        (
            changed("columns", "user", age__int32=None, age__float32=bytes(4)),
            "'age' is 'float32', the model reads int32",
        ),
        (changed("columns", "user", age__int32=bytes(8)), "'age' has 8 bytes; 1 × 1 int32 .user. are 4"),
        (changed("columns", "user", size__int32=bytes(4)), "'size:int32' .user. is unknown: the model reads age:"),
        (changed("prefix", "columns", dwell_s__float32=None), "'dwell_s' .behaviour, float32, width 1. is missing"),
        (changed("prefix", "columns", dwell_s__float32=bytes(24)), "'dwell_s' has 24 bytes; 3 × 1 float32"),
        (changed("suffix", "columns", place__int64=None), "'place' .behaviour, int64, width 1. is missing"),
        (changed("prefix", "columns", place__int64=None), "'place' .behaviour, int64, width 1. is missing$"),
        (changed("columns", "candidate", affinity__float32=bytes(8)), "'affinity' has 8 bytes; 2 × 2 float32 .cross."),
        (changed("columns", "candidate", affinity__float32=struct.pack("<4f", 0, 1, np.nan, 2)), "'affinity'.*finite"),
        (changed("columns", schema="0" * 16), "the sender's feature schema is '0000000000000000', this model's"),
        (changed(columns=None), "column 'age'.*is missing: no features came, .*config.json with --features"),
    ],
)
def test_a_worker_refuses_a_request_with_other_columns_and_names_the_first(value: Any, error: str) -> None:
    with pytest.raises(TooMuch, match=error) as refused:
        ranking(value)
    assert refused.value.request_id == "r"


def test_what_is_no_whole_number_of_rows_is_refused_by_everyone() -> None:
    for value in (
        changed("prefix", "columns", dwell_s__float32=bytes(13)),
        changed("columns", "candidate", shop__int64=bytes(15)),
    ):
        with pytest.raises(DecodeError, match=r"column '(dwell_s:float32|shop:int64)' has 1[35] bytes for [23] rows"):
            decode(RankingRequest, value)


def test_a_model_without_features_refuses_them() -> None:
    with pytest.raises(TooMuch, match=r"column 'age:int32' .user. is unknown: the model reads none there"):
        ranking(encode(request()), NO_FEATURES)


def test_a_signal_with_other_columns_is_a_decode_error() -> None:
    whole = request()
    signal = PreInferSignal(
        request_id="r", user_id="u", prefix=whole.prefix, admitted_ms=0, life_ms=1e3, columns=whole.columns
    )
    task = intake().signal(Record("pre-infer", 0, 0, 0, b"u", encode(signal), ()), time.monotonic()).task
    assert (task.tokens.array == ranking(encode(whole)).tokens.array).all()  # else its prefix KV would never serve
    plain = msgspec.structs.replace(signal, prefix=Behaviours.from_arrays([1], [1], [1]))
    with pytest.raises(DecodeError, match="column 'place'"):
        intake().signal(Record("pre-infer", 0, 0, 0, b"u", encode(plain), ()), time.monotonic())


def test_a_hostile_number_of_columns_is_refused() -> None:
    many = {f"c{index}:int32": b"" for index in range(1025)}
    with pytest.raises(DecodeError, match="length <= 1024"):
        decode(RankingRequest, changed("prefix", columns=many))


def test_messages_without_features_say_nothing_of_them() -> None:
    plain = RankingRequest(
        request_id="r", user_id="u", prefix=Behaviours.from_arrays([1], [1], [1]), candidates=bytes(4)
    )
    written = msgpack.unpackb(encode(plain))
    assert "columns" not in written
    assert "columns" not in written["prefix"]
    check_features(plain, NO_FEATURES)


# ---- tokens ----


def test_truncation_keeps_the_users_features_before_the_newest() -> None:
    task = ranking(encode(request()))
    user, suffix = task.tokens.array[:, 0].tolist(), task.suffix.array.copy()
    cut = Ranking(Rank(task))
    cut.keep_newest(2)
    assert (len(cut.tokens), cut.tokens.context, len(cut.suffix)) == (2, 1, 1)
    assert cut.tokens.array[:, 0].tolist() == user
    assert cut.tokens.array[:3, 1].tolist() == [3, 1, 0]  # the newest of the prefix, its gap cut off
    assert (cut.suffix.array == suffix).all()


def test_a_prefix_of_no_behaviours_is_the_user_alone() -> None:
    tokens = Tokens.from_behaviours(Behaviours(), None, SCHEMA, request().columns.user)  # type: ignore[union-attr]
    assert (len(tokens), tokens.context) == (1, 1)


@pytest.mark.parametrize(
    "value",
    [
        changed("columns", "user", age__int32=struct.pack("<i", 32)),
        changed("columns", "user", interests__float32=struct.pack("<3f", 0.5, -1.0, 2.0000002)),
        changed("prefix", "columns", dwell_s__float32=struct.pack("<3f", 1.5, 2.5, 0.1)),
        changed("prefix", "columns", place__int64=struct.pack("<3q", (1 << 40) + 1, -2, 3)),
    ],
)
def test_prefix_kv_of_other_features_are_a_miss(value: bytes) -> None:
    announced = Entry("u", ranking(encode(request())).tokens)
    assert announced.coverage(ranking(encode(request())).tokens, incremental=True) is Coverage.COVERS
    assert announced.coverage(ranking(value).tokens, incremental=True, max_stale=2) is Coverage.NONE


@pytest.mark.parametrize(
    "value",
    [
        changed("columns", "candidate", shop__int64=struct.pack("<2q", 1, 2)),
        changed("suffix", "columns", place__int64=struct.pack("<q", 8)),
    ],
)
def test_prefix_kv_serve_other_candidates_and_suffixes(value: bytes) -> None:
    announced = Entry("u", ranking(encode(request())).tokens)
    assert announced.coverage(ranking(value).tokens, incremental=True) is Coverage.COVERS


def test_an_offer_between_workers_carries_the_features() -> None:
    tokens = ranking(encode(request())).tokens
    offer = Offer.from_tokens("u", tokens, 64, 1)
    assert (offer.sequence(64, token_bytes(SCHEMA)).array == tokens.array).all()
    with pytest.raises(DecodeError, match="bytes a token"):
        offer.sequence(3, token_bytes(SCHEMA))


# ---- a client ----


async def test_the_client_packs_by_the_schema_and_refuses_what_it_does_not_know() -> None:
    relay = RelayClient("localhost:1", features=SCHEMA)
    shown = ([1, 2], [1, 1], [1000, 2000])
    whole: dict[str, Any] = {"age": 3, "interests": [1, 2, 3], "dwell_s": [1.0, 2.0], "place": [4, 5]}
    made = relay.request("u", shown, candidates=2, features=whole)
    with pytest.raises(Rejected, match=r"features: column 'age'.* is missing"):
        relay.request("u", shown, candidates=2, features={"dwell_s": [1.0, 2.0], "place": [4, 5]})
    with pytest.raises(Rejected, match=r"features: column 'shop'.* is missing"):
        await made.rank([1], features={"affinity": [[1.0, 2.0]]})
    with pytest.raises(Rejected, match="make the client with the model's schema"):
        RelayClient("localhost:1").request("u", shown, candidates=2, features=whole)


async def test_what_the_client_sends_has_the_features(embedded_settings: Kafka) -> None:
    """And it checks messages that were made by hand."""
    settings = Settings(kafka=embedded_settings)
    plain = RankingRequest(
        request_id="r", user_id="u", prefix=Behaviours.from_arrays([1], [1], [1]), candidates=bytes(4)
    )
    made: dict[str, Any] = {"age": 3, "interests": [1, 2, 3], "dwell_s": [1.0, 2.0], "place": [4, 5]}
    later: dict[str, Any] = {"shop": [8], "affinity": [[1.0, 2.0]]}
    async with responder_on(embedded_settings) as peer, RelayClient(settings=settings, features=SCHEMA) as relay:
        with pytest.raises(Rejected, match="column 'age'"):
            await relay.rank(plain)
        await relay.rank(request(), timeout=20)
        async with relay.request("u", ([1, 2], [1, 1], [1000, 2000]), candidates=2, features=made) as announced:
            await announced.rank([1], features=later, timeout=20)
        await until(lambda: peer.events, "the event")
    event, (by_hand, ranked) = decode(RequestEvent, peer.events[0].value), (sent for _, sent in peer.requests)
    assert by_hand.columns == request().columns
    expected = SCHEMA.pack({**made, **later}, {"user": 1, "behaviour": 2, "candidate": 1})
    for message in (event, ranked):
        check_features(message, SCHEMA)
        assert message.columns
        assert message.columns.user == expected["user"]
        assert message.prefix.columns == expected["behaviour"]
    assert ranked.columns
    assert ranked.columns.candidate == expected["candidate"]


def test_a_client_in_another_language_packs_as_the_protocol_says() -> None:
    message = {
        "request_id": "r",
        "user_id": "u",
        "prefix": {
            "items": struct.pack("<2I", 5, 6),
            "actions": bytes(2),
            "times": struct.pack("<2q", 1, 2),
            "columns": {"dwell_s:float32": struct.pack("<2f", 1.5, 2.5), "place:int64": struct.pack("<2q", -1, 9)},
        },
        "candidates": struct.pack("<I", 11),
        "columns": {
            "user": {"age:int32": struct.pack("<i", 31), "interests:float32": struct.pack("<3f", 1, 2, 3)},
            "candidate": {"shop:int64": struct.pack("<q", 8), "affinity:float32": struct.pack("<2f", 0.5, 0.25)},
        },
    }
    task = ranking(msgpack.packb(message))
    assert task.tokens.slice(1, 3).features("behaviour", SCHEMA)["place"].tolist() == [[-1], [9]]
    assert task.tokens.slice(0, 1).features("user", SCHEMA)["interests"].tolist() == [[1, 2, 3]]
    assert task.features["affinity"].tolist() == [[0.5, 0.25]]
