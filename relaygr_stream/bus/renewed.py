"""Replaces aiokafka's consumers and producers when one of their background tasks has ended.

Each client depends on background tasks (fetcher, sender, coordinator, metadata). If an unexpected error ends one,
aiokafka does not restart it, and calls do not fail: a consumer reads nothing, a producer sends nothing, for ever. This
module notices the end of such a task at once, and replaces the client.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Any, Final

import structlog
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from relaygr_stream.bus.aiokafka_compat import CLOSE_S, end_client, typed_errors
from relaygr_stream.bus.refused import refusals
from relaygr_stream.bus.throttling import throttled_s
from relaygr_stream.errors import BrokerError, BrokerUnavailable
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.telemetry.background import endless
from relaygr_stream.telemetry.limiter import LogLimiter

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: The attributes of aiokafka 0.14 that hold the tasks of a client's whole life. The coordinator manages heartbeats.
_TASKS: Final = {
    "fetcher": "_fetcher._fetch_task",
    "coordinator": "_coordinator._coordination_task",
    "positions": "_coordinator._reset_committed_task",
    "sender": "_sender.sender_task",
    "metadata of the consumer": "_client._sync_task",
    "metadata of the producer": "client._sync_task",
}
#: Pauses before a replacement, in seconds; the last one repeats. The first replacement is immediate.
PAUSES_S: Final = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
#: A client that has run this long was healthy: its end does not count as one in a row.
SOUND_S: Final = 30.0
#: Ends in a row after which a reader is given up: the records or the process cause them. The pauses sum up to 3.6 s.
MOST_ENDS: Final = 5

#: Part (`Renewed.part`) of this process → number of its replacements.
renewals: Final[Counter[str]] = Counter()


class RenewalsCollector(Collector):
    """`renewals`, how long brokers throttled us, and what they refused, for Prometheus. It covers the whole process:
    register it once."""

    def describe(self) -> Iterable[CounterMetricFamily]:
        """The families without values; a registry finds duplicates by them."""
        yield CounterMetricFamily(
            "relaygr_parts_made_anew",
            "Consumers and producers that were replaced because a background task inside them had ended, by part.",
            labels=["part"],
        )
        yield CounterMetricFamily(
            "relaygr_throttled_seconds", "Time for which brokers throttled clients by quotas.", labels=["client"]
        )
        yield CounterMetricFamily(
            "relaygr_sends_refused", "Messages and batches that brokers refused for good.", labels=["topic"]
        )

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The families with their present values."""
        for family, values in zip(self.describe(), (renewals, throttled_s, refusals), strict=True):
            for name, value in sorted(values.items()):
                family.add_metric([name], value)
            yield family


def background_tasks(client: Any) -> dict[str, asyncio.Task[None]]:
    """The background tasks of a started AIOKafkaConsumer or AIOKafkaProducer, by name."""
    found = {}
    for name, path in _TASKS.items():
        try:
            task = attrgetter(path)(client)
        except AttributeError:  # this kind of client does not have this task
            continue
        if task is not None:
            found[name] = task
    return found


def watch(client: Any, ended: Callable[[str], None]) -> None:
    """Call ended(why) for each background task that ends, also if the client is stopped."""

    def done(name: str, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        ended(f"its {name} task ended" + ("" if error is None else f" ({error.__cause__ or error!r})"))

    for name, task in background_tasks(client).items():
        task.add_done_callback(partial(done, name))


class ClientUser:
    """Who uses a renewed client; what it does with one."""

    #: Whether to give up after MOST_ENDS ends in a row, instead of replacing for ever.
    gives_up: bool = False

    def make_client(self) -> Any:
        """A new client, not started."""
        raise NotImplementedError

    async def begin_client(self, client: Any) -> None:
        """Prepare a started client (assign, seek); may raise aiokafka's errors."""

    def leave_client(self, client: Any) -> None:
        """Leave a client that has ended."""

    def give_up_client(self, error: BrokerError) -> None:
        """Clients end again and again, and none replaces the last."""


class Renewed:
    """One consumer or producer (`client`), replaced when it ends. part: its name in logs, metrics and `trouble`."""

    def __init__(self, kafka: Kafka, part: str, user: ClientUser) -> None:
        self._kafka = kafka
        self.part = part
        self._user = user
        self._there = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._started_s = 0.0
        self._ends = 0  # ends in a row, each less than SOUND_S after the start
        self.client: Any = None
        #: Why there is no client while it is being replaced, for readiness.
        self.trouble: str | None = None

    async def start(self) -> None:
        """Start a client. Raises BrokerUnavailable, BrokerError."""
        client = self._user.make_client()
        try:
            with typed_errors(self._kafka, f"start {self.part}"):
                await client.start()
                await self._user.begin_client(client)
        except BaseException:
            await self._end(client, CLOSE_S)
            raise
        self.client, self._started_s = client, time.monotonic()
        self._there.set()
        watch(client, partial(self._ended, client))

    @property
    def at_hand(self) -> Any:
        """The client; None while it is being replaced, and when it is closed."""
        return self.client if self._there.is_set() else None

    async def present(self) -> Any:
        """The client, after waiting for a replacement. Raises BrokerUnavailable after the request timeout or `stop`."""
        if not self._there.is_set() and self.client is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._kafka.request_timeout_ms / 1000):
                    await self._there.wait()
        if self.client is None or not self._there.is_set():
            raise BrokerUnavailable(self.trouble or f"{self.part} is closed")
        return self.client

    async def stop(self, within_s: float = CLOSE_S) -> None:
        """End the client within within_s; a producer delivers its buffered messages."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        client, self.client = self.client, None
        self._there.set()  # wakes the callers of `present`
        await self._end(client, within_s)

    def renew(self, why: str, error: type[BrokerError] = BrokerError) -> None:
        """Replace the client. No effect during a replacement, or after `stop`.

        why: the reason, for the log. error: what is given up with where clients end again and again.
        """
        if self.client is None or self._task is not None:
            return
        self._ends = self._ends + 1 if time.monotonic() - self._started_s < SOUND_S else 0
        self.trouble = f"{self.part} is being replaced: {why}"
        limited(log.error, self.part)("client ended; replacing it", part=self.part, why=why, in_a_row=self._ends + 1)
        self._there.clear()
        if self._user.gives_up and self._ends + 1 >= MOST_ENDS:
            self._user.give_up_client(error(f"{self.part} has ended {self._ends + 1} times in a row: {why}"))
            return
        self._task = asyncio.create_task(self._replace(self.client), name=f"renew {self.part}")

    async def _replace(self, old: Any) -> None:
        self._user.leave_client(old)
        for pause in islice(endless(PAUSES_S), self._ends, None):
            await asyncio.sleep(pause)
            try:
                await self.start()
                break
            except Exception as error:  # a BrokerError, or what aiokafka does not expect
                why = str(error) if isinstance(error, BrokerError) else repr(error)
                self.trouble = f"{self.part} cannot be replaced: {why}"
                limited(log.warning, f"no {self.part}")("client cannot be replaced", part=self.part, error=why)
        renewals[self.part] += 1
        self.trouble = self._task = None
        limited(log.warning, f"new {self.part}")("client replaced", part=self.part)
        await self._end(old, CLOSE_S)

    def _ended(self, client: Any, why: str) -> None:
        if client is self.client:  # otherwise its end was intended
            self.renew(why)

    async def _end(self, client: Any, within_s: float) -> None:
        if client is not None:
            await end_client(self.part, client, within_s)
