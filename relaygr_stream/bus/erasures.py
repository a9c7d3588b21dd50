"""Takes requests to erase a user from `worker-status`, in a process that keeps something of users, and confirms."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import structlog
from msgspec import UNSET, UnsetType

from relaygr_stream.errors import DecodeError, DeviceError
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.wire.erase import KIND, Erase, read_erase
from relaygr_stream.wire.records import Record, kind_of
from relaygr_stream.wire.worker_status import StatusReader

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: Erasures carried out that a status lists: the command that asked for one waits seconds for it.
STATED: Final = 16


class Erasures:
    """Carries out what the records ask for, in the background; who makes the statuses states it.

    carry_out(erase): drops the user; refused(): counts a request that is not believed.
    """

    def __init__(
        self,
        reader: StatusReader,
        background: Background,
        carry_out: Callable[[Erase], Awaitable[None]],
        refused: Callable[[], object],
    ) -> None:
        self._reader = reader
        self._background = background
        self._carry_out = carry_out
        self.publish: Callable[[], Awaitable[None]] | None = None  # publishes a status
        self._refused = refused
        self._done: deque[str] = deque(maxlen=STATED)

    @property
    def stated(self) -> tuple[str, ...] | UnsetType:
        """The ids of the newest requests carried out, as a status states them."""
        return tuple(self._done) or UNSET

    def on_records(self, records: Iterable[Record]) -> None:
        """Take the requests among these records, which were written since this process began."""
        for record in records:
            if kind_of(record.headers) != KIND:
                continue
            try:
                erase = read_erase(record, self._reader)
            except DecodeError as error:
                self._refused()
                limited(log.warning, "erase")("a request to erase a user is refused", detail=str(error))
                continue
            if erase is not None:
                self._background.start(self._erase(erase))

    async def _erase(self, erase: Erase) -> None:
        try:
            await self._carry_out(erase)
        except DeviceError:  # the process ends, and what it held with it
            return
        self._done.append(erase.id)
        if self.publish is not None:
            await self.publish()
