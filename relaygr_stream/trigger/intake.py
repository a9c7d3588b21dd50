"""Makes events of the records of `retrieval`. Unreadable ones are dead-lettered; unknown kinds are skipped."""

from __future__ import annotations

from typing import Final

import msgspec
import structlog

from relaygr_stream.bus.dead_letter import DeadLetters
from relaygr_stream.errors import DecodeError
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.trigger.metrics import TriggerMetrics
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import Id, Label, RequestEvent, RequestEventInPlace, tenant_key
from relaygr_stream.wire.records import Record, RecordReader, kind_of
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.wire.versions import NOT_DECODED

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited


class EventIntake:
    """Reads a trigger's events. reader: of their records, which it has done."""

    def __init__(
        self, topics: TopicSet, dead_letters: DeadLetters, metrics: TriggerMetrics, reader: RecordReader
    ) -> None:
        self._topics = topics
        self._dead_letters = dead_letters
        self._metrics = metrics
        self.reader: Final = reader

    def read(self, record: Record) -> RequestEvent | None:
        """The event; None: it is dead-lettered or skipped, and complete with that."""
        try:
            event = read_event(RequestEventInPlace, record, self._topics)
        except DecodeError as error:
            self._dead_letter(record, error)
            return None
        if event is None:
            self._metrics.records_skipped.inc()
            self.reader.done(record)
        return event

    def _dead_letter(self, record: Record, error: DecodeError) -> None:
        self._dead_letters.send(record, error)
        self._metrics.dead_letters.labels(error.reason).inc()
        limited(log.warning, error.reason)(
            "event unreadable", lane=record.lane, offset=record.offset, outcome=error.reason, detail=error.detail
        )


class _Who(msgspec.Struct):
    user_id: Id
    tenant: Label = ""


_who = msgspec.msgpack.Decoder(_Who)


def user_of(record: Record) -> str:
    """Whom an event is about (tenant_key): as it says, or its key where it cannot be read. Builds no arrays."""
    try:
        who = _who.decode(record.value or b"")
    except NOT_DECODED:
        return (record.key or b"").decode(errors="replace")
    return tenant_key(who.tenant, who.user_id)


def read_event(shape: type[RequestEvent], record: Record, topics: TopicSet) -> RequestEvent | None:
    """The event of a record of `retrieval`; None: the record is of a kind of a later release. Raises DecodeError."""
    if kind_of(record.headers):
        return None
    event = decode(shape, record.value, topics.retrieval.max_message_bytes, record.headers)
    # Bounds are per lane, and its signal goes there.
    user, lane = event.user_id, record.lane
    if lane == topics.lane_of(user) or topics.splits(lane, user) or lane in topics.lanes_of(user):
        return event
    raise DecodeError(
        "invalid",
        f"this user belongs on partition {topics.lane_of(user)} of {topics.lanes}, the event came on {lane}; set the "
        f"key to the user id and the partitioner to murmur2",
    )
