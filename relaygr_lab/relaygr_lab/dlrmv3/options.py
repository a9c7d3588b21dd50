"""The options of `relaygr bench dlrmv3`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relaygr_lab.bench.modes import Mode
from relaygr_lab.dlrmv3.loadgen import FEWEST, allowed_late
from relaygr_lab.dlrmv3.model import Shape
from relaygr_lab.dlrmv3.workload import Workload
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_stream.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run. Raises ConfigError for numbers out of range."""

    workload: Workload
    shape: Shape
    modes: tuple[Mode, ...]
    engine: bool
    broker: Literal["embedded", "kafka"] | None
    queries: int  # of a run, at most
    budget_s: float
    out: Path
    least_queries: int = FEWEST  # of a run, where the budget does not pay for more
    most_runs: int = 10  # of a search
    emulated: DeviceCosts | None = None  # of an emulated device, whose time is dilated; None: a real one

    def __post_init__(self) -> None:
        if self.emulated is not None and self.engine:
            raise ConfigError("modes: an emulated device has no engine without a bus; leave `engine` out")
        if allowed_late(self.queries) < 0:
            raise ConfigError(f"queries = {self.queries}: LoadGen calls fewer than {FEWEST} never VALID")
        if (there := len(self.workload.requests[1])) < self.queries:
            raise ConfigError(f"queries = {self.queries}: {self.workload.users} users have {there}; give more --users")
