"""Intake: decodes records, checks them against the limits, and puts their times on this process's clock.

It raises the reason why a record cannot become a task; requests.py decides what becomes of the record.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
from prometheus_client import Counter

from relaygr_stream.bus.ages import Age, AgeBounds, LogEnd, SenderLag, stated_age_ms
from relaygr_stream.engine.commands import DELEGATED_LANE, Prefill, PrefillTask, Rank, RankTask, Referred, Times
from relaygr_stream.errors import DecodeError
from relaygr_stream.models.api import ROWS, Tokens
from relaygr_stream.settings.schema import Relay, Settings
from relaygr_stream.telemetry.tracing import Trace
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import check_features, decode
from relaygr_stream.wire.features import NO_FEATURES, NO_TABLES, FeatureSchema
from relaygr_stream.wire.messages import (
    SCORE_DTYPE,
    Cancel,
    PreInferSignal,
    RankingRequest,
    prefix_length,
    tenant_key,
)
from relaygr_stream.wire.records import (
    HEADER_CORRELATION,
    HEADER_REPLY_PARTITION,
    MAX_CORRELATION_BYTES,
    Record,
    held_bytes,
    kind_of,
)
from relaygr_stream.wire.topic_files import TopicSet

#: Decimal digits of the largest partition number (int32).
MAX_PARTITION_DIGITS: Final = 10
#: Python's objects around a waiting ranking: task, arrays, entries of heaps and tables.
OBJECT_BYTES: Final = 4096


class Origin(msgspec.Struct, frozen=True, eq=False):
    """Where a ranking came from and where its answer goes."""

    record: Record
    reply_partition: int
    correlation: bytes
    trace: Trace | None = None  # the span of the work at it; None: this worker makes none


class UnknownReplyPartition(DecodeError):
    """A number that no partition of `scores` had when the cluster was asked last."""


class TooMuch(Exception):
    """A well-formed request beyond this worker's limits, or without the features that its model reads."""

    def __init__(self, message: str, request: RankingRequest, scenario: str = "") -> None:
        super().__init__(message)
        self.scenario = scenario
        self.request_id = request.request_id
        self.user_id = request.user_id
        self.request_key = tenant_key(request.tenant, request.request_id)


@dataclass(frozen=True, slots=True)
class IntakeLimits:
    """What a worker takes. max_bytes: of a message.

    max_timeout_ms: the longest timeout granted. scenario: of its group; "": none. slos_ms: of those that its group
    serves; empty: it serves one at most.
    """

    relay: Relay
    default_timeout_ms: float
    reply_partitions: int
    max_bytes: int
    max_timeout_ms: float = math.inf
    scenario: str = ""
    slos_ms: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_settings(cls, settings: Settings, topics: TopicSet) -> IntakeLimits:
        """As configured."""
        return cls(
            settings.relay,
            settings.client.timeout_ms,
            topics.scores.partitions,
            topics.ranking.max_message_bytes,
            settings.worker.max_timeout_ms,
            settings.scenario,
            {name: each.slo_ms for name, each in settings.sharing.items()},
        )


class Intake:
    """Decodes records; their times become seconds of the monotonic clock by which `now` comes in.

    clamped: counts requests whose sender's clock cannot be right. misnamed: those that name a scenario which its group
    does not serve. score_columns, features: of the model.
    """

    def __init__(
        self,
        limits: IntakeLimits,
        clamped: Counter | None = None,
        misnamed: Counter | None = None,
        score_columns: int = 1,
        features: FeatureSchema = NO_FEATURES,
    ) -> None:
        self._limits = limits
        self._relay = limits.relay
        self._reply_partitions = limits.reply_partitions
        self._clamped, self._misnamed = clamped, misnamed
        self._features = features
        self._token_bytes = 8 * (ROWS + features.words)
        self._score_columns = score_columns
        self._ages: defaultdict[tuple[str, int], AgeBounds] = defaultdict(partial(AgeBounds, SenderLag()))

    def counted(self, count: int) -> None:
        """The cluster has so many partitions of `scores`: clients choose among those, whatever the file says."""
        self._reply_partitions = count

    def sample_ages(self, topic: str, ends: Mapping[int, LogEnd]) -> None:
        """Note where lanes of a topic end now, which bounds the age of records that are read later."""
        for lane, end in ends.items():
            self._ages[topic, lane].sample(end)

    def lanes_lost(self, lanes: Iterable[int]) -> None:
        """Drop what is known of these lanes' ends."""
        lost = set(lanes)
        for key in [key for key in self._ages if key[1] in lost]:
            del self._ages[key]

    def signal(self, record: Record, now: float, origin: Any = None) -> Prefill:
        """A pre-infer signal as a command, also of one on another worker's behalf. Raises DecodeError.

        origin: as PrefillTask's.
        """
        signal = decode(PreInferSignal, record.value, self._limits.max_bytes, record.headers)
        length = prefix_length(signal)
        if beyond := self._relay.beyond(prefix=length):
            raise DecodeError("invalid", beyond)
        if kind_of(record.headers) and not signal.delegate:
            raise DecodeError("invalid", "a delegated signal must say on whose behalf it comes (delegate)")
        check_features(signal, self._features)
        user = (signal.columns or NO_TABLES).user
        tokens = Tokens.from_behaviours(signal.prefix, None, self._features, user)
        age = self._age(record, signal.admitted_ms, now).sure_ms
        life = min(signal.life_ms, self._relay.life_window_ms) - age
        task = PrefillTask(
            request_key=tenant_key(signal.tenant, signal.request_id),
            user_key=tenant_key(signal.tenant, signal.user_id),
            lane=DELEGATED_LANE if signal.delegate else record.lane,
            tokens=tokens,
            due=now + max(0.0, (signal.rank_in_ms or signal.life_ms) - age) / 1e3,
            expires=now + life / 1e3,
            arrived=now,
            nbytes=OBJECT_BYTES + self._token_bytes * (self._features.context_tokens + length),
            origin=origin,
            scenario=self._scenario_of(signal),
        )
        return Prefill(task, Referred(signal.history, user, Behaviours()) if signal.history else None)

    def complete(self, command: Rank | Prefill, prefix: Behaviours) -> Rank | Prefill:
        """The command with the history that it refers to. Raises DecodeError for one that does not fit the model or
        the suffix."""
        referred = command.referred
        assert referred is not None
        self._features.check("behaviour", len(prefix), prefix.table)
        tokens = Tokens.from_behaviours(prefix, None, self._features, referred.user)
        if isinstance(command, Prefill):
            return Prefill(msgspec.structs.replace(command.task, tokens=tokens))
        suffix, last = referred.suffix, int.from_bytes(prefix.times[-8:], "little", signed=True)
        if len(suffix) and int.from_bytes(suffix.times[:8], "little", signed=True) < last:
            raise DecodeError("invalid", "the suffix starts before the history ends")
        behind = Tokens.from_behaviours(suffix, last, self._features)
        task = msgspec.structs.replace(command.task, tokens=tokens, suffix=behind)
        return command._replace(task=task, referred=None)

    def route(self, record: Record) -> Origin:
        """Where to answer a ranking record, from its headers alone. Raises DecodeError, UnknownReplyPartition."""
        headers: dict[str, bytes | None] = dict(record.headers)  # Kafka allows null for a header's value
        correlation = headers.get(HEADER_CORRELATION) or b""
        if not 1 <= len(correlation) <= MAX_CORRELATION_BYTES:
            raise DecodeError("invalid", f"header {HEADER_CORRELATION} must be 1–{MAX_CORRELATION_BYTES} bytes")
        text = headers.get(HEADER_REPLY_PARTITION) or b""
        partition = int(text) if text.isdigit() and len(text) <= MAX_PARTITION_DIGITS else -1
        if not 0 <= partition < self._reply_partitions:
            kind = DecodeError if partition < 0 else UnknownReplyPartition
            raise kind(
                "invalid",
                f"header {HEADER_REPLY_PARTITION} = {text[:16]!r}: must be a partition of the scores topic in decimal, "
                f"0…{self._reply_partitions - 1}",
            )
        return Origin(record, partition, correlation)

    def ranking(self, record: Record, origin: Origin, now: float, reply_ms: float = 0.0) -> Rank:
        """A ranking record as a command. Raises DecodeError or TooMuch. reply_ms: an answer's way to its client."""
        request = decode(RankingRequest, record.value, self._limits.max_bytes, record.headers)
        prefix, suffix, scenario = prefix_length(request), len(request.suffix), self._scenario_of(request)
        item_dtype = request.candidate_dtype
        candidates = len(request.candidates) // item_dtype.itemsize
        if beyond := self._relay.beyond(prefix=prefix, suffix=suffix, candidates=candidates):
            raise TooMuch(beyond, request, scenario)
        try:
            check_features(request, self._features)
        except DecodeError as error:
            raise TooMuch(error.detail, request, scenario) from error
        columns = request.columns or NO_TABLES
        scores = 2 * SCORE_DTYPE.itemsize * self._score_columns  # twice, while they are written
        decoded = self._token_bytes * (self._features.context_tokens + prefix + suffix) + (8 + scores) * candidates
        if request.columns:
            decoded += columns.nbytes()  # copied from the record; the task keeps the candidates'
        timeout = min(request.timeout_ms or self._limits.default_timeout_ms, self._limits.max_timeout_ms)
        age, slo_ms = self._age(record, request.sent_ms, now), self._limits.slos_ms.get(scenario, self._relay.slo_ms)
        prefix_times = request.prefix.times
        last = int.from_bytes(prefix_times[-8:], "little", signed=True) if prefix_times else None
        task = RankTask(
            request_key=tenant_key(request.tenant, request.request_id),
            user_key=tenant_key(request.tenant, request.user_id),
            lane=record.lane,
            tokens=Tokens.from_behaviours(request.prefix, None, self._features, columns.user),
            suffix=Tokens.from_behaviours(request.suffix, last, self._features),
            candidates=np.frombuffer(request.candidates, item_dtype).astype(np.int64),
            times=Times.from_timeout(now, timeout, slo_ms, reply_ms, age_ms=age.sure_ms, inbound_ms=age.stated_ms),
            full=request.mode == "full",
            client=request.client_id or f"on reply partition {origin.reply_partition}",
            nbytes=OBJECT_BYTES + held_bytes(record) + decoded,
            hops=request.hops,
            origin=origin,
            features=self._features.values("candidate", columns.candidate) if columns.candidate else {},
            scenario=scenario,
        )
        referred = Referred(request.history, columns.user, request.suffix) if request.history else None
        return Rank(task, referred=referred, whole=request.mode != "auto")

    def _scenario_of(self, message: PreInferSignal | RankingRequest) -> str:
        """What it is charged to: the scenario that it names, or the group's own for a name that the group does not
        serve; "" where the group serves one at most."""
        named, own, several = message.scenario or "", self._limits.scenario, self._limits.slos_ms
        if named in several:
            return named
        if named and named != own and self._misnamed is not None:
            self._misnamed.inc()
        return own if several else ""

    def cancelled(self, record: Record) -> str:
        """The request (tenant_key) that a cancel record names. Raises DecodeError."""
        cancel = decode(Cancel, record.value, self._limits.max_bytes, record.headers)
        return tenant_key(cancel.tenant, cancel.request_id)

    def sure_age_ms(self, record: Record, now: float) -> float:
        """The part of a record's age, by its timestamp, that the log's order proves: clocks differ."""
        ages = self._ages[record.topic, record.lane]
        return ages.age(stated_age_ms(record.timestamp_ms), record.offset, now).sure_ms

    def _age(self, record: Record, sent_ms: int, now: float) -> Age:
        age = self._ages[record.topic, record.lane].age(stated_age_ms(sent_ms), record.offset, now)
        if age.clock_off and self._clamped is not None:
            self._clamped.inc()
        return age
