"""Puts records that nobody can read where an operator finds them: on the topic `dead-letter`, with reason and origin.

No lane waits for it: a record is done once its letter is acknowledged, and only the lane's commits wait for that.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from itertools import chain, repeat
from typing import Final

import structlog
from prometheus_client import Gauge

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topic_check import DEAD_LETTER_HEADERS_BYTES
from relaygr_stream.bus.topics import TopicSet
from relaygr_stream.errors import BrokerError, BrokerUnavailable, ConfigError, DecodeError, TopicError
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.messages import (
    HEADER_DETAIL,
    HEADER_ORIGIN_OFFSET,
    HEADER_ORIGIN_PARTITION,
    HEADER_ORIGIN_TOPIC,
    HEADER_REASON,
)
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import Topic

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

MAX_DETAIL_BYTES: Final = 1000  # a decoder's message may quote the input
#: Header of a letter without its message, which is not kept or would not fit: sizes and SHA-256 of the original.
HEADER_DIGEST: Final = "relaygr-digest"
#: A letter without its value keeps a key of so many bytes, and other headers of so many in all.
KEPT_BYTES: Final = 1024
#: Pauses between tries, in seconds; the last one repeats.
RETRY_S: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
#: A letter that waits this long is told by readiness: the pauses but for the last, and a broker's restart.
FAILING_S: Final = 8.0
#: Letters waiting for their topic at which a process counts as stuck and gives its lanes up (after kafka.max_poll_ms):
#: each keeps its message, of up to 1 MiB, and bad ones come as fast as others.
WAITING_LIMIT: Final = 1000


class DeadLetters:
    """producer: takes messages as large as the topic does. done(record): its letter is acknowledged. waiting: a metric.
    keep_values: letters have the whole message where it fits (kafka.dead_letter_values), else digests.

    failed: never completes unless something here broke; then it raises what.
    """

    def __init__(
        self,
        producer: Producer,
        topic: Topic,
        done: Callable[[Record], None],
        waiting: Gauge,
        *,
        keep_values: bool,
    ) -> None:
        self._producer = producer
        self._topic = topic
        self._done = done
        self._waiting = waiting
        self._keep_values = keep_values
        self._tasks: dict[asyncio.Task[None], float] = {}  # since when each tries, oldest first
        self._refused = ""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())  # may go unwatched

    @property
    def waiting(self) -> int:
        """Letters that their topic has not taken yet."""
        return len(self._tasks)

    @property
    def full(self) -> bool:
        """So many wait that no more should be read."""
        return self.waiting >= WAITING_LIMIT

    def why_not_taken(self) -> str | None:
        """For readiness: why letters have been waiting for long; None: they have not."""
        oldest = next(iter(self._tasks.values()), None)
        if oldest is None or time.monotonic() - oldest < FAILING_S:
            return None
        return f"{self.waiting} dead letters wait for {time.monotonic() - oldest:.0f} s: {self._refused or 'no answer'}"

    def send(self, record: Record, error: DecodeError) -> None:
        """Send a record's letter, for as long as it takes; returns at once."""
        task = asyncio.get_running_loop().create_task(self._deliver(record, error))
        self._tasks[task] = time.monotonic()
        self._waiting.set(self.waiting)
        task.add_done_callback(self._ended)

    async def flush(self, timeout_s: float) -> None:
        """Wait until all letters are there, or the time is over."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    def close(self) -> None:
        """Give up what waits; those records are not done, so they are read again."""
        for task in self._tasks:
            task.cancel()

    async def _deliver(self, record: Record, error: DecodeError) -> None:
        whole = self._keep_values and fits(record, self._topic.max_message_bytes)
        for pause in chain(RETRY_S, repeat(RETRY_S[-1])):
            key, value, headers = letter_of(record, error) if whole else digest_of(record, error)
            try:
                await self._producer.send_and_wait(self._topic.name, value, key=key, headers=headers)
                self._done(record)
                return
            except BrokerError as failure:
                # The cluster may take less than the topic's file says.
                whole = whole and isinstance(failure, (BrokerUnavailable, TopicError))
                self._refused = str(failure)
                limited(log.error, "dead letter")(
                    "dead letter not delivered yet",
                    topic=record.topic,
                    lane=record.lane,
                    offset=record.offset,
                    error=str(failure),
                )
            await asyncio.sleep(pause)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._waiting.set(self.waiting)
        if not task.cancelled() and (error := task.exception()) is not None and not self.failed.done():
            self.failed.set_exception(error)  # a defect: its record would hold up the lane's commits for ever


Letter = tuple[bytes | None, bytes, list[tuple[str, bytes]]]  # key, value, headers


def letter_of(record: Record, error: DecodeError) -> Letter:
    """The whole record, behind reason and origin."""
    return record.key, record.value or b"", dead_letter_headers(record, error)


def digest_of(record: Record, error: DecodeError) -> Letter:
    """What is left of a record that is not kept or does not fit: reason, origin, sizes, SHA-256, short key, headers."""
    key, value = record.key or b"", record.value or b""
    size = _size(record.headers)
    digest = (
        f"value {len(value)} bytes sha256 {hashlib.sha256(value).hexdigest()}, "
        f"key {len(key)} bytes sha256 {hashlib.sha256(key).hexdigest()}, {len(record.headers)} headers {size} bytes"
    )
    ours, theirs = dead_letter_headers(record._replace(headers=()), error), record.headers
    kept = list(theirs) if size <= KEPT_BYTES else []
    return (record.key if len(key) <= KEPT_BYTES else None), b"", [*ours, (HEADER_DIGEST, digest.encode()), *kept]


def fits(record: Record, most_bytes: int) -> bool:
    """Whether the whole record fits a topic that takes so many bytes."""
    size = len(record.key or b"") + len(record.value or b"") + _size(record.headers)
    return size + DEAD_LETTER_HEADERS_BYTES <= most_bytes


def _size(headers: tuple[tuple[str, bytes], ...]) -> int:
    # 10 bytes: both lengths. Kafka allows null for a header's value.
    return sum(len(name.encode()) + len(value or b"") + 10 for name, value in headers)


def dead_letter_headers(record: Record, error: DecodeError) -> list[tuple[str, bytes]]:
    """Reason and origin, then the original's own headers."""
    return [
        (HEADER_REASON, error.reason.encode()),
        (HEADER_DETAIL, error.detail.encode(errors="backslashreplace")[:MAX_DETAIL_BYTES]),
        (HEADER_ORIGIN_TOPIC, record.topic.encode()),
        (HEADER_ORIGIN_PARTITION, str(record.lane).encode()),
        (HEADER_ORIGIN_OFFSET, str(record.offset).encode()),
        *record.headers,
    ]


def check_dead_letters_fit(topics: TopicSet) -> None:
    """A dead letter that its topic does not take would hold up its lane's commits for ever: ConfigError."""
    for topic in (topics.retrieval, topics.ranking, topics.pre_infer):
        if topics.dead_letter.max_message_bytes < topic.max_message_bytes + DEAD_LETTER_HEADERS_BYTES:
            raise ConfigError(
                f"topic {topics.dead_letter.name} takes {topics.dead_letter.max_message_bytes} bytes, {topic.name} "
                f"{topic.max_message_bytes}: a dead letter has up to {DEAD_LETTER_HEADERS_BYTES} more than its "
                f"original; raise max_message_bytes of the former"
            )
