"""The process `relaygr rollout`: what a rollout needs, its end, and the workers of the new group if it starts them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

import msgspec

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import ConfigError, RelayError
from relaygr_stream.ops.children import end_with_parent
from relaygr_stream.ops.rollout.comparing import Comparison
from relaygr_stream.ops.rollout.in_place import InPlace, check, leave, unfinished
from relaygr_stream.ops.rollout.judgement import UNOWNED_S
from relaygr_stream.ops.rollout.observing import watching
from relaygr_stream.ops.rollout.routing import AssignmentsChanged, Bus, RoutesChanged, label, next_group, source_of
from relaygr_stream.ops.rollout.run import FIRST_S, Parts, Plan, Rollout, RolloutMetrics
from relaygr_stream.ops.rollout.warming import warming
from relaygr_stream.ops.status.overview import LISTEN_S
from relaygr_stream.settings.scenarios import LONGEST_PREFIX
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.printable import Say
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.routes import OWN, RolloutProgress, group_settings

#: Clients hear of routes within a second; a request that has begun lives for relay.life_window_ms.
HEARD_S: Final = 1.0
#: Beyond worker.drain_ms, for `up` and its processes to end.
END_S: Final = 20.0


@dataclass(frozen=True)
class RolloutRequest:
    """group: where users move to; None: the other one of two. lanes: of the group; 0: as it has, or as the others have.
    up: arguments of `relaygr up` for its processes; None: an operator starts them. warm: prefill before users move.
    unlike: the models may rank the same candidates in another order. in_place: workers that run serve the group, with
    the model in this folder ("": of their settings), and `up` has arguments of `relaygr trigger`; None: they do not."""

    plan: Plan
    group: str | None = None
    lanes: int = 0
    up: Sequence[str] | None = None
    warm: bool = True
    unlike: bool = False
    in_place: str | None = None


async def run_rollout(context: ProcessContext, asked: RolloutRequest, say: Say) -> None:
    """Roll out; with processes of its own, keep these until it is stopped.

    Raises RelayError where the users came back, or another command moves them, and for what is missing; BrokerError.
    """
    bus = Bus(context.settings)
    routes = await bus.read()
    assigned = await bus.assignments()
    to, in_place = asked.group, asked.in_place
    if assigned is not None and in_place and to is None and in_place == assigned.checkpoints.get(assigned.home):
        say(f"group {label(assigned.home)} serves this model already")
        return
    if to is None and (to := unfinished(assigned)) is None:
        to = next_group(routes)
    source = source_of(routes, to)
    check(assigned, in_place=in_place is not None, to=to, checkpoint=in_place or "", source=source)
    if scenarios := await bus.scenarios_of(to):
        raise ConfigError(
            f"--group {to} serves scenario {', '.join(scenarios)}, whose model is another one: name another group"
        )
    lanes = asked.lanes or routes.lanes_of(to) or routes.lanes_of(source) or bus.topics.lanes
    of_group = group_settings(context.settings, to, lanes)
    _check(of_group, to)
    report = await apply_topics(of_group.kafka)
    say(f"rollout from group {label(source)} to group {label(to)}, topics {of_group.kafka.prefix}…")
    if report.created:
        say(f"made {len(report.created)} topics")
    if not await bus.make_topic():
        say(f"made the topic of routes; clients know of it within {FIRST_S:g} s")
        await asyncio.sleep(FIRST_S)
    of_source = group_settings(context.settings, source, routes.lanes_of(source))
    async with (
        watching(of_source) as old,
        watching(of_group) as new,
        Producer(context.settings.kafka, client_id="relaygr-rollout") as producer,
    ):
        await asyncio.sleep(LISTEN_S)
        if asked.up is not None and in_place is None and new.versions:
            raise ConfigError(f"group {label(to)} has workers already ({', '.join(new.versions)}): stop them first")
        if in_place is not None:  # which counts the workers
            await old.is_whole(UNOWNED_S)
        moving = None if in_place is None else InPlace(bus, producer, to, in_place, assigned, new, old, say)
        if not routes.share_of(to):  # whom it prefills must be erased in it, too, and nobody falls back to it
            begun = RolloutProgress(state="moving", group=to, steps=asked.plan.steps)
            routes = msgspec.structs.replace(routes.moved(to, new.lanes, 0), rollout=begun)
            await bus.write(producer, msgspec.structs.replace(routes, epoch=max(routes.epoch, now_ms())))
        background = Background()
        async with (
            warming(of_source, of_group, to, (old.lanes, new.lanes), producer, background)
            if asked.warm
            else nullcontext() as warm,
            _started(("up",) if in_place is None else ("trigger", "--here"), asked.up, of_group) as started,
        ):
            settle_s = HEARD_S + context.settings.relay.life_window_ms / 1e3
            parts = Parts(bus, producer, RolloutMetrics(context.registry), say, started, moving, settle_s)
            comparison = None if asked.unlike else Comparison(of_source, of_group, producer, new, old)
            rollout = Rollout(parts, asked.plan, routes, to, new, old, warm, comparison)
            context.set_ready(True)
            try:
                await background.until(_run(context, rollout, parts, background))
            finally:
                await background.end()


async def _run(context: ProcessContext, rollout: Rollout, parts: Parts, background: Background) -> None:
    started, in_place, say = parts.started, parts.in_place, parts.say
    stop = background.start(context.stop.wait())
    work = asyncio.ensure_future(_whole(rollout, in_place))
    await asyncio.wait({stop, work}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
        if in_place is not None and in_place.finished:
            say("stopped; the users stay where they are, and the workers follow")
            return
        if in_place is None and (started is None or not rollout.moved):
            say("stopped; the users stay where they are: run it again to go on, or with --back")
            return
        await rollout.back("it was stopped")
    elif work.result():
        if in_place is not None:
            say(in_place.told)
        elif started is not None:
            say("this process keeps its workers; stop the former ones now. Ctrl-C ends both")
            await asyncio.wait({stop, asyncio.ensure_future(started.ended())}, return_when=asyncio.FIRST_COMPLETED)
            if not stop.done():
                raise RelayError(
                    f"its processes ended with exit code {started.exit_code}; until workers of the group serve, "
                    f"another group answers its users"
                )
        return
    if started is not None and in_place is None and rollout.moved:
        await asyncio.sleep(parts.settle_s)
    raise RelayError(rollout.why_back)


async def _whole(rollout: Rollout, in_place: InPlace | None) -> bool:
    try:
        await rollout.wait_for_workers()
        return await rollout.run()
    except (RoutesChanged, AssignmentsChanged) as error:
        rollout.why_back = str(error)
    except RelayError as error:
        if in_place is None or in_place.finished:
            raise
        await rollout.back(str(error))
    return False


async def take_back(settings: Settings, group: str | None, say: Say) -> None:
    """Move all users of a group to the one they came from.

    Raises RelayError if there are none, or no worker serves all lanes of the other group; BrokerError. A rollout under
    way ends with it.
    """
    bus = Bus(settings)
    routes, assigned = await bus.read(), await bus.assignments()
    named = routes.rollout.group if routes.rollout else OWN
    to = named if group is None else group
    if not routes.share_of(to) or len(routes.groups) == 1:
        async with Producer(settings.kafka, client_id="relaygr-rollout") as producer:
            if await leave(bus, producer, say):
                return
        raise RelayError(f"group {label(to)} has no users that could go back")
    source = source_of(routes, to)
    async with (
        watching(group_settings(settings, source, routes.lanes_of(source))) as old,
        Producer(settings.kafka, client_id="relaygr-rollout") as producer,
    ):
        if not await old.is_whole(UNOWNED_S):
            moved = assigned is not None and assigned.home == to
            first = (
                "its workers serve the other in place; roll its model out again" if moved else "start its workers first"
            )
            raise RelayError(f"group {label(source)} does not serve {old.missing_lanes} of {old.lanes} lanes: {first}")
        while routes.share_of(to):
            back = routes.moved(to, routes.lanes_of(to), 0)
            steps = routes.rollout.steps if routes.rollout else ()
            progress = RolloutProgress(state="back", group=to, steps=steps, reason="by hand")
            try:
                await bus.write(
                    producer, msgspec.structs.replace(back, epoch=max(back.epoch, now_ms()), rollout=progress)
                )
                break
            except RoutesChanged:  # by a rollout under way, which ends when it finds what is written here
                routes = await bus.read()
        say(f"all users are in group {label(source)}")
        if unfinished(assigned) is not None:
            await asyncio.sleep(HEARD_S + settings.relay.life_window_ms / 1e3)
            await leave(bus, producer, say)


def _check(settings: Settings, group: str) -> None:
    """Raise ConfigError for a group that can have no topics."""
    if len(settings.kafka.prefix) > LONGEST_PREFIX:
        raise ConfigError(
            f"group {group}: {settings.kafka.prefix} has more than {LONGEST_PREFIX} characters; shorten it"
        )


# ---- the processes of the group, on this host ----


class Up:
    """`relaygr up`, or a trigger, as a child."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def ended(self) -> int:
        """Wait for its end; returns the exit code."""
        return await self._process.wait()

    async def stop(self, within_s: float) -> None:
        """Have its processes drain and end; kill it after so many seconds, and they end with it."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(within_s):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


@asynccontextmanager
async def _started(command: Sequence[str], up: Sequence[str] | None, settings: Settings) -> AsyncIterator[Up | None]:
    if up is None:
        yield None
        return
    kafka = settings.kafka
    # Any free ports, since those that are set are the former group's; what is set on the command line comes later.
    any_port = ["--set", "telemetry.port=0", "--set", "handover.port=0"]
    group = ["--set", f"kafka.prefix={kafka.prefix}", "--set", f"kafka.partitions={kafka.partitions}"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "relaygr_stream", *command, *any_port, *up, *group),
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches only this process, which moves the users first
        preexec_fn=end_with_parent,
    )
    child = Up(process)
    try:
        yield child
    finally:
        await child.stop(settings.worker.drain_ms / 1e3 + END_S)
