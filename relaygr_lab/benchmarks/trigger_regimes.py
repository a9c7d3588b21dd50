"""Whether a choice is worth something: the relay, whose trigger makes none, beside one whose trigger passes on what is
at risk alone, on one simulated worker, without delegates, in regimes where a choice could pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from relaygr_lab.bench.lengths import costs_named
from relaygr_lab.bench.search import Search
from relaygr_lab.policies import Policy
from relaygr_lab.pools import pool_of
from relaygr_lab.simulate.run import run_group
from relaygr_lab.simulate.scenario import Scenario
from relaygr_lab.simulate.story import ALLOWED_LATE, late_share

from relaygr_stream.settings.load import load_settings
from relaygr_stream.workload.items import StageDelay
from relaygr_stream.workload.traffic import Mix, Traffic

GIB: Final = 1 << 30
MOST_TOKENS: Final = 4096
#: Requests of a probe, announced; 1 % of them are late at the largest rate.
REQUESTS: Final = 3000
WARM_UP_S: Final = 4.0
TOLERANCE: Final = 1.05
POLICIES: Final[tuple[Policy, ...]] = ("relay", "risk")


@dataclass(frozen=True)
class Regime:
    """Traffic for one worker. rate: where the search begins; overload: the rate whose goodput is the figure instead."""

    name: str
    rate: float
    costs: str = "npu"
    length: int = 1408
    mix: Mix | None = None
    unranked: float = 0.0
    hbm: int = 16 * GIB
    overload: bool = False

    def scenario(self, policy: Policy, rate: float, requests: int) -> Scenario:
        flags = {
            "relay.max_prefix_tokens": str(MOST_TOKENS),
            "worker.hbm_bytes": str(self.hbm),
            "worker.dram_bytes": str(32 * GIB),
            "worker.truncate_to": "0",
            "trigger.delegate": "false",
        }
        traffic = Traffic(
            rate=rate,
            users=10_000_000,
            return_s=1.5,
            length=self.length,
            mix=self.mix,
            max_prefix=MOST_TOKENS,
            candidates=32,
            delay=StageDelay(150.0, 0.25),
        )
        return Scenario(
            settings=load_settings([], flags).settings,
            costs=costs_named(self.costs),
            traffic=traffic,
            workers=1,
            sample=1,
            seconds=requests / rate,
            warm_s=WARM_UP_S,
            policy=policy,
            unranked=self.unranked,
        )


REGIMES: Final = (
    Regime("a: fixed costs (h100), 512 tokens", 250, costs="h100", length=512),
    Regime("b: 80 % short (350) beside 20 % long (2,816)", 85, length=2816, mix=Mix(0.8, 350)),
    Regime("c: 20 % never ranked", 65, unranked=0.2),
    Regime("c: 40 % never ranked", 75, unranked=0.4),
    Regime("c: 60 % never ranked", 85, unranked=0.6),
    Regime("c: 60 % never ranked, 150 tokens", 600, length=150, unranked=0.6),
    Regime("d: 3 GiB of HBM, 80 % 700 tokens, 20 % 2,816", 22, length=2816, mix=Mix(0.8, 700), hbm=3 * GIB),
    Regime("e: goodput at twice the capacity", 130, overload=True),
)


def figure(regime: Regime, policy: Policy, requests: int = REQUESTS) -> float:
    """The largest rate within the SLO, or the goodput at the overload's; requests/s, announced."""
    if regime.overload:
        return regime.rate * (1 - _late(regime.scenario(policy, regime.rate, requests)))
    search = Search(regime.rate, 1.0, 100 * regime.rate, 1.2, TOLERANCE)
    while (rate := search.next()) is not None:
        search.record(rate, _late(regime.scenario(policy, rate, requests)) <= ALLOWED_LATE)
    return search.passed or 0.0


def _late(scenario: Scenario) -> float:
    (group,) = scenario.groups
    return late_share(run_group(scenario, group), scenario.settings.relay.slo_ms).value


def measure() -> dict[str, dict[Policy, float]]:
    """Figures by regime and policy, one after the other on each core; prints a line for each regime as it is known."""
    print("Largest rate within the SLO, requests/s; simulated, one worker without delegates\n")
    print(f"{'regime':48} {'relay':>8} {'by risk':>8} {'ratio':>6}")
    found: dict[str, dict[Policy, float]] = {}
    with pool_of() as pool:
        cells = {regime.name: [pool.submit(figure, regime, policy) for policy in POLICIES] for regime in REGIMES}
        for name, futures in cells.items():
            found[name] = dict(zip(POLICIES, (future.result() for future in futures), strict=True))
            relay, by_risk = found[name].values()
            print(f"{name:48} {relay:8.1f} {by_risk:8.1f} {relay / by_risk:6.2f}", flush=True)
    print()
    return found
