"""The modes that are compared: ways of serving the same rankings, with the worker settings of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from relaygr_stream.errors import ConfigError
from relaygr_stream.lab.bench.routing import Route
from relaygr_stream.settings.schema import Settings


@dataclass(frozen=True)
class Mode:
    """One way of serving. `overrides`: worker settings; modes with equal settings share their processes."""

    name: str
    words: str  # a description for the table
    announce: bool  # whether request events are published, so that prefixes may be pre-inferred
    request: Literal["auto", "full"]  # of the ranking requests
    keeps: bool  # prefix KV outlives its ranking, so that returning users are cheaper
    overrides: Mapping[str, Any] = field(default_factory=dict)
    route: Route = "owner"  # where the client sends rankings
    policy: str = "relay"  # of a fleet's processes (lab/emulate/process.py); others need emulated devices


FULL: Final = Mode("full", "full inference at ranking, no relay", announce=False, request="full", keeps=False)
CACHE: Final = Mode(
    "cache", "prefix KV kept after ranking, no pre-inference", announce=False, request="auto", keeps=True
)
RELAY_HBM: Final = Mode(
    "relay-hbm",
    "relay without DRAM",
    announce=True,
    request="auto",
    keeps=True,
    overrides={"dram_bytes": 0},
)
RELAY: Final = Mode("relay", "relay with DRAM", announce=True, request="auto", keeps=True)
MODES: Final = (FULL, CACHE, RELAY_HBM, RELAY)

# A fleet's modes (`bench paper`): two baselines without any relay, and the relay without one of its parts.

FULL_LANE: Final = Mode(
    "full-lane", "full inference by the lane's owner", announce=False, request="full", keeps=False, route="lane"
)
FULL_ANY: Final = Mode(
    "full-any",
    "full inference by any worker, least waiting first",
    announce=False,
    request="full",
    keeps=False,
    route="least",
)
RELAY_ANYWHERE: Final = Mode(
    "relay-anywhere",
    "relay without affinity: the ranking goes to any live worker",
    announce=True,
    request="auto",
    keeps=True,
    route="any",
)
RELAY_EVERYTHING: Final = Mode(
    "relay-everything",
    "relay without the test of risk and without bounds",
    announce=True,
    request="auto",
    keeps=True,
    policy="everything",
)
RELAY_WHOLE: Final = Mode(
    "relay-whole",
    "relay without chunks: nothing interrupts a prefill",
    announce=True,
    request="auto",
    keeps=True,
    overrides={"max_ranking_delay_ms": 3.6e6},
)
RELAY_LRU: Final = Mode(
    "relay-lru",
    "relay whose tiers evict what was used longest ago",
    announce=True,
    request="auto",
    keeps=True,
    policy="lru",
)
RELAY_UNDELEGATED: Final = Mode(
    "relay-undelegated",
    "relay whose trigger sends no prefill to other workers than the lane's owner",
    announce=True,
    request="auto",
    keeps=True,
    policy="undelegated",
)
BASELINES: Final = (FULL_LANE, FULL_ANY, CACHE)
ABLATIONS: Final = (RELAY_ANYWHERE, RELAY_UNDELEGATED, RELAY_HBM, RELAY_LRU, RELAY_WHOLE, RELAY_EVERYTHING)
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


def missing_settings(mode: Mode, settings: Settings) -> list[str]:
    """Worker settings that the mode needs and this version does not have."""
    return [name for name in mode.overrides if name not in settings.worker.__struct_fields__]


def apply_mode(mode: Mode, settings: Settings) -> Settings:
    """The settings of the mode's processes."""
    return msgspec.structs.replace(settings, worker=msgspec.structs.replace(settings.worker, **mode.overrides))


def grouped(modes: Sequence[Mode], settings: Settings) -> list[tuple[str, list[Mode]]]:
    """Groups of modes that can share processes; each group has the name of its last mode."""
    groups: list[tuple[tuple[Settings, str], list[Mode]]] = []
    for mode in modes:
        wanted = apply_mode(mode, settings), mode.policy
        same = next((group for other, group in groups if other == wanted), None)
        if same is None:
            groups.append((wanted, [mode]))
        else:
            same.append(mode)
    return [(group[-1].name, group) for _, group in groups]
