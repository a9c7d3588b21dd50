"""Options that commands share, above all the sources of settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.load import Config, load_settings

F = TypeVar("F", bound=Callable[..., Any])


def parse_flags(assignments: tuple[str, ...]) -> dict[str, str]:
    """`--set section.key=value` arguments as a mapping. Raises ConfigError."""
    flags = {}
    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        if not separator:
            shown = re.match(r"[\w.-]*", assignment)[0]  # type: ignore[index]  # what follows may be a secret
            raise ConfigError(f"flag --set {shown}: write --set section.key=value")
        flags[key.strip()] = value.strip()
    return flags


def source_options(command: F) -> F:
    """Add --config/--profile and --set; the command gets `files` and `assignments`."""
    for option in (
        click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="SECTION.KEY=VALUE",
            help="Set one setting; `config show` lists them.",
        ),
        click.option(
            "--config",
            "--profile",
            "files",
            multiple=True,
            metavar="FILE",
            help="TOML file with settings, or a packaged profile (cpu, cuda, npu, trigger). A later one overrides.",
        ),
    ):
        command = option(command)
    return command


def config_options(command: F) -> F:
    """As source_options, and --bootstrap; the command gets `config: Config` as its first argument."""

    @source_options
    @click.option("--bootstrap", metavar="HOST:PORT", help="Kafka brokers; short for --set kafka.bootstrap=…")
    @wraps(command)
    def wrapped(
        files: tuple[str, ...], assignments: tuple[str, ...], bootstrap: str | None, *args: Any, **kwargs: Any
    ) -> Any:
        flags: dict[str, Any] = {"kafka.bootstrap": bootstrap, **parse_flags(assignments)}
        return command(load_settings(files, flags), *args, **kwargs)

    return wrapped  # type: ignore[return-value]


def settings_options(command: F) -> F:
    """As config_options; the command gets `settings: Settings` as its first argument."""

    @config_options
    @wraps(command)
    def wrapped(config: Config, *args: Any, **kwargs: Any) -> Any:
        return command(config.settings, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


def check_pace(speed: float | None, rate: float | None) -> None:
    """Raise click.UsageError if both are given: speed keeps a log's own times, rate replaces them."""
    if speed is not None and rate is not None:
        raise click.UsageError("--speed keeps the log's times, --rate replaces them; give one of them")
