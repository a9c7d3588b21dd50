"""What replaces a policy of the relay in the laboratory: where rankings go, how a trigger decides, what is evicted.

Emulated processes (emulate/process.py) and simulated fleets (simulate/fleet.py) take the same ones. The serving code
knows of none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, get_args

import msgspec

from relaygr_stream.cache.fading import CostAwarePolicy, FadingFrequency
from relaygr_stream.trigger.decision import Decide, Decision, LaneState, decide
from relaygr_stream.wire.messages import RequestEvent

if TYPE_CHECKING:  # a trigger does not load torch
    from relaygr_stream.cache.tiers import MakePolicy

#: owner: as every client. lane: the same, and no worker forwards it. least: to the worker with the fewest rankings
#: waiting, which keeps it. any: to any worker, at random, which keeps it.
Route = Literal["owner", "lane", "least", "any"]
#: relay: as it serves. risk: the trigger chooses what is at risk. lru: tiers evict what was used longest ago.
Policy = Literal["relay", "risk", "lru"]
POLICIES: Final[tuple[Policy, ...]] = get_args(Policy)
#: A fifth of the default SLO.
AT_RISK_MS: Final = 10.0


def decider(policy: Policy) -> Decide:
    """How a trigger decides."""
    return decide_by_risk if policy == "risk" else decide


def eviction(policy: Policy) -> MakePolicy:
    """What chooses the entries that leave a tier."""
    return LeastRecent if policy == "lru" else CostAwarePolicy


def decide_by_risk(event: RequestEvent, lane: LaneState, /, *, age_ms: float, now_s: float) -> Decision:
    """The paper's choice: as `decide`, for those alone whose full inference would take AT_RISK_MS at their owner now.
    For all others it says what it says of those without a prefix."""
    decision = decide(event, lane, age_ms=age_ms, now_s=now_s)
    if decision.predicted_ms >= AT_RISK_MS:
        return decision
    return msgspec.structs.replace(decision, reason="empty_prefix", delegate=None)


class LeastRecent(CostAwarePolicy[str]):
    """Eviction of what was used longest ago: the last use counts alone, and bytes cost the same."""

    def _use(self, uses: float) -> float:
        """The number of this use, whatever there was before."""
        del uses
        self._clock += 1
        return self._clock

    def add(self, key: str, nbytes: int, cost_ms: float) -> None:
        """Hold the key, and count a use."""
        del cost_ms
        FadingFrequency.add(self, key, nbytes, float(nbytes))

    def hold(self, key: str, nbytes: int, cost_ms: float) -> None:
        """Hold the key without a use."""
        del cost_ms
        super().hold(key, nbytes, float(nbytes))

    def touch(self, key: str, nbytes: int, cost_ms: float) -> None:
        """Count a use."""
        del cost_ms
        FadingFrequency.touch(self, key, nbytes, float(nbytes))
