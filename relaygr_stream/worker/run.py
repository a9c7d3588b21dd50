"""`relaygr worker`: one worker after the other in one process, each of the scenario that the assignments name.

    made_worker ─► run ─► stop: the end
         ▲          └───► another scenario is assigned: it has drained and left ─┐
         └────── settings of that scenario; of the one before, where it fails ◄──┘

The process, its name and its ports stay; model, memory, connections and metrics are each worker's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import structlog

from relaygr_stream.bus.assignments import AssignmentsTail
from relaygr_stream.bus.topics import topic_exists
from relaygr_stream.engine.build import build, free_memory
from relaygr_stream.errors import BrokerError, BrokerUnavailable, RelayError, Superseded
from relaygr_stream.settings.scenarios import RESERVE, scenario_in_words
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.routes import routes_topic
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader
from relaygr_stream.worker.handing import MakeHandover
from relaygr_stream.worker.moves import ScenarioMoves
from relaygr_stream.worker.process import Build, made_worker, name_of
from relaygr_stream.worker.reserve import stand_by

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: A worker on its way to another group waits so long for brokers, and tries again.
RETRY_S: Final = 2.0


async def run_worker(
    context: ProcessContext, make_handover: MakeHandover = lambda *_: None, build: Build = build
) -> None:
    """Serve until `context.stop` is set, then drain. Raises RelayError where the process must end otherwise."""
    own = context.settings
    moves = ScenarioMoves(name_of(own), own.scenario, (each.name for each in own.scenarios if not each.served_by))
    async with _following(own, moves):
        await _serve(context, moves, make_handover, build)


async def _serve(context: ProcessContext, moves: ScenarioMoves, make_handover: MakeHandover, build: Build) -> None:
    own, first = context.settings, True
    while not context.stop.is_set():
        before, scenario, epoch = moves.serving, moves.set_out(), moves.epoch
        if scenario != before or not first:
            doing = f"{'goes back' if scenario == before else 'moves'} to {scenario_in_words(scenario)}"
            if doing != context.doing:
                log.info(doing, epoch=epoch)
            context.doing = doing
        context.begin("worker", _settings_of(own, scenario))
        if not first:  # only now is nothing left of the worker before
            free_memory()
        first = False
        try:
            drained = await _live(context, moves, make_handover, build)
            if not drained and moves.target != scenario:
                moves.give_up(f"records were left after worker.drain_ms = {own.worker.drain_ms:g}", scenario)
        except Exception as error:  # whatever another model or its memory raises: its own is known to serve
            if context.started or isinstance(error, Superseded):
                raise
            if context.had_started and _passes(error, at_home=scenario == before):
                moves.serving = before
                limited(log.warning, "brokers")("waits for brokers", error=str(error))
                context.set_ready(False, str(error))
                await asyncio.sleep(RETRY_S)
            elif scenario == before:
                raise
            else:
                _say_defect(error)
                moves.give_up(str(error) or type(error).__name__, before, epoch)


def _passes(error: Exception, *, at_home: bool) -> bool:
    """Whether to wait for its end, as a worker that serves does: no broker answers, or not for its own group."""
    return type(error) is BrokerUnavailable or (at_home and isinstance(error, BrokerError))


def _say_defect(error: Exception) -> None:
    if not isinstance(error, RelayError):
        log.error("unexpected error on the way to another scenario", exc_info=error)


async def _live(context: ProcessContext, moves: ScenarioMoves, make_handover: MakeHandover, build: Build) -> bool:
    """One worker from its model to its end. Returns False if it was called away, and records were left."""
    if moves.serving == RESERVE:
        await stand_by(context, moves)
        return True
    async with made_worker(context, make_handover, build, moves) as worker:
        return await worker.run() or context.stop.is_set()


def _settings_of(own: Settings, scenario: str) -> Settings:
    """Of a worker of this scenario, in a process that was started for its own."""
    if scenario == own.scenario:
        return own
    return own.serving(scenario) if scenario else own.fleet or own


@asynccontextmanager
async def _following(own: Settings, moves: ScenarioMoves) -> AsyncIterator[None]:
    """Follow the assignments, where the fleet has scenarios. The worker serves on where that ends by a defect."""
    background = Background()
    if own.scenarios:
        fleet = own.fleet or own
        topics = load_topics(fleet.kafka)
        topic, reader = routes_topic(topics), StatusReader.from_settings(fleet, topics)
        await reader.prepare()
        exists = partial(topic_exists, fleet.kafka, topic)
        tail = AssignmentsTail(fleet.kafka, topic.name, reader, exists, moves.take)
        await tail.start()
        background.start(tail.run())
    try:
        yield
    finally:
        await background.end()
