"""Decisions on a log's requests in the log's own time, with simulated workers.

The simulated owners read every signal at once, pin what fits until its ranking, and state their lanes periodically with
the workers' own parts.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from relaygr_stream.engine.budgets import equal_parts
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.settings.schema import Settings
from relaygr_stream.trigger.core import Signal, TriggerCore
from relaygr_stream.trigger.decision import Policy
from relaygr_stream.trigger.explain import Explanation, explain
from relaygr_stream.wire.messages import CostModel, LaneStatus, WorkerStatus
from relaygr_stream.wire.topic_files import lane_of
from relaygr_stream.workload.items import WorkItem


@dataclass(frozen=True)
class Fleet:
    """The simulated workers and their costs. bytes_per_token: prefix KV of one token."""

    workers: int
    lanes: int
    costs: CostModel
    bytes_per_token: int
    alloc_bytes: int
    queue_ms: float = 0.0


def built_in_bytes(settings: Settings) -> tuple[int, int]:
    """The bytes_per_token and alloc_bytes that a worker of the built-in model states. Raises as `config_of`."""
    import torch  # noqa: PLC0415

    from relaygr_stream.engine.build import stated_bytes  # noqa: PLC0415
    from relaygr_stream.models.loading import config_of  # noqa: PLC0415 - imports torch

    model, relay = settings.model, settings.relay
    config = config_of(msgspec.structs.replace(model, checkpoint="") if model.factory else model)
    layout = config.layout(getattr(torch, settings.worker.dtype))
    longest = relay.max_prefix_tokens + relay.max_suffix_tokens
    return stated_bytes(layout, longest)


@dataclass
class _Owner:
    """One simulated worker: its lanes, their budgets and its pins."""

    name: str
    lanes: range
    room: int  # bytes that may be pinned
    read_to: dict[int, int] = field(default_factory=dict)
    pins: list[tuple[float, int, int]] = field(default_factory=list)  # (end, lane, bytes), a heap
    pinned: dict[int, int] = field(default_factory=dict)

    def expire(self, now_s: float) -> None:
        while self.pins and self.pins[0][0] <= now_s:
            _, lane, nbytes = heapq.heappop(self.pins)
            self.pinned[lane] -= nbytes

    def pin(self, lane: int, nbytes: int, until_s: float) -> None:
        if sum(self.pinned.values()) + nbytes <= self.room:
            heapq.heappush(self.pins, (until_s, lane, nbytes))
            self.pinned[lane] = self.pinned.get(lane, 0) + nbytes

    def status(self, fleet: Fleet) -> WorkerStatus:
        budgets = equal_parts(self.room, self.lanes)
        return WorkerStatus(
            name=self.name,
            incarnation=1,
            host="",
            pid=0,
            sent_ms=0,
            state="serving",
            lanes=tuple(
                LaneStatus(
                    lane=lane,
                    budget_bytes=budgets[lane],
                    pinned_bytes=self.pinned.get(lane, 0),
                    pre_infer_offset=self.read_to.get(lane, 0),
                )
                for lane in self.lanes
            ),
            costs=fleet.costs,
            bytes_per_token=fleet.bytes_per_token,
            alloc_bytes=fleet.alloc_bytes,
            queue_ms=fleet.queue_ms,
            model_version="",
        )


def explain_log(
    items: Iterable[WorkItem], settings: Settings, fleet: Fleet, policy: Policy | None = None
) -> Iterator[Explanation]:
    """A trigger's decision on each request, in the order of time. policy: by default that of the settings."""
    policy, worker = policy or Policy.from_settings(settings), settings.worker
    period_s = worker.status_interval_ms / 1e3
    now = 0.0
    directory = OwnerDirectory(settings.trigger.max_status_age_ms, clock=lambda: now)
    owners = []
    for number in range(fleet.workers):
        lanes = range(number * fleet.lanes // fleet.workers, (number + 1) * fleet.lanes // fleet.workers)
        owners.append(_Owner(f"worker-{number}", lanes, int(worker.pinned_share * worker.hbm_bytes)))
    owner_of = {lane: owner for owner in owners for lane in owner.lanes}
    core = TriggerCore(policy, directory)
    for lane in range(fleet.lanes):
        core.take_lane(lane)
    next_status = 0.0
    for item in items:
        while next_status <= item.at:
            now = next_status
            for owner in owners:
                owner.expire(now)
                directory.take(owner.status(fleet))
            next_status += period_s
            if not any(owner.pins for owner in owners):
                # Of the statuses that follow, the next request depends on the last. The log's gaps may be days.
                next_status += period_s * max(0, int((item.at - next_status) / period_s))
        now = item.at
        lane = lane_of(item.event.user_id, fleet.lanes)
        row, decision = explain(core, lane, item.event, age_ms=0.0, now_s=now, at_s=now)
        if isinstance(core.book(lane, item.event, decision, now), Signal):
            owner = owner_of[lane]
            owner.read_to[lane] = owner.read_to.get(lane, 0) + 1
            owner.pin(lane, decision.nbytes, min(item.rank_at, now + policy.life_ms / 1e3))
        yield row
