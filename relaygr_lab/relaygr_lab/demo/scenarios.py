"""`relaygr demo --scenarios`: a day of two scenarios, whose workers the planner moves, and a picture of it."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from relaygr_lab.demo.plot import check_can_draw
from relaygr_lab.demo.run import remark
from relaygr_lab.demo.timeline import as_share, by_time, mark, two_panels
from relaygr_lab.drawing import BLUE, ORANGE
from relaygr_lab.processes import cluster
from relaygr_lab.tides.days import play
from relaygr_lab.tides.traffic import FEED, day_of, rates_of
from relaygr_stream.ops.brokers.distribution import BRIEF_RELAY
from relaygr_stream.ops.brokers.local import BrokerKind
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import SafeConsole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from relaygr_lab.tides.fleet import TidalFleet

#: Times are so many times as long as a device's: two cores carry four workers with 12 requests a second.
FACTOR: Final = 20.0
WORKERS: Final = 4
#: Of what the devices carry with 1 % late.
LOAD: Final = 0.9
DAY_S: Final = 100.0
#: Users return after so many seconds of a device.
RETURN_S: Final = 0.5
POINT_S: Final = 5.0
COLOURS: Final = {"feed": BLUE, "search": ORANGE}


async def run_scenarios_demo(broker: BrokerKind | None, settings: Settings, out: Path, seconds: float = DAY_S) -> int:
    """Run it; returns the exit code: 1 if a ranking was lost. seconds: of the day. Raises RelayError."""
    console = SafeConsole()
    check_can_draw(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    day = day_of(rates_of(LOAD, WORKERS), WORKERS, seconds / FACTOR, FEED, tide=True, return_s=RETURN_S)
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=out.parent, ignore_cleanup_errors=True) as name:
        async with cluster(broker, settings, Path(name), BRIEF_RELAY, console.print) as (connected, where):
            console.print(f"a day of {seconds:g} s: {WORKERS} emulated devices, two scenarios, a planner; {where}")
            fleet = await play("moving", connected, Path(name), day, FACTOR)
    began_s, until_s = fleet.load.begins_s, math.inf
    for at_s, move in fleet.planned:
        console.print(f"{at_s - began_s:5.0f} s: a worker moves from {move.source} to {move.target}: {move.reason}")
    first_s = fleet.planned[0][0] if fleet.planned else until_s
    for name in fleet.load.samples:
        told, before, since = (
            fleet.load.served(name, part) for part in ((began_s, until_s), (began_s, first_s), (first_s, until_s))
        )
        then = f", {since.hits:.0%} since" if since.asked else ""
        console.print(
            f"{name}: {told.asked} rankings, {told.within:.0%} within {fleet.load.slo_ms(name):g} ms, {told.refused} "
            f"refused; hits {before.hits:.0%} before the first move{then}"
        )
    lost = len(fleet.load.unanswered)
    console.print(f"{len(fleet.planned)} moves, {len(fleet.verified)} verified; {lost} rankings lost")
    if broker is not None and fleet.disturbed:
        console.print(remark(fleet.disturbed))
    draw(fleet, began_s).savefig(out, format="png")
    console.print(f"picture: {out}")
    return 1 if lost else 0


def draw(fleet: TidalFleet, since_s: float) -> Figure:
    """Workers of each scenario above, shares within their SLOs below, over the seconds since then, and the moves."""
    title = f"A day of two scenarios on {fleet.day.devices} workers: {len(fleet.planned)} moves"
    figure, workers, shares = two_panels(f"{title}, {len(fleet.load.unanswered)} rankings lost")
    end_s = fleet.factor * fleet.day.seconds
    for name, samples in fleet.load.samples.items():
        steps = [(at_s - since_s, counts[name]) for at_s, counts in fleet.counts]
        at, counts = [each[0] for each in steps] + [end_s], [each[1] for each in steps] + [steps[-1][1]]
        workers.step(at, counts, where="post", color=COLOURS[name], linewidth=1.8, label=name)
        slo_ms = fleet.load.slo_ms(name)
        points = by_time(samples, since_s, POINT_S)
        within = [sum(each.latency_ms <= slo_ms for each in some) / len(some) for _, some in points]
        shares.plot([at_s for at_s, _ in points], within, color=COLOURS[name], linewidth=1.8, label=name)
    workers.set_xlim(0, end_s)
    workers.set_ylim(0, fleet.day.devices)
    workers.set_ylabel("workers")
    as_share(shares)
    shares.set_ylabel("rankings within their SLO")
    shares.legend(loc="best", fontsize=9)
    moves = [(at_s, move.reason.split(";")[0]) for at_s, move in fleet.planned]
    mark(workers, shares, [each for each in moves if since_s <= each[0] <= since_s + end_s], since_s)
    return figure
