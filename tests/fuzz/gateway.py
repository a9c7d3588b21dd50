"""Fuzzes the bodies of requests to a gateway."""

from __future__ import annotations

import copy
import json
import random
import time
from contextlib import suppress
from typing import Any, Final

import msgspec

from relaygr_stream.errors import RelayError
from relaygr_stream.gateway.bodies import decoded
from relaygr_stream.gateway.messages import JSON, MSGPACK, Announce
from relaygr_stream.gateway.messages import Rank as RankBody
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import encode, validated
from relaygr_stream.wire.messages import (
    RankingRequest,
    with_version,
)
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.versions import NOT_DECODED
from relaygr_stream.worker.intake import Intake, IntakeLimits, TooMuch
from tests.fuzz.checks import (
    MAX_BYTES,
    RELAY,
    REPLIES,
    TOPICS,
    decoded_or_none,
    holds,
)
from tests.fuzz.corpus import (
    route,
)
from tests.fuzz.mutate import Mutator


class Gateway:
    """Bodies of requests: what a gateway takes, a worker takes, and a trigger."""

    #: A body at a time with all that the API knows.
    BODY: Final[dict[str, Any]] = {
        "user_id": "u",
        "history": {"items": [5, 6, 7], "actions": [1, 0, 1], "times": [100, 200, 300]},
        "item_bytes": 4,
        "request_id": "r",
        "columns": {"user": {}, "candidate": {}},
    }

    def __init__(self) -> None:
        self._intake = Intake(IntakeLimits(RELAY, 1000.0, REPLIES, MAX_BYTES))

    def __call__(self, rng: random.Random) -> None:
        rank = rng.random() < 0.7
        fields: dict[str, Any] = {name: copy.deepcopy(value) for name, value in self.BODY.items() if rng.random() < 0.8}
        if rank:
            suffix = {"items": [8], "actions": [2], "times": [400]}
            fields |= {"candidates": [11, 30], "suffix": suffix, "mode": rng.choice(("auto", "full", "whole"))}
        else:
            fields |= {"candidates": 3, "rank_in_ms": 5.0}
        raw, form = Mutator(rng).value(fields), MSGPACK
        if rng.random() < 0.5:
            with suppress(TypeError, ValueError, RecursionError):
                raw, form = json.dumps(fields).encode(), JSON
        try:
            body: Any = decoded(raw, form, RankBody, RELAY) if rank else decoded(raw, form, Announce, RELAY)
            prefix = Behaviours() if body.history is msgspec.UNSET else body.history.behaviours("history")
            stated = {"prefix": prefix, **with_version(body.reference, prefix)}
            message = validated(body.request("r", "t", stated) if rank else body.event("r", "t", stated))
        except (RelayError, *NOT_DECODED, ValueError):
            return
        encoded, key = encode(message), message.user_id.encode()
        holds(decoded_or_none(type(message), encoded) == message, f"{message} does not survive the wire")
        if rank and isinstance(message, RankingRequest):
            headers: Any = tuple(route(rng, REPLIES))
            record = Record(TOPICS.ranking.name, 0, 0, 0, key, encoded, headers)
            with suppress(TooMuch):
                self._intake.ranking(record, self._intake.route(record), time.monotonic())
