"""python -m tests.faults.soak --minutes 30 [--seed N]: see `make soak`."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import tempfile
from pathlib import Path
from typing import Literal

import click
import structlog
import torch
from rich.console import Console

from relaygr_stream.errors import RelayError
from tests.faults.soak.run import Options, save, soak


@click.command()
@click.option("--minutes", type=click.FloatRange(0.3, 24 * 60), default=30.0, show_default=True)
@click.option("--seed", type=int, help="Of everything random; a new one by default, printed.")
@click.option("--rate", type=click.FloatRange(1, 1000), default=25.0, show_default=True, help="Requests per second.")
@click.option("--brokers", type=click.Choice(["three", "kafka", "embedded"]), default="three", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/soak.json"), show_default=True)
def main(
    minutes: float, seed: int | None, rate: float, brokers: Literal["three", "kafka", "embedded"], out: Path
) -> None:
    """Random faults under load; exits 1 naming the promises broken and the bounds not kept. Logs stay beside --out."""
    torch.set_num_threads(1)  # the truth is computed beside the workers
    # Our own clients' complaints of brokers that we killed; those of the processes are in their logs.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    logging.disable(logging.CRITICAL)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=out.parent))
    chosen = secrets.randbelow(1 << 31) if seed is None else seed
    try:
        soaked = asyncio.run(soak(Options(minutes * 60, chosen, rate, brokers, folder), Console()))
    except RelayError as error:
        sys.exit(f"soak: {error}")
    save(soaked, out)
    print(f"figures: {out}; logs: {folder}")
    sys.exit(1 if soaked.broken or soaked.outside else 0)


if __name__ == "__main__":
    main()
