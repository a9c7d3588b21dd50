"""`relaygr model check` on the command line."""

from __future__ import annotations

import click
from msgspec.structs import replace

from relaygr_stream.errors import ConfigError
from relaygr_stream.models.devices import select_device
from relaygr_stream.settings.schema import Settings

DTYPES = ("float32", "bfloat16", "float16")


def run_check(settings: Settings, factory: str, device: str | None, dtype: str | None, seed: int) -> bool:
    """Print the table; returns whether every property holds. Raises ConfigError, ModelError or DeviceError."""
    name = dtype or settings.worker.dtype
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name}: write {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    if seed < 0:
        raise ConfigError(f"--seed {seed}: write 0 or a positive number")
    if factory:
        settings = replace(settings, model=replace(settings.model, factory=factory))
    on = select_device(device or settings.worker.device)  # before any other import of torch
    import torch

    from relaygr_stream.models.check.run import check_model, probe_for

    if on.type == "cpu":
        torch.set_num_threads(settings.worker.threads)
    probe = probe_for(settings, on, getattr(torch, name), seed)
    note = f", {probe.model.note}" if probe.model.note else ""
    click.echo(f"{factory or settings.model.factory or 'built-in HSTU'}: version {probe.model.version} on {on}{note}\n")
    return check_model(probe, click.echo)
