"""The modes that are compared: ways of serving the same rankings, with what each changes of the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from relaygr_lab.policies import Policy, Route
from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.schema import Settings


@dataclass(frozen=True)
class Mode:
    """One way of serving; by default the relay's."""

    name: str
    words: str  # a description for the table
    announce: bool = True  # whether request events are published, so that prefixes may be pre-inferred
    request: Literal["auto", "full"] = "auto"  # of the ranking requests
    keeps: bool = True  # prefix KV outlives its ranking, so that returning users are cheaper
    overrides: Mapping[str, Any] = field(default_factory=dict)  # "section.name" → value of the processes' settings
    route: Route = "owner"  # where the client sends rankings
    policy: Policy = "relay"  # of a fleet's processes (lab/policies.py); others need emulated devices


def _full(name: str, words: str, route: Route = "owner") -> Mode:
    return Mode(name, words, announce=False, request="full", keeps=False, route=route)


FULL: Final = _full("full", "full inference at ranking, no relay")
CACHE: Final = Mode("cache", "prefix KV kept after ranking, no pre-inference", announce=False)
RELAY: Final = Mode("relay", "relay with DRAM")
RELAY_HBM: Final = Mode("relay-hbm", "relay without DRAM", overrides={"worker.dram_bytes": 0})
MODES: Final = (FULL, CACHE, RELAY_HBM, RELAY)

# A fleet's modes (`bench paper`): baselines without any relay, and the relay without one of its parts.
FULL_LANE: Final = _full("full-lane", "full inference by the lane's owner", "lane")
FULL_ANY: Final = _full("full-any", "full inference by any worker, least waiting first", "least")
BASELINES: Final = (FULL_LANE, FULL_ANY, CACHE)
ABLATIONS: Final = (
    Mode("relay-anywhere", "relay without affinity: the ranking goes to any live worker", route="any"),
    Mode("relay-undelegated", "relay without delegates", overrides={"trigger.delegate": False}),
    RELAY_HBM,
    Mode("relay-lru", "relay whose tiers evict what was used longest ago", policy="lru"),
    Mode("relay-whole", "relay without chunks", overrides={"worker.max_ranking_delay_ms": 3.6e6}),
)
FLEET_MODES: Final = (*BASELINES, RELAY, *ABLATIONS)


def modes_named(names: str) -> tuple[Mode, ...]:
    """The modes of a comma-separated list, in the order of MODES. Raises ConfigError; `full` must be among them."""
    asked = {name.strip() for name in names.split(",")}
    unknown = asked - {mode.name for mode in MODES}
    if unknown:
        known = ", ".join(mode.name for mode in MODES)
        raise ConfigError(f"modes {', '.join(sorted(unknown))}: no such mode; there are {known}")
    if FULL.name not in asked:
        raise ConfigError("modes: `full` is the baseline of every ratio and must be among them")
    return tuple(mode for mode in MODES if mode.name in asked)


def apply_mode(mode: Mode, settings: Settings) -> Settings:
    """The settings of the mode's processes."""
    for name, value in mode.overrides.items():
        section, _, key = name.partition(".")
        changed = msgspec.structs.replace(getattr(settings, section), **{key: value})
        settings = msgspec.structs.replace(settings, **{section: changed})
    return settings


def grouped(modes: Sequence[Mode], settings: Settings) -> list[tuple[str, list[Mode]]]:
    """Groups of modes that can share processes; each group has the name of its last mode."""
    groups: list[tuple[tuple[Settings, Policy], list[Mode]]] = []
    for mode in modes:
        wanted = apply_mode(mode, settings), mode.policy
        same = next((group for other, group in groups if other == wanted), None)
        if same is None:
            groups.append((wanted, [mode]))
        else:
            same.append(mode)
    return [(group[-1].name, group) for _, group in groups]
