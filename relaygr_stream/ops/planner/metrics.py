"""The planner's metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from relaygr_stream.wire.planner_status import REASON_KINDS, FleetPlan


class PlannerMetrics:
    """What it proposes, by scenario."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, meaning: str, *labels: str) -> Gauge:
            return Gauge(f"relaygr_{name}", meaning, ["scenario", *labels], registry=registry)

        self._wanted = gauge("workers_wanted", "Workers that the scenario's traffic needs, min_workers at least.")
        self._reason = gauge("workers_wanted_reason", "1 at what decides how many are wanted, 0 at the rest.", "reason")
        self._current = gauge("workers_current", "Workers that serve the scenario.")
        self._headroom = gauge(
            "slo_headroom_seconds", "The scenario's SLO less the P99 of its rankings, on the worker."
        )
        self.moves = Counter("relaygr_planner_moves", "Moves that ended, by result.", ["result"], registry=registry)

    def show(self, plan: FleetPlan) -> None:
        """Of the newest plan."""
        for name, each in plan.scenarios.items():
            if not each.served_by:
                self._wanted.labels(name).set(each.wanted)
                self._current.labels(name).set(each.workers)
                for kind in REASON_KINDS:
                    self._reason.labels(name, kind).set(each.reason_kind == kind)
            headroom_ms = float("nan") if each.headroom_ms is None else each.headroom_ms
            self._headroom.labels(name).set(headroom_ms / 1e3)
