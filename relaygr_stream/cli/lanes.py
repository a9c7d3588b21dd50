"""`relaygr lanes`: the load of each lane."""

from __future__ import annotations

import click

from relaygr_stream.cli.options import settings_options
from relaygr_stream.settings.schema import Settings


@click.command(name="lanes")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@settings_options
def lanes_command(settings: Settings, as_json: bool) -> None:
    """Show the load of each lane.

    \b
    Examples:
      relaygr lanes --bootstrap kafka:9092

    It listens for some seconds, joins no group and writes nothing. rankings/s, signals/s: read by the lane's worker in
    the last 10 to 20 seconds, forwards, copies and cancels included. pinned, granted: bytes of announced
    requests' prefix KV, and what triggers may have pinned.
    """
    from relaygr_stream.ops.looking import look
    from relaygr_stream.ops.status.overview import LISTEN_S

    look(settings.kafka, _show(settings, as_json), LISTEN_S)


async def _show(settings: Settings, as_json: bool) -> None:
    from relaygr_stream.bus.away import Away
    from relaygr_stream.bus.topics import verify_topics
    from relaygr_stream.ops.status.lanes import lanes_as_json, render_lanes
    from relaygr_stream.ops.status.overview import LISTEN_S, listening
    from relaygr_stream.telemetry.printable import SafeConsole, print_table
    from relaygr_stream.wire.topic_files import load_topics

    away = Away.of(await verify_topics(settings.kafka))
    topics = load_topics(settings.kafka)
    if (topics.worker_status.name, 0) in away:
        away.check()
    async with listening(settings, topics) as (view, tail):
        await tail.listen(LISTEN_S)
        click.echo(lanes_as_json(view)) if as_json else print_table(render_lanes(view), SafeConsole())
    away.check()
