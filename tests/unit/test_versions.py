"""Messages of every release so far, and of one to come, are read by this one; what only later readers understand is
refused as that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.errors import DecodeError
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.wire.behaviours import WIDE_VERSION, Behaviours
from relaygr_stream.wire.codec import MAX_UNKNOWN_BYTES, Message, decode, encode
from relaygr_stream.wire.messages import (
    Cancel,
    PreInferSignal,
    RankingRequest,
    RequestEvent,
    RequestEventInPlace,
    ScoreReply,
    WorkerStatus,
)
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.versions import READ_VERSION, RESERVED_FIELDS

#: <release>.json: what that release writes; next.json: what one after this may write. Never edited, only added to.
WIRE = Path(__file__).parents[1] / "data" / "wire"
GOLDEN = [(path.stem, entry) for path in sorted(WIRE.glob("*.json")) for entry in json.loads(path.read_text())]
KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (RequestEvent, PreInferSignal, RankingRequest, Cancel, ScoreReply, WorkerStatus)
}


def plain(value: Any) -> Any:
    """A message as the golden files state it: bytes as {"bytes": hex}."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return {"bytes": bytes(value).hex()} if isinstance(value, bytes | memoryview) else value


def meaning(message: Message) -> Any:
    return plain(msgspec.to_builtins(message, builtin_types=(bytes, memoryview)))


@pytest.mark.parametrize(("release", "golden"), GOLDEN, ids=[f"{release}: {each['about']}" for release, each in GOLDEN])
def test_every_release_is_read(release: str, golden: dict[str, Any]) -> None:
    kind, data = KINDS[golden["kind"]], bytes.fromhex(golden["message"])
    found = meaning(decode(kind, data))
    assert {name: found[name] for name in golden["means"]} == golden["means"]
    added = {name: value for name, value in found.items() if name not in golden["means"]}
    defaults = {f.name: plain(f.default) for f in msgspec.structs.fields(kind)}
    assert added == {name: defaults[name] for name in added}
    if kind is RequestEvent:
        assert meaning(decode(RequestEventInPlace, data)) == found


def test_a_worker_of_a_later_release_keeps_its_lanes() -> None:
    later = [each for release, each in GOLDEN if release == "next" and each["kind"] == "WorkerStatus"]
    assert later
    for each in later:
        owners = OwnerDirectory(1e3)
        owners.on_records([Record("worker-status", 0, 7, 0, b"w1", bytes.fromhex(each["message"]), ())])
        claim = owners.owner(3)
        assert claim is not None
        assert claim.lane.budget_bytes == 1 << 30


def changed(about: str, **fields: Any) -> tuple[Any, bytes]:
    """Kind and bytes of a message of 0.1.0, some fields set."""
    found = next(each for release, each in GOLDEN if (release, each["about"]) == ("0.1.0", about))
    return KINDS[found["kind"]], msgpack.packb(msgpack.unpackb(bytes.fromhex(found["message"])) | fields)


ONE_EACH = [
    "request event, full",
    "pre-infer signal, full",
    "ranking request, full",
    "score reply, ok",
    "worker status, serving",
]


@pytest.mark.parametrize("about", ONE_EACH)
@pytest.mark.parametrize(
    ("versions", "reads"),
    [
        ({"v": 1}, True),
        ({"v": 1, "min_v": 1}, True),
        ({"v": 2, "min_v": 1}, True),
        ({"v": 99, "min_v": 1}, True),
        ({"v": 2, "min_v": 2}, True),
        ({"v": READ_VERSION + 1, "min_v": 2}, True),
        ({"v": READ_VERSION, "min_v": READ_VERSION}, True),
        ({"v": READ_VERSION + 1, "min_v": READ_VERSION + 1}, False),
        ({"v": 1, "min_v": READ_VERSION + 1}, False),
        ({"v": 0}, False),
        ({"v": 0, "min_v": 1}, False),
        ({"v": -1, "min_v": 1}, False),
    ],
    ids=str,
)
def test_the_least_version_decides_who_reads(about: str, versions: dict[str, int], reads: bool) -> None:
    # The candidates of the release before version 4 have 4 bytes each.
    wide = {"candidates": bytes(24)} if about.startswith("ranking") and versions.get("min_v", 0) >= WIDE_VERSION else {}
    kind, data = changed(about, **versions, **wide)
    if reads:
        assert decode(kind, data).v == versions["v"]
        return
    with pytest.raises(DecodeError, match=f"schema version {versions['v']}, ") as refused:
        decode(kind, data)
    assert refused.value.reason == "unknown_version"


@pytest.mark.parametrize("about", ONE_EACH[:4])
def test_without_a_least_version_a_later_message_is_for_later_readers_but_a_status_for_all(about: str) -> None:
    with pytest.raises(DecodeError) as refused:
        decode(*changed(about, v=READ_VERSION + 1))
    assert refused.value.reason == "unknown_version"
    assert decode(*changed(ONE_EACH[4], v=READ_VERSION + 1)).v == READ_VERSION + 1


@given(st.text(max_size=64).filter(lambda name: name not in {"ok", "deadline_exceeded", "overloaded", "rejected"}))
def test_any_other_status_is_a_failure(name: str) -> None:
    assert decode(*changed("score reply, failed", status=name)).status == "failed"


@pytest.mark.parametrize(
    ("about", "field"),
    [
        ("ranking request, full", "mode"),
        ("score reply, ok", "status"),
        ("score reply, ok", "outcome"),
        ("worker status, serving", "state"),
    ],
)
@pytest.mark.parametrize("value", [7, "x" * 65, b"ok", ["ok"], {"ok": 1}, True])
def test_what_is_no_name_is_malformed_in_an_open_field(about: str, field: str, value: object) -> None:
    with pytest.raises(DecodeError, match=field) as refused:
        decode(*changed(about, **{field: value}))
    assert refused.value.reason == "malformed"


@pytest.mark.parametrize("field", ["mode", "status", "state"])
def test_nil_is_only_an_outcome(field: str) -> None:
    about = {"mode": "ranking request, full", "status": "score reply, ok", "state": "worker status, serving"}[field]
    with pytest.raises(DecodeError, match=field):
        decode(*changed(about, **{field: None}))
    assert decode(*changed("score reply, ok", outcome=None)).outcome is None


@pytest.mark.parametrize("about", ONE_EACH)
def test_unknown_fields_are_ignored_up_to_a_bound(about: str) -> None:
    kind, data = changed(about)
    unpadded = decode(kind, data)
    assert decode(*changed(about, later=bytes(MAX_UNKNOWN_BYTES - 200))) == unpadded
    with pytest.raises(DecodeError, match="in fields that this program does not know, the limit is 4096") as refused:
        decode(*changed(about, later=bytes(MAX_UNKNOWN_BYTES + 200)))
    assert refused.value.reason == "oversized"


def test_the_bound_counts_fields_inside_others_and_those_stated_twice() -> None:
    prefix = {"items": bytes(4), "actions": bytes(1), "times": bytes(8), "later": bytes(MAX_UNKNOWN_BYTES + 200)}
    for name in ("request event, full", "pre-infer signal, full", "ranking request, least"):
        with pytest.raises(DecodeError, match="does not know"):
            decode(*changed(name, prefix=prefix))
    kind, data = changed("ranking request, least")
    fields = len(msgpack.unpackb(data))
    again = msgpack.packb("candidates") + msgpack.packb(bytes(8000))
    twice = bytes([0x80 | fields + 1]) + again + data[1:]  # of a field stated twice the last counts
    with pytest.raises(DecodeError, match="does not know"):
        decode(kind, twice)


def test_arrays_of_any_length_are_no_unknown_field() -> None:
    n = 50_000
    prefix = Behaviours.from_arrays([1] * n, [1] * n, range(n))
    request = RankingRequest(request_id="r", user_id="u", prefix=prefix, candidates=bytes(4 * n))
    assert decode(RankingRequest, encode(request)) == request
    reply = ScoreReply(request_id="r", status="ok", outcome="hbm", scores=bytes(4 * n), tasks=("a",))
    assert decode(ScoreReply, encode(reply)) == reply


def test_reserved_names_are_free() -> None:
    for kind in set(KINDS.values()) - {PreInferSignal}:  # a signal says on whose behalf it comes
        assert not RESERVED_FIELDS & {field.name for field in msgspec.structs.fields(kind)}
