"""Gives commands their histories: a message that refers to a history waits for it before the device sees its command.

What the scheduler gets is as from a message with a prefix: it compares tokens, and never sees a reference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from time import monotonic
from typing import Final, TypeVar

import structlog

from relaygr_stream.engine.commands import Answer, Prefill, PrefillTask, Rank
from relaygr_stream.errors import DecodeError, HistoryError
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.logs import request_log_fields
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import Status
from relaygr_stream.worker.histories import Histories, HistoryMetrics
from relaygr_stream.worker.intake import Intake
from relaygr_stream.worker.traces import fetch_part

C = TypeVar("C", Rank, Prefill)

log = structlog.get_logger(__name__)
limited = LogLimiter().limited


class Resolver:
    """Completes commands whose messages refer to a history.

    histories: None: no store is set. submit: hands completed commands to the device. answered: takes answers to
    rankings that get no history. dropped: called for signals that get none. owns(lane): whether this worker does, or
    it is DELEGATED_LANE.
    """

    def __init__(
        self,
        histories: Histories | None,
        intake: Intake,
        metrics: HistoryMetrics,
        submit: Callable[[Rank | Prefill], None],
        answered: Callable[[Answer], None],
        dropped: Callable[[PrefillTask], None],
        owns: Callable[[int], bool],
        background: Background,
    ) -> None:
        self.histories: Final = histories
        self._intake = intake
        self._metrics = metrics
        self._submit = submit
        self._answered = answered
        self._dropped = dropped
        self._owns = owns
        self._background = background
        self._signal_tokens: defaultdict[int, list[int]] = defaultdict(list)  # of signals on their way, by lane

    def resolve(self, command: C) -> C | None:
        """The command with the history that it refers to, if any. None: it is submitted later, answered or dropped."""
        task = command.task
        if command.referred is None:
            return command
        reference = command.referred.reference
        if self.histories is None:
            self._failed(command, "failed", "the request refers to a history, and this worker has no history.store")
            return None
        known = self.histories.known(task.user_id, task.tenant, reference)
        if known is not None:
            self._metrics.found.labels("kept").inc()
            return self._complete(command, known)  # type: ignore[return-value]
        self._metrics.waiting.inc()
        if isinstance(command, Prefill):
            self._signal_tokens[task.lane].append(reference.length)
        self._background.start(self._fetch(self.histories, command, reference))
        return None

    def has(self, rank: Rank) -> bool:
        """Whether the ranking has its history, or would get it without reading the store."""
        if rank.referred is None:
            return True
        task = rank.task
        kept = self.histories and self.histories.known(task.user_id, task.tenant, rank.referred.reference)
        return kept is not None

    async def erase(self, names: Callable[[str], bool]) -> None:
        """Drop the histories kept of a user."""
        if self.histories is not None:
            await self.histories.erase(names)

    def signal_tokens(self, lane: int) -> list[int]:
        """The prefix lengths of a lane's signals that wait for their history: read, and not yet pinned."""
        return self._signal_tokens.get(lane, [])

    async def _fetch(self, histories: Histories, command: Rank | Prefill, reference: HistoryReference) -> None:
        task, started = command.task, monotonic()
        until = command.task.deadline if isinstance(command, Rank) else command.task.expires
        try:
            behaviours = await histories.find(task.user_id, task.tenant, reference, until)
        except TimeoutError:
            self._failed(command, "deadline_exceeded", "the deadline passed while the history was read from the store")
        except HistoryError as error:
            self._failed(command, "failed", str(error))
        else:
            if isinstance(command, Rank):
                command = command._replace(waited_s=command.waited_s + monotonic() - started)
            if (completed := self._complete(command, behaviours)) is not None:
                self._metrics.found.labels("read").inc()
                self._submit(completed)
        finally:
            fetch_part(task, started, reference.length)
            self._metrics.waiting.dec()
            if isinstance(command, Prefill):
                self._signal_tokens[task.lane].remove(reference.length)

    def _complete(self, command: Rank | Prefill, behaviours: Behaviours) -> Rank | Prefill | None:
        """The command with its tokens; None: it was answered or dropped instead."""
        if isinstance(command, Prefill) and not self._owns(command.task.lane):
            self._dropped(command.task)
            return None
        try:
            return self._intake.complete(command, behaviours)
        except DecodeError as error:
            self._failed(command, "rejected", error.detail)
            return None

    def _failed(self, command: Rank | Prefill, status: Status, detail: str) -> None:
        self._metrics.found.labels(status).inc()
        if isinstance(command, Rank):
            self._answered(Answer(command, status, detail=detail))
            return
        task = command.task
        limited(log.warning, status)(
            "signal without its history",
            **request_log_fields(task.request_id, task.user_id, task.lane, status),
            detail=detail,
        )
        self._dropped(task)
