"""Histories that messages refer to: kept, or read from the store beside the event loop's other work.

    reference ─► kept, same digest? ── yes ─► behaviours
                      └── no ─► read what is missing ─► same digest? ── yes ─► keep, behaviours
                                                             └── no ─► read all of it once more ─► HistoryMismatch

What leaves here has the digest that the reference states.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from relaygr_stream.errors import HistoryError, HistoryMismatch, HistoryUnavailable
from relaygr_stream.history.packed import joined
from relaygr_stream.history.store import HistoryStore, rows_of
from relaygr_stream.settings.schema import History
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.erase import Erase, filter_named_users
from relaygr_stream.wire.history import MAX_POSITIONS, HistoryReference, digests, row_bytes
from relaygr_stream.wire.latencies import BOUNDS_S
from relaygr_stream.wire.messages import tenant_key

#: Pause before a failed read is tried again; it doubles. A restarted store is back in tenths of a second.
RETRY_S: Final = 0.01
#: Python's objects around a kept history.
OBJECT_BYTES: Final = 1024
#: Digests remembered of a kept history: those of two references.
MAX_DIGESTS: Final = 2 * MAX_POSITIONS


#: A read: the user (messages.tenant_key), the length and the digest that are wanted.
_Key = tuple[str, int, bytes]


class HistoryMetrics:
    """Prometheus metrics of a worker's histories."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.found = Counter(
            "relaygr_histories", "Messages with a reference to a history, by result", ["result"], registry=registry
        )
        self.reads = Counter(
            "relaygr_history_reads", "Reads of the history store, by result", ["result"], registry=registry
        )
        self.seconds = Histogram(
            "relaygr_history_read_seconds",
            "Time of a read of the history store",
            registry=registry,
            buckets=BOUNDS_S,
        )
        self.behaviours = Counter(
            "relaygr_history_behaviours", "Behaviours read from the history store", registry=registry
        )
        self.waiting = Gauge("relaygr_history_waiting", "Messages that wait for their history", registry=registry)
        self.bytes = Gauge("relaygr_history_cache_bytes", "Histories kept by the worker", registry=registry)


@dataclass(slots=True)
class _Kept:
    behaviours: Behaviours
    digests: dict[int, bytes]  # at the lengths that were asked for
    nbytes: int


class Histories:
    """The histories of a worker's users: those that it keeps, and the store that it reads the others from."""

    def __init__(self, store: HistoryStore, settings: History, metrics: HistoryMetrics) -> None:
        self._store = store
        self._settings = settings
        self._metrics = metrics
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0
        self._slots = asyncio.Semaphore(settings.max_reads)
        self._reading: dict[_Key, asyncio.Task[Behaviours]] = {}
        self._until: dict[_Key, float] = {}  # of each read: the latest of its waiters' times

    def known(self, user_id: str, tenant: str, reference: HistoryReference) -> Behaviours | None:
        """What the reference refers to, if it is kept. Reads nothing."""
        user = tenant_key(tenant, user_id)
        kept = self._kept.get(user)
        if kept is None or len(kept.behaviours) < reference.length:
            return None
        if self._digests(kept, [reference.length])[reference.length] != reference.digest:
            return None
        self._kept.move_to_end(user)
        if len(kept.behaviours) == reference.length:
            return kept.behaviours
        return kept.behaviours.slice(0, reference.length)

    async def find(self, user_id: str, tenant: str, reference: HistoryReference, until: float) -> Behaviours:
        """What the reference refers to, kept or read; messages of one user that come together share a read.

        until: the time of the monotonic clock at which waiting ends with a TimeoutError. Raises HistoryUnavailable or
        HistoryMismatch.
        """
        if (known := self.known(user_id, tenant, reference)) is not None:
            return known
        key = tenant_key(tenant, user_id), reference.length, reference.digest
        self._until[key] = max(until, self._until.get(key, until))
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = asyncio.create_task(self._read(user_id, tenant, reference, key))
            reading.add_done_callback(lambda task: self._over(key, task))
        async with asyncio.timeout(until - monotonic()):
            await asyncio.wait({reading})
        if reading.cancelled():
            raise HistoryUnavailable("the user was erased while the history was read")
        return reading.result()

    async def erase(self, erase: Erase) -> None:
        """Drop what is kept of a user, and end reads of it."""
        for (user, _, _), reading in list(self._reading.items()):
            if erase.names(user):
                reading.cancel()
        for user in await filter_named_users(list(self._kept), erase):
            self._drop(user)

    async def close(self) -> None:
        """End the reads under way, and disconnect."""
        reads = list(self._reading.values())
        for reading in reads:
            reading.cancel()
        await asyncio.gather(*reads, return_exceptions=True)
        await self._store.close()

    def _over(self, key: _Key, task: asyncio.Task[Behaviours]) -> None:
        del self._reading[key], self._until[key]
        if not task.cancelled():
            task.exception()  # its waiters get it; there may be none

    async def _read(self, user_id: str, tenant: str, reference: HistoryReference, key: _Key) -> Behaviours:
        pause, failed = RETRY_S, 0
        async with self._slots:
            while True:
                if monotonic() >= self._until[key]:
                    raise HistoryUnavailable("the history could not be read in time")
                try:
                    return await self._attempt(user_id, tenant, reference)
                except HistoryError as error:
                    failed += 1
                    result = "mismatch" if isinstance(error, HistoryMismatch) else "unavailable"
                    self._metrics.reads.labels(result).inc()
                    if failed > self._settings.max_retries:
                        raise
                await asyncio.sleep(pause)
                pause *= 2

    async def _attempt(self, user_id: str, tenant: str, reference: HistoryReference) -> Behaviours:
        """One read of what is missing behind what is kept; and of everything, if the two do not fit together."""
        user = tenant_key(tenant, user_id)
        begun = self._beginning(user, reference)
        if len(begun) == reference.length:  # a read of a longer reference came before this one
            return begun
        rest = await self._rows(user_id, tenant, reference, len(begun))
        if not len(begun):
            whole = rest
        elif row_bytes(rest) == row_bytes(begun) and len(rest):
            whole = joined(begun, rest)
        else:
            whole = Behaviours()
        found = _digest(whole)
        if len(begun) and (len(whole), found) != (reference.length, reference.digest):
            self._drop(user)
            whole = await self._rows(user_id, tenant, reference, 0)
            found = _digest(whole)
        if (len(whole), found) != (reference.length, reference.digest):
            raise HistoryMismatch(
                f"the history store answers with {len(whole)} behaviours of digest {found.hex()}, the request refers "
                f"to {reference.length} of digest {reference.digest.hex()}"
            )
        whole.checked(HistoryMismatch)
        self._keep(user, whole, reference.digest)
        return whole

    async def _rows(self, user_id: str, tenant: str, reference: HistoryReference, start: int) -> Behaviours:
        started = perf_counter()
        rows = await rows_of(self._store, user_id, tenant, reference, start, self._settings.timeout_ms / 1e3)
        self._metrics.seconds.observe(perf_counter() - started)
        self._metrics.reads.labels("ok").inc()
        self._metrics.behaviours.inc(len(rows))
        return rows

    def _beginning(self, user: str, reference: HistoryReference) -> Behaviours:
        """The longest beginning of what is kept that the reference states the digest of; perhaps none."""
        kept = self._kept.get(user)
        if kept is None:
            return Behaviours()
        stated = {at: digest for at, digest in reference.stated().items() if at <= len(kept.behaviours)}
        found = self._digests(kept, stated)
        fitting = max((at for at, digest in stated.items() if found[at] == digest), default=0)
        return kept.behaviours.slice(0, fitting)

    def _digests(self, kept: _Kept, lengths: Iterable[int]) -> dict[int, bytes]:
        """The digests of what is kept, at these lengths and at others."""
        if len(kept.digests) > MAX_DIGESTS:
            kept.digests = {}
        missing = [at for at in lengths if at not in kept.digests]
        if missing:
            kept.digests |= digests(kept.behaviours, missing)
        return kept.digests

    def _keep(self, user: str, behaviours: Behaviours, digest: bytes) -> None:
        kept = self._kept.get(user)
        if kept is not None and len(kept.behaviours) > len(behaviours):
            found = self._digests(kept, [len(behaviours)])
            if found[len(behaviours)] == digest:
                return  # what is kept is longer, and begins with it
        self._drop(user)
        nbytes = OBJECT_BYTES + behaviours.nbytes()
        self._kept[user] = _Kept(behaviours, {len(behaviours): digest}, nbytes)
        self._bytes += nbytes
        while self._bytes > self._settings.cache_bytes and self._kept:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        self._metrics.bytes.set(self._bytes)

    def _drop(self, user: str) -> None:
        kept = self._kept.pop(user, None)
        if kept is not None:
            self._bytes -= kept.nbytes
            self._metrics.bytes.set(self._bytes)


def _digest(behaviours: Behaviours) -> bytes:
    return digests(behaviours, [len(behaviours)])[len(behaviours)]
