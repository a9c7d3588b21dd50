"""`relaygr worker`: one worker after the other in one process (groups/live.py), each with a model, memory, connections
and metrics of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from relaygr_stream.engine.build import build, free_memory
from relaygr_stream.errors import ModelError
from relaygr_stream.groups.live import live_where_assigned
from relaygr_stream.groups.moves import GroupMoves, ServedGroup
from relaygr_stream.models.loading import read_config
from relaygr_stream.settings.scenarios import RESERVE
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.worker.handing import MakeHandover
from relaygr_stream.worker.process import Build, made_worker, name_of
from relaygr_stream.worker.reserve import stand_by


async def run_worker(
    context: ProcessContext, make_handover: MakeHandover = lambda *_: None, build: Build = build
) -> None:
    """Serve until `context.stop` is set, then drain. Raises RelayError where the process must end otherwise."""
    own = context.settings
    known = (each.name for each in own.scenarios if not each.served_by)
    moves = GroupMoves(name_of(own), own.scenario, known, partial(_why_not, own))
    live = partial(_live, context, own, moves, make_handover, build)
    await live_where_assigned(context, "worker", moves, live)


async def _live(
    context: ProcessContext, own: Settings, moves: GroupMoves, make_handover: MakeHandover, build: Build
) -> bool:
    """One worker from its model to its end."""
    if why := _why_not(own, moves.serving):
        raise ModelError(why)
    free_memory()  # only now is nothing left of the worker before
    if moves.serving.group == RESERVE:
        await stand_by(context, moves)
        return True
    async with made_worker(context, make_handover, build, moves) as worker:
        return await worker.run() or context.stop.is_set()


def _why_not(own: Settings, place: ServedGroup) -> str:
    """Why a worker with these settings cannot serve a model that assignments name. A path never reaches a user's
    factory, which may execute what it reads."""
    if not place.checkpoint:
        return ""
    if own.model.factory:
        return f"its model is made by model.factory = {own.model.factory}, and not of a checkpoint alone"
    try:
        read_config(Path(place.checkpoint))
    except ModelError as error:
        return str(error)
    return ""
