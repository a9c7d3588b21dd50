"""The contract for machines: docs/reference/messages.schema.json and asyncapi.json, made of the types of the messages.

    python docs/contract.py            writes both
    python docs/contract.py --check    exits 1 where one differs from the types (make check)

protocol.md explains the same for people; messages.toml has what fields mean, for both. A type here is what a writer of
this release may send; readers ignore fields that they do not know.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire import assignments, erase, planner_status, records, refusals, trigger_status
from relaygr_stream.wire.assignments import Assignments
from relaygr_stream.wire.erase import Erase
from relaygr_stream.wire.messages import Cancel, PreInferSignal, RankingRequest, RequestEvent, ScoreReply, WorkerStatus
from relaygr_stream.wire.planner_status import PlannerStatus
from relaygr_stream.wire.refusals import Refusals
from relaygr_stream.wire.routes import Routes, routes_topic
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.trigger_status import TriggerStatus

FOLDER: Final = Path(__file__).parent / "reference"
SCHEMA, ASYNCAPI = "messages.schema.json", "asyncapi.json"
FIELDS: Final = FOLDER / "messages.toml"
LINK: Final = re.compile(r"\[([^]]+)\]\([^)]+\)")
MEDIA: Final = "application/msgpack"
PREFIX: Final = "{prefix}"

_HEADER: Final[dict[str, Any]] = {"type": "string", "x-messagepack": "bin"}
_ROUTE: Final = {
    records.HEADER_CORRELATION: {**_HEADER, "minLength": 1, "maxLength": records.MAX_CORRELATION_BYTES},
    records.HEADER_REPLY_PARTITION: {"type": "string", "pattern": "^[0-9]{1,10}$"},
}
_SIGNED: Final = {records.HEADER_SIGNATURE: {**_HEADER, "description": "HMAC-SHA256, where a secret is set"}}

#: Of each kind of record: its topic, its headers, and those of them that every record has.
RECORDS: Final[dict[type[Any], tuple[str, dict[str, Any], list[str]]]] = {
    RequestEvent: ("retrieval", {}, []),
    PreInferSignal: ("pre-infer", {}, []),
    Refusals: ("pre-infer", {records.HEADER_KIND: {"const": refusals.KIND}}, [records.HEADER_KIND]),
    RankingRequest: ("ranking", _ROUTE, list(_ROUTE)),
    Cancel: ("ranking", {records.HEADER_KIND: {"const": records.KIND_CANCEL}}, [records.HEADER_KIND]),
    ScoreReply: (
        "scores",
        {records.HEADER_CORRELATION: _ROUTE[records.HEADER_CORRELATION], **_SIGNED},
        [records.HEADER_CORRELATION],
    ),
    WorkerStatus: ("worker-status", _SIGNED, []),
    Erase: ("worker-status", {records.HEADER_KIND: {"const": erase.KIND}, **_SIGNED}, [records.HEADER_KIND]),
    TriggerStatus: (
        "worker-status",
        {records.HEADER_KIND: {"const": trigger_status.KIND}, **_SIGNED},
        [records.HEADER_KIND],
    ),
    PlannerStatus: (
        "worker-status",
        {records.HEADER_KIND: {"const": planner_status.KIND}, **_SIGNED},
        [records.HEADER_KIND],
    ),
    Routes: ("routes", _SIGNED, []),
    Assignments: (
        "routes",
        {records.HEADER_KIND: {"const": assignments.KIND}, **_SIGNED},
        [records.HEADER_KIND],
    ),
}
#: Messages that travel on a second topic, by the name that they have there.
ELSEWHERE: Final[dict[str, tuple[type[Any], tuple[str, dict[str, Any], list[str]]]]] = {
    "DelegatedSignal": (
        PreInferSignal,
        ("ranking", {records.HEADER_KIND: {"const": records.KIND_DELEGATED}}, [records.HEADER_KIND]),
    ),
}


def named() -> Iterator[tuple[str, type[Any], str, dict[str, Any], list[str]]]:
    """Every kind of record: its name, the type of its value, its topic, its headers, and those of every record."""
    for kind, where in RECORDS.items():
        yield kind.__name__, kind, *where
    for name, (kind, where) in ELSEWHERE.items():
        yield name, kind, *where


def schemas(place: str) -> dict[str, Any]:
    """JSON Schema of every message and what it is made of, by name. place: where references point."""
    _, found = msgspec.json.schema_components(list(RECORDS), ref_template=f"{place}{{name}}")
    for name, fields in tomllib.loads(FIELDS.read_text(encoding="utf-8")).items():
        for field, meaning in fields.items():
            found[name]["properties"][field]["description"] = LINK.sub(r"\1", meaning)
    return {name: _packed(schema) for name, schema in sorted(found.items())}


def json_schema() -> dict[str, Any]:
    """One JSON Schema document; a message is one of its definitions."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "RelayGR Stream: values of records, MessagePack maps",
        "description": "x-messagepack: bin stands for bytes, which JSON does not have. docs/reference/protocol.md",
        "$defs": schemas("#/$defs/"),
    }


def asyncapi() -> dict[str, Any]:
    """The AsyncAPI 3 document: topics as channels, and who sends and receives what."""
    channels, operations, messages = {}, {}, {}
    topics = load_topics(Kafka(prefix=""))
    for topic in (*topics.all, routes_topic(topics)):
        kinds = [name for name, _, on, _, _ in named() if on == topic.name]
        channels[topic.name] = {
            "address": PREFIX + topic.name,
            "parameters": {"prefix": {"default": Kafka().prefix, "description": "kafka.prefix"}},
            "description": f"key: {topic.key}; {', '.join(topic.producers)} → {', '.join(topic.consumers)}",
            "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in kinds},
            "bindings": {
                "kafka": {
                    "topic": Kafka().prefix + topic.name,
                    "partitions": topic.partitions,
                    "topicConfiguration": {
                        "cleanup.policy": [topic.cleanup_policy],
                        "retention.ms": topic.retention_ms,
                        "max.message.bytes": topic.max_message_bytes,
                    },
                }
            },
        }
        if not kinds:
            channels[topic.name]["messages"] = {"DeadLetter": {"$ref": "#/components/messages/DeadLetter"}}
        for action, verb in (("send", "produce"), ("receive", "consume")):
            operations[f"{verb}-{topic.name}"] = {
                "action": action,
                "channel": {"$ref": f"#/channels/{topic.name}"},
                "summary": ", ".join(topic.producers if action == "send" else topic.consumers),
            }
    for name, kind, _, fields, required in named():
        messages[name] = {
            "name": name,
            "contentType": MEDIA,
            "summary": (kind.__doc__ or "").partition("\n")[0],
            "headers": {"type": "object", "properties": fields, "required": required},
            "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
            "bindings": {"kafka": {"key": {"type": "string"}}},
        }
    messages["DeadLetter"] = {
        "name": "DeadLetter",
        "summary": "A record that could not be read: its key, its headers behind the letter's, perhaps its value.",
    }
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "RelayGR Stream", "version": "1", "description": "docs/reference/protocol.md explains it."},
        "defaultContentType": MEDIA,
        "channels": channels,
        "operations": operations,
        "components": {"schemas": schemas("#/components/schemas/"), "messages": messages},
    }


def _packed(schema: Any) -> Any:
    """msgspec describes bytes as base64, which they are in JSON; on the wire they are bin."""
    if isinstance(schema, list):
        return [_packed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: _packed(value) for name, value in schema.items() if name not in ("contentEncoding", "title")}
    if isinstance(pattern := kept.get("pattern"), str):  # Python's anchors are not those of JSON Schema
        kept["pattern"] = pattern.replace(r"\A", "^").replace(r"\Z", "$")
    if "contentEncoding" not in schema:
        return kept
    sizes = ("minLength", "maxLength")  # of the base64 text
    return {**{name: value for name, value in kept.items() if name not in sizes}, "x-messagepack": "bin"}


def main(arguments: list[str]) -> int:
    """Write both files, or compare them."""
    differ = []
    for name, made in ((SCHEMA, json_schema()), (ASYNCAPI, asyncapi())):
        path, text = FOLDER / name, json.dumps(made, indent=1, ensure_ascii=False) + "\n"
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            differ.append(name)
    for name in differ:
        print(f"docs/reference/{name} differs from the messages' types: run python docs/contract.py", file=sys.stderr)
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
