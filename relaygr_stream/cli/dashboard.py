"""`relaygr dashboard`: the fleet's page, without a gateway."""

from __future__ import annotations

import click

from relaygr_stream.cli.options import scenario_option, settings_options
from relaygr_stream.ops.stopping import run_until_stopped
from relaygr_stream.settings.schema import Settings


@click.command(name="dashboard")
@click.option("--port", type=click.IntRange(0, 65535), default=8090, show_default=True, help="0: any free one.")
@settings_options
@scenario_option
def dashboard_command(settings: Settings, port: int) -> None:
    """Serve a page of the fleet to this machine's browsers.

    Shows rates, latencies, hits, refusals, devices, memory and lanes of the last fifteen minutes, live.

    \b
    Examples:
      relaygr dashboard --bootstrap kafka:9092
      ssh -L 8090:localhost:8090 HOST relaygr dashboard

    It listens on 127.0.0.1 only, joins no group and writes nothing. A gateway serves the same page at / to who has a
    token.
    """
    from relaygr_stream.ops.dashboard.server import run_dashboard

    serving = run_dashboard(settings, port, lambda url: click.echo(f"{url} (Ctrl-C stops it)"))
    run_until_stopped(serving, line="stopped", exit_code=0)
