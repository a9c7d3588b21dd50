"""What is fed with bad input, and what must hold: no error but the typed ones, and nothing absurd gets through.

Each target takes one input from a stream of random numbers and raises `Finding` (or whatever escaped) where something
does not hold. Targets keep what the process they stand for would keep (directories, books), so that what piles up shows
as memory.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import numpy as np
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.dead_letter import dead_letter_headers
from relaygr_stream.cli.planner import _table as plan_table
from relaygr_stream.client.answers import Answers, ranking_of
from relaygr_stream.client.groups import Groups
from relaygr_stream.client.metrics import ClientMetrics
from relaygr_stream.engine.commands import Prefill, Rank, RankTask
from relaygr_stream.errors import BrokerUnavailable, ConfigError, DecodeError, RelayError, UnknownScenario
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.gateway.bodies import decoded
from relaygr_stream.gateway.messages import JSON, MSGPACK, Announce
from relaygr_stream.gateway.messages import Rank as RankBody
from relaygr_stream.ops.dead_letters.letter import letters_of
from relaygr_stream.ops.dead_letters.replay import verdict_before
from relaygr_stream.ops.dead_letters.table import as_json, line_of
from relaygr_stream.ops.rollout.routing import next_group, source_of
from relaygr_stream.ops.status.odd import oddities
from relaygr_stream.ops.status.overview import Overview
from relaygr_stream.ops.status.table import as_json as status_as_json
from relaygr_stream.ops.status.table import render
from relaygr_stream.settings.schema import MAX_LANES, Kafka, Relay, Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.printable import render_plain
from relaygr_stream.trigger.decision import LaneState, Policy, decide
from relaygr_stream.trigger.statement import stated_policy
from relaygr_stream.wire.assignments import KEY as ASSIGNMENTS_KEY
from relaygr_stream.wire.assignments import KIND as ASSIGNMENTS
from relaygr_stream.wire.assignments import Assignments, newer_assignments
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import Message, decode, encode, validated
from relaygr_stream.wire.erase import KIND as ERASE
from relaygr_stream.wire.erase import read_erase
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema
from relaygr_stream.wire.messages import (
    Cancel,
    PreInferSignal,
    RankingRequest,
    RequestEvent,
    ScoreReply,
    WorkerStatus,
    with_version,
)
from relaygr_stream.wire.planner_status import KIND as PLANNER
from relaygr_stream.wire.planner_status import read_planner
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_KIND, MAX_CORRELATION_BYTES, Record
from relaygr_stream.wire.routes import KEY, OWN, POSITIONS, Routes, encode_routes, with_newer
from relaygr_stream.wire.routes import KIND as SCENARIO
from relaygr_stream.wire.signature import Signer
from relaygr_stream.wire.topic_files import Topic, load_topics
from relaygr_stream.wire.trigger_status import KEY_PREFIX, KIND
from relaygr_stream.wire.versions import NOT_DECODED
from relaygr_stream.wire.worker_status import StatusReader, worker_statuses
from relaygr_stream.worker.intake import Intake, IntakeLimits, Origin, TooMuch
from relaygr_stream.worker.moves import ScenarioMoves
from tests.fuzz.corpus import (
    EPOCH_MS,
    SCHEMA,
    assignments,
    behaviours,
    by_reference,
    plain,
    planner,
    route,
    routes,
    trigger,
    with_features,
)
from tests.fuzz.handover import Handover
from tests.fuzz.mutate import Mutator

Target = Callable[[random.Random], None]

REPLIES: Final = 8
MAX_BYTES: Final = 1 << 20
MAX_TIMEOUT_MS: Final = 5000.0
#: Limits small enough for mutations to pass them.
RELAY: Final = Relay(max_prefix_tokens=64, max_suffix_tokens=8, max_candidates=64)
TOPICS: Final = load_topics(Kafka())
REASONS: Final = {"oversized", "malformed", "unknown_version", "invalid"}


class Finding(Exception):
    """Something got through that must not."""


def holds(condition: object, what: str) -> None:
    """Raise Finding unless the condition holds."""
    if not condition:
        raise Finding(what)


def targets(stack: ExitStack) -> dict[str, Target]:
    """Every target by its name, each with fresh state; what they opened is closed with the stack."""
    kinds: tuple[type[Any], ...] = (RequestEvent, PreInferSignal, RankingRequest, Cancel, ScoreReply, WorkerStatus)
    return {
        **{f"decode {kind.__name__}": _decode(kind) for kind in kinds},
        "worker intake": _Intake(),
        "worker intake with features": _Intake(SCHEMA),
        "trigger": _Trigger(),
        "status and explain": _Viewer(),
        "client": _Client(stack),
        "routes": _Routing(stack),
        "gateway": _Gateway(),
        "dead letters": _dead_letters,
        "hand-over": Handover(stack, holds),
    }


def _decode(kind: type[Any]) -> Target:
    def target(rng: random.Random) -> None:
        fields = plain(kind, rng)
        if kind in (RequestEvent, PreInferSignal, RankingRequest) and rng.random() < 0.5:
            fields = with_features(fields, rng)
        raw = Mutator(rng).value(fields)
        message = _decoded(kind, raw)
        if message is not None:
            if kind is not WorkerStatus:  # whose readers refuse or replace what they cannot reckon with: see `trigger`
                holds(_all_finite(msgspec.to_builtins(message, builtin_types=(bytes,))), f"not finite in {message}")
            again = encode(message)
            holds(encode(decode(kind, again)) == again, f"{message} does not survive the wire")

    return target


def _decoded(kind: type[Any], raw: bytes) -> Message | None:
    try:
        found: Message = decode(kind, raw, MAX_BYTES)
    except DecodeError as error:
        holds(error.reason in REASONS, f"reason {error.reason}")
        holds(len(error.detail) < 2000, f"a detail of {len(error.detail)} characters")
        return None
    return found


def _all_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_all_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_all_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


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
        self._owners.on_records([_stated(mutator, rng, self._count)])
        owner = self._owners.owner(rng.randrange(4))
        self._lane.observe(owner)
        event = _decoded(RequestEvent, mutator.value(plain(RequestEvent, rng)))
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


def _key(fields: dict[str, Any]) -> bytes:
    """The key under which a status of these fields, as they came to be, is believed."""
    return str(fields.get("name")).encode(errors="replace")


def _stated(mutator: Mutator, rng: random.Random, offset: int) -> Record:
    """A record of `worker-status` under its worker's name: a status, seldom a tombstone or another's."""
    fields = plain(WorkerStatus, rng)
    value = mutator.value(fields) if rng.random() < 0.97 else None
    key = _key(fields) if rng.random() < 0.95 else mutator.key()
    headers: Any = tuple(mutator.headers([])) if rng.random() < 0.1 else ()
    return Record("s", 0, offset, 0, key, value, headers)


class _Viewer:
    """What `relaygr status` and `relaygr explain` read: of workers and of triggers, signed or not."""

    #: Records after which a view is looked at, and begun anew: looking takes milliseconds.
    FRESH: Final = 200
    SETTINGS: Final = Settings()
    SIGNER: Final = Signer("a secret of the fuzzed fleet")

    def __init__(self) -> None:
        self._count = 0
        self._views = self._fresh()

    def _fresh(self) -> list[Overview]:
        wall = partial(float, EPOCH_MS / 1e3)
        readers = [StatusReader(4), StatusReader(4, self.SIGNER, wall=wall)]
        return [Overview(self.SETTINGS, TOPICS, reader, live=True) for reader in readers]

    def __call__(self, rng: random.Random) -> None:
        mutator = Mutator(rng)
        self._count += 1
        record = _stated(mutator, rng, self._count) if rng.random() < 0.6 else self._of_a_trigger(mutator, rng)
        signed: Any = self.SIGNER.sign(record.topic, record.key or b"", record.value, record.headers)
        if rng.random() < 0.2:
            signed = mutator.headers(signed)
        record = record._replace(headers=tuple(signed))
        for view in self._views:
            view.on_records([record])
            with suppress(DecodeError):
                if (erase := read_erase(record, view.reader)) is not None:
                    erase.names("u")
        for status in worker_statuses([record]):
            holds(len(status.name) <= 256, f"a name of {len(status.name)} characters")
        if self._count % self.FRESH == 0:
            for view in self._views:
                self.look(view)
            self._views = self._fresh()

    @staticmethod
    def _of_a_trigger(mutator: Mutator, rng: random.Random) -> Record:
        fields = trigger(rng)
        value = mutator.value(fields) if rng.random() < 0.97 else None
        key = KEY_PREFIX.encode() + _key(fields) if rng.random() < 0.9 else mutator.key()
        headers: Any = tuple(mutator.headers([(HEADER_KIND, rng.choice([KIND, KIND, ERASE]).encode())]))
        return Record("s", 0, 0, 0, key, value, headers)

    @staticmethod
    def look(view: Overview) -> None:
        for status in view.living_triggers().values():
            policy = stated_policy(status.policy)
            holds(math.isfinite(policy.stale_ms) and policy.max_prefix_tokens >= 0, f"{policy}")
        line = status_as_json(view)
        json.loads(line, parse_constant=_no_constant)
        holds(_printable(line), f"control characters in {line!r}")
        shown = render_plain(render(view), 80)
        holds(all(map(_printable, shown.split("\n"))), f"control characters in {shown!r}")
        before = len(oddities(view))
        odd = [each for each in render_plain(render(view)).split("\n") if each.startswith("odd: ")]
        after = len(oddities(view))  # another number where a process has become silent meanwhile
        holds(min(before, after) <= len(odd) <= max(before, after), f"a forged line in {odd}")


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


class _Gateway:
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
        holds(_decoded(type(message), encoded) == message, f"{message} does not survive the wire")
        if rank and isinstance(message, RankingRequest):
            headers: Any = tuple(route(rng, REPLIES))
            record = Record(TOPICS.ranking.name, 0, 0, 0, key, encoded, headers)
            with suppress(TooMuch):
                self._intake.ranking(record, self._intake.route(record), time.monotonic())


class _Routing:
    """What clients, workers, viewers and the command of a rollout make of records on `routes`, and of a planner's."""

    #: Records after which everybody begins anew: the highest epoch counts, and a spoiled one may be high.
    FRESH: Final = 50

    def __init__(self, stack: ExitStack) -> None:
        self._loop = asyncio.new_event_loop()
        stack.callback(self._loop.close)
        self._count = 0

    def __call__(self, rng: random.Random) -> None:
        if self._count % self.FRESH == 0:
            self._readers = [StatusReader(4), StatusReader(4, _Viewer.SIGNER)]
            self._view = Overview(Settings(), load_topics(Kafka()), self._readers[0], live=True)
            self._known: dict[int, Mapping[str, Routes]] = {0: {}, 1: {}}
            self._moves = ScenarioMoves("w1", "feed", ["next"])
            self._assignments: Assignments | None = None
        self._count += 1
        mutator = Mutator(rng)
        make, key, kind = rng.choice(
            [
                (routes, KEY, ""),
                (routes, rng.choice([b"feed", b"ads", b"s%d" % rng.randrange(400)]), SCENARIO),
                (assignments, ASSIGNMENTS_KEY, ASSIGNMENTS),
                (planner, b"planner/p%d" % rng.randrange(3), PLANNER),
            ]
        )
        fields = make(rng)
        value = msgspec.msgpack.encode(fields) if rng.random() < 0.3 else mutator.value(fields)
        headers: Any = [(HEADER_KIND, kind.encode())] if kind else []
        if rng.random() < 0.1:
            key, headers = mutator.key() or b"", mutator.headers(headers)
        headers = _Viewer.SIGNER.sign("routes", key, value, headers)
        record = Record("routes", 0, self._count, 0, key, value, tuple(headers))
        for number, reader in enumerate(self._readers):
            with suppress(DecodeError):
                before = self._known[number]
                self._known[number] = with_newer(record, reader, before)
                if self._known[number] is not before and not number:
                    self._routed(rng)
            with suppress(DecodeError):
                if (found := newer_assignments(record, reader, self._assignments)) is not self._assignments:
                    self._assignments = found
                    self._moves.take(found)
                    holds(self._moves.target in ("", "feed", "next"), f"goes to {self._moves.target!r}")
            with suppress(DecodeError):
                if (status := read_planner(record, reader)) is not None:
                    shown = render_plain(plan_table(status.plan), 80)
                    holds(all(map(_printable, shown.split("\n"))), f"control characters in {shown!r}")

    def _routed(self, rng: random.Random) -> None:
        known = self._known[0]
        self._view.take_routes(known)
        _Viewer.look(self._view)
        for routed in known.values():
            of = routed
            holds(of.group_of(f"u{rng.randrange(1000)}") in of.groups, "a group that the routes do not name")
            with suppress(ConfigError):
                to = next_group(of)
                source_of(of, to)
                moved = of.moved(to, 16, rng.randrange(POSITIONS + 1))
                msgspec.msgpack.decode(encode_routes(moved), type=Routes)
                of = moved
            holds(sum(part.share for part in of.parts) == POSITIONS, f"not all users, or some twice: {of}")
            holds(len(set(of.groups)) == len(of.parts), f"a group twice: {of}")
        self._loop.run_until_complete(self._followed(rng, known))

    @staticmethod
    async def _followed(rng: random.Random, known: Mapping[str, Routes]) -> None:
        """By a client."""
        own: Any = SimpleNamespace(serves=rng.random() < 0.9)

        @asynccontextmanager
        async def opened(*_: object) -> AsyncIterator[Any]:
            if rng.random() < 0.2:
                raise BrokerUnavailable("away")
            yield SimpleNamespace(serves=rng.random() < 0.9)

        groups, topics = Groups(Settings(), opened, ClientMetrics(CollectorRegistry())), load_topics(Kafka())
        owner = Background()
        groups._topics[""] = topics
        groups._background = owner
        try:
            groups._on_routes(known)
            for _ in range(3):
                await asyncio.sleep(0)
            for scenario in known:
                with suppress(UnknownScenario, BrokerUnavailable):
                    group = groups.group_of(own, f"u{rng.randrange(100)}", scenario=scenario)
                    holds(group in (OWN, *known[scenario].groups), f"{group!r} is none of {scenario!r}")
            holds(not owner.failed.done(), "a client ends")
            holds(0 < topics.lanes <= MAX_LANES, f"{topics.lanes} lanes")
        finally:
            await owner.end()


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
        json.loads(line, parse_constant=_no_constant)
        holds(_printable(line), f"control characters in {line!r}")
        holds(len(line) < 100_000 + 4 * len(value), f"a line of {len(line)} characters")
        verdict = verdict_before(letter, TOPICS, again=False)
        shown = line_of(letter, verdict, letter.detail)
        holds(_printable(shown), f"control characters in {shown!r}")


def _printable(text: str) -> bool:
    return not any(ord(each) < 32 or 127 <= ord(each) < 160 for each in text)


def _no_constant(name: str) -> None:
    raise Finding(f"{name} in JSON")
