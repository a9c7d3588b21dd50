"""Loads settings: defaults < TOML files < environment (RELAYGR_SECTION_KEY) < flags.

Each value keeps its source, for `relaygr config show` and for errors. An unknown key or a bad value raises ConfigError,
which names the key and the source. schema.py and worker.py define the settings.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import tomllib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Any, Final

import msgspec

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.files import packaged_dir, read_by_others
from relaygr_stream.settings.inputs import MARK, read_text
from relaygr_stream.settings.scenarios import IN_A_FILE, SECTION, read_scenarios
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.section import ENV_PREFIX, Field, Value, env_name, fields_of
from relaygr_stream.settings.values import checked, shortened

log = logging.getLogger(__name__)  # settings are loaded before logging is set up; stdlib's goes to stderr then

#: Names a TOML file to load.
ENV_CONFIG: Final = "RELAYGR_CONFIG"
#: The packaged checkpoint of a trained model, for `model.checkpoint`.
PACKAGED_MODEL: Final = "demo"
#: Most settings that a hint names.
MOST_HINTS: Final = 3
#: How TOML looks, and files that are mistaken for it, by their suffix.
TOML_LIKE: Final = 'the line [kafka], and below it bootstrap = "kafka:9092"'
_OTHER_FORMATS: Final = {
    ".yaml": "a YAML file, ",
    ".yml": "a YAML file, ",
    ".json": "a JSON file, ",
}
#: Suffix of a secret's variable: the variable then names a file that holds the value.
ENV_FILE: Final = "_FILE"
#: A status may be late by half of its interval, through a busy loop and a broker, and its worker is not silent yet.
STATUS_MARGIN: Final = 1.5
#: Longest secret file, in bytes: a secret is a line of text, so a larger file is named by mistake.
MAX_SECRET_FILE: Final = 64 << 10
#: Names under the prefix that are not settings; the second is for tests.
ENV_NOT_SETTINGS: Final = (ENV_CONFIG, "RELAYGR_TEST_")

#: Variables that Kubernetes (and formerly Docker's links) puts into every pod for a service named `relaygr-…`; see
#: "Discovering services" in its documentation. Name and value must both match, so that a mistyped setting does not.
_INJECTED: Final = (
    (re.compile(r"_PORT(_\d+_(TCP|UDP|SCTP))?$"), re.compile(r"(tcp|udp|sctp)://")),
    (re.compile(r"_PORT_\d+_(TCP|UDP|SCTP)_PROTO$"), re.compile(r"(tcp|udp|sctp)$")),
    (re.compile(r"_PORT_\d+_(TCP|UDP|SCTP)_PORT$|_SERVICE_PORT(_\w+)?$"), re.compile(r"\d+$")),
    (re.compile(r"_PORT_\d+_(TCP|UDP|SCTP)_ADDR$|_SERVICE_HOST$"), re.compile(r"\S+$")),
)

#: Removed settings, which release 0.1 accepts with a warning and without effect, and why.
REMOVED: Final[Mapping[str, str]] = {
    "relay.averaging": "load is averaged over a second",
    "trigger.load_burst_ms": "pre-inference takes what device time rankings leave",
    "trigger.risk_share": "every request is pre-inferred within the bounds on its length, age and memory",
    "worker.dram_int8_deviation": "copies in DRAM are exact",
    "worker.dram_storage": "copies in DRAM are exact",
    "worker.pre_infer_share": "pre-inference takes what device time rankings leave",
    "worker.reply_ms": "workers learn how long their answers take to the broker",
    "worker.truncate_min_tokens": "worker.truncate_to says to how many behaviours a ranking that would be late is cut",
}

_EVERY: Final[dict[str, Field]] = fields_of(Settings)
#: The settings, by key.
FIELDS: Final = {key: field for key, field in _EVERY.items() if field.description}
#: What was a setting and is a constant now. Release 0.1 accepts a value with a warning.
RETIRED: Final = {key: field for key, field in _EVERY.items() if not field.description}
_BY_ENV: Final = {field.env: field for field in _EVERY.values()}
_KEY_BY_ENV: Final = {env_name(key): key for key in (*_EVERY, *REMOVED)}


@dataclass(frozen=True)
class Config:
    """The effective settings, and each value's source."""

    settings: Settings
    values: tuple[Value, ...]


def with_packaged_model(config: Config) -> Settings:
    """The settings, with the packaged model where nobody set anything in [model]; an empty checkpoint that somebody set
    stays, and stands for random weights."""
    settings = config.settings
    if any(value.source != "default" for value in config.values if value.field.key.startswith("model.")):
        return settings
    model = msgspec.structs.replace(settings.model, checkpoint=PACKAGED_MODEL)
    return msgspec.structs.replace(settings, model=model)


def load_settings(
    files: Iterable[str | Path] = (),
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Merge the layers and check every value.

    files: TOML files or packaged profile names ("cpu"); a later one overrides an earlier one, and all override the file
    named by RELAYGR_CONFIG. flags: {"section.key": value}; None: not given. environ: by default os.environ. Raises
    ConfigError.
    """
    environ = os.environ if environ is None else environ
    merged = {key: Value(field, field.default, "default") for key, field in FIELDS.items()}
    tables: list[tuple[str, Any, str]] = []
    first = [environ[ENV_CONFIG]] if environ.get(ENV_CONFIG) else []
    for file in [*first, *files]:
        for former, raw, source in _read_file(file):
            if former.startswith(SECTION):
                tables.append((former.removeprefix(SECTION), raw, source))
            elif key := _current(former, source):
                merged[key] = checked(_EVERY[key], raw, source)
    for value in _of_environment(environ):
        merged[value.field.key] = value
    for former, raw in (flags or {}).items():
        source = f"flag for {former}"
        if raw is not None and (key := _current(former, source)):
            if _EVERY[key].is_secret:
                raise ConfigError(
                    f"{source}: every user of this machine can read a command line; set {_EVERY[key].env}, or write "
                    f"the secret into a file that others cannot read"
                )
            merged[key] = checked(_EVERY[key], raw, source)
    sections: dict[str, dict[str, Any]] = {}
    for key, value in merged.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value.value
    settings = _with_tls(msgspec.convert(sections, Settings))
    _check_together(settings)
    scenarios, values = read_scenarios(tables, settings.kafka.prefix, settings.relay.slo_ms)
    return Config(msgspec.structs.replace(settings, scenarios=scenarios), (*merged.values(), *values))


def _with_tls(settings: Settings) -> Settings:
    """The settings, with the files of [tls] wherever TLS is used and nothing else is given. Raises ConfigError."""
    tls, kafka, history, handover = settings.tls, settings.kafka, settings.history, settings.handover
    uses = (kafka.security_protocol.endswith("SSL"), history.store.startswith("rediss://"), handover.tls_certificate)
    if (tls.ca or tls.certificate or tls.key) and not any(uses):
        raise ConfigError(
            "[tls] names files, and no connection uses them: set `kafka.security_protocol` = SSL or SASL_SSL, a "
            "`history.store` of rediss://, or `handover.tls_certificate`"
        )
    certificate = {"tls_certificate": tls.certificate, "tls_key": tls.key, "tls_key_password": tls.key_password}
    changed: dict[str, Any] = {}
    for name, section, used in (("kafka", kafka, uses[0]), ("history", history, uses[1])):
        own = {} if section.tls_certificate or section.tls_key else certificate
        if used:
            changed[name] = msgspec.structs.replace(section, tls_ca=section.tls_ca or tls.ca, **own)
    if handover.tls_certificate:
        changed["handover"] = msgspec.structs.replace(handover, tls_ca=handover.tls_ca or tls.ca)
    return msgspec.structs.replace(settings, **changed)


def _check_together(settings: Settings) -> None:
    """Raise ConfigError where two values make a process useless."""
    kafka = settings.kafka
    for name in ("fetch_max_wait_ms", "tail_max_wait_ms"):
        if (wait := getattr(kafka, name)) >= kafka.request_timeout_ms:
            raise ConfigError(
                f"`kafka.{name}` = {wait} is not below `kafka.request_timeout_ms` = {kafka.request_timeout_ms}: each "
                f"fetch without messages would end the connection; lower the former, or raise the latter"
            )
    if settings.trigger.group == settings.worker.group:
        raise ConfigError(
            f"`trigger.group` and `worker.group` are both {settings.trigger.group!r}: triggers and workers would take "
            f"each other's lanes; give the groups different names"
        )
    interval = settings.worker.status_interval_ms
    for key, bound in (
        ("client.silence_ms", settings.client.silence_ms),
        ("trigger.max_status_age_ms", settings.trigger.max_status_age_ms),
    ):
        if STATUS_MARGIN * interval > bound:
            raise ConfigError(
                f"`worker.status_interval_ms` = {interval} is more than two thirds of `{key}` = {bound:g}: a worker "
                f"would count as silent between two statuses; lower the former, or raise the latter"
            )


def _of_environment(environ: Mapping[str, str]) -> Iterable[Value]:
    ignored = frozenset(injected_names(environ))
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name.startswith(ENV_NOT_SETTINGS) or name in ignored:
            continue
        if (base := _BY_ENV.get(name.removesuffix(ENV_FILE))) and base.is_secret and name.endswith(ENV_FILE):
            _current(base.key, f"environment {name}")
            yield _from_secret_file(base, name, environ)
        elif name not in _KEY_BY_ENV:
            hint = _did_you_mean(name, [field.env for field in FIELDS.values()])
            hint = IN_A_FILE if name.startswith(env_name(SECTION)) else hint
            raise ConfigError(f"environment {name}: no such setting{hint}")
        elif key := _current(_KEY_BY_ENV[name], f"environment {name}"):
            given = environ[name].strip(MARK).rstrip() if _EVERY[key].is_secret else environ[name]  # as from a file
            yield checked(_EVERY[key], given, f"environment {name}")


def _from_secret_file(field: Field, name: str, environ: Mapping[str, str]) -> Value:
    """The secret in the file that a variable names, without the line end. Raises ConfigError without the secret."""
    path, source = environ[name], f"environment {name} ({environ[name]})"
    if environ.get(field.env):
        raise ConfigError(f"both {field.env} and {name} are set: unset one")
    try:
        text = read_text(path, MAX_SECRET_FILE).rstrip()  # its line end, and blanks before it, whatever wrote them
    except UnicodeError:
        raise ConfigError(f"{source}: not text in UTF-8") from None  # its cause would show the bytes
    except OSError as error:
        hint = "; name a file that holds only the secret" if error.errno == errno.EFBIG else ""
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error}{hint}") from error
    if not text:
        raise ConfigError(f"{source}: the file is empty; write `{field.key}` into it")
    if read_by_others(path):
        log.warning("%s: every user of this machine can read this secret: chmod o-rwx %s", source, path)
    return checked(field, text, source)


def injected_names(environ: Mapping[str, str]) -> list[str]:
    """Variables with the prefix RELAYGR_ that a cluster injects for its services, recognised by name and value.

    One may have the name of a setting: a service `relaygr-telemetry` gives `RELAYGR_TELEMETRY_PORT=tcp://…`.
    """
    return sorted(
        name
        for name, value in environ.items()
        if name.startswith(ENV_PREFIX) and any(n.search(name) and v.match(value) for n, v in _INJECTED)
    )


def profile_path(name: str | Path) -> Path:
    """A packaged TOML file by its bare name ("cpu", "trigger"), or any by its path, which has a "/" or ends in ".toml".

    A file that lies in the working folder by chance, or by somebody's will, is never taken for a packaged one: settings
    name code that runs. Raises ConfigError if absent.
    """
    path, is_bare = Path(name), os.sep not in str(name) and not str(name).endswith(".toml")
    try:
        exists = path.exists()
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from error
    if not is_bare and exists:
        return path
    packaged = {file.stem: file for file in packaged_dir("workers").glob("*.toml")}
    # `workers/cpu.toml`, as in the documentation, must work from any folder, not only from the clone.
    if (is_bare or str(path.parent) == "workers") and (stem := path.name.removesuffix(".toml")) in packaged:
        return packaged[stem]
    if path.is_dir():
        raise ConfigError(f"{name}: is a folder; name the file in it")
    there = ", ".join(sorted(packaged))
    here = f"; for the file of this folder, write ./{name}" if is_bare and exists else ""
    raise ConfigError(f"{name}: no such file, and no packaged profile of that name; the profiles are {there}{here}")


def _read_file(file: str | Path) -> Iterable[tuple[str, Any, str]]:
    path = profile_path(file)
    try:
        tables = tomllib.loads(read_text(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not only TOMLDecodeError: int refuses 5,000 digits
        found = _OTHER_FORMATS.get(path.suffix.lower(), "")
        raise ConfigError(f"{path}: {found}not TOML: {shortened(str(error))}; TOML looks like {TOML_LIKE}") from error
    for section, table in tables.items():
        if not isinstance(table, dict):
            hint = IN_A_FILE if section == SECTION[:-1] else "; write it under [section]"
            raise ConfigError(f"{path}: `{shortened(section)}` stands outside any section{hint}")
        for name, raw in table.items():
            yield f"{section}.{name}", raw, str(path)


def _current(key: str, source: str) -> str | None:
    """The key; None for a setting that was removed. Warns of removed and retired ones; raises ConfigError."""
    if key in REMOVED:
        _warn(f"{source}: `{key}` was removed and has no effect: {REMOVED[key]}")
        return None
    if key in RETIRED:
        _warn(f"{source}: `{key}` is no setting from the next release on: {replacement_of(key)}")
    elif key not in FIELDS:
        hint = IN_A_FILE if key.startswith(SECTION[:-1]) else _did_you_mean(key, FIELDS)
        raise ConfigError(f"{source}: no setting `{shortened(key)}`{hint}")
    return key


def _warn(text: str) -> None:
    warnings.warn(text, FutureWarning, stacklevel=4)


def replacement_of(key: str) -> str:
    """What a retired setting is replaced by, as its warning and the documentation have it."""
    if key.startswith("model."):
        return "config.json in the folder that `model.checkpoint` names says it; `relaygr model random` writes one"
    if (name := key.partition(".")[2]).startswith("tls_"):
        return f"`tls.{name.removeprefix('tls_')}` is for brokers and the history store"
    if name == "group":
        return f"it is always {RETIRED[key].default}, behind `kafka.prefix`, which keeps fleets apart"
    if key == "history.prefix":
        return f"it is always {RETIRED[key].default}; fleets that share a Redis have a DB of `history.store` each"
    return f"it is always {msgspec.json.encode(RETIRED[key].default).decode()}"


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the settings meant: the few that begin like this (worker.hbm_bytes for worker.hbm), or a near one."""
    known = list(known)
    close = [each for each in known if each.startswith(name)]
    if not 0 < len(close) <= MOST_HINTS:
        # By the name in its section: the section before it would make any two of its settings alike.
        by_name: dict[str, list[str]] = {}
        for each in known:
            for text in {_in_section(each), each}:
                by_name.setdefault(text, []).append(each)
        near = get_close_matches(_in_section(name), by_name, n=1, cutoff=0.7)
        close = [max(by_name[text], key=lambda each: SequenceMatcher(a=each, b=name).ratio()) for text in near]
    hint = ", ".join(f"`{each}`" for each in close)
    return f"; did you mean {hint}?" if close else "; `relaygr config show` lists them"


def _in_section(name: str) -> str:
    """hbm_bytes of worker.hbm_bytes, HBM_BYTES of RELAYGR_WORKER_HBM_BYTES; without a section, the name."""
    bare = name.removeprefix(ENV_PREFIX)
    section, _, rest = bare.partition("_" if bare.isupper() else ".")
    return rest if section.lower() in Settings.__struct_fields__ else bare
