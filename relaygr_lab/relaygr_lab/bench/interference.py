"""Detects that other processes, or a stopped machine, made a probe slow."""

from __future__ import annotations

from typing import Final

from relaygr_lab.bench.results import Probe
from relaygr_lab.cpu_times import OTHERS_CORES

#: Emulated devices that end their operations later than this share of their busy time are not the devices of the cost
#: file; whatever such a probe found is set aside.
LATE_DEVICE: Final = 0.05


def disturbance_of(probe: Probe, *, private: bool) -> str:
    """Why this probe says nothing, as text: late devices, or an external cause that may have made it fail; "": neither.

    private: whether all processes of the run are descendants of this one.
    """
    if is_late(probe):
        return f"emulated devices were {probe.device_late:.0%} late"
    if probe.passed:
        return ""
    if probe.stalled:
        return f"the machine stood still for {probe.stalled_ms:.0f} ms"
    if private and (probe.others_cores or 0.0) > OTHERS_CORES:
        return f"other processes used {probe.others_cores:.1f} cores"
    return ""


def is_late(probe: Probe) -> bool:
    """Whether its emulated devices were later than LATE_DEVICE allows."""
    return (probe.device_late or 0.0) > LATE_DEVICE
