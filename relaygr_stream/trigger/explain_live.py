"""A live sample: for each event on `retrieval`, the numbers of a decision made here, and whether a signal followed.

It reads `retrieval`, `pre-infer` and `worker-status` beside the running triggers. It joins no group and writes nothing.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

from relaygr_stream.bus.ages import LogEnds
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import TopicSet, load_topics, verify_topics
from relaygr_stream.errors import BrokerUnavailable, DecodeError
from relaygr_stream.settings.schema import Settings
from relaygr_stream.trigger.decision import Decision, LaneState, Policy
from relaygr_stream.trigger.delegation import Delegation
from relaygr_stream.trigger.explain import Explanation, explain
from relaygr_stream.trigger.load import OwnerLoads
from relaygr_stream.trigger.statement import stated_policy
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.fleet import OwnerDirectory
from relaygr_stream.wire.messages import PreInferSignal, RequestEvent, WorkerStatus, prefix_length, tenant_key
from relaygr_stream.wire.records import Record, kind_of
from relaygr_stream.wire.refusals import KIND as REFUSALS
from relaygr_stream.wire.refusals import decode_refusals
from relaygr_stream.wire.trigger_status import TriggerStatus, read_trigger
from relaygr_stream.wire.worker_status import MAX_SKEW_S, StatusReader, charge_ms, prefix_bytes

#: Seconds to wait for signals after the last event: a signal follows its event within milliseconds.
SIGNAL_S = 1.0
#: Status intervals to wait before the first event, so that every owner has stated itself.
STATUS_PERIODS = 2


async def explain_live(settings: Settings, policy: Policy, seconds: float) -> list[Explanation]:
    """Explanations of the events of the next `seconds` seconds. Raises BrokerUnavailable, TopicError."""
    await verify_topics(settings.kafka)
    topics = load_topics(settings.kafka)
    directory = OwnerDirectory(settings.trigger.max_status_age_ms, reader=StatusReader.of(settings, topics))
    async with AsyncExitStack() as stack:
        ends = await stack.enter_async_context(LogEnds(settings.kafka, "relaygr-explain"))
        log_ends = await ends.ask(topics.pre_infer.name, range(topics.lanes))
        if silent := set(range(topics.lanes)) - log_ends.keys():
            raise BrokerUnavailable(
                f"no broker answers for the log ends of partitions {sorted(silent)} of {topics.pre_infer.name}; "
                f"check that their leaders run"
            )
        shadow = Shadow(policy, topics, directory, {lane: end.offset for lane, end in log_ends.items()})
        tails = []
        for topic, on_records in (
            (topics.worker_status, directory.on_records),
            (topics.pre_infer, shadow.on_signals),
            (topics.retrieval, shadow.on_events),
        ):
            tail = TopicTail(settings.kafka, topic.name, range(topic.partitions), "latest", on_records)
            tails.append(await stack.enter_async_context(tail))
            if topic is topics.worker_status:
                await asyncio.sleep(STATUS_PERIODS * settings.worker.status_interval_ms / 1e3)
        failed = [tail.failed for tail in tails]
        await asyncio.wait(failed, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        shadow.looking = False
        await asyncio.wait(failed, timeout=SIGNAL_S, return_when=asyncio.FIRST_COMPLETED)
        for each in failed:
            if each.done():
                each.result()
    return shadow.explanations()


async def stated_by_a_worker(settings: Settings) -> WorkerStatus | None:
    """The newest status of a serving worker on `worker-status`, of any age. Raises BrokerUnavailable, TopicError."""
    await verify_topics(settings.kafka)
    topics = load_topics(settings.kafka)
    topic, reader = topics.worker_status, StatusReader.of(settings, topics)
    found: dict[str, WorkerStatus] = {}  # the newest written last

    def on_records(records: list[Record]) -> None:
        for record in records:
            try:
                status = reader.read(record, fresh=False)
            except DecodeError:
                continue
            if status is not None:
                found.pop(status.name, None)
            if isinstance(status, WorkerStatus) and status.state == "serving":
                found[status.name] = status

    async with TopicTail(settings.kafka, topic.name, range(topic.partitions), "earliest", on_records):
        pass
    return list(found.values())[-1] if found else None


async def running_policy(settings: Settings) -> tuple[Policy, str]:
    """The policy of the running triggers, and a line that names its source; if none runs, the policy in `settings`.

    Raises BrokerUnavailable, TopicError.
    """
    await verify_topics(settings.kafka)
    topics = load_topics(settings.kafka)
    topic, reader = topics.worker_status, StatusReader.of(settings, topics)
    await reader.prepare()
    found: dict[str, TriggerStatus] = {}  # the newest stated last

    def on_records(records: list[Record]) -> None:
        for record in records:
            with suppress(DecodeError):
                status = read_trigger(record, reader, fresh=False)
                if status is not None:
                    found.pop(status.name, None)
                    found[status.name] = status

    async with TopicTail(settings.kafka, topic.name, range(topic.partitions), "earliest", on_records):
        pass
    lately_ms = (time.time() - MAX_SKEW_S) * 1e3  # excludes triggers that were killed
    running = [status for status in found.values() if status.state == "serving" and status.sent_ms >= lately_ms]
    if not running:
        return Policy.of(settings), "no trigger runs there: decided with the settings given here"
    others = sum(status.policy != running[-1].policy for status in running)
    differ = f"; {others} others run with other settings" if others else ""
    return stated_policy(running[-1].policy), f"decided with the settings of {running[-1].name}, which runs{differ}"


class Shadow:
    """The lanes' bounds, as in a trigger that admitted each signalled request.

    Events and signals may be read in either order.
    """

    def __init__(self, policy: Policy, topics: TopicSet, directory: OwnerDirectory, ends: dict[int, int]) -> None:
        self._policy = policy
        self._topics = topics
        self._directory = directory
        now = time.monotonic()
        keep_s = topics.pre_infer.retention_ms / 1e3
        loads = OwnerLoads(policy.averaging)
        self._delegation = Delegation(directory, loads, topics.lanes) if policy.delegate else None
        self._lanes = {lane: LaneState(self._policy, end, keep_s, now, lane, loads) for lane, end in ends.items()}
        self._start = now
        self._rows: list[Explanation] = []
        self._events: dict[str, RequestEvent] = {}
        self._signalled: set[str] = set()
        self._delegates: dict[str, str] = {}  # request → the worker that its signal was sent to
        self.looking = True

    def on_events(self, records: list[Record]) -> None:
        """Handle records of `retrieval`: decide on each event while `looking`."""
        for record in records:
            try:
                event = decode(RequestEvent, record.value, self._topics.retrieval.max_message_bytes)
            except DecodeError:
                continue  # the trigger dead-letters it
            if self.looking:
                self._look_at(event, record.lane)

    def _look_at(self, event: RequestEvent, lane: int) -> None:
        now, state, owner = time.monotonic(), self._lanes[lane], self._directory.owner(lane)
        state.observe(owner, now)
        age_ms = max(0.0, time.time() * 1e3 - event.sent_ms) if event.sent_ms else 0.0
        row, _ = explain(
            event,
            policy=self._policy,
            lane_number=lane,
            lane=state,
            owner=owner,
            age_ms=age_ms,
            now_s=now,
            at_s=now - self._start,
            delegation=self._delegation,
        )
        self._rows.append(row)
        self._events[tenant_key(event.tenant, event.request_id)] = event

    def on_signals(self, records: list[Record]) -> None:
        """Handle records of `pre-infer`: book each signal as admitted."""
        for record in records:
            if kind_of(record.headers):  # not a signal, but the trigger that wrote it knows its offset
                ledger = self._lanes[record.lane].ledger
                ledger.acknowledged(ledger.admit(0), record.offset, time.monotonic())
                self._note_delegated(record)
                continue
            try:
                signal = decode(PreInferSignal, record.value, self._topics.pre_infer.max_message_bytes)
            except DecodeError:
                continue
            self._signalled.add(tenant_key(signal.tenant, signal.request_id))
            self._book(signal, record)

    def _book(self, signal: PreInferSignal, record: Record) -> None:
        """Book a request that the lane's trigger has admitted."""
        now, state, owner = time.monotonic(), self._lanes[record.lane], self._directory.owner(record.lane)
        state.observe(owner, now)  # first: it fills the lane's bucket
        tokens = prefix_length(signal)
        nbytes = 0 if owner is None else prefix_bytes(tokens, owner.worker)
        cost_ms = 0.0 if owner is None else charge_ms(state.costs, tokens, owner.worker)
        admitted = Decision("admitted", tokens, 0.0, nbytes=nbytes, cost_ms=cost_ms)
        event = self._events.get(tenant_key(signal.tenant, signal.request_id))
        if event is not None:
            pending = state.admit(event, admitted, now)
        else:  # read before its event, which must not count as a duplicate
            state.charge(admitted.cost_ms, now)
            pending = state.ledger.admit(nbytes)
        state.ledger.acknowledged(pending, record.offset, now)

    def _note_delegated(self, record: Record) -> None:
        """Note the requests whose signals went to delegates, and charge nothing: their own statuses will tell."""
        if kind_of(record.headers) == REFUSALS:
            with suppress(DecodeError):
                for worker, keys in (decode_refusals(record.value).delegates or {}).items():
                    self._delegates.update(dict.fromkeys(keys, worker))

    def explanations(self) -> list[Explanation]:
        """The explanations of all events, in the order of reading."""
        keys = [tenant_key(row.tenant, row.request_id) for row in self._rows]
        sent = self._delegates  # the running trigger's choices, which are random: shown instead of those made here
        return [
            replace(row, signalled=key in self._signalled or key in sent, delegate=sent.get(key, row.delegate))
            for row, key in zip(self._rows, keys, strict=True)
        ]
