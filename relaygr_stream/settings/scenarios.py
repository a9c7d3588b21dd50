"""Scenarios: product surfaces, each with an SLO, a model and workers of its own; of a file's sections [scenario.NAME].

    [scenario.feed]
    tenants = ["shop"]
    slo_ms = 50.0
    model = "models/feed"

All processes of a fleet read one file. Its keys are not among the settings that are counted (load.py: FIELDS): they say
what a fleet is made of, not how a process runs, and no environment variable or flag sets them. Without sections there
are no scenarios. The group that serves a scenario has its name (wire/routes.py), so its topics begin with kafka.prefix,
the name and a dot. A scenario that states `served_by` has no group of its own: that of the scenario which it names, the
host, serves both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

from msgspec import Meta, structs

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.section import BYTES, LABEL, FilePath, Ms, Positive, Section, Value, doc, section_fields
from relaygr_stream.settings.values import checked, shortened

#: What the keys of all scenarios begin with.
SECTION: Final = "scenario."
#: Said where an environment variable or a flag names one.
IN_A_FILE: Final = (
    '; scenarios stand in a file (--config, RELAYGR_CONFIG): [scenario.feed], and below it tenants = ["…"]'
)
#: A scenario's name is a group's (wire/routes.py: GroupName).
NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,23}")
#: What the workers of the reserve are assigned to: they stand by for every scenario, and serve none.
RESERVE: Final = "reserve"
#: Keys of other records on `routes` (wire/routes.py, wire/assignments.py), and the group that `relaygr rollout` makes.
RESERVED: Final = ("default", "assignments", RESERVE, "next")
#: Scenarios that one group serves: a status tells of each of them. Of a fleet: a plan does.
MAX_SHARING: Final = 16
MAX_SCENARIOS: Final = 256
#: Longest kafka.prefix (schema.py).
LONGEST_PREFIX: Final = 64
#: A model's factory, module:name; anything else is a checkpoint.
FACTORY: Final = re.compile(r"[\w.]+:[\w.]+")

Tenant = Annotated[str, LABEL, Meta(min_length=1)]


class Scenario(Section, frozen=True, kw_only=True):
    """One scenario: the name of its section, and what stands there."""

    name: str
    tenants: Annotated[
        tuple[Tenant, ...], doc("tenants whose requests are of this scenario; those of none are of `default`")
    ] = ()
    slo_ms: Annotated[Ms, doc("P99 target of its ranking stage, in place of relay.slo_ms")] = 50.0
    model: Annotated[
        FilePath, doc("checkpoint folder, packaged checkpoint, or module:factory, in place of those of [model]")
    ] = ""
    served_by: Annotated[
        str,
        LABEL,
        doc("the scenario whose workers, with their model, serve this one, too; empty: it has workers of its own"),
    ] = ""
    lead_ms: Annotated[Ms, doc("usual head start, from a request event to its ranking")] = 150.0
    priority: Annotated[int, Meta(ge=0, le=100), doc("where workers lack, those of lower priority give theirs")] = 1
    max_rate: Annotated[
        float, Meta(ge=0, le=1e6), doc("requests a second of each of its tenants at a gateway; 0: gateway.max_rate")
    ] = 0.0
    max_pinned_bytes: Annotated[
        int,
        Meta(ge=0, extra=BYTES),
        doc("prefix KV that announced requests of one tenant may pin on a worker; 0: up to worker.pinned_share"),
    ] = 0
    min_workers: Annotated[Positive, Meta(le=256), doc("it never has fewer workers than this")] = 1

    @property
    def group(self) -> str:
        """The group that serves it."""
        return self.served_by or self.name


def read_scenarios(
    tables: Sequence[tuple[str, Any, str]], prefix: str, slo_ms: float
) -> tuple[tuple[Scenario, ...], tuple[Value, ...]]:
    """The scenarios, in the order of their names, and the value of each of their keys.

    tables: (name, content, source) of each section in the order of files, of which a later one counts for the keys that
    it has. prefix: kafka.prefix. slo_ms: of those that state none. Raises ConfigError.
    """
    found: dict[str, dict[str, Value]] = {}
    for name, table, source in tables:
        _check_name(name, table, source, prefix)
        fields = {key.rpartition(".")[2]: field for key, field in section_fields(SECTION + name, Scenario).items()}
        keys = [key for key, field in fields.items() if field.description]
        values = found.setdefault(name, {key: Value(fields[key], fields[key].default, "default") for key in keys})
        if values["slo_ms"].source == "default":
            values["slo_ms"] = Value(fields["slo_ms"], slo_ms, "relay.slo_ms")
        for key, raw in table.items():
            if key not in keys:
                raise ConfigError(
                    f"{source}: no key `{SECTION}{name}.{shortened(key)}`; a scenario has {', '.join(keys)}"
                )
            values[key] = checked(fields[key], raw, source)
    if len(found) > MAX_SCENARIOS:
        raise ConfigError(
            f"{tables[-1][2]}: {len(found)} sections [{SECTION}NAME], at most {MAX_SCENARIOS} are possible: give some "
            f"of them another `kafka.prefix`, in a file of their own"
        )
    _check_tenants(found)
    _check_served_by(found)
    scenarios = (
        Scenario(name=name, **{key: value.value for key, value in found[name].items()}) for name in sorted(found)
    )
    return tuple(scenarios), tuple(value for name in sorted(found) for value in found[name].values())


def scenario_of(scenarios: Iterable[Scenario], tenant: str) -> str:
    """The name of the tenant's scenario; "": none, so that of `default`."""
    return next((scenario.name for scenario in scenarios if tenant in scenario.tenants), "")


def served_together(scenarios: Iterable[Scenario], group: str) -> tuple[Scenario, ...]:
    """The scenarios that the group serves, its own first."""
    return tuple(sorted((each for each in scenarios if each.group == group), key=lambda each: each.name != group))


def groups_of(scenarios: Sequence[Scenario]) -> tuple[Scenario, ...]:
    """Each group as one scenario, under its own name: what its workers must keep of all that it serves.

    That is the tightest SLO, the shortest head start, and the highest priority.
    """
    together = (served_together(scenarios, each.name) for each in scenarios if not each.served_by)
    return tuple(
        structs.replace(
            every[0],
            slo_ms=min(each.slo_ms for each in every),
            lead_ms=min(each.lead_ms for each in every),
            priority=max(each.priority for each in every),
        )
        for every in together
    )


def _check_name(name: str, table: Any, source: str, prefix: str) -> None:
    if not NAME.fullmatch(name) or name in RESERVED:
        raise ConfigError(
            f"{source}: [{SECTION}{shortened(name)}]: a scenario's name is part of its topics' names: up to 24 of a–z, "
            f"0–9 and -, the first no -, and not {', '.join(RESERVED[:-1])} or {RESERVED[-1]}; choose another one"
        )
    if not isinstance(table, dict):
        raise ConfigError(
            f"{source}: `{SECTION}{name}` is no section; write [{SECTION}NAME], with the scenario's name, and below it "
            f"its keys"
        )
    if len(prefix) + len(name) + 1 > LONGEST_PREFIX:
        raise ConfigError(
            f"{source}: [{SECTION}{name}]: {prefix}{name}. has more than {LONGEST_PREFIX} characters; shorten the name "
            f"or `kafka.prefix`"
        )


def _check_tenants(found: dict[str, dict[str, Value]]) -> None:
    """Raise ConfigError where a tenant stands in two scenarios, or twice in one."""
    of: dict[str, str] = {}
    for name, values in found.items():
        for tenant in values["tenants"].value:
            if tenant in of:
                others = f"in [{SECTION}{of[tenant]}], too" if of[tenant] != name else "twice"
                raise ConfigError(
                    f"{values['tenants'].source}: `{SECTION}{name}.tenants` has {tenant!r}, which stands {others}; a "
                    f"tenant's requests are of one scenario: leave it in one place"
                )
            of[tenant] = name


def _check_served_by(found: dict[str, dict[str, Value]]) -> None:
    """Give a scenario that another's workers serve their model. Raise ConfigError where it cannot be served by them."""
    hosted = Counter(values["served_by"].value for values in found.values())
    for name, values in found.items():
        host, source = values["served_by"].value, values["served_by"].source
        if not host:
            continue
        stated, leave = f"{source}: `{SECTION}{name}.served_by` = {host!r}", "or leave out `served_by`"
        own = sorted(each for each, other in found.items() if not other["served_by"].value)
        there = f"scenarios with workers of their own are {', '.join(own)}" if own else "no scenario has workers"
        if host not in found:
            raise ConfigError(f"{stated}: no file has a section [{SECTION}{host}]; {there}; name one, {leave}")
        if found[host]["served_by"].value:
            whose = "itself" if host == name else f"served by {found[host]['served_by'].value} itself"
            raise ConfigError(f"{stated}: that is {whose}, and has no workers; {there}; name one, {leave}")
        if hosted[host] >= MAX_SHARING:
            raise ConfigError(
                f"{stated}: {hosted[host]} name it; a group serves {MAX_SHARING} at most, its own included"
            )
        model, theirs = values["model"], found[host]["model"].value
        if model.source != "default" and model.value != theirs:
            raise ConfigError(
                f"{model.source}: `{SECTION}{name}.model` = {model.value!r}, and {host}, whose workers serve {name}, "
                f"has {repr(theirs) if theirs else 'that of [model]'}; workers of a group have one model: leave out "
                f"`model`, {leave}"
            )
        if (least := values["min_workers"]).source != "default":
            raise ConfigError(
                f"{least.source}: `{SECTION}{name}.min_workers`: {name} has no workers of its own, those of {host} "
                f"serve it; set `{SECTION}{host}.min_workers`, {leave}"
            )
        values["model"] = Value(model.field, theirs, f"{SECTION}{host}.model")


def scenario_in_words(name: str) -> str:
    """For people; "": none."""
    if name == RESERVE:
        return "the reserve"
    return f"scenario {name}" if name else "no scenario"
