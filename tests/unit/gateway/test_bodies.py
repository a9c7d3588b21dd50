"""Bodies: counted before they are converted, kept as packed bytes, and refused with the place of what is wrong."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from relaygr_stream.errors import RelayError
from relaygr_stream.gateway.bodies import decoded
from relaygr_stream.gateway.details import Details
from relaygr_stream.gateway.messages import JSON, MSGPACK, Announce, Format, Rank
from relaygr_stream.settings.schema import Kafka, Relay
from relaygr_stream.wire.versions import NOT_DECODED
from tests.unit.client_peers import responder_on
from tests.unit.gateway.doors import ANNOUNCE, HISTORY, RANK, door_on

MIB = 1 << 20
N = 4096
FORMS = pytest.mark.parametrize("form", [JSON, MSGPACK], ids=["json", "msgpack"])


def history(n: int, value: int = 1) -> dict[str, list[int]]:
    return {"items": [value] * n, "actions": [1] * n, "times": [value] * n}


HUGE: dict[str, Any] = {
    "small candidates": {**RANK, "candidates": [0] * (MIB // 2)},
    "candidates": {**RANK, "candidates": [70_000] * (MIB // 6)},
    "history": {**RANK, "history": history(MIB // 6)},
    "suffix": {**RANK, "suffix": history(MIB // 6)},
    "columns": {**RANK, "columns": {"user": {f"{number:x}": b"" for number in range(90_000)}}},
    "history's columns": {**RANK, "history": {**HISTORY, "columns": {f"{number:x}": b"" for number in range(90_000)}}},
    "one array": {**RANK, "history": {**HISTORY, "times": [1] * (MIB // 2)}},
    "a name": {**RANK, "user_id": "u" * MIB},
    "packed": {**RANK, "candidates": b"\1" * (MIB // 2)},
}


@FORMS
@pytest.mark.parametrize("body", HUGE.values(), ids=HUGE.keys())
def test_a_body_beyond_the_limits_is_refused_before_it_is_converted(form: Format, body: dict[str, Any]) -> None:
    """A list of a mebibyte became 13 times its bytes, and 14 ms of the gateway."""
    data = form.encode(body)
    tracemalloc.start()
    try:
        with pytest.raises((RelayError, *NOT_DECODED)):
            decoded(data, form, Rank, Relay())
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data)
    finally:
        tracemalloc.stop()


@FORMS
@pytest.mark.parametrize("value", [1, 70_000], ids=["small", "large"])
def test_what_is_kept_of_a_body_are_packed_arrays(form: Format, value: int) -> None:
    data = form.encode({**RANK, "history": history(N, value), "candidates": [value] * 2048})
    tracemalloc.start()
    try:
        body = decoded(data, form, Rank, Relay())
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    arrays = 13 * N + 4 * 2048
    assert body.candidates == (value).to_bytes(4, "little") * 2048
    assert body.history
    assert len(body.history.times) == 8 * N
    assert kept < max(3 * len(data), arrays + 4096)


PLACES: list[tuple[dict[str, Any], str]] = [
    ({"candidates": [1, "x"]}, "got 'x' at position 1 of `$.candidates`"),
    ({"candidates": [[1]]}, "$.candidates[0]"),
    ({"candidates": 3}, "$.candidates"),
    ({"candidates": [1.0]}, "got 1.0 at position 0 of `$.candidates`"),
    ({"candidates": [True]}, "got True at position 0 of `$.candidates`"),
    ({"candidates": [1] * 2049}, "2049 candidates, the limit is 2048 (relay.max_candidates)"),
    ({"history": history(4097)}, "4097 prefix behaviours, the limit is 4096 (relay.max_prefix_tokens)"),
    ({"history": {**HISTORY, "times": [1] * 4097}}, "4097 prefix behaviours"),
    ({"suffix": history(257)}, "257 suffix behaviours"),
    ({"history": {**HISTORY, "times": [1, 2, None]}}, "got None at position 2 of `$.history.times`"),
    ({"history": {**HISTORY, "times": [1, 2, 1 << 62]}}, "history: times must be Unix milliseconds"),
    ({"history": {**HISTORY, "times": [-(1 << 62), 2, 3]}}, "history: times must be Unix milliseconds"),
    ({"suffix": {"items": [1], "actions": [1], "times": [1 << 62]}}, "suffix: times must be Unix milliseconds"),
    ({"history": {**HISTORY, "times": [1, 2, 1 << 63]}}, "history: times must be within"),
    ({"history": {**HISTORY, "times": [1, 2, 1 << 70]}}, "got 2**70 at position 2"),
    ({"history": {**HISTORY, "times": [-1, 2, 1 << 63]}}, "history: times must be within"),
    ({"suffix": {"items": [1], "actions": [1], "times": [299]}}, "before the prefix ends"),
    ({"columns": {"user": {"a:int32": 7}}}, "$.columns.user"),
    ({"history": {**HISTORY, "columns": {"a:int32": 7}}}, "$.history.columns"),
]


async def test_what_a_worker_would_dead_letter_is_refused_with_its_place(
    embedded_settings: Kafka, subtests: pytest.Subtests
) -> None:
    async with responder_on(embedded_settings) as peer, door_on(embedded_settings) as door:
        for change, named in PLACES:
            with subtests.test(str(change)[:80]):
                found = await door.ask("POST", "/v1/rank", {**RANK, **change})
                assert (found.status, named in found.value["detail"]) == (400, True), found.value
        for change, named in PLACES:
            if "history" in change:
                with subtests.test(f"announce {str(change)[:80]}"):
                    found = await door.ask("POST", "/v1/announce", {**ANNOUNCE, **change})
                    assert (found.status, named in found.value["detail"]) == (400, True), found.value
        for rank_in in (-1.0, float("nan"), float("inf"), 1e9):
            with subtests.test(f"rank_in_ms {rank_in}"):
                body = msgspec.msgpack.encode({**ANNOUNCE, "rank_in_ms": rank_in})
                found = await door.ask("POST", "/v1/announce", body, content_type=MSGPACK.media)
                assert (found.status, "$.rank_in_ms" in found.value["detail"]) == (400, True)
        for stated in ("-1", "nan", "inf", "1_0", "+5", "1e3", "0x10", "1e309", "٣", "1,5", "", "0", "0.0", "3600001"):
            with subtests.test(f"timeout {stated!r}"):
                found = await door.ask("POST", "/v1/rank", RANK, relaygr_timeout_ms=stated.encode().decode("latin-1"))
                assert (found.status, "relaygr-timeout-ms" in found.value["detail"]) == (400, True)
        assert not (peer.requests or peer.events)
        assert (await door.ask("POST", "/v1/rank", RANK, relaygr_timeout_ms="20000.5")).status == 200


@FORMS
def test_an_announcement_is_decoded_as_a_ranking_is(form: Format) -> None:
    body = decoded(form.encode({**ANNOUNCE, "rank_in_ms": 5}), form, Announce, Relay())
    assert (body.candidates, body.rank_in_ms) == (3, 5.0)
    assert body.history
    assert len(body.history.behaviours("history")) == 3


@pytest.mark.parametrize(
    "internal",
    [
        "kafka-1.internal:9092", "10.1.2.3:9092", "10.1.2.3", "[fe80::1]:9092", "fe80::1", "/var/lib/relay/x.db",
        "redis://cache:6379/0", "localhost:1", "prod.ranking", "../x/y", "~/secret",
    ],
)  # fmt: skip
def test_details_name_no_part_of_the_relay(internal: str) -> None:
    text = Details("prod.").public(f"it broke at {internal}, twice ({internal})")
    assert text == "it broke at (internal), twice ((internal))"


@pytest.mark.parametrize(
    "text",
    [
        "6 suffix behaviours, the limit is 5 (relay.max_suffix_tokens)",
        "this id was not made by a gateway: name the user, …/v1/requests/ID?user_id=USER",
        "behaviour 2 is at 5 after 7: 3 of 4",
        "send application/json or application/msgpack, uncompressed",
        "features: the column dwell:float32 has 3 rows",
    ],
)
def test_details_for_callers_stay_as_they_are(text: str) -> None:
    assert Details("prod.").public(text) == text
