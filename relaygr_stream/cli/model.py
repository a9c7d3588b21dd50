"""`relaygr model check` and `relaygr model conformance`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import click
from msgspec.structs import replace

from relaygr_stream.cli.options import settings_options
from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Kernels

DTYPES = ("float32", "bfloat16", "float16")


@click.group(name="model")
def model_command() -> None:
    """Check models."""


@model_command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True)
@click.option("--kernels", type=click.Choice(get_args(Kernels)), default="auto", help="As worker.kernels.")
def conformance(file: Path, dtype: str, kernels: Kernels) -> None:
    """Compare the built-in HSTU with reference arrays (FILE.npz), full and cached.

    float32: prints the largest absolute deviations of each variant; exits 1 if one exceeds 1e-4. Half precision: exits
    1 if cached, chunked or cut results deviate more from the reference than full inference in that type does.
    """
    from relaygr_stream.models.devices import select_device

    select_device("cpu")  # as in `worker`
    import torch

    from relaygr_stream.models.conformance import format_table, run_conformance

    results = run_conformance(file, getattr(torch, dtype), kernels)
    click.echo(format_table(results))
    sys.exit(not all(result.conforms for result in results))


@model_command.command(name="check")
@click.argument("factory", default="")
@click.option("--device", help="cpu, cuda[:N] or npu[:N]; short for --set worker.device=…")
@click.option("--dtype", help="float32, bfloat16 or float16; short for --set worker.dtype=…")
@click.option(
    "--seed", default=0, show_default=True, help="Seed of the random requests; model.seed is that of the weights."
)
@settings_options
def model_check(settings: Settings, factory: str, device: str | None, dtype: str | None, seed: int) -> None:
    """Check that a model keeps the protocol and that its relayed scores equal full inference.

    FACTORY is module:factory (model.factory); by default, the settings' model. Prints a table of properties and, for
    each that failed, its usual cause; exits 1 if one failed. Check float32 first: in half precision, rounding hides
    small errors.

    \b
    Examples:
      relaygr model check relaygr_stream.models.transformer:make
      relaygr model check my_model:make --set model.path=. --dtype bfloat16
    """
    sys.exit(0 if run_check(settings, factory, device, dtype, seed) else 1)


def run_check(settings: Settings, factory: str, device: str | None, dtype: str | None, seed: int) -> bool:
    """Print the table; returns whether every property holds. Raises ConfigError, ModelError or DeviceError."""
    name = dtype or settings.worker.dtype
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name}: write {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    if seed < 0:
        raise ConfigError(f"--seed {seed}: write 0 or a positive number")
    if factory:
        settings = replace(settings, model=replace(settings.model, factory=factory))
    from relaygr_stream.models.devices import select_device

    on = select_device(device or settings.worker.device)  # before any other import of torch
    import torch

    from relaygr_stream.models.check.run import check_model, probe_for

    if on.type == "cpu":
        torch.set_num_threads(settings.worker.threads)
    probe = probe_for(settings, on, getattr(torch, name), seed)
    note = f", {probe.model.note}" if probe.model.note else ""
    click.echo(f"{factory or settings.model.factory or 'built-in HSTU'}: version {probe.model.version} on {on}{note}\n")
    return check_model(probe, click.echo)
