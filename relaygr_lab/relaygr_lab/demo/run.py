"""The demo: broker, topics, trigger, two workers, and a client that sends each request with and without the relay.

With the relay, each request is announced and ranked after the stage delay. The same ranking requests are sent at the
same times with full inference, and with the newest behaviours only. The three take turns. The report
compares latencies, scores and hit rates at the client.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import msgspec
from rich.console import Console

from relaygr_lab.cpu_times import CpuTimes, disturbance
from relaygr_lab.demo.live import LiveState, LiveView
from relaygr_lab.demo.plot import save_plot
from relaygr_lab.demo.report import PREPARED_WORDS, DemoResult, render_table, verdict
from relaygr_lab.demo.traffic import MEDIAN_TOKENS, NEWEST, TURNS, WARM_UP_S, Requests, by_reference, requests_of
from relaygr_lab.processes import cluster, start_relay, wait_for_lanes
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.errors import DecodeError
from relaygr_stream.history.sqlite_store import SqliteStore
from relaygr_stream.models.api import relative_deviation
from relaygr_stream.models.loading import config_of
from relaygr_stream.ops.brokers.distribution import BRIEF_RELAY
from relaygr_stream.ops.brokers.local import BrokerKind
from relaygr_stream.ops.children import Child, stop_all
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Model
from relaygr_stream.telemetry.printable import SafeConsole
from relaygr_stream.wire.codec import decode
from relaygr_stream.wire.messages import HITS, PreInferSignal
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import worker_statuses
from relaygr_stream.workload.driver import DriveSummary, Result, drive
from relaygr_stream.workload.items import WorkItem
from relaygr_stream.workload.metrics import Quality, QualityMeter

WORKERS: Final = ("worker-1", "worker-2")
#: Longest wait after the load for the audits that wait then: at most 16 of a full inference each.
AUDITS_S: Final = 30.0
POLL_S: Final = 0.05


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command line.

    broker: None: kafka.bootstrap names a running cluster. events: a user's log; None: generated requests.
    """

    broker: BrokerKind | None
    seconds: float
    rate: float
    seed: int
    out: Path
    events: Path | None = None
    by_reference: bool = False  # histories in a local store, to which the requests with the relay refer


@dataclass
class Seen:
    """What the demo reads besides its answers: signals and statuses."""

    admitted: set[str]
    live: LiveState

    def signals(self, records: list[Record]) -> None:
        """Handle pre-infer signals: they name the admitted requests."""
        for record in records:
            try:
                self.admitted.add(decode(PreInferSignal, record.value).request_id)
            except DecodeError:
                continue  # the workers report it

    def statuses(self, records: list[Record]) -> None:
        """Handle worker statuses, for the live view and the report."""
        for status in worker_statuses(records):
            self.live.worker(status)


async def run_demo(options: DemoOptions, settings: Settings) -> int:
    """Run the demo; returns the exit code. Raises RelayError if it cannot run."""
    console = SafeConsole()
    started = time.monotonic()
    # In a thread, so that a long log can be stopped.
    requests = await asyncio.to_thread(
        requests_of, settings, options.events, seconds=options.seconds, rate=options.rate, seed=options.seed
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # Beside the picture, so that nothing outside the user's folder remains, even after a crash.
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=options.out.parent, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if options.by_reference:
            requests, settings = await _stored(requests, settings, folder)
        async with cluster(options.broker, settings, folder, BRIEF_RELAY, console.print) as (connected, broker):
            result = await _play(options, requests, connected, folder, broker, console)
    result.wall_s = time.monotonic() - started
    console.print(render_table(result))
    save_plot(result, options.out)
    console.print(f"picture: {options.out}")
    return 1 if verdict(result) else 0


async def _stored(requests: Requests, settings: Settings, folder: Path) -> tuple[Requests, Settings]:
    """The requests with the relay by reference, and the settings with the store that has their histories."""
    path = (folder / "histories").resolve()
    store = SqliteStore(path)
    try:
        relayed = await by_reference(requests.relayed, store)
    finally:
        await store.close()
    history = msgspec.structs.replace(settings.history, store=f"sqlite:{path}")
    return requests._replace(relayed=relayed), msgspec.structs.replace(settings, history=history)


async def _play(
    options: DemoOptions, requests: Requests, settings: Settings, folder: Path, broker: str, console: Console
) -> DemoResult:
    report = await apply_topics(settings.kafka)
    topics = load_topics(settings.kafka)
    console.print(f"topics: {len(report.created)} created, {len(report.existing)} existing, {topics.lanes} lanes")
    children = start_relay(settings, folder, "trigger", WORKERS)
    live = LiveState()
    seen = Seen(set(), live)
    relay: dict[str, Result] = {}
    full: dict[str, Result] = {}
    newest: dict[str, Result] = {}
    codes: dict[str, int] = {}
    disturbed = ""
    try:
        console.print("starting a trigger and two workers (loading torch takes some seconds) …")
        await asyncio.gather(*(child.wait_ready() for child in children))
        async with AsyncExitStack() as stack:
            statuses = TopicTail(settings.kafka, topics.worker_status.name, [0], "recent", seen.statuses)
            lanes = range(topics.pre_infer.partitions)
            signals = TopicTail(settings.kafka, topics.pre_infer.name, lanes, "latest", seen.signals, relaxed=True)
            await stack.enter_async_context(statuses)
            await stack.enter_async_context(signals)
            client = await stack.enter_async_context(RelayClient(settings=settings, client_id="demo"))
            await wait_for_lanes(children, lambda: live.owned(WORKERS), topics.lanes)
            await stack.enter_async_context(LiveView(live, console))
            watch = asyncio.create_task(_watch(children, console))
            stack.callback(watch.cancel)
            live.enter("warm-up", WARM_UP_S)
            await _phase(client, settings, requests.warm_up, live, {}, mode="auto")
            before = CpuTimes.now()
            for number, (relayed, measured, shortened) in enumerate(requests.turns()):
                turn, seconds = f", turn {number + 1} of {TURNS}", options.seconds / TURNS
                live.enter(f"relay{turn}", seconds)
                await _phase(client, settings, relayed, live, relay, mode="auto")
                live.enter(f"full inference, the same requests{turn}", seconds)
                await _phase(client, settings, measured, live, full, mode="full")
                live.enter(f"full inference, the newest {NEWEST} behaviours only{turn}")
                await _phase(client, settings, shortened, live, newest, mode="full")
            disturbed = disturbance(before, CpuTimes.now()) if options.broker else ""
            live.enter("audits")
            await _audited(live)
            await signals.catch_up()
    finally:
        codes = await stop_all(children)
    result = _result(options, settings, broker, seen, relay, full, newest, codes)
    return replace(result, notes=(*([remark(disturbed)] if disturbed else []), *result.notes))


def remark(disturbed: str) -> str:
    """What a demo says of it (cpu_times.disturbance)."""
    return f"! disturbed: {disturbed}, so latencies and their ratios say little; run it again on a quiet machine"


async def _audited(live: LiveState) -> None:
    """Return when each worker has stated, since now, that no audit waits; or after AUDITS_S."""
    since = live.clock()
    while live.clock() - since < AUDITS_S:
        stated = [(when, status.counters.get("audits_waiting", 0.0)) for when, status in live.workers.values()]
        if all(when > since and not waiting for when, waiting in stated):
            return
        await asyncio.sleep(POLL_S)


async def _watch(children: Sequence[Child], console: Console) -> None:
    """Report processes that end; they are not restarted."""
    running = list(children)
    while running:
        for child in list(running):
            if child.exit_code is not None:
                running.remove(child)
                console.print(
                    f"{child.name} (pid {child.pid}) ended with exit code {child.exit_code} and is not restarted:"
                )
                console.print(child.log_tail(), markup=False, highlight=False)
        await asyncio.sleep(0.25)


async def _phase(
    client: RelayClient,
    settings: Settings,
    items: list[WorkItem],
    live: LiveState,
    results: dict[str, Result],
    *,
    mode: Literal["auto", "full"],
) -> DriveSummary:
    def note(result: Result) -> None:
        results[result.item.request.request_id] = result
        if mode == "auto":
            live.announced()
        if result.outcome is None:
            live.failed(result.error or "")
        else:
            live.ranked(result.latency_ms, result.outcome)

    timeout = settings.client.timeout_ms / 1e3
    return await drive(client, items, mode=mode, announce=mode == "auto", timeout=timeout, on_result=note)


def deviations_of(relay: Mapping[str, Result], full: Mapping[str, Result]) -> list[float]:
    """Largest relative deviation of each request's scores by the relay from those of full inference.

    Only scores of whole histories: those of the newest behaviours alone are others.
    """
    return [
        relative_deviation(mine.scores, other.scores)
        for key, mine in relay.items()
        if mine.outcome != "truncated"
        and (other := full.get(key)) is not None
        and mine.scores is not None
        and other.scores is not None
    ]


def _result(
    options: DemoOptions,
    settings: Settings,
    broker: str,
    seen: Seen,
    relay: dict[str, Result],
    full: dict[str, Result],
    newest: dict[str, Result],
    codes: dict[str, int],
) -> DemoResult:
    answered = {key: result for key, result in relay.items() if result.outcome is not None}
    admitted = {key for key in relay if key in seen.admitted}
    hits = {key for key in admitted if key in answered and answered[key].outcome in HITS}
    deviations = deviations_of(answered, full)
    statuses = [status for _, status in seen.live.workers.values()]
    counters = [status.counters for status in statuses]
    note = next((status.model_note for status in statuses if status.model_note), "")
    return DemoResult(
        relay_ms=[result.latency_ms for result in answered.values()],
        outcomes=[result.outcome for result in answered.values() if result.outcome is not None],
        full_ms=[result.latency_ms for result in full.values() if result.outcome is not None],
        requests=len(relay) + len(full) + len(newest),
        announced=len(relay),
        answered=sum(one.outcome is not None for phase in (relay, full, newest) for one in phase.values()),
        errors=Counter(one.error for phase in (relay, full, newest) for one in phase.values() if one.error is not None),
        admissions=Counter(one.ranking.admission for one in answered.values() if one.ranking is not None),
        admitted=len(admitted),
        admitted_hits=len(hits),
        admitted_found=Counter(str(answered[key].outcome) for key in hits),
        prepared={name: int(sum(totals.get(f"signal_{name}", 0) for totals in counters)) for name in PREPARED_WORDS},
        reloaded=int(sum(totals.get("cache_loaded", 0) for totals in counters)),
        spilled=int(sum(totals.get("cache_spilled", 0) for totals in counters)),
        audits=int(sum(totals.get("audits", 0) for totals in counters)),
        audit_share=settings.worker.audit_share,
        audit_deviation=max((totals.get("audit_deviation", 0.0) for totals in counters), default=0.0),
        compared=len(deviations),
        deviation=max(deviations, default=0.0),
        quality=_quality({"relay": relay, "full inference": full, f"the newest {NEWEST} behaviours only": newest}),
        model=f"{_shape(settings.model)}, {settings.worker.dtype}{f', {note}' if note else ''}",
        broker=broker,
        device=f"2 workers on {settings.worker.device}",
        wall_s=0.0,
        processes=dict(codes),
        notes=(
            f"{options.rate:g} requests/s, {options.seconds:g} s each way; "
            + (
                f"the latest of {options.events}, "
                if options.events
                else f"prefixes log-normal around {MEDIAN_TOKENS:g} tokens, "
            )
            + f"stage delay log-normal around 80 ms{', histories by reference' if options.by_reference else ''}",
        ),
    )


def _quality(phases: Mapping[str, Mapping[str, Result]]) -> dict[str, Quality]:
    """HR and NDCG of each phase, of popularity and of chance, over the requests that all phases scored."""
    meters = [QualityMeter() for _ in phases]
    for key in next(iter(phases.values())):
        results = [phase[key] for phase in phases.values() if key in phase]
        scores = [one.scores[:, 0] for one in results if one.scores is not None]
        item = results[0].item
        if item.target is not None and len(scores) == len(meters):
            for meter, values in zip(meters, scores, strict=True):
                meter.add(values, item.target, item.popularity)
    found = {name: meter.served for name, meter in zip(phases, meters, strict=True)}
    found |= {"popularity": meters[0].popularity, "chance": meters[0].chance}
    return {name: quality for name, quality in found.items() if quality is not None}


def _shape(model: Model) -> str:
    """The model in words."""
    if model.factory:
        return model.factory
    config, named = config_of(model), f", checkpoint {model.checkpoint}" if model.checkpoint else ""
    return f"{config.architecture.upper()}, {config.layers} layers, D {config.dim}{named}"
