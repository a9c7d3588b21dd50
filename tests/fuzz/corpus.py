"""Valid messages to start from: every kind, as plain maps, and the headers that a ranking request comes with."""

from __future__ import annotations

import random
import time
from typing import Any, Final

import msgspec
import numpy as np

from relaygr_stream.wire.assignments import Assignments
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import Message
from relaygr_stream.wire.features import FeatureColumn, FeatureSchema, Table
from relaygr_stream.wire.history import HISTORY_VERSION, HistoryReference
from relaygr_stream.wire.messages import (
    Cancel,
    CostModel,
    PreInferSignal,
    RankingRequest,
    RequestEvent,
    ScoreReply,
)
from relaygr_stream.wire.planner_status import FleetPlan, Move, PlannerStatus, ScenarioPlan, SharedGroup
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION
from relaygr_stream.wire.routes import POSITIONS, Figures, RolloutProgress, RoutePart, Routes
from relaygr_stream.wire.trigger_status import PolicyStatus, TriggerStatus
from tests.statuses import lane_statuses, worker_status

#: A column of each kind.
SCHEMA: Final = FeatureSchema(
    [
        FeatureColumn(name="age", of="user", dtype="int32"),
        FeatureColumn(name="dwell", of="behaviour", dtype="float32", width=2),
        FeatureColumn(name="place", of="behaviour", dtype="int64"),
        FeatureColumn(name="price", of="candidate", dtype="float32"),
        FeatureColumn(name="affinity", of="cross", dtype="float32"),
    ]
)
#: The first behaviour is somewhere in 2023.
EPOCH_MS: Final = 1_700_000_000_000
Headers = list[tuple[str, bytes | None]]


def behaviours(rng: random.Random, size: int, first_ms: int = EPOCH_MS) -> Behaviours:
    """`size` random behaviours, 100 ms apart."""
    items = [rng.randrange(1 << 32) for _ in range(size)]
    actions = [rng.randrange(256) for _ in range(size)]
    return Behaviours.from_arrays(items, actions, first_ms + 100 * np.arange(size)) if size else Behaviours()


def message(kind: type[Message], rng: random.Random) -> Message:
    """A valid message of that kind, small: what is wrong with large ones is their size."""
    request, user = f"r{rng.randrange(1000)}", f"u{rng.randrange(50)}"
    size = rng.randrange(1, 12)
    prefix = behaviours(rng, size)
    if kind is RequestEvent:
        return RequestEvent(request_id=request, user_id=user, prefix=prefix, candidates=rng.randrange(100))
    if kind is PreInferSignal:
        return PreInferSignal(
            request_id=request, user_id=user, prefix=prefix, admitted_ms=EPOCH_MS, life_ms=1e3, rank_in_ms=50.0
        )
    if kind is RankingRequest:
        suffix = behaviours(rng, rng.randrange(4), EPOCH_MS + 100 * size)
        candidates = pack_items([rng.randrange(1 << 32) for _ in range(rng.randrange(1, 8))])
        return RankingRequest(request_id=request, user_id=user, prefix=prefix, suffix=suffix, candidates=candidates)
    if kind is Cancel:
        return Cancel(request_id=request, tenant=f"t{rng.randrange(3)}")
    if kind is ScoreReply:
        scores = np.ones(2 * rng.randrange(1, 5), "<f4").tobytes()
        return ScoreReply(request_id=request, status="ok", outcome="hbm", scores=scores, tasks=("click", "like"))
    return worker_status(
        f"w{rng.randrange(3)}",
        lane_statuses(range(rng.randrange(4)), budget_bytes=1 << 30),
        incarnation=rng.randrange(4),
        sent_ms=EPOCH_MS,
        costs=CostModel(c0=1.0, c1=0.1, c2=1e-4, c3=1e-4),
        bytes_per_token=2048,
        alloc_bytes=65536,
        queue_ms=rng.random(),
        model_version="m1",
        counters={"signals": 1.0},
    )


def plain(kind: type[Message], rng: random.Random) -> dict[str, Any]:
    """The same as a map, to be mutated."""
    found: dict[str, Any] = msgspec.to_builtins(message(kind, rng), builtin_types=(bytes,))
    return found


def trigger(rng: random.Random) -> dict[str, Any]:
    """A trigger's status, as a map."""
    policy = PolicyStatus(stale_ms=1e3, life_ms=2e3, max_prefix_tokens=4096)
    found: dict[str, Any] = msgspec.to_builtins(
        TriggerStatus(
            name=f"t{rng.randrange(3)}", incarnation=rng.randrange(4), host="h", pid=1, sent_ms=EPOCH_MS,
            state="serving", group="g", lanes=tuple(range(rng.randrange(4))), policy=policy,
            decisions={"admitted": 3.0, "stale": 1.0},
        )
    )  # fmt: skip
    return found


def routes(rng: random.Random) -> dict[str, Any]:
    """The routes of all users, or of a scenario's, with a rollout under way, as a map."""
    share = rng.randrange(POSITIONS + 1)
    parts = tuple(
        RoutePart(group=group, share=each, lanes=rng.choice((8, 16, 64)))
        for group, each in (("next", share), (rng.choice(("", "feed")), POSITIONS - share))
    )
    figures = {part.group: Figures(version="m1", answers=200, hits=0.5, p99_ms=20.0) for part in parts}
    progress = RolloutProgress(state="moving", group="next", steps=(500, POSITIONS), reason="holds", figures=figures)
    now_ms = int(time.time() * 1e3)
    return to_map(Routes(epoch=now_ms, sent_ms=now_ms, parts=parts, rollout=rng.choice((progress, msgspec.UNSET))))


def assignments(rng: random.Random) -> dict[str, Any]:
    """A planner's assignments, as a map."""
    workers = {f"w{number}": rng.choice(("", "feed", "next")) for number in range(rng.randrange(4))}
    groups, models = ("", "feed", "next"), ("/models/new", "/", "models/new", "")
    checkpoints = {group: rng.choice(models) for group in groups if rng.random() < 0.3}
    home = rng.choice(groups)
    return to_map(Assignments.after(None, "p", workers, int(time.time() * 1e3), home, checkpoints))


def planner(rng: random.Random) -> dict[str, Any]:
    """A planner's status, as a map."""
    scenario = ScenarioPlan(workers=2, wanted=3, demand=2.5, headroom_ms=rng.choice((None, 12.0)), reason="late")
    shared = SharedGroup(scenarios=("feed", "ads"), reason="idle")
    plan = FleetPlan(
        at_s=EPOCH_MS / 1e3, scenarios={"feed": scenario}, move=Move(source="", target="feed"), shared=shared
    )
    return to_map(
        PlannerStatus(name=f"p{rng.randrange(3)}", incarnation=1, sent_ms=EPOCH_MS, state="serving", plan=plan)
    )


def to_map(message: msgspec.Struct) -> dict[str, Any]:
    """The message as a map, to be mutated."""
    found: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    return found


def by_reference(fields: dict[str, Any]) -> dict[str, Any]:
    """The map of an event, a signal or a request, which refers to its prefix instead of having it."""
    reference = HistoryReference.from_behaviours(Behaviours(**fields["prefix"]), 3, range(64))
    empty = msgspec.to_builtins(Behaviours(), builtin_types=(bytes,))
    stated = msgspec.to_builtins(reference, builtin_types=(bytes,))
    return {**fields, "prefix": empty, "history": stated, "v": HISTORY_VERSION, "min_v": HISTORY_VERSION}


def with_features(fields: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """The map of an event, a signal or a request, with all columns of SCHEMA."""

    def packed(table: Table, rows: int) -> dict[str, bytes]:
        values = {one.name: [[rng.randrange(1000)] * one.width] * rows for one in SCHEMA.table(table)}
        return SCHEMA.pack(values, {table: rows})[table] if rows else {}

    for name in ("prefix", "suffix"):
        if name in fields:
            fields[name]["columns"] = packed("behaviour", len(fields[name]["actions"]))
    fields["columns"] = {"schema": SCHEMA.digest, "user": packed("user", 1)}
    if isinstance(candidates := fields.get("candidates"), bytes):
        fields["columns"]["candidate"] = packed("candidate", len(candidates) // 4)
    return fields


def route(rng: random.Random, partitions: int) -> Headers:
    """Headers of a ranking request that says where to answer."""
    return [
        (HEADER_CORRELATION, rng.randbytes(16)),
        (HEADER_REPLY_PARTITION, str(rng.randrange(partitions)).encode()),
    ]
