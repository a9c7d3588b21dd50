"""What demo and bench run on this machine: a broker, a trigger and workers with one file of settings."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from relaygr_stream.errors import ConfigError, RelayError
from relaygr_stream.ops.brokers.distribution import NodePlan
from relaygr_stream.ops.brokers.local import BrokerKind, local_broker
from relaygr_stream.ops.children import Child, write_settings
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Model

LANES_TIMEOUT_S: Final = 30.0
POLL_S: Final = 0.05


@asynccontextmanager
async def cluster(
    kind: BrokerKind | None, settings: Settings, folder: Path, node: NodePlan, say: Callable[[str], object]
) -> AsyncIterator[tuple[Settings, str]]:
    """A broker of this kind, or the running cluster: (settings with its address, its name for a report).

    say(line): shows progress.
    """
    if kind is None:
        yield settings, f"cluster at {settings.kafka.bootstrap}"
        return
    name = "embedded broker (Tansu)" if kind == "embedded" else "Apache Kafka, one node"
    say(f"starting the {name} …")
    async with local_broker(kind, folder=folder, node=node) as broker:
        yield msgspec.structs.replace(settings, kafka=broker.kafka_settings(settings.kafka)), name


def servable(settings: Settings, folder: Path) -> Settings:
    """The settings for processes, which take no shape: a model with random weights is written to a folder."""
    model = settings.model
    if model.checkpoint or msgspec.structs.replace(model, factory="", path="") == Model():
        return settings
    from relaygr_stream.models.loading import save_random  # noqa: PLC0415 - imports torch

    shape = hashlib.sha256(msgspec.json.encode(model)).hexdigest()[:8]
    if (saved := folder / f"model-{shape}" / "config.json").exists():
        model = Model(factory=model.factory, path=model.path, checkpoint=str(saved.parent))
    else:
        model = save_random(model, saved.parent)
    return msgspec.structs.replace(settings, model=model)


def known_items(model: Model) -> int:
    """The number of items with a row of their own. Raises ModelError for a checkpoint without a readable config."""
    from relaygr_stream.models.loading import config_of  # noqa: PLC0415 - imports torch

    return config_of(msgspec.structs.replace(model, checkpoint="") if model.factory else model).vocab


def start_relay(
    settings: Settings,
    folder: Path,
    trigger: str,
    workers: Sequence[str] | Mapping[str, Sequence[str]],
    module: str = "relaygr_stream",
    options: Sequence[str] = (),
) -> list[Child]:
    """Start a trigger and workers with these names; returns them in this order, without waiting. folder: for logs.

    workers: names, or further options of each by name. module, options: what runs instead of the `relaygr` command, and
    its further options. Raises ConfigError for workers that would not tell where they found prefix KV.
    """
    if settings.worker.withhold_outcomes:
        raise ConfigError(
            "worker.withhold_outcomes is set: demo and benches count hits by the answers; unset it for them"
        )
    config = write_settings(folder / f"{trigger}.toml", servable(settings, folder))
    common = ("--config", config, "--set", "telemetry.log_format=console", *options)
    return [
        Child(trigger, ("trigger", *common), folder, module),
        *(
            Child(name, ("worker", *common, "--set", f"worker.name={name}", *own), folder, module)
            for name, own in (workers if isinstance(workers, Mapping) else dict.fromkeys(workers, ())).items()
        ),
    ]


def check_running(children: Sequence[Child]) -> None:
    """Raise RelayError, with the end of its log, if a process has ended."""
    for child in children:
        if child.exit_code is not None:
            raise RelayError(f"{child.name} ended with exit code {child.exit_code}:\n{child.log_tail()}")


async def wait_for_lanes(children: Sequence[Child], owned: Callable[[], Sequence[int]], lanes: int) -> None:
    """Return when the workers own all lanes, each at least one. owned(): the number of lanes of each worker.

    Raises RelayError if that takes too long, or if a process ends.
    """

    def whole() -> bool:
        return sum(counts := owned()) == lanes and min(counts) > 0

    await wait_until(whole, children, LANES_TIMEOUT_S, lambda: f"the workers own {owned()} of {lanes} lanes")


async def wait_until(
    condition: Callable[[], bool], children: Sequence[Child], seconds: float, instead: Callable[[], str]
) -> None:
    """Return when the condition holds. instead(): what is so while it does not.

    Raises RelayError if that takes longer than so many seconds, or if a process ends.
    """
    until_s = time.monotonic() + seconds
    while not condition():
        check_running(children)
        if time.monotonic() > until_s:
            raise RelayError(f"after {seconds:g} s {instead()}")
        await asyncio.sleep(POLL_S)
