"""Options that commands share, above all the sources of settings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import click
from click.core import ParameterSource

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.load import Config, load_settings
from relaygr_stream.settings.schema import Settings

if TYPE_CHECKING:
    from relaygr_stream.workload.arrivals import ArrivalLog
    from relaygr_stream.workload.traffic import Mix, Shift, Tide

F = TypeVar("F", bound=Callable[..., Any])
#: Parameters of a command by which its settings come.
SOURCES: Final = ("files", "assignments", "bootstrap")


class AddOptions(Protocol):
    """A decorator that adds options to a command."""

    def __call__(self, command: F, /) -> F:
        """The same command, with them."""


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


def scenario_option(command: F) -> F:
    """Below config_options or settings_options: add --scenario, by which the first argument is that of a process which
    serves the scenario."""

    @click.option("--scenario", metavar="NAME", help="As of a section [scenario.NAME]: its group, SLO and model.")
    @wraps(command)
    def wrapped(given: Config | Settings, *args: Any, scenario: str | None, **kwargs: Any) -> Any:
        if scenario is not None and isinstance(given, Settings):
            given = given.serving(scenario)
        elif scenario is not None and isinstance(given, Config):
            given = replace(given, settings=given.settings.serving(scenario))
        return command(given, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


def given() -> dict[str, str]:
    """The options of this command that stand on its command line: how each is written, by its parameter's name."""
    context = click.get_current_context()
    named = {option.name or "": option.opts[0] for option in context.command.params}
    return {
        name: flag for name, flag in named.items() if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }


def refuse_others(what: str, *takes: str) -> None:
    """Raise click.UsageError if the command line has an option that the command would ignore then.

    takes: the parameters that it does not ignore.
    """
    if others := ", ".join(flag for name, flag in given().items() if name not in takes):
        raise click.UsageError(f"{what}; leave out {others}")


def parse_share(text: str) -> float:
    """A share: 0.02 or 2%. Raises click.BadParameter."""
    try:
        found = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        if math.isfinite(found):
            return found
    except ValueError:
        pass
    raise click.BadParameter(f"{text!r} is not a share; write 0.02 or 2%")


def share(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """The callback of an option that is a share."""
    if value is None:
        return None
    if not 0 <= (parsed := parse_share(value)) <= 1:
        raise click.BadParameter(f"{value!r} is not within 0…1")
    return parsed


def _pair(text: str, expected: str) -> tuple[float, float]:
    first, _, second = text.partition(":")
    try:
        return parse_share(first), float(second)
    except (ValueError, click.BadParameter):
        raise click.BadParameter(f"{text!r}: write {expected}") from None


def _mix(_: click.Context, __: click.Parameter, value: str | None) -> Mix | None:
    from relaygr_stream.workload.traffic import Mix

    return None if value is None else Mix(*_pair(value, "SHARE:TOKENS, such as 80%:128"))


def _tide(_: click.Context, __: click.Parameter, value: str | None) -> Tide | None:
    from relaygr_stream.workload.traffic import Tide

    return None if value is None else Tide(*_pair(value, "SHARE:SECONDS, such as 50%:60"))


def _shift(_: click.Context, __: click.Parameter, value: str | None) -> Shift | None:
    from relaygr_stream.workload.traffic import Shift

    return None if value is None else Shift(*_pair(value, "SHARE:SECONDS, such as 30%:60"))


def _arrivals(_: click.Context, __: click.Parameter, value: Path | None) -> ArrivalLog | None:
    from relaygr_stream.workload.arrivals import read_arrivals

    return None if value is None else read_arrivals(value)


#: The options of traffic, by the names of Traffic's fields: flag, other arguments.
_TRAFFIC: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "rate": ("--rate", {"type": float, "help": "Requests per second."}),
    "arrivals": (
        "--arrivals",
        {
            "type": click.Path(path_type=Path),
            "metavar": "FILE",
            "callback": _arrivals,
            "help": "Times of a log, scaled to the rate, and its users and returns if it has users: an interaction "
            "log, a trace of prompts, or a CSV with a column of times.",
        },
    ),
    "tide": (
        "--tide",
        {"metavar": "SHARE:SECONDS", "callback": _tide, "help": "Let the rate swing by this share in this time."},
    ),
    "users": ("--users", {"type": click.IntRange(1, 10**12), "help": "Users among whom first visits are drawn."}),
    "zipf": ("--zipf", {"type": float, "help": "Zipf exponent over users; 0: all alike."}),
    "revisit": (
        "--revisit",
        {"metavar": "SHARE", "callback": share, "help": "Share of requests by returning users."},
    ),
    "shift": (
        "--shift",
        {
            "metavar": "SHARE:SECONDS",
            "callback": _shift,
            "help": "Another share of requests by returning users from so many seconds on, warm-up included.",
        },
    ),
    "return_s": ("--return-after", {"type": float, "help": "Mean seconds until a return."}),
    "length": ("--length", {"type": float, "help": "Median prefix tokens of a new user (log-normal)."}),
    "sigma": ("--sigma", {"type": float, "help": "Sigma of the log-normal lengths; 0: all alike."}),
    "mix": (
        "--mix",
        {
            "metavar": "SHARE:TOKENS",
            "callback": _mix,
            "help": "A short majority: this share of the users has so many tokens at the median, not --length.",
        },
    ),
    "growth": ("--growth", {"type": float, "help": "Mean new behaviours of a returning user."}),
    "suffix": ("--suffix", {"type": click.IntRange(0, 65536), "help": "Latest behaviours, sent at ranking only."}),
    "candidates": ("--candidates", {"type": click.IntRange(1, 65536), "help": "Items to rank."}),
    "stage_delay": (
        "--stage-delay",
        {"type": float, "metavar": "MS", "help": "Median head start: from event to ranking."},
    ),
    "stage_sigma": ("--stage-sigma", {"type": float, "help": "Sigma of that log-normal delay."}),
}


def traffic_options(**defaults: str) -> AddOptions:
    """Add the named options of traffic, with the defaults as help shows them; the command gets None where not given."""

    def add(command: F) -> F:
        for name in reversed(defaults):
            flag, arguments = _TRAFFIC[name]
            default = f" [{defaults[name]}]" if defaults[name] else ""
            command = click.option(flag, name, **{**arguments, "help": arguments["help"] + default})(command)
        return command

    return add


def flag_of(name: str) -> str:
    """The flag of an option by its name."""
    return _TRAFFIC[name][0] if name in _TRAFFIC else f"--{name.replace('_', '-')}"


def taken(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """The options among these names that were given."""
    return {name: given[name] for name in names if given.get(name) is not None}


def head_start(given: dict[str, Any]) -> dict[str, float]:
    """StageDelay's arguments, of those options that were given."""
    return taken({"median_ms": given.get("stage_delay"), "sigma": given.get("stage_sigma")}, "median_ms", "sigma")


def check_pace(speed: float | None, rate: float | None) -> None:
    """Raise click.UsageError if both are given: speed keeps a log's own times, rate replaces them."""
    if speed is not None and rate is not None:
        raise click.UsageError("--speed keeps the log's times, --rate replaces them; give one of them")


def check_cluster(broker: str | None, bootstrap: str | None) -> None:
    """Raise click.UsageError if both are given: one starts a broker, the other uses one that runs."""
    if broker is not None and bootstrap is not None:
        raise click.UsageError("--broker starts a private broker, --bootstrap uses a running cluster; give one of them")
