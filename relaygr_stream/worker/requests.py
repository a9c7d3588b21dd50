"""Requests from their record to their answer: reads records, and carries out what the core decides (core.py).

record ─► intake ─► core ─► history ─► device ─► core ─► outbox ─► core ─► record done
             └── cannot be read ───────────────────────────┘
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec
import structlog

from relaygr_stream.bus.dead_letter import DeadLetters
from relaygr_stream.cache.transit import ListUsers
from relaygr_stream.engine.commands import (
    Answer,
    Command,
    EraseUser,
    Placed,
    Prefill,
    Rank,
)
from relaygr_stream.errors import CRASHED, DecodeError, DeviceError
from relaygr_stream.models.api import schema_of
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.logs import request_log_fields
from relaygr_stream.wire.erase import Erase, filter_named_users
from relaygr_stream.wire.records import KIND_CANCEL, KIND_DELEGATED, Record, RecordReader, kind_of
from relaygr_stream.wire.refusals import KIND as REFUSALS
from relaygr_stream.wire.refusals import decode_refusals
from relaygr_stream.worker.context import WorkerConnections, WorkerContext
from relaygr_stream.worker.core import WorkerCore
from relaygr_stream.worker.device import Device
from relaygr_stream.worker.effects import (
    CountForward,
    DeadLetter,
    Done,
    Effect,
    Effects,
    Fetch,
    Forward,
    Reject,
    Release,
    Reply,
    SignalOver,
    Submit,
)
from relaygr_stream.worker.histories import Histories, HistoryMetrics
from relaygr_stream.worker.intake import Intake, IntakeLimits, Origin, TooMuch, UnknownReplyPartition
from relaygr_stream.worker.replies import Outbox, Sending, user_of
from relaygr_stream.worker.resolver import Resolver
from relaygr_stream.worker.traces import SignalOrigin, signal_over
from relaygr_stream.worker.under_way import UnderWay
from relaygr_stream.worker.unrouted import Unrouted

log = structlog.get_logger(__name__)

#: A worker whose device failed gives its last answers this long to leave: a send takes milliseconds, and its lanes'
#: next owners wait for it to end.
LAST_ANSWERS_S: Final = 2.0


class Requests:
    """The requests of a worker's lanes. reader: of their records, whose offsets may be committed once they are done."""

    def __init__(
        self,
        context: WorkerContext,
        connections: WorkerConnections,
        device: Device,
        core: WorkerCore,
        reader: RecordReader,
    ) -> None:
        settings, metrics, model = context.settings, context.metrics, device.runtime.model
        self._context = context
        self._metrics = metrics
        self._topics = topics = connections.topics
        self._device = device.thread
        self._core = core
        self._reader = reader
        self._all_answered: asyncio.Event | None = None  # while somebody waits for it
        self._limiter = LogLimiter()
        limits = IntakeLimits.from_settings(settings, topics)
        self.intake: Final = Intake(limits, metrics.clock_clamped, metrics.misnamed, len(model.tasks), schema_of(model))
        history_metrics, store = HistoryMetrics(context.registry), connections.store
        histories = None if store is None else Histories(store, settings.history, history_metrics)
        self.resolver: Final = Resolver(histories, self.intake, history_metrics)
        self.outbox: Final = Outbox(context, connections, model)
        self.under_way: Final = UnderWay(context.background)
        self._unrouted = Unrouted(connections.scores, topics, self.intake, context.background, self)
        self.letters: Final = DeadLetters(
            connections.others,
            topics.dead_letter,
            reader,
            metrics.dead_letters_waiting,
            context.background,
            keep_values=settings.kafka.dead_letter_values,
            scenario=settings.scenario,
            sharing=settings.sharing,
        )

    # ---- records in ----

    def on_lanes(self, gained: frozenset[int], lost: frozenset[int]) -> None:
        """Handle a change of the lanes that this worker owns."""
        if lost:
            self.intake.lanes_lost(lost)
        self._carry(self._core.on_lanes(gained, lost))

    def on_records(self, records: list[Record], *, suspect: bool = False) -> None:
        """Take what came. suspect: it may end this worker, and is done only when nothing is left to do at it."""
        self._core.held.taken = self._device.prefill_bytes
        effects: Effects = []
        for record in records:
            kind, ranked = kind_of(record.headers), record.topic == self._topics.ranking.name
            effects += self._ranking(record) if ranked and not kind else self._other(record, kind, ranked, suspect)
        self._carry(effects)

    def on_asked(self, records: list[Record]) -> None:
        """Take rankings again, with what the cluster says of their reply partitions (Rereader)."""
        self._core.held.taken = self._device.prefill_bytes
        self._carry([effect for record in records for effect in self._ranking(record, asked=True)])

    def on_crashed(self, record: Record) -> None:
        """Dead-letter a record at which so many workers ended: no worker runs it again. A ranking is answered, too."""
        limit = self._context.settings.worker.max_crashes
        error = DecodeError(CRASHED, f"{limit} workers ended while they worked at this request")
        origin: Origin | None = None
        if record.topic == self._topics.ranking.name and not kind_of(record.headers):
            with suppress(DecodeError):
                origin = self.intake.route(record)
        self._carry(self._core.on_unreadable(record, error, origin))

    def _other(self, record: Record, kind: str, ranked: bool, suspect: bool) -> Effects:
        """A record that is no ranking. ranked: on the topic of rankings."""
        try:
            if not kind or (ranked and kind == KIND_DELEGATED):
                return self._signal(record, suspect)
            if ranked and kind == KIND_CANCEL:
                request_key = self.intake.cancelled(record)
                return self._core.on_cancel(request_key, record, time.monotonic(), suspect=suspect)
        except DecodeError as error:
            return self._core.on_unreadable(record, error)
        if kind == REFUSALS and not ranked:
            return [*self._notice(record), Done(record)]
        self._metrics.records_skipped.inc()
        return [Done(record)]

    def _ranking(self, record: Record, *, asked: bool = False) -> Effects:
        """asked: the cluster was asked for its reply partition."""
        origin, now = None, 0.0
        try:
            origin = self.intake.route(record)
            if self._context.tracing.on:
                trace = self._context.tracing.receive("relaygr.ranking", record)
                origin = msgspec.structs.replace(origin, trace=trace)
            now = time.monotonic()  # within the span
            rank = self.intake.ranking(record, origin, now, self._core.way.ms)
        except TooMuch as error:
            self._limiter.limited(log.warning, "rejected")(
                "refused",
                **request_log_fields(error.request_id, error.user_id, record.lane, "rejected"),
                detail=str(error),
            )
            about = (error.request_key, error.request_id, str(error))
            return self._core.on_too_much(origin, *about, now, error.scenario)
        except DecodeError as error:
            if isinstance(error, UnknownReplyPartition) and not asked and self._unrouted.keep(record):
                return []
            return self._core.on_unreadable(record, error, origin)
        self._metrics.rankings_read.labels(str(rank.task.hops)).inc()
        return self._core.on_ranking(rank, now)

    def _signal(self, record: Record, suspect: bool) -> Effects:
        origin, tracing = None, self._context.tracing
        trace = tracing.receive("relaygr.pre-infer", record) if tracing.on else None
        now = time.monotonic()  # within the span
        if tracing.on or suspect:
            origin = SignalOrigin(trace, now, record if suspect else None)
        command = self.intake.signal(record, now, origin)
        return self._core.on_signal(command, None if suspect else record)

    def _notice(self, record: Record) -> Effects:
        """A notice of the trigger. One that cannot be read is ignored: nothing depends on it."""
        try:
            refusals = decode_refusals(record.value)
        except DecodeError:
            return []
        now = time.monotonic()
        return self._core.on_notice(refusals, self.intake.sure_age_ms(record, now), now)

    # ---- effects out ----

    def _carry(self, effects: Iterable[Effect]) -> None:
        """Carry these out. Of commands rankings go first, because their clients wait."""
        commands: list[Command] = []  # in their order: a ranking may come behind the cancel of its request
        signals: list[Command] = []
        left = deque(effects)
        while left:
            effect = left.popleft()
            if isinstance(effect, Submit):
                if effect.record is not None:
                    self._context.background.start(self._submit_and_wait(effect))
                else:
                    (signals if isinstance(effect.command, Prefill) else commands).append(effect.command)
            elif isinstance(effect, Done):
                self._reader.done(effect.record)
            elif isinstance(effect, Fetch):
                left.extendleft(reversed(self._fetch(effect)))
            elif isinstance(effect, Reply):
                self._send(self.outbox.reply(effect), refusal=effect.declined)
            elif isinstance(effect, Forward):
                self.under_way.start(self._forward(effect))
            else:
                self._carry_rare(effect)
        if commands or signals:
            self._device.submit(*commands, *signals)
        if self._all_answered is not None and not self._core.in_flight:
            self._all_answered.set()

    def _carry_rare(self, effect: Reject | Release | DeadLetter | SignalOver | CountForward) -> None:
        if isinstance(effect, Reject):
            self._send(self.outbox.reject(effect), refusal=True, done=effect.done)
        elif isinstance(effect, Release):
            self.under_way.start(self.outbox.release(effect))
        elif isinstance(effect, DeadLetter):
            self._dead_letter(effect)
        elif isinstance(effect, SignalOver):
            self._signal_over(effect.placed)
        else:
            self._metrics.forwards.labels(effect.result).inc()

    async def _submit_and_wait(self, effect: Submit) -> None:
        """Have the device take a command; only then is its record done."""
        with suppress(DeviceError):  # which ends the worker, as it may have to
            await self._device.ask(effect.command)
            self._reader.done(effect.record)

    def _fetch(self, effect: Fetch) -> Effects:
        found = self.resolver.resolve(effect)
        if found is not None:
            return self._core.on_history(effect.command, found, time.monotonic())
        self._context.background.start(self._read_history(effect.command))
        return []

    async def _read_history(self, command: Rank | Prefill) -> None:
        found = await self.resolver.read(command)
        self._carry(self._core.on_history(command, found, time.monotonic()))

    def _send(self, sending: Sending, *, refusal: bool, done: bool = True) -> None:
        self.under_way.start(self._send_and_report(sending, done), refusal=refusal)

    async def _send_and_report(self, sending: Sending, done: bool) -> None:
        await self.outbox.send(sending)
        if done:
            self._carry(self._core.on_replied(sending.origin, (time.monotonic() - sending.since) * 1e3))

    async def _forward(self, effect: Forward) -> None:
        started = time.monotonic()
        if await self.outbox.forward(effect):
            self._carry(self._core.on_forwarded(effect))
        else:
            self._carry(self._core.on_not_forwarded(effect, time.monotonic() - started))

    def _dead_letter(self, effect: DeadLetter) -> None:
        record, error = effect
        self._metrics.dead_letters.labels(error.reason).inc()
        self._limiter.limited(log.warning, error.reason)(
            "dead letter",
            **request_log_fields("", user_of(record), record.lane, "rejected"),
            topic=record.topic,
            offset=record.offset,
            detail=str(error),
        )
        if not self.under_way.closed:
            self.letters.send(record, error)

    def _signal_over(self, placed: Placed) -> None:
        if placed.result == "no_memory":
            self._metrics.signals.labels("no_memory").inc()
        if (origin := placed.task.origin) is not None:
            signal_over(placed, self._context.name)
            if origin.record is not None:
                self._reader.done(origin.record)

    # ---- from the device ----

    def on_placed(self, placed: list[Placed]) -> None:
        """What became of signals whose origin is to be told."""
        for each in placed:
            self._signal_over(each)

    def on_answers(self, answers: list[Answer]) -> None:
        """Reply to rankings."""
        now = time.monotonic()
        for answer in answers:
            self._carry(self._core.on_answer(answer, now))

    async def erase(self, erase: Erase) -> None:
        """Drop a user from this worker: kept histories, both tiers, pins."""
        self._core.on_erased(erase, time.monotonic())
        if self.resolver.histories is not None:
            await self.resolver.histories.erase(erase)
        users: list[str] = await self._device.ask(ListUsers())
        found = await filter_named_users(users, erase)
        entries = await self._device.ask(EraseUser(erase, found, set(users)))
        log.info("a user was erased", erase=erase.id, entries=entries)

    # ---- its state, and its end ----

    @property
    def held_bytes(self) -> int:
        """Bytes of what was read (worker.max_waiting_bytes)."""
        self._core.held.taken = self._device.prefill_bytes
        return self._core.held.nbytes

    @property
    def full(self) -> bool:
        """Whether so many dead letters or refusals wait that the process should read no more records."""
        return self.letters.full or self.under_way.full

    async def flush(self, timeout_s: float) -> None:
        """Wait until everything handed in so far has left, or the time is over."""
        letters = asyncio.ensure_future(self.letters.flush(timeout_s))
        await asyncio.wait({letters, *self.under_way.tasks}, timeout=timeout_s)

    async def all_answered(self, until_s: float) -> bool:
        """Wait until every ranking taken is answered and its answer has left, at most until this monotonic time.

        Returns whether that is so.
        """
        in_flight, under_way = self._core.in_flight, self.under_way
        while (in_flight or under_way.tasks) and (left_s := until_s - time.monotonic()) > 0:
            if in_flight:
                self._all_answered = asyncio.Event()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._all_answered.wait()
            else:
                await asyncio.wait(under_way.tasks, timeout=left_s)
        return not (in_flight or under_way.tasks)

    async def fail_in_flight(self, error: Exception) -> None:
        """Answer every request in flight `failed`."""
        log.error("the device failed", error=str(error), in_flight=len(self._core.in_flight))
        self._carry(self._core.on_device_failed(str(error), time.monotonic()))
        await self.flush(LAST_ANSWERS_S)

    def stop_sending(self) -> None:
        """Send nothing more; the records of what is under way are not done, so they are read again."""
        self.letters.close()
        self.under_way.close()

    async def close(self) -> None:
        """End reads of histories, and disconnect from their store."""
        if self.resolver.histories is not None:
            await self.resolver.histories.close()
