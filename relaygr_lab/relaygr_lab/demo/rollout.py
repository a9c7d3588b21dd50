"""`relaygr demo --rollout`: a rollout under load on this machine, and a picture of hits and latencies through it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from relaygr_lab.cpu_times import CpuTimes, disturbance
from relaygr_lab.demo.plot import check_can_draw
from relaygr_lab.demo.run import remark
from relaygr_lab.demo.timeline import as_share, by_time, mark, two_panels
from relaygr_lab.drawing import BLUE, GREY, ORANGE, RED
from relaygr_lab.processes import cluster
from relaygr_lab.rollouts import NEXT, Change, ChangingFleet, Sample, Traffic, changed
from relaygr_stream.errors import RelayError
from relaygr_stream.ops.brokers.distribution import BRIEF_RELAY
from relaygr_stream.ops.brokers.local import BrokerKind
from relaygr_stream.ops.rollout.run import Plan
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import SafeConsole
from relaygr_stream.workload.quantiles import nearest_rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Of a worker: all users' prefix KV, of 2 MiB each, and 40 MiB at a time for users who move.
HBM_BYTES: Final = 256 << 20
#: Each user returns about every eight seconds.
TRAFFIC: Final = Traffic(users=100, rate=12.0, tokens=500, candidates=50, items=5000)
#: Each step ends with 200 answers of the new group: 33 s and 17 s.
PLAN: Final = Plan.from_shares([0.5, 1.0], 10.0)
USUAL_S: Final = 15.0
#: A point of the picture is of so many seconds.
POINT_S: Final = 4.0


async def run_rollout_demo(broker: BrokerKind | None, settings: Settings, out: Path) -> int:
    """Run it; returns the exit code: 1 if a ranking was lost, or the users came back. Raises RelayError."""
    console = SafeConsole()
    check_can_draw(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # Nothing is refused or too late for it: a machine of two cores is shared by all processes.
    relay = msgspec.structs.replace(settings.relay, slo_ms=TRAFFIC.timeout_s * 1e3)
    settings = msgspec.structs.replace(
        settings, relay=relay, worker=msgspec.structs.replace(settings.worker, hbm_bytes=HBM_BYTES)
    )
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=out.parent, ignore_cleanup_errors=True) as name:
        async with cluster(broker, settings, Path(name), BRIEF_RELAY, console.print) as (connected, _):
            fleet = ChangingFleet(connected, Path(name), TRAFFIC, "relaygr_stream", console.print)
            async with fleet.serving():
                console.print(f"{TRAFFIC.users} users return, {TRAFFIC.rate:g} rankings a second")
                await fleet.start(NEXT)
                before_s = time.monotonic()
                await asyncio.sleep(USUAL_S)
                began_s, cpu, back = time.monotonic(), CpuTimes.now(), ""
                try:
                    await fleet.roll_out(NEXT, PLAN)
                except RelayError as error:  # a busy machine is enough: the picture shows it all the same
                    fleet.check_running()
                    fleet.mark("all users go back")
                    back = str(error)
                await asyncio.sleep(USUAL_S)
                disturbed = disturbance(cpu, CpuTimes.now()) if broker is not None else ""
    change = changed("rollout", fleet.samples, began_s, before_s)
    console.print(
        f"{change.rankings} rankings through the rollout, {change.lost} lost; hits {change.before:.0%} before, and at "
        f"least {change.least:.2f} times that; P99 {change.p99_before_ms:.0f} ms before, and {change.p99_ms:.0f} ms"
    )
    if disturbed:
        console.print(remark(disturbed))
    if back:
        console.print(f"✗ {back}")
    draw(fleet.samples, fleet.marks, before_s, change).savefig(out, format="png")
    console.print(f"picture: {out}")
    return 1 if change.lost or back else 0


def draw(samples: Sequence[Sample], marks: Sequence[tuple[float, str]], since_s: float, change: Change) -> Figure:
    """Hits above, P50 and P99 below, over the seconds since then; marks: what happened when."""
    figure, hits, latencies = two_panels(
        f"A rollout: {change.rankings:,} rankings, {change.lost} lost, hits at least {change.least:.2f} × those before"
    )
    at, share, p50, p99 = points(samples, since_s)
    hits.plot(at, share, color=BLUE, linewidth=1.8)
    hits.axhline(change.before, color=GREY, linewidth=0.8)
    as_share(hits)
    hits.set_ylabel("rankings that hit")
    latencies.plot(at, p99, color=RED, linewidth=1.8, label="P99")
    latencies.plot(at, p50, color=ORANGE, linewidth=1.8, label="P50")
    latencies.set_ylim(0)
    latencies.set_ylabel("milliseconds")
    latencies.legend(loc="best", fontsize=9)
    mark(hits, latencies, marks, since_s)
    return figure


def points(samples: Sequence[Sample], since_s: float) -> tuple[list[float], list[float], list[float], list[float]]:
    """Of each POINT_S: its middle in seconds since then, the share of hits, P50 and P99 in milliseconds."""
    columns: tuple[list[float], list[float], list[float], list[float]] = ([], [], [], [])
    for at_s, some in by_time(samples, since_s, POINT_S):
        times = [each.latency_ms for each in some if not each.lost]
        if times:
            row = (
                at_s,
                sum(each.hit for each in some) / len(some),
                nearest_rank(times, 0.5),
                nearest_rank(times, 0.99),
            )
            for column, value in zip(columns, row, strict=True):
                column.append(value)
    return columns
