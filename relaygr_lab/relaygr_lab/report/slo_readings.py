"""Reads the probes of `bench slo`: values found, ratios to full inference, why not more. Judges nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Final

from relaygr_lab.bench.capacity import device_ms
from relaygr_lab.bench.cells import Cell, World
from relaygr_lab.bench.modes import FULL
from relaygr_lab.bench.results import STAGES, Found, Probe, Ratio
from relaygr_lab.bench.search import ROUNDING

#: A device with a larger busy share is the limit; the rest of its time goes into steps between operations.
BUSY: Final = 0.85
#: A device with a smaller busy share could do half as much again.
IDLE: Final = 0.6
#: With a larger share of all cores' time in use, threads often wait for a core: device, broker, trigger and client
#: share them.
CROWDED: Final = 0.6
#: Smallest share that is reported, of events not admitted and of slow requests without ready prefix KV.
WORTH_NAMING: Final = 0.05


def found(cell: Cell, worlds: Sequence[World]) -> Found:
    """The result of the cell's searches; its given value is known."""
    values = cell.values
    at_found = [probe for probe in cell.probes if cell.value(probe) in values]
    return Found(
        kind=cell.kind,
        mode=cell.mode.name,
        revisit=cell.revisit,
        given=cell.given,
        values=values,
        settled=cell.settled,
        bound=_bound(cell, worlds),
        requests=sum(probe.requests for probe in at_found),
        bad=sum(probe.bad for probe in at_found),
        limits=_limits(cell),
        p99_short=_median(probe.p99_short for probe in at_found),
        p99_long=_median(probe.p99_long for probe in at_found),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def up_to_found(cell: Cell) -> list[Probe]:
    """The probes up to the value found, whether they passed: in another repeat the same value may fail."""
    most = ROUNDING * median(cell.values or [0.0])
    return [probe for probe in cell.probes if cell.value(probe) <= most]


def ratios(cells: Sequence[Cell], worlds: Sequence[World]) -> list[Ratio]:
    """The ratio of every cell to full inference, if that has a value."""
    return [ratio for cell in cells if cell.mode is not FULL and (ratio := _ratio(cell, cells, worlds)) is not None]


def _ratio(cell: Cell, cells: Sequence[Cell], worlds: Sequence[World]) -> Ratio | None:
    base = next((one for one in cells if one.mode is FULL and one.kind == cell.kind), None)
    rates = next((one for one in cells if one.mode is FULL and one.kind == "rate"), None)
    if rates is None or not any(rates.values):
        return None
    # At full inference's largest rate, its largest length is the length at which that rate was found.
    full = rates.given if base is None else base.values
    if not full or not (middle := median(full)):
        return None
    mine = cell.values
    length = median(cell.given if cell.kind == "rate" else full)
    cost = worlds[-1].cost(length, cell.revisit)
    return Ratio(
        kind=cell.kind,
        mode=cell.mode.name,
        revisit=cell.revisit,
        value=(median(mine) / middle or None) if mine else None,
        low=min(mine) / max(full) if mine else None,
        high=max(mine) / min(full) if mine and all(full) else None,
        bound=_bound(cell, worlds) / middle,
        queue=cell.queue(worlds, median(cell.given)) / middle,
        work=cost.full / device_ms(cell.mode, cost, cell.revisit),
        least=not cell.settled,
        most=not (base or rates).settled,
    )


def _bound(cell: Cell, worlds: Sequence[World]) -> float:
    """The largest bound over all fitted costs: costs fitted beside other work do not bound a quiet moment."""
    at = median(cell.given)
    return max(cell.bound(world, at) for world in worlds)


def _limits(cell: Cell) -> list[str]:
    """Why a larger value fails, from the smallest failing probe."""
    failing = [probe for probe in cell.probes if not probe.passed]
    if not cell.probes:
        return ["not probed: there was no time left"]
    if not failing:
        return ["nothing failed: the search ended at its limit or when its time was used up"]
    probe = min(failing, key=cell.value)
    return list(explain(probe))


def explain(probe: Probe) -> Iterator[str]:
    """The causes of a probe's slowest requests, most important first."""
    slow = sorted(probe.slow_stages.items(), key=lambda pair: -pair[1])
    parts = ", ".join(f"{STAGES[name]} {ms:.0f} ms" for name, ms in slow[:3] if ms >= 1)
    if parts:
        yield f"at {probe.rate:,.1f}/s with {probe.length:,} tokens the slowest requests spent: {parts}"
    if probe.stalled:
        yield f"the machine stood still: a process that only slept woke {probe.stalled_ms:.0f} ms late"
    if probe.busy >= BUSY:
        yield f"the device was busy {probe.busy:.0%} of the time"
    elif probe.busy <= IDLE:
        waits = "what comes together waits for each other" if slow and slow[0][0] == "queued" else "waits beside it"
        yield f"the device was busy only {probe.busy:.0%} of the time: {waits}, not its capacity"
    if probe.cores_busy is not None and probe.cores_busy >= CROWDED:
        yield f"the machine's cores were busy {probe.cores_busy:.0%}: the relay's processes wait for each other's"
    decided = sum(probe.decisions.values())
    for reason, count in sorted(probe.decisions.items(), key=lambda pair: -pair[1]):
        if reason != "admitted" and decided and count / decided >= WORTH_NAMING:
            yield f"the trigger did not admit {count / decided:.0%} ({reason})"
    slowest = sum(probe.slow_outcomes.values())
    for outcome, words in (("full", "had no prefix KV"), ("joined", "came while theirs was being computed")):
        count = probe.slow_outcomes.get(outcome, 0)
        if slowest and count / slowest >= WORTH_NAMING and probe.announced:
            yield f"{count / slowest:.0%} of the slowest {words}"
    for error, count in sorted(probe.errors.items()):
        yield f"{count} got no scores ({error})"
