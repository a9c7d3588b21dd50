"""What simulates a report of `bench slo` simulates the traffic that the report states, or refuses it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from relaygr_lab.bench.options import QUICK, SloOptions
from relaygr_lab.bench.run import Bench
from relaygr_lab.report.conditions import of_slo
from relaygr_lab.simulate.bus import BusLatency
from simulate_slo import _scenario, not_comparable
from slo_fit import Fit

from relaygr_stream.settings.schema import Settings
from relaygr_stream.workload.items import StageDelay
from tests.unit.simulate.scenes import COSTS


def conditions(**given: Any) -> dict[str, Any]:
    """As report.json states them."""
    options = SloOptions(preset="quick", length=160, **QUICK, **given)
    bench = SimpleNamespace(
        options=options, settings=Settings(), measured=[], overloaded=[], length=160, about={"broker": "embedded"}
    )
    return cast(dict[str, Any], json.loads(msgspec.json.encode(of_slo(cast(Bench, bench), "relaygr bench slo"))))


def test_the_traffic_is_the_reports() -> None:
    stated = conditions(
        candidates=100, suffix=5, growth=7.0, known=50, users=9000, zipf=0.5, delay=StageDelay(90.0, 0.2)
    )
    assert not not_comparable(stated)
    fit = SimpleNamespace(ways=lambda probe: (BusLatency(), BusLatency()), costs=lambda probe: COSTS)
    probe = {"mode": "relay", "rate": 20.0, "revisit": 0.5, "length": 160, "requests": 100}
    traffic = _scenario(probe, Settings(), stated["traffic"], cast(Fit, fit), seed=1).traffic
    assert (traffic.candidates, traffic.suffix, traffic.growth, traffic.users, traffic.zipf) == (100, 5, 7.0, 9000, 0.5)
    assert traffic.delay == StageDelay(90.0, 0.2)
    assert traffic.return_s == 16.0  # 50 users of 512 tokens are 160 of 160 tokens, who return at 10/s


@pytest.mark.parametrize(("given", "words"), [({"workers": 4}, "4 workers"), ({"sigma": 0.5}, "with sigma")])
def test_a_report_of_other_traffic_than_can_be_simulated_is_refused(given: dict[str, Any], words: str) -> None:
    assert words in not_comparable(conditions(**given))


def test_a_report_that_does_not_state_its_traffic_is_refused() -> None:
    stated = conditions()
    del stated["traffic"]
    assert "measure anew" in not_comparable(stated)
