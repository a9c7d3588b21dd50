"""The options that every command shares: where settings come from."""

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


def config_options(command: F) -> F:
    """Add --config/--profile, --set and --bootstrap; the command gets `config: Config` as its first argument."""

    @click.option(
        "--config",
        "--profile",
        "files",
        multiple=True,
        metavar="FILE",
        help="TOML file with settings, or a packaged profile (cpu, cuda, npu, trigger). Later ones win.",
    )
    @click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        help="One setting; `config show` lists them.",
    )
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
