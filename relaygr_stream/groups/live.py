"""One worker or trigger after the other in one process, each of the group that the assignments name.

    settings of the place ─► live ─► stop: the end
         ▲                     └───► another group is assigned: it has drained and left ─┐
         └──────────────── of the place before, where the move fails ◄───────────────────┘

The process, its name and its ports stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
from msgspec.structs import replace

from relaygr_stream.bus.assignments import following_assignments
from relaygr_stream.errors import BrokerError, BrokerUnavailable, RelayError, Superseded
from relaygr_stream.groups.moves import GroupMoves, ServedGroup
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.routes import group_settings

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: A process on its way to another group waits so long for brokers, and tries again.
RETRY_S: Final = 2.0
#: One worker or trigger, of the context's settings, to its end. False: it was called away, and records were left.
Live = Callable[[], Awaitable[bool]]


async def live_where_assigned(context: ProcessContext, role: str, moves: GroupMoves, live: Live) -> None:
    """Live until `context.stop` is set. Raises RelayError where the process must end otherwise."""
    own = context.settings
    async with following_assignments(own.fleet or own, moves.take):
        await _go_on(context, role, moves, live)


async def _go_on(context: ProcessContext, role: str, moves: GroupMoves, live: Live) -> None:
    own, first = context.settings, True
    while not context.stop.is_set():
        before, place, epoch = moves.serving, moves.set_out(), moves.epoch
        if place != before or not first:
            doing = f"{'goes back' if place == before else 'moves'} to {moves.in_words(place)}"
            if doing != context.doing:
                log.info(doing, epoch=epoch, checkpoint=place.checkpoint or None)
            context.doing = doing
        context.begin(role, settings_at(own, place))
        first = False
        try:
            drained = await live()
            if not drained and moves.target != place:
                moves.give_up(f"records were left after worker.drain_ms = {own.worker.drain_ms:g}", place)
        except Exception as error:  # whatever another model or its memory raises: its own is known to serve
            if context.started or isinstance(error, Superseded):
                raise
            if context.had_started and _passes(error, at_home=place == before):
                moves.serving = before
                limited(log.warning, "brokers")("waits for brokers", error=str(error))
                context.set_ready(False, str(error))
                await asyncio.sleep(RETRY_S)
            elif place == before:
                raise
            else:
                _say_defect(error)
                moves.give_up(str(error) or type(error).__name__, before, epoch)


def _passes(error: Exception, *, at_home: bool) -> bool:
    """Whether to wait for its end, as a worker that serves does: no broker answers, or not for its own group."""
    return type(error) is BrokerUnavailable or (at_home and isinstance(error, BrokerError))


def _say_defect(error: Exception) -> None:
    if not isinstance(error, RelayError):
        log.error("unexpected error on the way to another group", exc_info=error)


def settings_at(own: Settings, place: ServedGroup) -> Settings:
    """Of a process that serves this place, and was started with its own."""
    fleet = own.fleet or own
    found = own if place.group == own.scenario else group_settings(fleet, place.group, fleet.kafka.partitions)
    if not place.checkpoint:
        return found
    return replace(found, model=replace(found.model, checkpoint=place.checkpoint, factory="", path=""))
