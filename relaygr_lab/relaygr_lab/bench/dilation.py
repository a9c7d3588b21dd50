"""Dilated time: every time of serving times one factor, so that a fast device's traffic fits two cores.

Devices, SLO, head start and deadlines are dilated. The bus, its statuses and its sessions are not: they take their real
milliseconds, which weigh 1/k as much. Shares and bytes do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from relaygr_lab.emulate.process import FACTORY
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.messages import CostModel

#: Section → what are times of serving. Left out are times of the bus:
#: client.silence_ms and trigger.max_status_age_ms (statuses), client.announce_linger_ms (batches), kafka.*.
DILATED: Final = {
    "relay": ("slo_ms", "life_window_ms"),
    "trigger": ("max_event_age_ms",),
    "worker": ("max_ranking_delay_ms", "max_timeout_ms"),
    "client": ("timeout_ms", "hedge_ms"),
}
#: The longest that a setting of the schema may be, ms.
LONGEST_MS: Final = 3.6e6


def dilated(settings: Settings, factor: float) -> Settings:
    """The settings of processes whose time runs `factor` times as slow."""
    changed: dict[str, Any] = {}
    for section, names in DILATED.items():
        values = getattr(settings, section)
        slower = {name: min(LONGEST_MS, factor * getattr(values, name)) for name in names}
        changed[section] = replace(values, **slower)
    return replace(settings, **changed)


@dataclass(frozen=True)
class Fleet:
    """Emulated devices of one cost file, all times multiplied by `factor`."""

    costs: DeviceCosts  # undilated
    factor: float

    @property
    def cost_model(self) -> CostModel:
        """The dilated costs of full inference in one piece, c0…c4 of T_full."""
        costs = self.costs.dilated(self.factor)
        (e0, e1, e2), (s0, s1, s2) = costs.prefill_ms, costs.score_ms
        return CostModel(c0=e0 + s0, c1=e1, c2=e2 / 2, c3=s2, c4=s1)

    def settings(self, settings: Settings, folder: Path) -> Settings:
        """The settings of its processes. folder: takes the dilated cost file."""
        file = folder / f"costs-{self.factor:g}.toml"
        file.write_text(self.costs.dilated(self.factor).as_toml(), encoding="utf-8")
        model = replace(settings.model, factory=FACTORY, checkpoint=str(file))
        return replace(dilated(settings, self.factor), model=model)
