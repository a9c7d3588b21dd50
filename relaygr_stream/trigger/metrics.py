"""The trigger's Prometheus metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from relaygr_stream.errors import REASONS as UNREADABLE
from relaygr_stream.telemetry.tracing import OFF, Tracing
from relaygr_stream.trigger.decision import REASONS, Decision, Reason
from relaygr_stream.wire.messages import RequestEvent

log = structlog.get_logger(__name__)

#: Seconds. A decision takes microseconds; more than a millisecond is a defect or a stalled loop.
DECISION_BUCKETS = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2)


class TriggerMetrics:
    """The trigger's metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = _Decisions()
        registry.register(self._decisions)
        self.ages_clamped = Counter(
            "relaygr_trigger_ages_clamped",
            "Events whose stated sending time cannot be true, because clocks differ.",
            registry=registry,
        )
        self.lanes = Gauge("relaygr_trigger_lanes", "Lanes that this trigger decides for.", registry=registry)
        self.lanes_with_owner = Gauge(
            "relaygr_trigger_lanes_with_owner", "Of its lanes, those whose owner it knows.", registry=registry
        )
        self.backlog = Gauge("relaygr_trigger_backlog", "Events read and not yet decided.", registry=registry)
        self.lag = Gauge(
            "relaygr_trigger_lag_records",
            "Events of its lanes: unread, and read without their offsets being committable (uncommitted).",
            ["stage"],
            registry=registry,
        )
        self.dead_letters = Counter(
            "relaygr_trigger_dead_letters",
            "Unreadable events, dead-lettered, by reason.",
            ["reason"],
            registry=registry,
        )
        for unreadable in UNREADABLE:  # a rate over a counter that appears with its first event misses it
            self.dead_letters.labels(unreadable)
        self.records_skipped = Counter(
            "relaygr_trigger_records_skipped",
            "Records of a kind (header relaygr-kind) that this release does not know.",
            registry=registry,
        )
        self.dead_letters_waiting = Gauge(
            "relaygr_trigger_dead_letters_waiting", "Dead letters that are not acknowledged yet.", registry=registry
        )
        self.signals_failed = Counter(
            "relaygr_trigger_signals_failed", "Signals that no broker acknowledged.", registry=registry
        )
        self.statuses_unreadable = Counter(
            "relaygr_trigger_statuses_unreadable", "Worker statuses that could not be read.", registry=registry
        )
        self.statuses_unsigned = Counter(
            "relaygr_trigger_statuses_unsigned",
            "Worker statuses without a valid signature by handover.secret, or with one that is too old.",
            registry=registry,
        )

    @property
    def decisions(self) -> Mapping[Reason, int]:
        """Events by decision, since the start."""
        return self._decisions.counts

    def decided(self, reason: Reason, seconds: float) -> None:
        """Count one decision, which took so many seconds."""
        self._decisions.add(reason, seconds)


class TriggerTelemetry:
    """What a trigger tells of its decisions: metrics, traces and, with log_decisions, a line each.

    log_decisions is off by default: a log line costs more than a decision, even one below the level.
    """

    def __init__(self, metrics: TriggerMetrics, tracing: Tracing = OFF, *, log_decisions: bool = False) -> None:
        self.metrics: Final = metrics
        self.tracing: Final = tracing
        self._log_decisions = log_decisions

    def decided(self, event: RequestEvent, lane: int, decision: Decision, seconds: float) -> None:
        """Tell of one decision, which took so many seconds."""
        self.metrics.decided(decision.reason, seconds)
        if self._log_decisions:
            log.debug(
                "decided",
                request_id=event.request_id,
                user_id=event.user_id,
                lane=lane,
                outcome=decision.reason,
                tokens=decision.tokens,
                age_ms=round(decision.age_ms, 1),
                predicted_ms=round(decision.predicted_ms, 2),
                delegate="" if decision.delegate is None else decision.delegate.worker,
            )


class _Decisions(Collector):
    """Counts and times of decisions, in plain numbers: prometheus_client's own metrics take 3 µs an event."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(REASONS, 0)
        self._buckets = [0] * (len(DECISION_BUCKETS) + 1)
        self._seconds = 0.0

    def add(self, reason: Reason, seconds: float) -> None:
        self.counts[reason] += 1
        self._buckets[bisect_left(DECISION_BUCKETS, seconds)] += 1
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily("relaygr_trigger_decisions", "Request events by decision.", labels=["reason"])
        for reason, count in self.counts.items():
            decisions.add_metric([reason], count)
        yield decisions
        bounds = [*map(floatToGoString, DECISION_BUCKETS), "+Inf"]
        yield HistogramMetricFamily(
            "relaygr_trigger_decision_seconds",
            "Time to decide on one event, decoding excluded.",
            buckets=list(zip(bounds, accumulate(self._buckets), strict=True)),
            sum_value=self._seconds,
        )
