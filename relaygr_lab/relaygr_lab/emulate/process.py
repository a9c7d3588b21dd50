"""`python -m relaygr_lab.emulate.process worker|trigger|planner`: that process, with parts of the laboratory.

A worker has an emulated device. `--policy` replaces one of the relay's policies by what it is compared with. A planner
acts, and `--pace` divides its damping, for a day of minutes. The serving code is the same and knows of none of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from relaygr_lab.averages import stretched
from relaygr_lab.policies import POLICIES, Policy, decider, eviction
from relaygr_stream.errors import RelayError
from relaygr_stream.ops.planner.plan import DAY, Damping
from relaygr_stream.ops.planner.process import PlannerOptions, run_planner
from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.process import ProcessContext, run_process
from relaygr_stream.trigger.service import run_trigger

if TYPE_CHECKING:
    from relaygr_lab.emulate.device import WallClock

MODULE: Final = "relaygr_lab.emulate.process"
FACTORY: Final = "relaygr_lab.emulate.device:make"
#: The metrics in which a worker states its device's time, in milliseconds.
BUSY_METRIC: Final = "relaygr_emulated_busy_ms_total"
LATE_METRIC: Final = "relaygr_emulated_late_ms_total"


class Lateness(Collector):
    """The device's busy time and lateness, as metrics."""

    def __init__(self, clock: WallClock) -> None:
        self._clock = clock

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Totals in milliseconds."""
        yield CounterMetricFamily(BUSY_METRIC, "Time of the emulated device's operations", self._clock.busy_s * 1e3)
        yield CounterMetricFamily(LATE_METRIC, "Time by which its operations ended late", self._clock.late_s * 1e3)


def damping_at(pace: float) -> Damping:
    """A planner's damping on a day that passes so many times as fast. A move takes as long as ever."""
    return Damping(DAY.floor_s / pace, DAY.patience_s / pace, DAY.settle_s / pace, DAY.arrive_s)


async def run_emulated_worker(context: ProcessContext, policy: Policy = "relay") -> None:
    """A worker with an emulated device, whose lateness is among its metrics."""
    # Only here: a trigger does not load torch.
    from relaygr_lab.emulate.device import EmulatedModel, build  # noqa: PLC0415
    from relaygr_stream.engine.audit import Report  # noqa: PLC0415
    from relaygr_stream.engine.build import WorkerRuntime  # noqa: PLC0415
    from relaygr_stream.worker.run import run_worker  # noqa: PLC0415

    def build_here(settings: Settings, report: Report, wake: Callable[[], None]) -> WorkerRuntime:
        runtime = build(settings, report, wake, eviction(policy))
        assert isinstance(runtime.model, EmulatedModel)
        context.registry.register(Lateness(runtime.model.clock))
        return runtime

    await run_worker(context, build=build_here)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the process; returns its exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("role", choices=("worker", "trigger", "planner"))
    parser.add_argument("--scenario", metavar="NAME", help="as of a section [scenario.NAME]")
    parser.add_argument("--config", action="append", default=[], metavar="FILE", help="TOML file with settings")
    parser.add_argument("--set", action="append", default=[], dest="assignments", metavar="SECTION.KEY=VALUE")
    parser.add_argument("--policy", choices=POLICIES, default="relay", help="what replaces the relay's policy")
    parser.add_argument("--averaging", type=float, default=1.0, help="factor of the times over which is averaged")
    parser.add_argument("--pace", type=float, default=1.0, help="how much faster a planner's day is (default 1)")
    parser.add_argument("--period", type=float, default=10.0, help="seconds between a planner's decisions (default 10)")
    given = parser.parse_args(arguments)
    try:
        flags = dict(each.split("=", 1) for each in given.assignments)
        settings: Settings = load_settings(given.config, flags).settings
        if given.scenario:
            settings = settings.serving(given.scenario)
    except (RelayError, ValueError) as error:
        parser.error(str(error))
    with stretched(given.averaging):
        return _run(given, settings)


def _run(given: argparse.Namespace, settings: Settings) -> int:
    if given.role == "planner":
        options = PlannerOptions(given.period, act=True, damping=damping_at(given.pace))
        return run_process("planner", settings, partial(run_planner, options=options))
    if given.role == "trigger":
        return run_process("trigger", settings, partial(run_trigger, decide=decider(given.policy)))
    return run_process("worker", settings, partial(run_emulated_worker, policy=given.policy))


if __name__ == "__main__":
    sys.exit(main())
