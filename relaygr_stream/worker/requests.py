"""Requests from their record to their answer: records become commands of the device thread, its answers become replies.

record ─► intake ─► history ─► device ─► outbox ─► record done
             └── cannot be read ──────────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import structlog
from prometheus_client import CollectorRegistry

from relaygr_stream.bus.ages import LogEnds
from relaygr_stream.bus.producer import Producer
from relaygr_stream.cache.transit import ListUsers
from relaygr_stream.engine.build import WorkerRuntime
from relaygr_stream.engine.commands import (
    DELEGATED_LANE,
    Answer,
    Cancel,
    EraseUser,
    LanesLost,
    Placed,
    Prefill,
    PrefillTask,
    Rank,
)
from relaygr_stream.errors import CRASHED, DecodeError, DeviceError
from relaygr_stream.history.store import HistoryStore
from relaygr_stream.models.api import schema_of
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.tracing import Tracing
from relaygr_stream.wire.erase import Erase, filter_named_users
from relaygr_stream.wire.fleet import OwnerDirectory
from relaygr_stream.wire.records import KIND_CANCEL, KIND_DELEGATED, Record, kind_of
from relaygr_stream.wire.refusals import KIND as REFUSALS
from relaygr_stream.wire.refusals import Reasons
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.worker.delegates import Delegates
from relaygr_stream.worker.device import DeviceThread
from relaygr_stream.worker.forwarding import Forwarding
from relaygr_stream.worker.histories import Histories, HistoryMetrics
from relaygr_stream.worker.intake import HeldRequest, Intake, Origin, TooMuch
from relaygr_stream.worker.metrics import WorkerMetrics
from relaygr_stream.worker.replies import Outbox
from relaygr_stream.worker.resolver import Resolver
from relaygr_stream.worker.traces import SignalOrigin, signal_over

log = structlog.get_logger(__name__)

#: A worker whose device failed gives its last answers this long to leave: a send takes milliseconds, and its lanes'
#: next owners wait for it to end.
LAST_ANSWERS_S: Final = 2.0


@dataclass(frozen=True)
class Bus:
    """A worker's connections. scores: for answers, acknowledged by one broker; others: for all else, by all in sync."""

    topics: TopicSet
    scores: Producer
    others: Producer
    ends: LogEnds


class Requests:
    """The requests of a worker's lanes.

    done(record): marks a record done, so that its offset may be committed. background: runs reads of histories and the
    sending of replies, and learns of defects in them.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        bus: Bus,
        device: DeviceThread,
        runtime: WorkerRuntime,
        metrics: WorkerMetrics,
        registry: CollectorRegistry,
        peers: OwnerDirectory,
        tracing: Tracing,
        store: HistoryStore | None,
        done: Callable[[Record], None],
        background: Background,
    ) -> None:
        self._max_crashes = settings.worker.max_crashes
        self._background = background
        self._longest_s = settings.worker.max_timeout_ms / 1e3
        self._erased: list[tuple[float, Erase]] = []  # users lately erased, for rankings that come back to be ranked
        self._name = name
        self._topics = topics = bus.topics
        self._device = device
        device.on_answers = self.on_answers
        device.on_placed = self._on_placed
        self._runtime = runtime
        self._metrics = metrics
        self._tracing = tracing
        self._consumer_done = done
        self._lanes: frozenset[int] = frozenset()
        self.in_flight: Final[dict[Origin, Rank]] = {}  # rankings without an answer, by where it goes
        self._all_answered: asyncio.Event | None = None  # while somebody waits for it
        self.intake: Final = Intake(
            settings.relay,
            settings.client.timeout_ms,
            topics.scores.partitions,
            topics.ranking.max_message_bytes,
            metrics.clock_clamped.inc,
            settings.worker.reply_ms,
            settings.worker.max_timeout_ms,
            len(runtime.model.tasks),
            schema_of(runtime.model),
        )
        self.held: Final = HeldRequest(settings.worker.max_waiting_bytes, lambda: device.prefill_bytes)
        history_metrics = HistoryMetrics(registry)
        self.resolver: Final = Resolver(
            None if store is None else Histories(store, settings.history, history_metrics),
            self.intake,
            history_metrics,
            self._on_resolved,
            lambda answer: self.on_answers([answer]),
            self._signal_dropped,
            lambda lane: lane in self._lanes or lane == DELEGATED_LANE,
            background,
        )
        self._reasons = Reasons(settings.relay.life_window_ms)
        forwarding = Forwarding(name, peers, topics.lanes, averaging=settings.relay.averaging)
        self.outbox: Final = Outbox(
            topics,
            bus.scores,
            bus.others,
            metrics,
            name,
            runtime.model,
            self._done,
            self._rank_again,
            background,
            forwarding if settings.worker.forward else None,
            settings.relay.answer_secret,
            self._reasons,
            settings.kafka.dead_letter_values,
            settings.worker.withhold_outcomes,
        )
        self._delegates = Delegates(
            self._reasons,
            forwarding,
            topics.ranking.name,
            self.outbox.pass_on,
            metrics.forwards.labels("delegate_gone").inc,
        )

    # ---- records in ----

    def on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> None:
        """Handle a change of the lanes that this worker owns."""
        self._lanes = self._lanes - lost | gained
        if lost:
            self.intake.lanes_lost(lost)
            self._device.submit(LanesLost(lost))

    def on_records(self, records: list[Record], *, suspect: bool = False) -> None:
        """Hand what came to the device as commands: rankings first, because their clients wait.

        suspect: they may end this worker, and are done only when nothing is left to do at them.
        """
        signals: list[Prefill] = []
        rankings: list[Rank | Cancel] = []  # in their order: a ranking may come behind the cancel of its request
        for record in records:
            kind, ranked = kind_of(record.headers), record.topic == self._topics.ranking.name
            if kind and not (ranked and kind == KIND_DELEGATED):
                if (cancel := self._other(record, kind)) is None:
                    continue
                if suspect:
                    self._background.start(self._cancelled(cancel, record))
                else:
                    self._done(record)
                    rankings.append(cancel)
            elif ranked and not kind:
                if (ranking := self._ranking(record)) is not None:
                    rankings.append(ranking)
            elif (signal := self._signal(record, suspect)) is not None:
                signals.append(signal)
        if signals or rankings:
            self._device.submit(*rankings, *signals)

    def _other(self, record: Record, kind: str) -> Cancel | None:
        """A client's cancel, refusals of the trigger, or a kind of a later release, which is skipped.

        The record of a cancel that is returned is not done.
        """
        if kind == KIND_CANCEL and record.topic == self._topics.ranking.name:
            try:
                cancel = Cancel(self.intake.cancelled(record))
            except DecodeError as error:
                self.outbox.dead_letter(record, error)
                return None
            self._delegates.release(cancel.request_key, record)
            return cancel
        if kind == REFUSALS and record.topic == self._topics.pre_infer.name:
            self._delegates.notice(record, self.intake.sure_age_ms(record))
        else:
            self._metrics.records_skipped.inc()
        self._done(record)
        return None

    async def _cancelled(self, cancel: Cancel, record: Record) -> None:
        """Have the device take a cancel; only then is its record done."""
        with suppress(DeviceError):  # which ends the worker, as it may have to
            await self._device.ask(cancel)
            self._done(record)

    def _signal(self, record: Record, suspect: bool = False) -> Prefill | None:
        try:
            origin = None
            if self._tracing.on or suspect:
                trace = self._tracing.receive("relaygr.pre-infer", record) if self._tracing.on else None
                origin = SignalOrigin(trace, time.monotonic(), record if suspect else None)
            command = self.intake.signal(record, origin)
        except DecodeError as error:
            self.outbox.dead_letter(record, error)
            return None
        task = command.task
        self._reasons.admitted(task.request_key, delegated=task.lane == DELEGATED_LANE)
        # A signal is acknowledged at once: if it is lost with the process, its ranking runs in full.
        if not suspect:
            self._done(record)
        if self.held.signal(task.nbytes):
            return self.resolver.resolve(command)
        self._metrics.signals.labels("no_memory").inc()
        self._signal_over(Placed(task, "no_memory", completed=False))
        return None

    def _ranking(self, record: Record) -> Rank | None:
        origin: Origin | None = None
        try:
            origin = self.intake.route(record)
            if self._tracing.on:
                origin = replace(origin, trace=self._tracing.receive("relaygr.ranking", record))
            rank = self.intake.ranking(record, origin)
            task = rank.task
            self._metrics.rankings_read.labels(str(task.hops)).inc()
            rank = rank._replace(pass_to=self._delegates.lane(task))
            if self.held.ranking(record.lane, record.offset, task.nbytes):
                self.in_flight[origin] = rank
                if rank.pass_to is None or self.resolver.has(rank):
                    return self.resolver.resolve(rank)
                detail = "its prefix KV are with another worker, and its history is not here"
                self.on_answers([Answer(rank, "overloaded", detail=detail)])
                return None
            self.outbox.decline(
                rank, f"requests of {self.held.nbytes >> 20} MiB wait for their answers (worker.max_waiting_bytes)"
            )
        except TooMuch as error:
            assert origin is not None
            self.outbox.refuse(origin, error)
            self._delegates.answered(error.request_key)
        except DecodeError as error:
            self.outbox.dead_letter(record, error, origin)
        return None

    def _rank_again(self, rank: Rank) -> None:
        if any(at > rank.task.arrived and erase.names(rank.task.user_key) for at, erase in self._erased):
            rank = rank._replace(leaves_nothing=True)
        self.in_flight[rank.task.origin] = rank
        if (command := self.resolver.resolve(rank)) is not None:
            self._device.submit(command)

    def _on_resolved(self, command: Rank | Prefill) -> None:
        """A command that waited for its history has it; its ranking may have been answered meanwhile."""
        if isinstance(command, Prefill) or command.task.origin in self.in_flight:
            self._device.submit(command)

    def _signal_dropped(self, task: PrefillTask) -> None:
        self.held.signal_over(task.nbytes)
        self._signal_over(Placed(task, "no_history", completed=False))

    def _signal_over(self, placed: Placed) -> None:
        if (origin := placed.task.origin) is not None:
            signal_over(placed, self._name)
            if origin.record is not None:
                self._done(origin.record)

    def fetching_bytes(self, lane: int) -> int:
        """HBM bytes of signals that were read and wait for their history: a status counts them as pinned."""
        context = schema_of(self._runtime.model).context_tokens
        return sum(self._runtime.cache.nbytes(context + tokens) for tokens in self.resolver.signal_tokens(lane))

    async def erase(self, erase: Erase) -> None:
        """Drop a user from this worker: kept histories, both tiers, pins."""
        now = time.monotonic()
        self._erased = [(at, each) for at, each in self._erased if at > now - self._longest_s] + [(now, erase)]
        await self.resolver.erase(erase.names)
        users: list[str] = await self._device.ask(ListUsers())
        found = await filter_named_users(users, erase.names)
        entries = await self._device.ask(EraseUser(erase, found, set(users)))
        log.info("a user was erased", erase=erase.id, entries=entries)

    def on_crashed(self, record: Record) -> None:
        """Dead-letter a record at which so many workers ended: no worker runs it again. A ranking is answered, too."""
        limit = self._max_crashes
        detail = f"{limit} workers ended while they worked at this request (worker.max_crashes)"
        origin: Origin | None = None
        if record.topic == self._topics.ranking.name and not kind_of(record.headers):
            with suppress(DecodeError):
                origin = self.intake.route(record)
        self.outbox.dead_letter(record, DecodeError(CRASHED, detail), origin)

    def _done(self, record: Record) -> None:
        if record.topic == self._topics.ranking.name:
            self.held.over(record.lane, record.offset)
        self._consumer_done(record)

    # ---- answers out ----

    def _on_placed(self, placed: list[Placed]) -> None:
        for each in placed:
            self._signal_over(each)

    def on_answers(self, answers: list[Answer]) -> None:
        """Reply to rankings; one that has its answer already gets no second."""
        for answer in answers:
            task = answer.task
            if self.in_flight.pop(task.origin, None) is None:  # it was answered here when the device failed
                continue
            self.outbox.deliver(answer)
            if not self.in_flight and self._all_answered is not None:
                self._all_answered.set()
            # One that is refused goes to its delegate, or finds the prefix KV there when it is repeated.
            if answer.status != "overloaded" and not (task.hops or task.full):
                self._delegates.answered(task.request_key)

    async def all_answered(self, until_s: float) -> bool:
        """Wait until every ranking taken is answered and its answer has left, at most until this monotonic time.

        Returns whether that is so.
        """
        while (self.in_flight or self.outbox.sending) and (left_s := until_s - time.monotonic()) > 0:
            if self.in_flight:
                self._all_answered = asyncio.Event()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._all_answered.wait()
            else:
                await asyncio.wait(self.outbox.sending, timeout=left_s)
        return not (self.in_flight or self.outbox.sending)

    async def close(self) -> None:
        """End reads of histories, and disconnect from their store."""
        if self.resolver.histories is not None:
            await self.resolver.histories.close()

    async def fail_in_flight(self, error: Exception) -> None:
        """Answer every request in flight `failed`, so that the lanes' next owners do not read it again: it may have
        caused the failure."""
        log.error("the device failed", error=str(error), in_flight=len(self.in_flight))
        for rank in list(self.in_flight.values()):
            self.on_answers([Answer(rank, "failed", detail=str(error))])
        await self.outbox.flush(LAST_ANSWERS_S)
