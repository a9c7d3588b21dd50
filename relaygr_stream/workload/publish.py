"""`relaygr replay`: sends a log or a generated workload through the relay, and reports the results.

Connects the workload's parts: reading, replay or generator, driver, metrics, report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final, Literal

import structlog

from relaygr_stream.client import RelayClient
from relaygr_stream.errors import ConfigError, InputError, RelayError
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema
from relaygr_stream.workload.columns import ColumnMap, IdKind
from relaygr_stream.workload.driver import DriveSummary, RankingClient, Result, drive
from relaygr_stream.workload.formats import Format
from relaygr_stream.workload.generator import Generator, GeneratorOptions
from relaygr_stream.workload.items import WorkItem
from relaygr_stream.workload.logs import InteractionLog
from relaygr_stream.workload.metrics import QualityMeter
from relaygr_stream.workload.packaged import is_packaged
from relaygr_stream.workload.replay import Replay, ReplayOptions
from relaygr_stream.workload.report import LIVE_EVERY_S, LiveLine, PublishReport, live_line, make_report
from relaygr_stream.workload.values import TimeUnit

log = structlog.get_logger(__name__)

#: Seconds to wait for a worker's status: workers publish four a second, and a fetch may delay one by half a second.
LISTEN_S: Final = 1.5
#: Longest wait for a worker that is ready: importing torch and loading a model takes up to a minute on two busy cores.
READY_S: Final = 120.0


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """The log to replay, how to read it and how to replay it."""

    path: Path
    format: Format | None = None
    columns: ColumnMap | None = None
    time_unit: TimeUnit = "auto"
    item_ids: IdKind = "auto"
    features: FeatureSchema = NO_FEATURES
    replay: ReplayOptions = field(default_factory=ReplayOptions)


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """The options of `relaygr replay`."""

    source: LogOptions | GeneratorOptions
    requests: int | None = 1000  # of a generated workload; None: until stopped
    timeout_ms: float | None = None  # of each ranking; None: client.timeout_ms
    mode: Literal["auto", "full"] = "auto"
    announce: bool = True
    k: int = 10


@dataclass(frozen=True)
class Workload:
    """A workload that is ready to send; iterating `items` gives its requests in the order of time."""

    items: Iterable[WorkItem]
    count: int | None  # None: endless
    description: list[str]
    notes: list[str]
    log: InteractionLog | None = None


async def publish(options: PublishOptions, ctx: ProcessContext) -> PublishReport:
    """Prepare the workload, connect, send it and report. Once `ctx.stop` is set, it stops and reports what was sent.

    Raises InputError or ConfigError if there is nothing to send, BrokerError if Kafka cannot be reached, RelayError
    if no worker becomes ready.
    """
    line = LiveLine()
    ctx.set_ready(False, "preparing the workload")
    try:
        # In a thread, so that health probes and signals are handled while a long file is read.
        workload = await asyncio.to_thread(prepare, options, ctx.settings, line, ctx.stop)
    finally:
        line.close()
    async with RelayClient(settings=ctx.settings, registry=ctx.registry) as relay:
        ctx.set_ready(False, "no worker is ready")
        await _worker_ready(relay, ctx.settings.kafka.bootstrap)
        ctx.set_ready(True)
        return await send(relay, workload, options, ctx.settings, ctx.stop, line)


async def _worker_ready(relay: RelayClient, bootstrap: str) -> None:
    """Return when a worker serves. Raises RelayError after READY_S."""
    if await relay.worker_serves(LISTEN_S):
        return
    hint = "start one with `relaygr up`, or check with `relaygr status`"
    log.warning(f"no worker is ready; waiting for one: {hint}", bootstrap=bootstrap, longest_s=READY_S)
    if not await relay.worker_serves(READY_S):
        raise RelayError(f"no worker was ready within {READY_S:g} s at {bootstrap}, so nothing was sent: {hint}")
    log.info("a worker is ready")


def prepare(options: PublishOptions, settings: Settings, line: LiveLine, stop: asyncio.Event) -> Workload:
    """Read the log or make the generator, within the limits of the settings. Raises InputError, ConfigError."""
    source = options.source
    shape = source.replay if isinstance(source, LogOptions) else source
    _check_bounds(shape, settings)
    if isinstance(source, GeneratorOptions):
        generator = Generator(source)
        items = generator if options.requests is None else _Limited(generator, options.requests)
        others = "the packaged model knows them; another" if is_packaged(settings.model) else "a model"
        notes = [f"generated users follow tastes of their own: {others} that was not trained on them ranks by chance"]
        return Workload(
            items, options.requests, generator.describe().splitlines(), notes + _model_notes(source.items - 1, settings)
        )

    def progress(done: int, total: int) -> None:
        if stop.is_set():
            raise InputError(f"{source.path}: stopped while reading")
        if line.due():
            line.show(f"reading {source.path.name}: {done / max(1, total):.0%} of {total / 1e6:.0f} MB")

    from relaygr_stream.workload.rows import read_log_for  # noqa: PLC0415 - imports torch

    log = read_log_for(
        source.path,
        settings.model,
        format=source.format,
        columns=source.columns,
        time_unit=source.time_unit,
        item_ids=source.item_ids,
        progress=progress,
        features=source.features,
    )
    replay = Replay(log, source.replay)
    return Workload(
        replay, len(replay), replay.describe().splitlines(), _model_notes(int(log.items.max()), settings), log
    )


async def send(
    client: RankingClient,
    workload: Workload,
    options: PublishOptions,
    settings: Settings,
    stop: asyncio.Event,
    line: LiveLine,
) -> PublishReport:
    """Send the workload through a connected client, show progress, and report."""
    meter, summary = QualityMeter(options.k), DriveSummary()
    examples: dict[str, str] = {}
    models: set[str] = set()

    def on_result(result: Result) -> None:
        if result.ranking is not None:
            models.add(result.ranking.model_version)
        if result.error is not None:
            examples.setdefault(result.error, result.detail)
        elif result.scores is not None and result.item.target is not None:
            # Ranked by the first task's scores, as in a service that orders by its main objective.
            meter.add(result.scores[:, 0], result.item.target, result.item.popularity)

    async def show() -> None:
        while True:
            await asyncio.sleep(LIVE_EVERY_S)
            if line.due():
                line.show(live_line(summary, meter, workload.count))

    showing = asyncio.create_task(show())
    try:
        await drive(
            client,
            workload.items,
            mode=options.mode,
            announce=options.announce,
            timeout=(options.timeout_ms or settings.client.timeout_ms) / 1000,
            on_result=on_result,
            stop=stop,
            summary=summary,
        )
    finally:
        showing.cancel()
        line.close()
    log = workload.log
    return make_report(
        summary,
        meter,
        workload=workload.description,
        notes=workload.notes,
        models=sorted(models),
        error_examples=examples,
        lines=log.lines if log else None,
        broken_lines=log.broken_count if log else None,
        broken_examples=log.broken_text().splitlines() if log else [],
    )


@dataclass(frozen=True)
class _Limited:
    """The first `count` requests of an endless workload; every iteration starts from the beginning."""

    generator: Generator
    count: int

    def __iter__(self) -> Iterator[WorkItem]:
        return islice(iter(self.generator), self.count)


def _check_bounds(shape: ReplayOptions | GeneratorOptions, settings: Settings) -> None:
    """Raise ConfigError for limits above those of the workers, which would refuse every request."""
    beyond = settings.relay.beyond(prefix=shape.max_prefix, suffix=shape.suffix, candidates=shape.candidates)
    if beyond:
        raise ConfigError(f"{beyond}; lower it, or raise the setting everywhere")


def _model_notes(largest_item: int, settings: Settings) -> list[str]:
    """Notes on the model in these settings; the workers may have other settings."""
    from relaygr_stream.models.loading import checkpoint_folder, config_of  # noqa: PLC0415 - imports torch

    model, notes = settings.model, []
    known = not model.factory and (not model.checkpoint or checkpoint_folder(model.checkpoint).is_dir())
    if known and largest_item >= (shape := config_of(model)).vocab:
        taken = f"in {shape.oov_rows} rows by hash" if shape.oov_rows else "modulo it"
        notes.append(f"item ids go up to {largest_item}; the model takes those from vocab = {shape.vocab} on {taken}")
    if not model.factory and not model.checkpoint:
        notes.append(
            "these settings have no model.checkpoint; workers without one rank as chance does, with random weights or, "
            "as `relaygr up` starts them, with the packaged model, which knows generated users alone"
        )
    return notes
