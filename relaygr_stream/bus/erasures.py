"""Takes requests to erase a user from `worker-status`, in a process that keeps something of users, and confirms."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

import structlog
from prometheus_client import Counter

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.errors import DecodeError, DeviceError
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.clocks import Clock
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.erase import CLOCK_MS, KEPT_MS, KIND, MARK_BYTES, Erase, Everyone, read_erase
from relaygr_stream.wire.records import Record, kind_of
from relaygr_stream.wire.worker_status import StatusReader

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: Erasures carried out that a status lists: the command that asked for one waits seconds for it.
STATED: Final = 16
#: Who has read nothing for longer may have missed requests: they are kept, and believed, for KEPT_MS.
DISCONNECTED_S: Final = (KEPT_MS - CLOCK_MS) / 1e3


class Eraser(Protocol):
    """Who keeps something of users."""

    async def erase(self, erase: Erase) -> None:
        """Drop the user."""

    async def on_erased(self, ids: tuple[str, ...]) -> None:
        """A request is done: publish a status now. ids: of the newest ones, as statuses state them from now on."""


class Erasures:
    """Has `eraser` carry out what the records ask for, in the background. refused: counts requests not believed.

    A process that has been without a broker for DISCONNECTED_S drops every user: any may have been erased unseen.
    """

    def __init__(
        self,
        reader: StatusReader,
        background: Background,
        eraser: Eraser,
        refused: Counter,
        clock: Clock = time.monotonic,
    ) -> None:
        self._reader = reader
        self._background = background
        self._eraser = eraser
        self._refused = refused
        self._done: deque[str] = deque(maxlen=STATED)
        self._under_way = 0
        self._clock = clock
        self._heard_s = clock()

    @property
    def under_way(self) -> bool:
        """Whether something that `on_records` took is not carried out yet."""
        return self._under_way > 0

    def on_records(self, records: Iterable[Record]) -> None:
        """Take the requests among these records, which were written since this process began."""
        heard_s, self._heard_s = self._heard_s, self._clock()
        if (away_s := self._heard_s - heard_s) > DISCONNECTED_S:
            log.warning("drops every user: without a broker for so long, erasures may have been missed", seconds=away_s)
            self._begin(Everyone(id=f"{now_ms():016}", user=bytes(MARK_BYTES), sent_ms=now_ms()))
        for record in records:
            if kind_of(record.headers) != KIND:
                continue
            try:
                erase = read_erase(record, self._reader)
            except DecodeError as error:
                self._refused.inc()
                limited(log.warning, "erase")("a request to erase a user is refused", detail=str(error))
                continue
            if erase is not None:
                self._begin(erase)

    def _begin(self, erase: Erase) -> None:
        self._under_way += 1
        self._background.start(self._erase(erase))

    async def _erase(self, erase: Erase) -> None:
        try:
            await self._eraser.erase(erase)
        except DeviceError:  # the process ends; what it held in a file is `under_way` for the next one
            return
        self._under_way -= 1
        self._done.append(erase.id)
        await self._eraser.on_erased(tuple(self._done))
