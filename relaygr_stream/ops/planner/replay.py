"""A recorded day: the observations that `relaygr planner --record` wrote, and what the planner proposes over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from relaygr_stream.errors import InputError
from relaygr_stream.ops.planner.plan import Memory, decide
from relaygr_stream.ops.planner.seen import Observation
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.wire.planner_status import FleetPlan

_decoder = msgspec.json.Decoder(Observation)


def read_observations(path: Path) -> Iterator[Observation]:
    """The observations of a file, one a line. Raises InputError, which names file and line."""
    last_s = 0.0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    seen = _decoder.decode(line)
                except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
                    raise InputError(
                        f"{path}, line {number}: no observation: {error}; `relaygr planner --record FILE` writes them"
                    ) from error
                if seen.at_s < last_s:
                    raise InputError(
                        f"{path}, line {number}: at_s {seen.at_s:g} is before that of the line before, {last_s:g}; a "
                        f"file has one planner's observations in the order of time"
                    )
                last_s = seen.at_s
                yield seen
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def plans(observations: Iterable[Observation], scenarios: Sequence[Scenario]) -> Iterator[FleetPlan]:
    """What the planner proposes after each of them."""
    memory = Memory()
    for seen in observations:
        memory, plan = decide(memory, seen, scenarios)
        yield plan
