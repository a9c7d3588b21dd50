"""From records to tasks: decode, check against the limits, put on this process's clock.

A record that cannot become a task is reported with its reason; what to do about it is the service's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from relaygr_stream.bus.records import Record
from relaygr_stream.errors import DecodeError
from relaygr_stream.messages import (
    HEADER_CORRELATION,
    HEADER_REPLY_PARTITION,
    ITEM_DTYPE,
    MAX_CORRELATION_BYTES,
    PreInferSignal,
    RankingRequest,
    decode,
)
from relaygr_stream.models.tokens import Tokens
from relaygr_stream.settings import Relay
from relaygr_stream.worker.tasks import PreInferTask, RankTask

#: Decimal digits of the largest partition number (int32).
MAX_PARTITION_DIGITS: Final = 10


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a ranking came from and where its answer goes."""

    record: Record
    reply_partition: int
    correlation: bytes


class TooMuch(Exception):
    """A well-formed request beyond this worker's limits."""


class Intake:
    """Decodes records; times become seconds of the monotonic clock."""

    def __init__(
        self,
        relay: Relay,
        default_timeout_ms: float,
        reply_partitions: int,
        max_bytes: int,
        clamped: Callable[[], None],
    ) -> None:
        self._relay = relay
        self._default_timeout_ms = default_timeout_ms
        self._reply_partitions = reply_partitions
        self._max_bytes = max_bytes
        self._clamped = clamped

    def signal(self, record: Record) -> PreInferTask:
        """A pre-infer record as a task. Raises DecodeError."""
        signal = decode(PreInferSignal, record.value, self._max_bytes)
        if len(signal.prefix) > self._relay.max_prefix_tokens:
            raise DecodeError(
                "invalid",
                f"{len(signal.prefix)} prefix tokens, relay.max_prefix_tokens is {self._relay.max_prefix_tokens}",
            )
        now = time.monotonic()
        age = self._age_ms(signal.admitted_ms)
        life = min(signal.life_ms, self._relay.life_window_ms) - age
        return PreInferTask(
            request_id=signal.request_id,
            user_id=signal.user_id,
            lane=record.lane,
            offset=record.offset,
            tokens=Tokens.of(signal.prefix),
            due=now + max(0.0, (signal.rank_in_ms or signal.life_ms) - age) / 1e3,
            expires=now + life / 1e3,
        )

    def route(self, record: Record) -> Origin:
        """Where to answer a ranking record, from its headers alone. Raises DecodeError."""
        headers = dict(record.headers)
        correlation = headers.get(HEADER_CORRELATION, b"")
        if not 1 <= len(correlation) <= MAX_CORRELATION_BYTES:
            raise DecodeError("invalid", f"header {HEADER_CORRELATION} must be 1–{MAX_CORRELATION_BYTES} bytes")
        text = headers.get(HEADER_REPLY_PARTITION, b"")
        partition = int(text) if text.isdigit() and len(text) <= MAX_PARTITION_DIGITS else -1
        if not 0 <= partition < self._reply_partitions:
            raise DecodeError(
                "invalid",
                f"header {HEADER_REPLY_PARTITION} = {text[:16]!r}: must be a partition of the scores topic in decimal, "
                f"0…{self._reply_partitions - 1}",
            )
        return Origin(record, partition, correlation)

    def ranking(self, record: Record, origin: Origin) -> RankTask:
        """A ranking record as a task. Raises DecodeError or TooMuch."""
        request = decode(RankingRequest, record.value, self._max_bytes)
        limits = self._relay
        for what, count, limit, setting in (
            ("prefix tokens", len(request.prefix), limits.max_prefix_tokens, "relay.max_prefix_tokens"),
            ("suffix tokens", len(request.suffix), limits.max_suffix_tokens, "relay.max_suffix_tokens"),
            (
                "candidates",
                len(request.candidates) // ITEM_DTYPE.itemsize,
                limits.max_candidates,
                "relay.max_candidates",
            ),
        ):
            if count > limit:
                raise TooMuch(f"{count} {what}, this worker takes {limit} ({setting})")
        now = time.monotonic()
        timeout = request.timeout_ms or self._default_timeout_ms
        prefix_times = request.prefix.times
        last = int.from_bytes(prefix_times[-8:], "little", signed=True) if prefix_times else None
        return RankTask(
            request_id=request.request_id,
            user_id=request.user_id,
            lane=record.lane,
            tokens=Tokens.of(request.prefix),
            suffix=Tokens.of(request.suffix, previous_ms=last),
            candidates=np.frombuffer(request.candidates, ITEM_DTYPE).astype(np.int64),
            arrived=now,
            deadline=now + (timeout - self._age_ms(request.sent_ms)) / 1e3,
            full=request.mode == "full",
            origin=origin,
        )

    def _age_ms(self, sent_ms: int) -> float:
        """Age by the sender's clock; a sender ahead of us is taken as "just now" and counted."""
        if not sent_ms:
            return 0.0
        age = time.time() * 1e3 - sent_ms
        if age < 0:
            # Two clocks that agree still differ by their rounding to milliseconds.
            if age < -1.0:
                self._clamped()
            return 0.0
        return age
