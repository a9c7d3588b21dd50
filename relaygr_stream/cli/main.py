"""The `relaygr` command. Each subcommand imports what it needs, so that `relaygr trigger` never loads torch."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click

from relaygr_stream.cli.options import config_options, settings_options
from relaygr_stream.errors import RelayError
from relaygr_stream.settings.files import FILE_TROUBLE, discard_output
from relaygr_stream.settings.load import Config
from relaygr_stream.settings.schema import Settings

#: Commands with a module of their own, imported when asked for: `relaygr worker` does not pay for `relaygr bench`.
_ELSEWHERE: Final = {
    "bench": "relaygr_stream.cli.bench:bench_command",
    "broker": "relaygr_stream.cli.broker:broker_command",
    "dead-letters": "relaygr_stream.cli.dead_letters:dead_letters_command",
    "demo": "relaygr_stream.cli.demo:demo_command",
    "publish": "relaygr_stream.cli.replay:publish_command",
    "simulate": "relaygr_stream.cli.simulate:simulate_command",
    "status": "relaygr_stream.cli.status:status_command",
    "trigger": "relaygr_stream.cli.trigger:trigger_command",
    "up": "relaygr_stream.cli.up:up_command",
}


class _Group(click.Group):
    """Finds commands that are elsewhere; errors of this package become one line on stderr and exit code 1."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted([*super().list_commands(context), *_ELSEWHERE])

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _ELSEWHERE:
            return super().get_command(context, name)
        module, _, attribute = _ELSEWHERE[name].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            return super().main(*args, **options)
        except OSError as error:
            if error.errno not in FILE_TROUBLE:
                raise
            discard_output()
            self._tell(error)
            sys.exit(1)

    def invoke(self, context: click.Context) -> object:
        try:
            result = super().invoke(context)
            sys.stdout.flush()  # a full disk behind a pipe or a file is told here, not by the interpreter at its end
        except KeyboardInterrupt as interrupt:
            from relaygr_stream.ops.stopping import stopped

            stopped("stopped", *interrupt.args)
        except RelayError as error:
            self._tell(error)
            context.exit(1)
        return result

    def _tell(self, error: Exception) -> None:
        from relaygr_stream.telemetry.printable import printable_lines

        click.echo(printable_lines(f"error: {error}"), err=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="relaygr-stream", prog_name="relaygr")
def main() -> None:
    """RelayGR Stream: rank with long user sequences inside a tight P99.

    Prefix KV are pre-inferred while retrieval still runs and wait on the worker that will rank. See `relaygr demo`
    first; `relaygr COMMAND --help` tells the rest.

    Settings come from: defaults < TOML files (--config) < environment (RELAYGR_SECTION_KEY) < flags (--set).
    """


@main.command()
@settings_options
def worker(settings: Settings) -> None:
    """Run a worker: hold prefix KV, score ranking requests; one per device.

    Example: relaygr worker --profile workers/cpu.toml --set worker.name=w1 --bootstrap kafka:9092
    """
    from relaygr_stream.models.devices import select_device
    from relaygr_stream.telemetry.process import run_process

    select_device(settings.worker.device)  # before anything else imports torch: a missing driver is said in words
    from relaygr_stream.handover.build import handover_for
    from relaygr_stream.worker.process import run_worker

    sys.exit(run_process("worker", settings, partial(run_worker, make_handover=handover_for)))


@main.group()
def topics() -> None:
    """Create, check and show the topics (topics/*.toml)."""


@topics.command()
@click.option("--alter", is_flag=True, help="Change existing topics to what their files say; add partitions.")
@settings_options
def apply(settings: Settings, alter: bool) -> None:
    """Create the topics that are missing; then verify all.

    Existing topics are left as they are without --alter. Adding partitions to topics that share lanes moves users to
    other lanes: stop everything first (docs/operations.md).
    """
    from relaygr_stream.bus.topics import apply_topics

    click.echo(asyncio.run(apply_topics(settings.kafka, alter=alter)))


@topics.command()
@settings_options
def verify(settings: Settings) -> None:
    """Check that every topic exists, and is in every setting as its file says; names each difference."""
    from relaygr_stream.bus.topics import verify_topics

    rows = asyncio.run(verify_topics(settings.kafka, strict=True))
    click.echo(f"all {len(rows)} topics are as described")


@topics.command()
@settings_options
def show(settings: Settings) -> None:
    """Show each topic's file beside what the cluster has."""
    from relaygr_stream.bus.topics import describe_topics
    from relaygr_stream.cli.topics_table import render_topics

    click.echo(render_topics(asyncio.run(describe_topics(settings.kafka))))


@main.group(name="config")
def config_group() -> None:
    """Look at the configuration."""


@config_group.command(name="show")
@click.option("--markdown", is_flag=True, help="As a Markdown table of the defaults, for the documentation.")
@config_options
def config_show(config: Config, markdown: bool) -> None:
    """Print every effective setting, where its value comes from, and what it means."""
    from relaygr_stream.cli.config_table import render_settings_markdown, render_settings_table

    click.echo(render_settings_markdown() if markdown else render_settings_table(config))


@main.group()
def model() -> None:
    """Check models."""


@model.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True)
def conformance(file: Path, dtype: str) -> None:
    """Compare the built-in HSTU with reference arrays (FILE.npz), full and cached.

    float32: prints the largest absolute deviations of each variant; exits 1 if one exceeds 1e-4. Half precision: exits
    1 if cached, chunked or cut results are further from the reference than full inference in that type is.
    """
    from relaygr_stream.models.devices import select_device

    select_device("cpu")  # as in `worker`
    import torch

    from relaygr_stream.models.conformance import format_table, run_conformance

    results = run_conformance(file, getattr(torch, dtype))
    click.echo(format_table(results))
    sys.exit(not all(result.conforms for result in results))


@model.command(name="check")
@click.argument("factory", default="")
@click.option("--device", help="cpu, cuda[:N] or npu[:N]; short for --set worker.device=…")
@click.option("--dtype", help="float32, bfloat16 or float16; short for --set worker.dtype=…")
@click.option("--seed", default=0, show_default=True, help="Of the random requests; model.seed is the weights'.")
@settings_options
def model_check(settings: Settings, factory: str, device: str | None, dtype: str | None, seed: int) -> None:
    """Check that a model keeps the protocol and that its relayed scores equal full inference.

    FACTORY is module:factory (model.factory); without it, the model that the settings name, which may be the built-in
    one. Prints a table of properties and, for each that failed, what it usually means; exits 1 if one failed. Check
    float32 first: half precision hides small errors in its rounding.

    \b
    Examples:
      relaygr model check relaygr_stream.models.transformer:make
      relaygr model check my_model:make --set model.path=. --dtype bfloat16
    """
    from relaygr_stream.cli.model import run_check

    sys.exit(0 if run_check(settings, factory, device, dtype, seed) else 1)
