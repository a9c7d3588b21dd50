"""One request by its id, from the topics: announced, admitted, ranked, answered, and how long each took.

Needs no collector of traces. What it reads is bounded by age, bytes and time; it joins no group and writes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from relaygr_stream.bus.contents import read_since
from relaygr_stream.errors import BrokerError, DecodeError
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import (
    Cancel,
    PreInferSignal,
    RankingRequest,
    RequestEvent,
    ScoreReply,
    prefix_length,
    tenant_key,
)
from relaygr_stream.wire.records import (
    HEADER_CORRELATION,
    HEADER_REPLY_PARTITION,
    KIND_CANCEL,
    KIND_DELEGATED,
    Record,
    header,
    held_bytes,
    kind_of,
)
from relaygr_stream.wire.refusals import KIND as REFUSALS
from relaygr_stream.wire.refusals import decode_refusals
from relaygr_stream.wire.topic_files import TopicSet

#: How far back it looks: `ranking` and `scores` keep a minute, and no request lives for longer.
BACK_MS: Final = 90_000
#: Bytes of one topic that it reads: at 20 requests a second and lane, with histories of 2,000, 90 s have 50 MB.
MOST_BYTES: Final = 64 << 20
#: Seconds for all of it.
WITHIN_S: Final = 20.0
#: An answer's clock may be behind that of its request.
SKEW_MS: Final = 1000
#: Answers to one request that are looked for: its own, and those of its copies.
MOST_REPLIES: Final = 4

_Take = Callable[[Record], bool]  # whether nothing more is looked for in this topic


class Step(NamedTuple):
    """What happened to the request, when (Unix time, by the broker's record), and what is known of it."""

    at_ms: int
    what: str
    facts: dict[str, str]


@dataclass
class RequestTrace:
    """What the topics hold of a request. missing: why something may be missing."""

    request_id: str
    steps: list[Step] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


async def trace(
    kafka: Kafka, topics: TopicSet, request_id: str, lanes: Sequence[int] = (), tenant: str | None = None
) -> RequestTrace:
    """Look for a request. lanes: where; none: all. tenant: shows only a request of it; None: any.

    What cannot be read is told in `missing`, not raised.
    """
    found = RequestTrace(request_id)
    finder, lanes = _Finder(found, tenant), lanes or range(topics.lanes)
    back_ms = int(time.time() * 1e3) - BACK_MS
    needle = request_id.encode()
    try:
        async with asyncio.timeout(WITHIN_S):
            await _scan(kafka, topics.retrieval.name, lanes, back_ms, needle, finder.on_event, found)
            since_ms = min((step.at_ms for step in found.steps), default=back_ms)
            await _scan(kafka, topics.pre_infer.name, lanes, since_ms, needle, finder.on_signal, found)
            await _scan(kafka, topics.ranking.name, lanes, since_ms, needle, finder.on_ranking, found)
            for asked_ms, partition, correlation in sorted(finder.asked)[:MOST_REPLIES]:
                at = topics.scores.name, [partition], asked_ms - SKEW_MS
                await _scan(kafka, *at, correlation, finder.on_reply, found)
    except TimeoutError:
        found.missing.append(f"the search took longer than {WITHIN_S:g} s")
    found.steps.sort(key=lambda step: step.at_ms)
    return found


async def _scan(
    kafka: Kafka, topic: str, partitions: Sequence[int], since_ms: int, needle: bytes, take: _Take, found: RequestTrace
) -> None:
    """Give what may be about the request to `take`, until that has enough."""
    left = MOST_BYTES
    try:
        async with aclosing(read_since(kafka, topic, partitions, since_ms)) as batches:
            async for batch in batches:
                for record in batch:
                    left -= held_bytes(record)
                    if needle in (record.value or b"") or needle == header(record.headers, HEADER_CORRELATION):
                        with suppress(DecodeError):  # of another request, which has this id in it
                            if take(record):
                                return
                if left < 0:
                    found.missing.append(f"{topic}: only {MOST_BYTES >> 20} MiB were read; name the user")
                    return
                await asyncio.sleep(0)  # what serves goes first
    except BrokerError as error:
        found.missing.append(str(error))


class _Finder:
    """Makes steps of records."""

    def __init__(self, found: RequestTrace, tenant: str | None) -> None:
        self._found = found
        self._tenant = tenant
        self.asked: set[tuple[int, int, bytes]] = set()  # when, partition of `scores`, correlation id

    def on_event(self, record: Record) -> bool:
        event = decode(RequestEvent, record.value)
        if self._is_it(event):
            facts = {"lane": str(record.lane), "behaviours": str(prefix_length(event))}
            facts |= {"candidates expected": str(event.candidates), "tenant": event.tenant}
            self._add(record, "announced", {**facts, "trace id": _trace_id(record)})
        return False

    def on_signal(self, record: Record) -> bool:
        if kind_of(record.headers) == REFUSALS:
            key = tenant_key(self._tenant or "", self._found.request_id)
            refusals = decode_refusals(record.value)
            for reason, keys in refusals.reasons.items():
                if key in keys or (self._tenant is None and any(each.endswith(f"\0{key}") for each in keys)):
                    self._add(record, "not admitted" if reason != "delegated" else "delegated", {"reason": reason})
        else:
            self._on_admitted(record)
        return False

    def on_ranking(self, record: Record) -> bool:
        kind = kind_of(record.headers)
        if kind == KIND_DELEGATED:
            self._on_admitted(record)
        elif kind == KIND_CANCEL:
            if self._is_it(decode(Cancel, record.value)):
                self._add(record, "cancelled", {"lane": str(record.lane)})
        elif not kind:
            request = decode(RankingRequest, record.value)
            if self._is_it(request):
                facts = {"lane": str(record.lane), "mode": request.mode, "client": request.client_id}
                size = request.candidate_dtype.itemsize
                facts |= {"candidates": str(len(request.candidates) // size), "trace id": _trace_id(record)}
                self._add(record, "ranking asked" if not request.hops else f"forwarded, hop {request.hops}", facts)
                partition = header(record.headers, HEADER_REPLY_PARTITION)
                if partition.isdigit():
                    self.asked.add((record.timestamp_ms, int(partition), header(record.headers, HEADER_CORRELATION)))
        return False

    def on_reply(self, record: Record) -> bool:
        reply = decode(ScoreReply, record.value)
        if reply.request_id != self._found.request_id:
            return False
        times, shown = reply.timings, {"outcome": reply.outcome or "", "worker": reply.worker}
        shown |= {"admission": reply.admission, "detail": reply.detail}
        for name, ms in (
            ("to the worker", times.inbound_ms),
            ("until the device", times.queued_ms),
            ("on the device", times.device_ms),
            ("on the worker", times.worker_ms),
        ):
            shown[name] = f"{ms:.1f} ms" if ms else ""
        self._add(record, f"answered {reply.status}", shown)
        return True

    def _on_admitted(self, record: Record) -> None:
        signal = decode(PreInferSignal, record.value)
        if self._is_it(signal):
            self._add(record, "admitted", {"lane": str(record.lane), "for worker": signal.delegate or ""})

    def _is_it(self, message: Any) -> bool:
        mine = self._tenant is None or message.tenant == self._tenant
        return bool(message.request_id == self._found.request_id and mine)

    def _add(self, record: Record, what: str, facts: dict[str, str]) -> None:
        self._found.steps.append(Step(record.timestamp_ms, what, {name: text for name, text in facts.items() if text}))


def _trace_id(record: Record) -> str:
    """The trace's id in a collector; "" where the request is not traced."""
    parts = header(record.headers, "traceparent").decode("ascii", "replace").split("-")
    return parts[1] if len(parts) == 4 else ""
