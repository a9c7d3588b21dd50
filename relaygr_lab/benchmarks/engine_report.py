"""What the engine's bench found: printed as it comes, kept for `--json`, judged by the bounds."""

from __future__ import annotations

from typing import Any

import torch
from floors import Cost, Floors, dtype_name


class Report:
    """Prints figures as they come; keeps them, and the bounds not kept."""

    def __init__(self) -> None:
        self.figures: list[dict[str, Any]] = []
        self.broken: list[str] = []

    def head(self, title: str) -> None:
        print(f"\n{title}\n{'':44} {'ms':>9} {'floor':>9} {'× floor':>8} {'of peak':>8}", flush=True)

    def figure(self, dtype: torch.dtype, name: str, seconds: float, cost: Cost, floors: Floors) -> None:
        """One operation beside its floor."""
        floor = floors.seconds(cost)
        times, share = seconds / floor, cost.flops / seconds / floors.peak
        print(f"{name:44} {seconds * 1e3:9.2f} {floor * 1e3:9.2f} {times:8.2f} {share:8.0%}", flush=True)
        self.keep(dtype, name, ms=seconds * 1e3, floor_ms=floor * 1e3, of_floor=times, of_peak=share)

    def note(self, dtype: torch.dtype, name: str, text: str, **values: float) -> None:
        print(f"    {name}: {text}", flush=True)
        self.keep(dtype, name, **values)

    def keep(self, dtype: torch.dtype, name: str, **values: float) -> None:
        self.figures.append({"dtype": dtype_name(dtype), "name": name, **values})

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.broken.append(what)
