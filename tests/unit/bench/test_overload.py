"""What `bench slo --overload` says of its probes."""

from __future__ import annotations

import msgspec
from relaygr_lab.bench.overload import line

from tests.unit.paper.test_judge import PROBE

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
