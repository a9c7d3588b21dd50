"""Why a request is admitted or not: the numbers behind a decision, and a live sample of such decisions.

`explain` asks a core, books nothing, and collects the numbers that its decision compares. `explain_live` does so for
the events of a running relay, and says what became of their rankings: it reads `retrieval`, `pre-infer`, `scores` and
`worker-status` beside the running triggers, joins no group and writes nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, replace
from typing import Final

from relaygr_stream.bus.ages import AgeBounds, SenderLag, stated_age_ms
from relaygr_stream.bus.away import Away
from relaygr_stream.bus.contents import read_back, spans
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import verified_topics
from relaygr_stream.errors import DecodeError
from relaygr_stream.fleet import STATUS_PERIODS, OwnerDirectory
from relaygr_stream.ops.status.overview import LISTEN_S, listening
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.trigger.core import TriggerCore
from relaygr_stream.trigger.decision import Decision, Policy, Reason
from relaygr_stream.trigger.delegation import Delegation
from relaygr_stream.trigger.explain_answers import SampledAnswers
from relaygr_stream.trigger.intake import read_event
from relaygr_stream.trigger.sent import KeptAt, SentBooks
from relaygr_stream.trigger.statement import stated_policy
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import (
    PreInferSignal,
    RequestEvent,
    WorkerStatus,
    prefix_length,
    prefix_tokens,
    tenant_key,
)
from relaygr_stream.wire.records import Record, kind_of
from relaygr_stream.wire.refusals import KIND as REFUSALS
from relaygr_stream.wire.refusals import decode_refusals
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.wire.worker_status import Room, StatusReader, Tombstone, prefix_bytes

#: Seconds to wait for signals after the last event: a signal follows its event within milliseconds.
SIGNAL_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One decision and the numbers it compared; None: unknown, since the lane has no owner."""

    request_id: str
    user_id: str
    tenant: str = ""
    scenario: str = ""  # "": none
    lane: int
    at_s: float  # seconds since the first event
    tokens: int
    candidates: int
    age_ms: float
    stale_ms: float
    owner: str | None
    queue_ms: float | None
    predicted_ms: float | None  # full inference plus the owner's queue
    nbytes: int | None  # of the prefix KV
    outstanding_bytes: int | None  # pinned by the owner, or asked for by signals since its status
    budget_bytes: int | None  # that it may have pinned
    cost_ms: float | None  # expected device time of the pre-inference
    wait_ms: float | None  # of that before it at the owner
    reason: Reason
    delegate: str | None = None  # the worker that would compute the prefix KV for the owner
    signalled: bool | None = None  # whether the running trigger sent a signal; None: not a live sample
    answer: str | None = (
        None  # its ranking's status, `late` (by its scenario's SLO) or `truncated`; None: none was seen
    )
    overload: bool = False  # it was refused, cut or late at a worker whose device has no time to spare


def explain(
    core: TriggerCore, lane: int, event: RequestEvent, *, age_ms: float, now_s: float, at_s: float
) -> tuple[Explanation, Decision]:
    """The core's decision and its numbers; books nothing. at_s: the event's time in the explanation."""
    decision = core.decide(lane, event, age_ms, now_s)
    state = core.observe(lane)
    policy, owner, tokens = core.policy, state.claim, prefix_length(event)
    ahead, room = (None, None) if owner is None else (state.ahead(owner, now_s), Room.from_status(owner.worker))
    explanation = Explanation(
        request_id=event.request_id,
        user_id=event.user_id,
        tenant=event.tenant,
        scenario=event.scenario or "",
        lane=lane,
        at_s=at_s,
        tokens=tokens,
        candidates=event.candidates,
        age_ms=age_ms,
        stale_ms=policy.stale_ms,
        owner=None if owner is None else owner.worker.name,
        queue_ms=None if owner is None else owner.worker.queue_ms,
        predicted_ms=None if owner is None else state.costs.full_ms(tokens, event.candidates) + owner.worker.queue_ms,
        nbytes=None if owner is None else prefix_bytes(prefix_tokens(event), owner.worker),
        outstanding_bytes=None if room is None or ahead is None else room.pinned + ahead.own_bytes,
        budget_bytes=None if room is None else room.budget,
        cost_ms=None if owner is None else state.cost_ms(tenant_key(event.tenant, event.user_id), tokens),
        wait_ms=None if owner is None or ahead is None else owner.worker.queue_ms + ahead.ms,
        reason=decision.reason,
        delegate=None if decision.delegate is None else decision.delegate.worker,
    )
    return explanation, decision


# ---- a running relay ----


async def explain_live(settings: Settings, policy: Policy, seconds: float, away: Away) -> list[Explanation]:
    """Explanations of the events of the next `seconds` seconds. Raises BrokerUnavailable, TopicError.

    away: gets the partitions that no broker serves; their lanes are left out.
    """
    topics = await verified_topics(settings.kafka)
    directory = OwnerDirectory(settings.trigger.max_status_age_ms, reader=StatusReader.from_settings(settings, topics))
    async with AsyncExitStack() as stack:
        events, signals, answers = await asyncio.gather(
            *(
                spans(settings.kafka, topic.name, range(topic.partitions), away)
                for topic in (topics.retrieval, topics.pre_infer, topics.scores)
            )
        )
        if not (lanes := sorted(events.keys() & signals.keys())):
            away.check()
        shadow = Shadow(policy, topics, directory, lanes, settings)
        background = Background()
        for topic, read, on_records in (
            (topics.worker_status, [0], directory.on_records),
            (topics.pre_infer, lanes, shadow.on_signals),
            (topics.scores, sorted(answers), shadow.answers.on_records),
            (topics.retrieval, lanes, shadow.on_events),
        ):
            if not read:
                continue
            tail = TopicTail(settings.kafka, topic.name, read, "latest", on_records)
            await stack.enter_async_context(tail)
            background.watch(tail.failed)
            if topic is topics.worker_status:
                await asyncio.sleep(STATUS_PERIODS * settings.worker.status_interval_ms / 1e3)
        await background.until(asyncio.sleep(seconds))
        shadow.looking = False
        await background.until(asyncio.sleep(SIGNAL_S))
    return shadow.explanations()


async def stated_by_a_worker(settings: Settings) -> WorkerStatus | None:
    """The newest status of a serving worker on `worker-status`, of any age. Raises BrokerUnavailable, TopicError.

    By chunks of the log, from its end on (bus/contents.py): each has the names that the ones before had not.
    """
    topics = await verified_topics(settings.kafka)
    reader = StatusReader.from_settings(settings, topics)
    await reader.prepare()
    known: set[str] = set()
    async with aclosing(read_back(settings.kafka, topics.worker_status.name)) as chunks:
        async for chunk in chunks:
            found: dict[str, WorkerStatus | Tombstone] = {}
            for record in chunk:
                with suppress(DecodeError):
                    status = reader.read(record, fresh=False)
                    if status is not None and status.name not in known:
                        found.pop(status.name, None)
                        found[status.name] = status
            known |= found.keys()
            serving = [each for each in found.values() if isinstance(each, WorkerStatus) and each.state == "serving"]
            if serving:
                return serving[-1]
    return None


async def running_policy(settings: Settings) -> tuple[Policy, str]:
    """The policy of the running triggers, and a line that names its source; if none runs, the policy in `settings`.

    Listens for LISTEN_S.
    Raises BrokerUnavailable, TopicError.
    """
    async with listening(settings, await verified_topics(settings.kafka)) as (view, tail):
        await tail.listen(LISTEN_S)  # excludes triggers that were killed, whatever any clock says
        running = [status for status in view.living_triggers().values() if status.state == "serving"]
    if not running:
        return Policy.from_settings(settings), "no trigger runs there: decided with the settings given here"
    others = sum(status.policy != running[-1].policy for status in running)
    differ = f"; {others} others run with other settings" if others else ""
    return stated_policy(running[-1].policy), f"decided with the settings of {running[-1].name}, which runs{differ}"


class Shadow:
    """The lanes' states, as in a trigger that admitted each signalled request.

    Events and signals may be read in either order.
    """

    def __init__(
        self,
        policy: Policy,
        topics: TopicSet,
        directory: OwnerDirectory,
        lanes: Iterable[int],
        settings: Settings | None = None,
    ) -> None:
        self._topics = topics
        self._directory = directory
        self.answers = SampledAnswers(topics, directory)
        self._settings = settings or Settings()
        self._core = TriggerCore(policy, directory, delegation=Delegation(directory, SentBooks(), topics.lanes))
        for lane in lanes:
            self._core.take_lane(lane)
        self._start = time.monotonic()
        lag = SenderLag()
        self._ages: defaultdict[int, AgeBounds] = defaultdict(lambda: AgeBounds(lag))
        self._rows: list[Explanation] = []
        self._events: dict[str, RequestEvent] = {}
        self._signalled: set[str] = set()
        self._delegates: dict[str, str] = {}  # request → the worker that its signal was sent to
        self.looking = True

    def on_events(self, records: list[Record]) -> None:
        """Handle records of `retrieval`: decide on each event while `looking`."""
        for record in records:
            try:
                event = read_event(RequestEvent, record, self._topics)
            except DecodeError:
                continue  # the trigger dead-letters it
            if event is not None and self.looking:
                self._look_at(event, record.lane, record.offset)

    def _look_at(self, event: RequestEvent, lane: int, offset: int) -> None:
        now = time.monotonic()
        age_ms = self._ages[lane].age(stated_age_ms(event.sent_ms), offset, now).sure_ms
        row, _ = explain(self._core, lane, event, age_ms=age_ms, now_s=now, at_s=now - self._start)
        self._rows.append(row)
        self._events[tenant_key(event.tenant, event.request_id)] = event

    def on_signals(self, records: list[Record]) -> None:
        """Handle records of `pre-infer`: book each signal as admitted."""
        for record in records:
            if kind_of(record.headers):
                self._note_delegated(record)
                continue
            try:
                signal = decode(PreInferSignal, record.value, self._topics.pre_infer.max_message_bytes)
            except DecodeError:
                continue
            key = tenant_key(signal.tenant, signal.request_id)
            self._signalled.add(key)
            self._core.on_signalled(record.lane, signal, self._events.get(key), time.monotonic())

    def _note_delegated(self, record: Record) -> None:
        """Note the requests whose signals went to delegates, and charge nothing: their own statuses will tell."""
        if kind_of(record.headers) == REFUSALS:
            with suppress(DecodeError):
                for worker, keys in (decode_refusals(record.value).delegates or {}).items():
                    self._delegates.update(dict.fromkeys(keys, worker))
                    if (owned := self._directory.lanes_of(worker)) is None:
                        continue
                    kept = KeptAt(worker, owned[0].incarnation, delegated=True)
                    for event in (self._events[key] for key in keys if key in self._events):
                        self._core.sent.remember(tenant_key(event.tenant, event.user_id), kept)

    def explanations(self) -> list[Explanation]:
        """The explanations of all events, in the order of reading."""
        return [self._completed(row) for row in self._rows]

    def _completed(self, row: Explanation) -> Explanation:
        key = tenant_key(row.tenant, row.request_id)
        sent = self._delegates  # the running trigger's choices, which are random: shown instead of those made here
        answer, overload = self.answers.answer_to(row.request_id, row.owner, self._settings.slo_ms_of(row.scenario))
        return replace(
            row,
            signalled=key in self._signalled or key in sent,
            delegate=sent.get(key, row.delegate),
            answer=answer,
            overload=overload,
        )
