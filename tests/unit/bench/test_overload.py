"""What `bench slo --overload` says of its probes."""

from __future__ import annotations

import msgspec
from relaygr_lab.bench.modes import RELAY
from relaygr_lab.bench.options import QUICK, SloOptions
from relaygr_lab.bench.overload import line
from relaygr_lab.bench.progress import Progress
from relaygr_lab.bench.run import Bench

from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.printable import SafeConsole
from tests.unit.report.test_judge import PROBE

CARRIED = msgspec.structs.replace(PROBE, rate=100.0, requests=1000, bad=10, revisit=0.5)


def test_a_line_has_goodput_of_whole_and_cut_rankings_and_when_refusals_are_known() -> None:
    refused = msgspec.structs.replace(CARRIED, rate=200.0, bad=600, refused_p99=25.0)
    said = line(2.0, refused, CARRIED, 50.0)
    assert said.startswith("2 × 100.0/s, 50% returning: 40.0% in time, 0.81 of the largest rate's")
    assert said.endswith("99 % of the refused know it within 0.50 SLO")
    said = line(2.0, msgspec.structs.replace(refused, cut=0.5, refused_p99=None), CARRIED, 50.0)
    assert said.endswith("40.0% in time and 50.0% cut to their newest behaviours, 1.82 of the largest rate's")


def test_without_anything_in_time_at_the_largest_rate_there_is_no_ratio() -> None:
    assert "0.00 of the largest rate's" in line(2.0, CARRIED, msgspec.structs.replace(CARRIED, bad=1000), 50.0)


async def test_where_the_relay_carried_no_rate_it_is_said_that_no_more_was_offered() -> None:
    options = SloOptions(preset="quick", length=512, overload=(2.0,), **QUICK | {"modes": (RELAY,), "revisits": (0.5,)})
    with Progress(SafeConsole()) as progress:
        bench = Bench(options, Settings(), progress)
        await bench._overload(bench.cells[0], None, None, 0)  # type: ignore[arg-type]
    assert bench.overloaded == ["not offered at 50% returning: the relay carried no rate there within the SLO"]
