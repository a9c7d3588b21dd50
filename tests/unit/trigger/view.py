"""A trigger's view of a fleet, for the tests of delegation."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from relaygr_stream.trigger.decision import Decision, LaneState, Policy, decide
from relaygr_stream.trigger.delegation import Delegation
from relaygr_stream.trigger.load import OwnerLoads
from relaygr_stream.wire.fleet import OwnerDirectory
from tests.unit.trigger.parts import POLICY, event, lane_status, worker_status

LANES: Final = 6
TOKENS: Final = 100
HEAD_MS: Final = 300.0


class View:
    """A trigger's view: `a` owns lanes 0 and 1, where requests come; a prefix of n tokens takes n ms and 10·n bytes."""

    def __init__(self, lanes: int = LANES, policy: Policy = POLICY) -> None:
        self.now = 100.0
        self.owners = OwnerDirectory(3000.0, clock=lambda: self.now)
        loads = OwnerLoads()
        self.led: set[int] = set(range(lanes))
        self.delegation = Delegation(self.owners, loads, lanes, seed=1, led=lambda lane: lane in self.led)
        self.lanes = [LaneState(policy, 0, 60.0, self.now, lane, loads, self.delegation) for lane in range(lanes)]
        self.number = 0

    def state(self, name: str, lanes: tuple[int, ...], *, of_lanes: dict[str, Any] | None = None, **more: Any) -> None:
        bounds = {"budget": 10**6, "rate": 1e5} | (of_lanes or {})
        plain = worker_status(*(lane_status(lane=lane, **bounds) for lane in lanes), name=name)
        self.owners.take(msgspec.structs.replace(plain, **({"delegated_bytes": 10**6} | more)))
        for lane in lanes:
            self.lanes[lane].observe(self.owners.owner(lane), self.now)

    def ask(
        self,
        tokens: int = TOKENS,
        *,
        user: str = "",
        lane: int = 0,
        book: bool = True,
        again: bool = False,
        rank_in_ms: float = HEAD_MS,
    ) -> Decision:
        """user: by default one that was never here. again: the same request."""
        self.number += not again
        asked = event(tokens, f"r{self.number}", user or f"u{self.number}", rank_in_ms=rank_in_ms)
        state = self.lanes[lane]
        state.observe(self.owners.owner(lane), self.now)
        found = decide(asked, state, age_ms=0.0, now_s=self.now)
        if book and found.delegate is not None:
            state.delegate(asked, found, self.now)
        elif book and found.admit:
            state.admit(asked, found, self.now)
        return found


#: What makes an owner refuse a signal, by the reason.
REFUSALS: Final[dict[str, dict[str, Any]]] = {
    "over_load": {"of_lanes": {"rate": 0.0}},
    "over_footprint": {"of_lanes": {"budget": 0}},
    "too_late": {"pre_infer_wait_ms": HEAD_MS + 1},
}
