"""`relaygr status`: the processes of a fleet, and what is odd about them."""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING

import click

from relaygr_stream.cli.options import SOURCES, refuse_others, scenario_option, settings_options
from relaygr_stream.ops.stopping import run_until_stopped
from relaygr_stream.settings.schema import Settings

if TYPE_CHECKING:
    from relaygr_stream.ops.status.overview import Overview
    from relaygr_stream.wire.assignments import Assignments


@click.command(name="status")
@click.option("--watch", is_flag=True, help="Repeat once a second until Ctrl-C.")
@click.option("--json", "as_json_line", is_flag=True, help="Print a JSON object; with --watch, one line a second.")
@click.option("--forget", metavar="NAME", help="Only remove the record of a worker (trigger/NAME: of a trigger).")
@settings_options
@scenario_option
def status_command(settings: Settings, watch: bool, as_json_line: bool, forget: str | None) -> None:
    """Show the processes of a fleet, and what is odd about them.

    Shows triggers, workers, lanes, hits, queues and memory.

    \b
    Examples:
      relaygr status --bootstrap kafka:9092
      relaygr status --bootstrap kafka:9092 --watch

    It listens for some seconds, joins no group and writes nothing. rankings: of the last 10 to 20 seconds, timed from
    reading a request to its reply; relay: those that found prefix KV. hits: their share, lately or, without
    rankings, since the worker's start. lag: unread records of the worker's lanes. Exits 4 if a
    partition has no broker.
    """
    from relaygr_stream.ops.looking import look
    from relaygr_stream.ops.status.overview import LISTEN_S

    if forget is not None:
        refuse_others("--forget removes a record, and shows nothing", "forget", "scenario", *SOURCES)
        look(settings.kafka, _forget(settings, forget))
    elif watch:
        run_until_stopped(_show(settings, watch, as_json_line), line="stopped", exit_code=0)
    else:
        look(settings.kafka, _show(settings, watch, as_json_line), LISTEN_S)


async def _show(settings: Settings, watch: bool, as_json_line: bool) -> None:
    from rich.live import Live

    from relaygr_stream.bus.assignments import AssignmentsTail
    from relaygr_stream.bus.away import Away
    from relaygr_stream.bus.routes import RoutesTail
    from relaygr_stream.bus.topic_check import topics_with
    from relaygr_stream.bus.topics import topic_exists, verify_topics
    from relaygr_stream.ops.status.overview import LISTEN_S, OfScenario, listening
    from relaygr_stream.ops.status.table import as_json, render
    from relaygr_stream.telemetry.printable import SafeConsole, print_table
    from relaygr_stream.wire.routes import group_settings, routes_topic
    from relaygr_stream.wire.topic_files import load_topics

    away = Away.from_rows(rows := await verify_topics(settings.kafka))
    topics = topics_with(settings.kafka, rows)
    if (topics.worker_status.name, 0) in away:
        away.check()
    console = SafeConsole()
    async with listening(settings, topics) as (view, tail), AsyncExitStack() as stack:
        topic = routes_topic(topics)
        exists = partial(topic_exists, settings.kafka, topic)
        routes = RoutesTail(
            settings.kafka,
            topic.name,
            view.reader,
            exists,
            view.take_routes,
        )
        await routes.start()
        stack.push_async_callback(routes.stop)
        if any(routes.routes):
            assignments = AssignmentsTail(settings.kafka, topic.name, view.reader, exists, partial(_assign, view))
            await assignments.start()
            stack.push_async_callback(assignments.stop)
        for name, of in sorted(routes.routes.items()):
            for part in of.parts if name else ():
                group = group_settings(settings, part.group, part.lanes)
                seen, _ = await stack.enter_async_context(listening(group, load_topics(group.kafka)))
                seen.scenario = name
                view.scenarios.append(OfScenario(name, part.group, seen))
        await tail.listen(LISTEN_S)
        if not watch:
            click.echo(as_json(view)) if as_json_line else print_table(render(view), console)
            away.check()
        elif as_json_line or not sys.stdout.isatty():
            while True:
                click.echo(as_json(view)) if as_json_line else print_table(render(view), console)
                await tail.listen(1.0)
        else:
            with Live(render(view), console=console, auto_refresh=False) as screen:
                while True:
                    await tail.listen(1.0)
                    screen.update(render(view), refresh=True)


def _assign(view: Overview, assignments: Assignments | None) -> None:
    view.assignments = assignments


async def _forget(settings: Settings, name: str) -> None:
    """Write a tombstone for the name's latest record."""
    from relaygr_stream.bus.contents import read_back
    from relaygr_stream.bus.producer import Producer
    from relaygr_stream.bus.topics import verify_topics
    from relaygr_stream.errors import DecodeError
    from relaygr_stream.wire.codec import decode
    from relaygr_stream.wire.messages import WorkerStatus
    from relaygr_stream.wire.records import HEADER_KIND, Record
    from relaygr_stream.wire.signature import Signer
    from relaygr_stream.wire.topic_files import load_topics
    from relaygr_stream.wire.trigger_status import KEY_PREFIX, KIND
    from relaygr_stream.wire.worker_status import HEADER_INCARNATION

    await verify_topics(settings.kafka)
    topic, key = load_topics(settings.kafka).worker_status.name, name.encode()
    found: list[Record] = []
    async with aclosing(read_back(settings.kafka, topic)) as chunks:
        async for chunk in chunks:
            found = [record for record in chunk if record.key == key]
            if found:
                break
    if not found or found[-1].value is None:
        raise click.UsageError(
            f"--forget {name}: worker-status has no record of that name; `relaygr status` lists names"
        )
    headers: list[tuple[str, bytes]] = []
    if name.startswith(KEY_PREFIX):
        headers = [(HEADER_KIND, KIND.encode())]
    else:
        with suppress(DecodeError):  # an unreadable record is removed, too
            headers = [(HEADER_INCARNATION, str(decode(WorkerStatus, found[-1].value).incarnation).encode())]
    signer = Signer.from_settings(settings.handover)
    if signer is not None:
        headers = signer.sign(topic, key, None, headers)
    async with Producer(settings.kafka, client_id="relaygr-status") as producer:
        await producer.send_and_wait(topic, None, key=key, headers=headers)
    click.echo(f"removed the record of {name}; if it runs, it publishes a new one")
