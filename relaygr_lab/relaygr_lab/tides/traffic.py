"""A feed (2,000 tokens, 50 ms) and a search page (300 tokens, 20 ms), whose rates swing by 60 %, against each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Final

from msgspec import UNSET, structs

from relaygr_lab.bench.lengths import costs_named
from relaygr_lab.simulate.groups import Day, Surface
from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.workload.generator import Generator, GeneratorOptions
from relaygr_stream.workload.items import StageDelay, WorkItem
from relaygr_stream.workload.traffic import Tide, Traffic
from relaygr_stream.workload.visits import Pace

SCENARIOS: Final = (
    Scenario(name="feed", slo_ms=50.0, lead_ms=150.0),
    Scenario(name="search", slo_ms=20.0, lead_ms=150.0),
)
LENGTHS: Final = {"feed": 2000.0, "search": 300.0}
#: So a ranking of search takes 5 of its 20 ms. One of the feed takes 16 ms with FEED candidates, as long as search can
#: wait, and 7 ms with 400.
CANDIDATES: Final = 300
FEED: Final = 1000
#: Users return after so many seconds, half of the requests are theirs: a day of minutes must not begin cold.
RETURN_S: Final = 4.0
SWING: Final = 0.6
#: A device's change of model: weights of 1 GB, their check, the warm-up of each size. Assumed.
LOAD_S: Final = 2.0
#: Mean load of all devices, of what they carry with 1 % late. A device that gets more is late more often, and carries
#: about twice as much before it refuses: at 1.25 the best fixed split loses a twentieth, and no mover can win more.
LOAD: Final = 1.75
#: Requests a second that a device carries with 1 % late, as `make bench-scenarios` finds them.
CARRIED: Final = {"feed": 13.0, "search": 75.0}
COSTS: Final = "npu"
GIVEN: Final = {
    # A ranking that no worker has in time is refused, not cut to its newest behaviours: it does not count as answered.
    "worker.truncate_to": "0", "worker.hbm_bytes": "32GiB", "worker.dram_bytes": "64GiB", "worker.audit_share": "0",
    "relay.max_prefix_tokens": "4096",
}  # fmt: skip


def rates_of(load: float, devices: int, carried: Mapping[str, float] = CARRIED) -> dict[str, float]:
    """Mean requests a second of each scenario where half of the devices are its own; load: of what they carry."""
    return {name: load * devices / 2 * rate for name, rate in carried.items()}


def day_of(
    rates: Mapping[str, float], devices: int, seconds: float, feed: int, *, tide: bool, return_s: float = RETURN_S
) -> Day:
    """A day with these mean rates. feed: candidates of a ranking of the feed."""
    swing = Tide(SWING, seconds) if tide else None
    surfaces = tuple(
        Surface(
            each,
            Traffic(
                rate=rates[each.name], revisit=0.5, return_s=return_s, length=LENGTHS[each.name], sigma=0.3,
                max_prefix=4096, tide=swing, candidates=feed if each.name == "feed" else CANDIDATES,
                delay=StageDelay(each.lead_ms, 0.1),
            ),
            index / 2,
        )
        for index, each in enumerate(SCENARIOS)
    )  # fmt: skip
    settings = load_settings([], GIVEN).settings
    return Day(surfaces, settings, costs_named(COSTS), devices, seconds, 2 * return_s, LOAD_S)


def requests_of(surface: Surface, seconds: float, factor: float, seed: int, scenario: str) -> Iterator[WorkItem]:
    """Its requests until so many seconds, all times `factor` times as long. scenario: that they name; "": none."""
    traffic, name = surface.traffic, surface.scenario.name
    tide = None if traffic.tide is None else Tide(traffic.tide.swing, factor * traffic.tide.period_s)
    stated = {each.name: getattr(traffic, each.name) for each in fields(Traffic)}
    dilated = {
        "rate": traffic.rate / factor,
        "return_s": factor * traffic.return_s,
        "delay": StageDelay(factor * traffic.delay.median_ms, traffic.delay.sigma),
        "tide": tide,
    }
    generator = Generator(GeneratorOptions(**(stated | dilated), seed=seed, run=f"{name}-"))
    ahead = 0.0 if tide is None else surface.phase * tide.period_s
    pace = Pace(generator.options.rate, tide, ahead)
    for item in generator.paced():
        at = pace.after(item.at) - ahead
        if at >= seconds:
            return
        own = {"user_id": f"{name}-{item.event.user_id}", "scenario": scenario or UNSET}
        event, request = structs.replace(item.event, **own), structs.replace(item.request, **own)
        yield replace(item, at=at, event=event, request=request)
