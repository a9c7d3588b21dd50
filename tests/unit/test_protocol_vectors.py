"""docs/reference/protocol.md and protocol-vectors.json beside it say what the codec does: for other clients."""

from __future__ import annotations

import hmac
import json
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from relaygr_stream.wire import records, versions
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import MAX_UNKNOWN_BYTES, decode, encode
from relaygr_stream.wire.history import digests
from relaygr_stream.wire.refusals import decode_refusals
from relaygr_stream.wire.signature import answer_signature
from relaygr_stream.wire.topic_files import lane_of
from tests.unit.test_docs_model_page import GENERATE
from tests.unit.test_versions import KINDS, meaning, plain

DOCS = Path(__file__).parents[2] / "docs" / "reference"
VECTORS = json.loads((DOCS / "protocol-vectors.json").read_text(encoding="utf-8"))
PROTOCOL = GENERATE.on_page_markdown((DOCS / "protocol.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("vector", VECTORS["messages"], ids=lambda vector: str(vector["about"]))
def test_a_message_is_what_its_vector_says(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["message"])
    message = decode(KINDS[vector["kind"]], data)
    assert meaning(message) == vector["means"]
    assert encode(message) == data
    assert plain(msgpack.unpackb(data)) == vector["means"]  # with nothing of this package


def test_every_kind_has_a_vector_with_every_field() -> None:
    for name, kind in KINDS.items():
        written = [set(each["means"]) for each in VECTORS["messages"] if each["kind"] == name]
        assert written
        optional = {field.name for field in msgspec.structs.fields(kind) if field.default is msgspec.UNSET}
        assert set().union(*written) == {field.name for field in msgspec.structs.fields(kind)}
        assert all(fields | optional == set().union(*written) for fields in written)


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_documented_where_its_message_is(kind: str) -> None:
    section = PROTOCOL.split(f"### {kind}, on ", 1)[1].split("\n### ", 1)[0]
    for field in msgspec.structs.fields(KINDS[kind]):
        assert f"`{field.name}`" in section, f"{kind}.{field.name}"


def test_refusals_are_what_their_vector_says() -> None:
    vector = VECTORS["refusals"]
    data = bytes.fromhex(vector["message"])
    assert msgspec.to_builtins(decode_refusals(data)) == msgpack.unpackb(data) == vector["means"]
    assert msgspec.msgpack.encode(decode_refusals(data)) == data


def test_the_signature_of_an_answer_is_a_plain_hmac() -> None:
    vector = VECTORS["answer_signature"]
    correlation, value = bytes.fromhex(vector["correlation"]), bytes.fromhex(vector["value"])
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in (b"answer", correlation, value))
    found = hmac.new(vector["secret"].encode(), framed, "sha256").hexdigest()
    assert found == vector["signature"] == answer_signature(vector["secret"], correlation, value).hex()


def test_lanes_are_those_of_the_vectors() -> None:
    assert VECTORS["lanes"]
    for vector in VECTORS["lanes"]:
        assert lane_of(vector["user_id"], vector["partitions"]) == vector["lane"]


def test_digests_of_histories_are_those_of_the_vectors() -> None:
    assert VECTORS["histories"]
    for vector in VECTORS["histories"]:
        parts = {name: value for name, value in vector["behaviours"].items() if name != "columns"}
        table = {key: bytes.fromhex(value["bytes"]) for key, value in vector["behaviours"].get("columns", {}).items()}
        plain_parts = {name: bytes.fromhex(value["bytes"]) for name, value in parts.items()}
        behaviours = Behaviours(**plain_parts, columns=table or msgspec.UNSET)
        found = digests(behaviours, map(int, vector["digests"]))
        assert found
        assert {str(at): digest.hex() for at, digest in found.items()} == vector["digests"]


def test_headers_reserved_names_and_bounds_are_documented() -> None:
    names = [value for name, value in vars(records).items() if name.startswith(("HEADER_", "KIND_"))]
    for name in [*names, *versions.RESERVED_FIELDS]:
        assert f"`{name}`" in PROTOCOL, name
    assert f"{MAX_UNKNOWN_BYTES:,} bytes" in PROTOCOL
