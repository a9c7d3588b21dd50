"""Sends bad records to the topic `dead-letter`, with reason and origin, where an operator finds them.

A record is done when its dead letter is acknowledged. Only the lane's commits wait for that, not the lane.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Collection
from functools import partial
from typing import Final

import structlog
from prometheus_client import Gauge

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topic_check import DEAD_LETTER_HEADERS_BYTES, too_large_for_dead_letters
from relaygr_stream.errors import BrokerError, ConfigError, DecodeError, MessageTooLarge
from relaygr_stream.telemetry.background import Background, endless
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.messages import named_scenario
from relaygr_stream.wire.records import (
    HEADER_DETAIL,
    HEADER_ORIGIN_OFFSET,
    HEADER_ORIGIN_PARTITION,
    HEADER_ORIGIN_TOPIC,
    HEADER_REASON,
    HEADER_SCENARIO,
    MOST_HEADERS,
    Record,
    RecordReader,
    held_bytes,
)
from relaygr_stream.wire.topic_files import Topic, TopicSet

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

MAX_DETAIL_BYTES: Final = 1000  # bounded, since a decoder's message may quote the input
#: Header of a dead letter without its value: sizes and SHA-256 of the original.
HEADER_DIGEST: Final = "relaygr-digest"
#: A dead letter without its value keeps a key of up to this size, and the original's headers up to this total.
KEPT_BYTES: Final = 1024
#: Pauses between attempts, in seconds; the last one repeats.
RETRY_S: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
#: Readiness reports a dead letter that waits this long: the pauses without the last, and a broker's restart.
FAILING_S: Final = 8.0
#: With this many waiting dead letters, or WAITING_BYTES of records in them, the process counts as stuck, and loses its
#: lanes after kafka.max_poll_interval_ms: bad messages arrive as fast as good ones.
WAITING_LIMIT: Final = 1000
WAITING_BYTES: Final = 64 << 20
#: Headers that a dead letter and its replay add to the original's; with more than MOST_HEADERS it could not be read.
OWN_HEADERS: Final = 8


class DeadLetters:
    """Sends dead letters, and retries until the topic acknowledges them.

    producer: its size limit must be that of the topic. reader: has a record done when its dead letter is
    acknowledged. waiting: the metric of waiting dead letters. background: runs the sending and reports a defect in it.
    keep_values: whether a dead letter has the whole message if it fits (kafka.dead_letter_values); else a digest.
    scenario: that the reader serves. sharing: all that it serves, if several: a message that names one is of that.
    """

    def __init__(
        self,
        producer: Producer,
        topic: Topic,
        reader: RecordReader,
        waiting: Gauge,
        background: Background,
        *,
        keep_values: bool,
        scenario: str = "",
        sharing: Collection[str] = (),
    ) -> None:
        self._background = background
        self._producer = producer
        self._topic = topic
        self._reader = reader
        self._waiting = waiting
        self._keep_values = keep_values
        self._scenario, self._sharing = scenario, sharing
        self._tasks: dict[asyncio.Task[None], float] = {}  # sending task → its start, oldest first
        self._nbytes = 0  # of records in dead letters that wait
        self._refused = ""

    @property
    def waiting(self) -> int:
        """The number of dead letters that are not acknowledged."""
        return len(self._tasks)

    @property
    def full(self) -> bool:
        """Whether WAITING_LIMIT dead letters or WAITING_BYTES wait, so that the process should read no more records."""
        return self.waiting >= WAITING_LIMIT or self._nbytes >= WAITING_BYTES

    def why_not_taken(self) -> str | None:
        """The reason for readiness if a dead letter has waited for FAILING_S; None if not."""
        oldest = next(iter(self._tasks.values()), None)
        if oldest is None or time.monotonic() - oldest < FAILING_S:
            return None
        return f"{self.waiting} dead letters wait for {time.monotonic() - oldest:.0f} s: {self._refused or 'no answer'}"

    def send(self, record: Record, error: DecodeError) -> None:
        """Start to send a record's dead letter; returns at once, and retries until it is acknowledged."""
        whole = self._keep_values and fits(record, self._topic.max_message_bytes)
        letter = (whole_dead_letter if whole else digest_dead_letter)(record, error)
        named = named_scenario(record.value) if self._sharing else ""
        scenario = named if named in self._sharing else self._scenario
        error = DecodeError(error.reason, _detail(error))  # without its traceback, which keeps what was read with it
        if not whole:
            record = record._replace(key=None, value=None, headers=())  # a thousand may wait, a megabyte each
        nbytes = held_bytes(record)
        # A defect in the task ends the process, since it would block the lane's commits for ever.
        task = self._background.start(self._deliver(record, error, letter, scenario, whole=whole))
        self._tasks[task] = time.monotonic()
        self._nbytes += nbytes
        self._waiting.set(self.waiting)
        task.add_done_callback(partial(self._ended, nbytes))

    async def flush(self, timeout_s: float) -> None:
        """Wait until all dead letters are acknowledged, at most timeout_s."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    def close(self) -> None:
        """Cancel the waiting dead letters; their records are not done, so the next owner reads them again."""
        for task in self._tasks:
            task.cancel()

    async def _deliver(
        self, record: Record, error: DecodeError, letter: DeadLetter, scenario: str, *, whole: bool
    ) -> None:
        key, value, headers = letter
        of = [(HEADER_SCENARIO, scenario.encode())] if scenario else []
        headers[:0] = of
        for pause in endless(RETRY_S):
            try:
                await self._producer.send_and_wait(self._topic.name, value, key=key, headers=headers)
                self._reader.done(record)
                return
            except BrokerError as failure:
                if whole and isinstance(failure, MessageTooLarge):
                    # The cluster's size limit may be lower than the topic's file says.
                    whole, (key, value, headers) = False, digest_dead_letter(record, error)
                    headers[:0] = of
                self._refused = str(failure)
                limited(log.error, "dead letter")(
                    "dead letter not delivered yet",
                    topic=record.topic,
                    lane=record.lane,
                    offset=record.offset,
                    error=str(failure),
                )
            await asyncio.sleep(pause)

    def _ended(self, nbytes: int, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._nbytes -= nbytes
        self._waiting.set(self.waiting)


DeadLetter = tuple[bytes | None, bytes, list[tuple[str, bytes]]]  # key, value, headers


def whole_dead_letter(record: Record, error: DecodeError) -> DeadLetter:
    """A dead letter with the whole record."""
    return record.key, record.value or b"", dead_letter_headers(record, error)


def digest_dead_letter(record: Record, error: DecodeError) -> DeadLetter:
    """A dead letter without the value: reason, origin, sizes, SHA-256, a short key, small headers."""
    key, value = record.key or b"", record.value or b""
    size = _size(record.headers)
    digest = (
        f"value {len(value)} bytes sha256 {hashlib.sha256(value).hexdigest()}, "
        f"key {len(key)} bytes sha256 {hashlib.sha256(key).hexdigest()}, {len(record.headers)} headers {size} bytes"
    )
    ours, theirs = dead_letter_headers(record._replace(headers=()), error), record.headers
    kept = list(theirs) if size <= KEPT_BYTES and len(theirs) + OWN_HEADERS <= MOST_HEADERS else []
    return (record.key if len(key) <= KEPT_BYTES else None), b"", [*ours, (HEADER_DIGEST, digest.encode()), *kept]


def fits(record: Record, most_bytes: int) -> bool:
    """Whether a dead letter with the whole record fits into most_bytes, and can be read."""
    size = len(record.key or b"") + len(record.value or b"") + _size(record.headers)
    return size + DEAD_LETTER_HEADERS_BYTES <= most_bytes and len(record.headers) + OWN_HEADERS <= MOST_HEADERS


def _size(headers: tuple[tuple[str, bytes], ...]) -> int:
    # 10 bytes for both lengths. A header's value may be null in Kafka.
    return sum(len(name.encode()) + len(value or b"") + 10 for name, value in headers)


def dead_letter_headers(record: Record, error: DecodeError) -> list[tuple[str, bytes]]:
    """The headers of a dead letter: reason and origin, then the original's headers."""
    return [
        (HEADER_REASON, error.reason.encode()),
        (HEADER_DETAIL, _detail(error).encode(errors="backslashreplace")[:MAX_DETAIL_BYTES]),
        (HEADER_ORIGIN_TOPIC, record.topic.encode()),
        (HEADER_ORIGIN_PARTITION, str(record.lane).encode()),
        (HEADER_ORIGIN_OFFSET, str(record.offset).encode()),
        *record.headers,
    ]


def _detail(error: DecodeError) -> str:
    return error.detail[:MAX_DETAIL_BYTES]


def check_dead_letters_fit(topics: TopicSet) -> None:
    """Raise ConfigError if a dead letter may be too large for its topic: it would block its lane's commits for ever."""
    problems = too_large_for_dead_letters([(topic, topic.max_message_bytes) for topic in topics.all])
    if problems:
        raise ConfigError(f"{'; '.join(problems)}. Raise max_message_bytes of {topics.dead_letter.name}")
