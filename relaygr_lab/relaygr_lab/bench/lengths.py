"""The lengths at which throughput is compared: a fixed grid by a cost file, never a run's own choice.

The unit is the longest prefix whose full inference takes 0.4 of the SLO: a request may then wait for one other (0.8 in
all, which leaves a fifth for the bus and the rest), but not for two. A length that the run chose by what it measured
would make ratios of two runs those of two different questions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from relaygr_lab.bench.cells import LENGTH_STEP
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_stream.errors import ConfigError

#: Full inference of the unit length takes this share of the SLO.
FULL_SHARE: Final = 0.4
#: Suffix and candidates of the unit length, whatever a run's own.
ROWS: Final = 8 + 32
#: The packaged cost files.
COSTS_DIR: Final = Path(__file__).parent.parent / "emulate" / "costs"


def grid_length(costs: DeviceCosts, slo_ms: float, share: float = 1.0) -> int:
    """Tokens of a share of the unit length, in whole steps; one step at least."""
    unit = costs.longest_full(FULL_SHARE * slo_ms, ROWS, LENGTH_STEP)
    return max(LENGTH_STEP, round(share * unit / LENGTH_STEP) * LENGTH_STEP)


def costs_named(name: str) -> DeviceCosts:
    """The packaged cost file of this name, or the file at this path. Raises ConfigError, or InputError as read."""
    packaged = COSTS_DIR / f"{name}.toml"
    if packaged.is_file():
        return DeviceCosts.read(packaged)
    if not Path(name).exists():
        known = ", ".join(sorted(path.stem for path in COSTS_DIR.glob("*.toml")))
        raise ConfigError(f"costs {name}: no such file; packaged are {known}")
    return DeviceCosts.read(Path(name))
