"""What is fed with bad input, and what must hold: no error but the typed ones, and nothing absurd gets through.

Each target takes one input from a stream of random numbers and raises `Finding` (or whatever escaped) where something
does not hold. Targets keep what the process they stand for would keep (directories, books), so that what piles up shows
as memory.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.dead_letter import dead_letter_headers
from relaygr_stream.client.answers import Answers, ranking_of
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.engine.commands import Prefill, Rank, RankTask
from relaygr_stream.errors import DecodeError, RelayError
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.ops.dead_letters.letter import letters_of
from relaygr_stream.ops.dead_letters.replay import verdict_before
from relaygr_stream.ops.dead_letters.table import as_json, line_of
from relaygr_stream.settings.schema import Settings
from relaygr_stream.trigger.decision import LaneState, Policy, decide
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema
from relaygr_stream.wire.messages import (
    Cancel,
    PreInferSignal,
    RankingRequest,
    RequestEvent,
    ScoreReply,
    WorkerStatus,
)
from relaygr_stream.wire.records import HEADER_CORRELATION, MAX_CORRELATION_BYTES, Record
from relaygr_stream.wire.topic_files import Topic
from relaygr_stream.worker.intake import Intake, IntakeLimits, Origin, TooMuch
from tests.fuzz.checks import (
    MAX_BYTES,
    MAX_TIMEOUT_MS,
    RELAY,
    REPLIES,
    TOPICS,
    all_finite,
    decoded_or_none,
    holds,
    no_constant,
    printable,
)
from tests.fuzz.corpus import (
    SCHEMA,
    behaviours,
    by_reference,
    plain,
    route,
    with_features,
)
from tests.fuzz.gateway import Gateway
from tests.fuzz.handover import Handover
from tests.fuzz.mutate import Mutator
from tests.fuzz.routing import Routing
from tests.fuzz.viewers import Viewer, worker_record

Target = Callable[[random.Random], None]


def targets(stack: ExitStack) -> dict[str, Target]:
    """Every target by its name, each with fresh state; what they opened is closed with the stack."""
    kinds: tuple[type[Any], ...] = (RequestEvent, PreInferSignal, RankingRequest, Cancel, ScoreReply, WorkerStatus)
    return {
        **{f"decode {kind.__name__}": _decode(kind) for kind in kinds},
        "worker intake": _Intake(),
        "worker intake with features": _Intake(SCHEMA),
        "trigger": _Trigger(),
        "status and explain": Viewer(),
        "client": _Client(stack),
        "routes": Routing(stack),
        "gateway": Gateway(),
        "dead letters": _dead_letters,
        "hand-over": Handover(stack),
    }


def _decode(kind: type[Any]) -> Target:
    def target(rng: random.Random) -> None:
        fields = plain(kind, rng)
        if kind in (RequestEvent, PreInferSignal, RankingRequest) and rng.random() < 0.5:
            fields = with_features(fields, rng)
        raw = Mutator(rng).value(fields)
        message = decoded_or_none(kind, raw)
        if message is not None:
            if kind is not WorkerStatus:  # whose readers refuse or replace what they cannot reckon with: see `trigger`
                holds(all_finite(msgspec.to_builtins(message, builtin_types=(bytes,))), f"not finite in {message}")
            again = encode(message)
            holds(encode(decode(kind, again)) == again, f"{message} does not survive the wire")

    return target


class _Intake:
    """A worker's reading of both its topics, from headers to tasks."""

    def __init__(self, schema: FeatureSchema = NO_FEATURES) -> None:
        self._schema = schema
        self._intake = Intake(
            IntakeLimits(RELAY, 1000.0, REPLIES, MAX_BYTES, max_timeout_ms=MAX_TIMEOUT_MS), features=schema
        )
        self._offset = 0

    def __call__(self, rng: random.Random) -> None:
        mutator = Mutator(rng)
        kinds: list[tuple[type[Any], Topic]] = [(RankingRequest, TOPICS.ranking), (PreInferSignal, TOPICS.pre_infer)]
        kind, topic = rng.choice(kinds)
        fields = with_features(plain(kind, rng), rng) if self._schema else plain(kind, rng)
        if not self._schema and rng.random() < 0.3:
            fields = by_reference(fields)
        value = mutator.value(fields) if rng.random() < 0.95 else None
        headers: Any = tuple(mutator.headers(route(rng, REPLIES)))
        self._offset += 1
        record = Record(topic.name, rng.randrange(8), self._offset, 0, mutator.key(), value, headers)
        try:
            command: Rank | Prefill
            if kind is PreInferSignal:
                command = signal = self._intake.signal(record, time.monotonic())
                holds(math.isfinite(signal.task.due) and math.isfinite(signal.task.expires), f"times of {signal.task}")
            else:
                origin = self._intake.route(record)
                self._check(origin)
                command = rank = self._intake.ranking(record, origin, time.monotonic())
                self._check_ranking(rank.task, value or b"")
            if command.referred is not None:
                command = self._intake.complete(command, behaviours(rng, rng.randrange(1, 12)))
            task = command.task
            holds((task.tokens.array[2] >= 0).all(), "a gap of the prefix below 0")
            context = self._schema.context_tokens
            holds(task.tokens.context == context, "the user's token")
            holds(len(task.tokens) - context <= RELAY.max_prefix_tokens, "prefix too long")
        except (DecodeError, TooMuch):
            return

    def _check_ranking(self, task: RankTask, value: bytes) -> None:
        holds(math.isfinite(task.deadline), f"deadline {task.deadline}")
        holds((task.suffix.array[2] >= 0).all(), "a gap of the suffix below 0")
        holds(0 < len(task.candidates) <= RELAY.max_candidates, "candidates")
        holds(0 < task.times.timeout_ms <= MAX_TIMEOUT_MS, f"waits for {task.times.timeout_ms} ms")
        holds(task.client, "a ranking of nobody")
        for name, rows in task.features.items():
            holds(len(rows) == len(task.candidates), f"{name} has {len(rows)} rows")
            holds(np.isfinite(rows).all(), f"{name} is not finite")
        held = len(value) + task.tokens.array.nbytes + task.suffix.array.nbytes
        holds(held < task.nbytes < held + MAX_BYTES, f"{task.nbytes} bytes counted of {held}")

    def _check(self, origin: Origin) -> None:
        holds(0 <= origin.reply_partition < REPLIES, f"reply partition {origin.reply_partition}")
        holds(1 <= len(origin.correlation) <= MAX_CORRELATION_BYTES, "correlation id")


class _Trigger:
    """What workers state, and what is decided on events from that: bounds hold whatever anybody says."""

    #: Decisions after which a lane is taken over anew; its recent requests would be dropped by age meanwhile.
    FRESH: Final = 2000

    def __init__(self) -> None:
        self._policy = Policy.from_settings(Settings(relay=RELAY))
        self._owners = OwnerDirectory(1e6)
        self._count = 0
        self._lane = LaneState(self._policy)

    def __call__(self, rng: random.Random) -> None:
        mutator = Mutator(rng)
        self._count += 1
        now = time.monotonic()
        if self._count % self.FRESH == 0:
            self._owners = OwnerDirectory(1e6)
            self._lane = LaneState(self._policy)
        self._owners.on_records([worker_record(mutator, rng, self._count)])
        owner = self._owners.owner(rng.randrange(4))
        self._lane.observe(owner)
        event = decoded_or_none(RequestEvent, mutator.value(plain(RequestEvent, rng)))
        if not isinstance(event, RequestEvent):
            return
        decision = decide(event, self._lane, age_ms=0.0, now_s=now)
        holds(math.isfinite(decision.predicted_ms) and decision.predicted_ms >= 0, f"predicted {decision}")
        holds(math.isfinite(decision.cost_ms) and decision.cost_ms >= 0, f"cost {decision}")
        if decision.admit:
            holds(decision.nbytes > 0, f"admitted for nothing: {decision}")
            self._lane.book(event, decision, now)
            assert owner is not None
            ahead_ms = self._lane.ahead(owner, now).ms
            holds(math.isfinite(ahead_ms) and ahead_ms >= 0, f"{ahead_ms} ms before the owner")


class _Client:
    """Answers as a client reads them, to a call of its own as often as not."""

    def __init__(self, stack: ExitStack) -> None:
        self._loop = asyncio.new_event_loop()
        stack.callback(self._loop.close)
        self._answers = Answers(ClientMetrics(CollectorRegistry()), MAX_BYTES)

    def __call__(self, rng: random.Random) -> None:
        self._loop.run_until_complete(self._one(rng))

    async def _one(self, rng: random.Random) -> None:
        mutator = Mutator(rng)
        fields = plain(ScoreReply, rng)
        call = self._answers.expect(fields["request_id"])
        headers: Any = [(HEADER_CORRELATION, call.new_copy(0))]
        if rng.random() < 0.3:
            headers = mutator.headers(headers)
        value = mutator.value(fields)
        self._answers.on_records([Record("scores", 0, 0, 0, mutator.key(), value, tuple(headers))])
        try:
            if call.reply.done():
                ranking = ranking_of(call.reply.result(), np.arange(rng.randrange(5)), 1.0)
                holds(ranking.scores.ndim == 2, f"scores of shape {ranking.scores.shape}")
                holds(np.isfinite(ranking.scores).all(), f"scores {ranking.scores}")
        except RelayError:
            pass
        finally:
            self._answers.release(call)


def _dead_letters(rng: random.Random) -> None:
    """Dead letters can be listed, shown and judged: as JSON that any program reads, and harmless to a terminal."""
    mutator = Mutator(rng)
    kinds: list[type[Any]] = [RequestEvent, PreInferSignal, RankingRequest]
    kind = rng.choice(kinds)
    value = mutator.value(plain(kind, rng))
    when = rng.choice([0, -1, 1 << 41, 1 << 62, -(1 << 62)])
    headers: Any = tuple(mutator.headers(route(rng, REPLIES)))
    bad = Record(rng.choice([TOPICS.ranking.name, "\x1b[2J"]), 3, 17, when, mutator.key(), value, headers)
    error = DecodeError("invalid", rng.choice(["no map", "\x1b[2J", "\ud800", "é" * 999]))
    letter_headers: Any = tuple(dead_letter_headers(bad, error)) if rng.random() < 0.8 else headers
    letter_headers = tuple(mutator.headers(list(letter_headers))) if rng.random() < 0.5 else letter_headers
    for letter in letters_of([Record("d", 0, 5, when, bad.key, value, letter_headers)]):
        line = as_json(letter, value=True)
        json.loads(line, parse_constant=no_constant)
        holds(printable(line), f"control characters in {line!r}")
        holds(len(line) < 100_000 + 4 * len(value), f"a line of {len(line)} characters")
        verdict = verdict_before(letter, TOPICS, again=False)
        shown = line_of(letter, verdict, letter.detail)
        holds(printable(shown), f"control characters in {shown!r}")
