"""Gives commands their histories: a message that refers to a history waits for it before the device sees its command.

What the scheduler gets is as from a message with a prefix: it compares tokens, and never sees a reference.
"""

from __future__ import annotations

from time import monotonic
from typing import Final

import structlog

from relaygr_stream.engine.commands import Prefill, Rank
from relaygr_stream.errors import DecodeError, HistoryError
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.logs import request_log_fields
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.messages import Status
from relaygr_stream.worker.effects import Fetch, Missing
from relaygr_stream.worker.histories import Histories, HistoryMetrics
from relaygr_stream.worker.intake import Intake
from relaygr_stream.worker.traces import fetch_part

#: The command with its tokens, or why it gets none.
Found = Rank | Prefill | Missing

log = structlog.get_logger(__name__)
limited = LogLimiter().limited

NO_STORE: Final = "the request refers to a history, and this worker has no history.store"
NOT_KEPT: Final = "its prefix KV are with another worker, and its history is not here"


class Resolver:
    """Carries Fetch effects out. histories: None: no store is set."""

    def __init__(self, histories: Histories | None, intake: Intake, metrics: HistoryMetrics) -> None:
        self.histories: Final = histories
        self._intake = intake
        self._metrics = metrics

    def resolve(self, fetch: Fetch) -> Found | None:
        """What is known without reading the store; None: it has to be read."""
        command, histories = fetch.command, self.histories
        assert command.referred is not None
        task, reference = command.task, command.referred.reference
        known = None if histories is None else histories.known(task.user_id, task.tenant, reference)
        if known is not None:
            self._metrics.found.labels("kept").inc()
            return self._complete(command, known)
        if not fetch.stored:
            return Missing("overloaded", NOT_KEPT)
        return self._missing(command, "failed", NO_STORE) if histories is None else None

    async def read(self, command: Rank | Prefill) -> Found:
        """What the store has, until the command's deadline, or the end of its life window."""
        task, started, histories, referred = command.task, monotonic(), self.histories, command.referred
        assert histories is not None and referred is not None
        self._metrics.waiting.inc()
        until = command.task.deadline if isinstance(command, Rank) else command.task.expires
        try:
            behaviours = await histories.find(task.user_id, task.tenant, referred.reference, until)
        except TimeoutError:
            late = "the deadline passed while the history was read from the store"
            return self._missing(command, "deadline_exceeded", late)
        except HistoryError as error:
            return self._missing(command, "failed", str(error))
        finally:
            fetch_part(task, started, referred.reference.length)
            self._metrics.waiting.dec()
        if isinstance(command, Rank):
            command = command._replace(waited_s=command.waited_s + monotonic() - started)
        found = self._complete(command, behaviours)
        if not isinstance(found, Missing):
            self._metrics.found.labels("read").inc()
        return found

    def _complete(self, command: Rank | Prefill, behaviours: Behaviours) -> Found:
        try:
            return self._intake.complete(command, behaviours)
        except DecodeError as error:
            return self._missing(command, "rejected", error.detail)

    def _missing(self, command: Rank | Prefill, status: Status, detail: str) -> Missing:
        self._metrics.found.labels(status).inc()
        if isinstance(command, Prefill):
            task = command.task
            limited(log.warning, status)(
                "signal without its history",
                **request_log_fields(task.request_id, task.user_id, task.lane, status),
                detail=detail,
            )
        return Missing(status, detail)
