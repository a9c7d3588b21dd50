"""The gateway's OpenAPI document, made of the types of its messages."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from relaygr_stream.gateway.messages import FORMATS, Announce, Announced, Problem, Rank, Ranked
from relaygr_stream.wire.messages import Timings

#: Statuses of every verb, and what a client does.
PROBLEMS: Final = {
    "400": "the request is wrong: `detail` says what; do not send it again",
    "401": "no valid bearer token",
    "408": "the body came too slowly",
    "413": "the body is larger than gateway.max_body_bytes",
    "415": "neither JSON nor MessagePack, or compressed",
    "429": "overloaded: after `Retry-After` seconds, or fall back",
    "502": "the worker failed while it held the request; ask once more",
    "503": "no broker answers, or the gateway stops; after `Retry-After` seconds",
    "504": "no answer in time: fall back",
}
#: Of an announcement and a cancel: nothing waits for a worker.
_SENT_ONLY: Final = ("502", "504")
_REQUEST_ID: Final[dict[str, Any]] = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "1–128 printable characters, echoed; made up where it is absent",
    "schema": {"type": "string"},
}
_TIMEOUT: Final[dict[str, Any]] = {
    "name": "Relaygr-Timeout-Ms",
    "in": "header",
    "description": "the deadline: milliseconds from the request's arrival, after which the answer is worthless; "
    "client.timeout_ms by default",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 3_600_000},
}
#: What the requests below are answered, as an example.
_ANSWERS: Final[dict[type[Any], object]] = {
    Announced: Announced(request_id="8f14e45fceea167a-4"),
    Ranked: Ranked(
        request_id="8f14e45fceea167a-4",
        tasks=("click", "like"),
        scores=[[0.41, 0.08], [0.37, 0.11], [0.29, 0.02]],
        outcome="hbm",
        admission="admitted",
        truncated_to=0,
        worker="worker-1",
        model_version="hstu-3",
        latency_ms=14.2,
        timings=Timings(inbound_ms=2.9, queued_ms=0.4, device_ms=6.8, worker_ms=7.5),
    ),
}
_EXAMPLE: Final = {"items": [3, 141, 592], "actions": [1, 1, 1], "times": [1000, 2000, 3000]}


def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document, as plain values."""
    kinds = (Announce, Announced, Rank, Ranked, Problem)
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    announce = {"user_id": "user-17", "history": _EXAMPLE, "candidates": 3}
    rank = {"user_id": "user-17", "history": _EXAMPLE, "candidates": [11, 12, 13]}
    named = {"name": "request_id", "in": "path", "required": True, "schema": {"type": "string"}}
    user = {
        "name": "user_id",
        "in": "query",
        "description": "whose request it is; needed where its id was not made by a gateway",
        "schema": {"type": "string"},
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "RelayGR Stream gateway",
            "version": "1",
            "description": "Announce a request when retrieval starts; rank when the candidates are known. Arrays are "
            "lists of numbers, or packed: `bin` in MessagePack, base64 in JSON (docs/reference/protocol.md, Values).",
        },
        "paths": {
            "/v1/announce": {
                "post": _verb(Announce, announce, "202", Announced, "on its way to a trigger", _SENT_ONLY)
            },
            "/v1/rank": {"post": _verb(Rank, rank, "200", Ranked, "scores", (), _TIMEOUT)},
            "/v1/requests/{request_id}": {
                "delete": {
                    **_verb(
                        None, None, "204", None, "on its way to the worker, which releases what is pinned", _SENT_ONLY
                    ),
                    "summary": "An announced request will not be ranked: free what it holds.",
                    "parameters": [named, user, _REQUEST_ID],
                }
            },
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _verb(
    asks: type[Any] | None,
    example: object,
    status: str,
    gives: type[Any] | None,
    means: str,
    never: tuple[str, ...],
    *parameters: dict[str, Any],
) -> dict[str, Any]:
    answers: dict[str, Any] = {
        status: {
            "description": means,
            **({"content": _content(gives, msgspec.to_builtins(_ANSWERS[gives]))} if gives else {}),
        }
    }
    for problem, text in PROBLEMS.items():
        if problem not in never:
            answers[problem] = {"description": text, "content": _content(Problem)}
    found: dict[str, Any] = {"parameters": [*parameters, _REQUEST_ID], "responses": answers}
    if asks is not None:
        found["summary"] = (asks.__doc__ or "").partition("\n")[0]
        found["requestBody"] = {"required": True, "content": _content(asks, example)}
    return found


def _content(kind: type[Any], example: object = None) -> dict[str, Any]:
    schema = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
    return {
        media: {**schema, "example": example} if example and media == "application/json" else schema
        for media in FORMATS
    }
