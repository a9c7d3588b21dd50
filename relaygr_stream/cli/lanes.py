"""`relaygr lanes`: the load of each lane, and more lanes."""

from __future__ import annotations

import click

from relaygr_stream.cli.options import SOURCES, refuse_others, settings_options
from relaygr_stream.cli.rollout import group_name
from relaygr_stream.ops.stopping import run_until_stopped
from relaygr_stream.settings.schema import Settings


@click.command(name="lanes")
@click.argument("action", required=False, type=click.Choice(["grow"]), metavar="[grow]")
@click.argument("number", required=False, type=click.IntRange(1, 10_000), metavar="[NUMBER]")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.option("--group", default="default", show_default=True, callback=group_name, help="Group whose lanes grow.")
@settings_options
def lanes_command(settings: Settings, action: str | None, number: int | None, as_json: bool, group: str) -> None:
    """Show the load of each lane, or have more lanes.

    \b
    Examples:
      relaygr lanes --bootstrap kafka:9092
      relaygr lanes grow 64 --bootstrap kafka:9092

    grow: adds partitions to the topics while everything serves, waits until workers and triggers own them, then tells
    clients. NUMBER is a multiple of the present one. Where it was stopped, run it again.

    Without grow it listens for some seconds, joins no group and writes nothing. rankings/s, signals/s: read by the
    lane's worker in the last 10 to 20 seconds, forwards, copies and cancels included. pinned, granted: bytes of
    announced requests' prefix KV, and what triggers may have pinned.
    """
    if action is not None:
        from relaygr_stream.ops.lane_growth import grow_lanes

        if number is None:
            raise click.UsageError("write a number of lanes: relaygr lanes grow 64")
        refuse_others("grow says in words what it does", "action", "number", "group", *SOURCES)
        kept = "stopped; lanes that were added stay, and clients go by the number announced last: run it again to go on"
        run_until_stopped(grow_lanes(settings, group, number, click.echo), line=kept)
        return
    refuse_others("the load is of the group that kafka.prefix names", "as_json", *SOURCES)
    from relaygr_stream.ops.looking import look
    from relaygr_stream.ops.status.overview import LISTEN_S

    look(settings.kafka, _show(settings, as_json), LISTEN_S)


async def _show(settings: Settings, as_json: bool) -> None:
    from relaygr_stream.bus.away import Away
    from relaygr_stream.bus.topic_check import topics_with
    from relaygr_stream.bus.topics import verify_topics
    from relaygr_stream.ops.status.lanes import lanes_as_json, render_lanes
    from relaygr_stream.ops.status.overview import LISTEN_S, listening
    from relaygr_stream.telemetry.printable import SafeConsole, print_table

    away = Away.from_rows(rows := await verify_topics(settings.kafka))
    topics = topics_with(settings.kafka, rows)
    if (topics.worker_status.name, 0) in away:
        away.check()
    async with listening(settings, topics) as (view, tail):
        await tail.listen(LISTEN_S)
        click.echo(lanes_as_json(view)) if as_json else print_table(render_lanes(view), SafeConsole())
    away.check()
