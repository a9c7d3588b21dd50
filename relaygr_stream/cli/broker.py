"""`relaygr broker`: a local broker in the foreground, for trying out the relay."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from relaygr_stream.cli.options import settings_options
from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import Settings

if TYPE_CHECKING:
    from relaygr_stream.ops.brokers.local import BrokerKind

LOOPBACK: Final = ("localhost", "127.0.0.1")


@click.command(name="broker")
@click.option(
    "--kind",
    type=click.Choice(["embedded", "kafka"]),
    default="embedded",
    show_default=True,
    help="The embedded broker (Tansu, messages in memory), or one node of Apache Kafka from KAFKA_HOME.",
)
@click.option("--port", type=click.IntRange(1, 65_535), help="Port on loopback. [the port of kafka.bootstrap: 9092]")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep Apache Kafka's messages in this folder, for the next run. [nothing is kept]",
)
@settings_options
def broker_command(settings: Settings, kind: BrokerKind, port: int | None, data: Path | None) -> None:
    """Run a local broker until Ctrl-C, to try out the relay.

    It has one node, serves loopback only, and has no authentication: it is not for production.

    \b
    Examples:
      relaygr broker
      relaygr broker --kind kafka --port 19092 --data kafka-data
    """
    from relaygr_stream.ops.brokers.local import local_broker
    from relaygr_stream.ops.stopping import run_until_stopped
    from relaygr_stream.settings.files import check_writable

    if data is not None and kind == "embedded":
        raise click.UsageError("--data: the embedded broker keeps its messages in memory; --kind kafka can keep them")
    if data is not None:
        check_writable(data / "data" / "meta.properties", "--data")  # a file of Kafka's, which an earlier run may leave
    chosen = _port_of(settings.kafka.bootstrap) if port is None else port

    async def serve() -> None:
        async with local_broker(kind, port=chosen, data=data) as broker:
            click.echo(_greeting(kind, chosen, data))
            await broker.ended()

    run_until_stopped(serve(), line="stopped", exit_code=0)


def _port_of(bootstrap: str) -> int:
    """The port of an address on this machine. Raises ConfigError for any other."""
    host, _, port = bootstrap.rpartition(":")
    if host not in LOOPBACK or not port.isdecimal():
        raise ConfigError(f"kafka.bootstrap = {bootstrap}: a local broker listens on localhost:PORT; give --port")
    return int(port)


def _greeting(kind: BrokerKind, port: int, data: Path | None) -> str:
    what = "the embedded broker (Tansu)" if kind == "embedded" else "Apache Kafka, one node"
    keeps = "its messages are lost when it ends" if data is None else f"its messages stay in {data}"
    where = [] if port == _port_of(Settings().kafka.bootstrap) else [f"export RELAYGR_KAFKA_BOOTSTRAP=localhost:{port}"]
    lines = [*where, "relaygr topics apply", "relaygr up --workers 2 --profile cpu", "relaygr replay --generate"]
    head = f"{what} serves localhost:{port}; {keeps}; stop it with Ctrl-C"
    return "\n".join([head, "", "In other terminals:", *(f"  {line}" for line in lines)])
