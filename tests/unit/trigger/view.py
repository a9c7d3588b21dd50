"""A trigger's view of a fleet, for the tests of delegation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import msgspec

from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.trigger.core import TriggerCore
from relaygr_stream.trigger.decision import Decision, Policy
from relaygr_stream.trigger.delegation import Delegation
from relaygr_stream.trigger.sent import SentBooks
from tests.unit.trigger.parts import POLICY, event, lane_status, worker_status

LANES: Final = 6
TOKENS: Final = 100
HEAD_MS: Final = 300.0


class View:
    """A trigger's view: `a` owns lanes 0 and 1, where requests come; a prefix of n tokens takes n ms and 10·n bytes."""

    def __init__(self, lanes: int = LANES, policy: Policy = POLICY) -> None:
        self.now = 100.0
        self.owners = OwnerDirectory(3000.0, clock=lambda: self.now)
        self.with_leader: set[int] = set(range(lanes))
        policy = replace(policy, delegate=True)
        delegation = Delegation(self.owners, SentBooks(), lanes, seed=1, leaders=self)
        self.core = TriggerCore(policy, self.owners, delegation=delegation)
        for lane in range(lanes):
            self.core.take_lane(lane)
        assert self.core.delegation is not None
        self.delegation = self.core.delegation
        self.number = 0

    def has_leader(self, partition: int) -> bool:
        return partition in self.with_leader

    def state(self, name: str, lanes: tuple[int, ...], *, of_lanes: dict[str, Any] | None = None, **more: Any) -> None:
        bounds = {"budget": 10**6} | (of_lanes or {})
        plain = worker_status(*(lane_status(lane=lane, **bounds) for lane in lanes), name=name)
        self.owners.take(msgspec.structs.replace(plain, **({"delegated_bytes": 10**6} | more)))

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
        found = self.core.decide(lane, asked, 0.0, self.now)
        if book:
            self.core.book(lane, asked, found, self.now)
        return found


#: Where an owner computes a signal late or not at all, by the reason.
REFUSALS: Final[dict[str, dict[str, Any]]] = {
    "full": {"of_lanes": {"budget": 0}},
    "late": {"pre_infer_wait_ms": HEAD_MS + 1},
}
