"""The worker's metrics. Their names are part of the interface: docs/reference/metrics.md and the dashboard use them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from relaygr_stream.engine.scheduler import Snapshot
from relaygr_stream.errors import REASONS
from relaygr_stream.settings.schema import Relay, Settings
from relaygr_stream.wire.latencies import BOUNDS_S
from relaygr_stream.wire.messages import FOUND
from relaygr_stream.wire.worker_status import WITHIN_SLO

#: What becomes of signals and of prefill jobs, and what the device works at, as the engine's counters name it.
SIGNAL_RESULTS: Final = (
    *("computed", "extended", "hbm", "dram", "joined", "duplicate", "expired", "ranked", "cancelled"),
    *("over_footprint", "no_room", "outranked", "delegated", "over_delegated", "over_quota"),
)
JOB_RESULTS: Final = ("finished", "late", "starved", "cancelled", "failed", "joined")
WORK: Final = ("pre_infer", "ranking", "full")


class Answered:
    """Running totals of answers as a status states them: by status and outcome, and the latencies by outcome."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {WITHIN_SLO: 0.0}
        self.latencies: dict[str, list[int]] = {}

    def add(self, *names: str) -> None:
        """Count one more of each of these."""
        for name in names:
            self.counters[name] = self.counters.get(name, 0.0) + 1.0

    def ranked(self, outcome: str, seconds: float, *, within: bool) -> None:
        """Count an answer with scores. within: its SLO."""
        self.add("answers_ok", f"outcome_{outcome}", *((WITHIN_SLO,) if within else ()))
        self.latencies.setdefault(outcome, [0] * (len(BOUNDS_S) + 1))[bisect_left(BOUNDS_S, seconds)] += 1


class WorkerMetrics:
    """Prometheus metrics of one worker process, and what its statuses tell of them.

    slo_ms: relay.slo_ms. scenario: of its group, a label of the series of answers; "": they have no such label.
    slos_ms: of the scenarios that the group serves, where it serves several: each has series of its own.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        slo_ms: float = Relay().slo_ms,
        scenario: str = "",
        slos_ms: Mapping[str, float] | None = None,
    ) -> None:
        slos_ms = slos_ms or {}
        self._slo_s = {"": slo_ms / 1e3} | {name: each / 1e3 for name, each in slos_ms.items()}
        of = ("scenario",) if scenario else ()
        self._labels: dict[str, tuple[str, ...]] = {
            "": (scenario,) if scenario else (),
            **{name: (name,) for name in slos_ms},
        }

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, *labels: str) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=BOUNDS_S)

        self.answers = counter(
            "relaygr_answers", "Answers by status and by where the prefix was found", "status", "outcome", *of
        )
        self.ranking_seconds = histogram(
            "relaygr_ranking_seconds",
            "From reading a ranking request to its reply, the read of its history included; of those with scores",
            "outcome",
            *of,
        )
        self.within_slo = counter(
            "relaygr_rankings_within_slo", "Of those with scores, the ones within the SLO of being read", *of
        )
        self.queued_seconds = histogram(
            "relaygr_ranking_queued_seconds", "Of that, until the device first worked for it"
        )
        self.signals = counter("relaygr_signals", "Pre-infer signals by what became of them", "result")
        self.device_seconds = counter("relaygr_device_seconds", "Device time by kind of work", "work")
        self.cache_events = counter("relaygr_cache_events", "What happened in the cache tiers", "event")
        self.hbm_bytes = gauge("relaygr_hbm_bytes", "HBM tier", "kind")
        self.dram_bytes = gauge("relaygr_dram_bytes", "DRAM tier", "kind")
        self.entries = gauge("relaygr_cache_entries", "Users with prefix KV in either tier")
        self.pins = gauge("relaygr_pins", "Admitted requests whose ranking is awaited")
        self.pins_expired = counter("relaygr_pins_expired", "Life windows that ended without a ranking")
        self.waiting = gauge("relaygr_rankings_waiting", "Ranking requests without an answer")
        self.backlog = gauge(
            "relaygr_pre_infer_backlog",
            "Prefill jobs not finished, those of full inference included, without one in the scratch region",
        )
        self.pre_infer_waiting = gauge(
            "relaygr_pre_infer_waiting_seconds", "Predicted device time of the pre-inferences not finished"
        )
        self.pre_infer_late = gauge(
            "relaygr_pre_infer_late_seconds", "How overdue the most overdue pre-inference not finished is"
        )
        self.jobs = counter("relaygr_pre_infer_jobs", "Prefill jobs by how they ended", "result")
        self.queue_seconds = gauge("relaygr_queue_seconds", "Recent delay of a ranking before the device takes it")
        self.lanes = gauge("relaygr_lanes", "Lanes owned")
        self.lag = gauge(
            "relaygr_lag_records",
            "Records of the owned lanes: unread, and read without their offsets being committable (uncommitted)",
            "stage",
        )
        self.name_conflicts = counter(
            "relaygr_name_conflicts", "Statuses of another process with this worker's name, since this one started"
        )
        self.lane_changes = counter("relaygr_lane_changes", "Lanes gained and lost", "change")
        self.audits = counter(
            "relaygr_audits",
            "Rankings scored twice, by verdict; storage is always exact",
            "verdict",
            "storage",
        )
        self.audit_deviation = gauge(
            "relaygr_audit_deviation_max",
            "Largest relative deviation of relayed from full scores; in half precision, of root mean squares",
            "storage",
        )
        self.forwards = counter(
            "relaygr_forwards", "Rankings refused here: sent to another worker, or why not", "result"
        )
        self.rankings_read = counter(
            "relaygr_rankings_read", "Ranking requests read, by how often they were forwarded before", "hops"
        )
        self.records_skipped = counter(
            "relaygr_records_skipped", "Records of a kind (header relaygr-kind) that this release does not know"
        )
        self.dead_letters = counter("relaygr_dead_letters", "Messages that could not be read, by reason", "reason")
        self.dead_letters_waiting = gauge("relaygr_dead_letters_waiting", "Dead letters that their topic has not taken")
        self.clock_clamped = counter("relaygr_clock_clamped", "Requests whose sender's clock cannot be right")
        self.misnamed = counter(
            "relaygr_scenario_unknown",
            "Messages that name a scenario which this group does not serve: served as its own",
        )
        self.statuses_unreadable = counter(
            "relaygr_statuses_unreadable", "Other workers' statuses that could not be read or were out of bounds"
        )
        self.statuses_unsigned = counter(
            "relaygr_statuses_unsigned",
            "Worker statuses without a valid signature by handover.secret, or with one that is too old",
        )
        self.unknown_items = counter(
            "relaygr_unknown_items", "Item ids outside the model's vocabulary, in behaviours and candidates computed"
        )
        self.reply_failures = counter("relaygr_reply_failures", "Answers that could not be produced at once")
        self.device_stall_seconds = gauge(
            "relaygr_device_stall_seconds", "Time since the device thread last finished a step or looked for work"
        )
        self.model_info = gauge(
            "relaygr_model_info", "1; the model's version and a note on its weights", "version", "note"
        )
        self._begin()
        #: What each of a snapshot's totals counts: a counter, its label's value, and its units a unit of the total.
        self._counted: dict[str, tuple[Counter, str | None, float]] = {
            **{f"signal_{result}": (self.signals, result, 1.0) for result in SIGNAL_RESULTS},
            **{f"job_{result}": (self.jobs, result, 1.0) for result in JOB_RESULTS},
            **{f"{work}_ms": (self.device_seconds, work, 1e-3) for work in WORK},
            "unknown_items": (self.unknown_items, None, 1.0),
        }
        #: What each of its numbers is the level of.
        self._levels: dict[str, tuple[Gauge, float]] = {
            "hbm_used": (self.hbm_bytes.labels("used"), 1.0),
            "pinned_bytes": (self.hbm_bytes.labels("pinned"), 1.0),
            "dram_used": (self.dram_bytes.labels("used"), 1.0),
            "entries": (self.entries, 1.0),
            "pins": (self.pins, 1.0),
            "waiting": (self.waiting, 1.0),
            "backlog": (self.backlog, 1.0),
            "queue_ms": (self.queue_seconds, 1e-3),
            "pre_infer_waiting_ms": (self.pre_infer_waiting, 1e-3),
            "pre_infer_late_s": (self.pre_infer_late, 1.0),
        }
        # For `worker-status`: running totals by status and by outcome, and the latencies as it states them.
        self.whole: Final = Answered()
        self.of: Final = {name: Answered() for name in slos_ms}
        self._totals: dict[tuple[Counter, str | None], float] = {}

    def _begin(self) -> None:
        # Known label values from the start: a rate over a counter that appears with its first event misses that event,
        # and a share of events that never came would be no number instead of 0.
        for labels in {*self._labels.values()}:
            for outcome in FOUND:
                self.answers.labels("ok", outcome, *labels)
            if labels:
                self.within_slo.labels(*labels)
        for reason in REASONS:
            self.dead_letters.labels(reason)
        for verdict in ("agreed", "deviated"):
            self.audits.labels(verdict, "exact")
        for result in ("sent", "late", "alone", "hops", "unsent", "delegate", "delegate_gone"):
            self.forwards.labels(result)

    @classmethod
    def of_settings(cls, registry: CollectorRegistry, settings: Settings) -> WorkerMetrics:
        """Of a worker with these settings."""
        slos_ms = {name: each.slo_ms for name, each in settings.sharing.items()}
        return cls(registry, settings.relay.slo_ms, settings.scenario, slos_ms)

    def export(self, now: Snapshot) -> None:
        """Bring the metrics of the scheduler and its cache up to this snapshot."""
        for name, (counter, label, factor) in self._counted.items():
            self._advance(counter, label, factor * now.totals[name])
        for name, total in now.cache.items():
            self._advance(self.cache_events, name, total)
        self._advance(self.pins_expired, None, now.pins_expired)
        for name, (gauge, factor) in self._levels.items():
            gauge.set(factor * getattr(now, name))
        self.audit_deviation.labels("exact").set(now.totals["audit_deviation"])

    def answer(self, status: str, scenario: str = "") -> None:
        """An answer without scores leaves. scenario: that it is charged to, where the group serves several."""
        self.answers.labels(status, "none", *self._labels[scenario]).inc()
        for each in self._told(scenario):
            each.add(f"answers_{status}")

    def ranked(self, outcome: str, seconds: float, queued_s: float, scenario: str = "") -> None:
        """An answer with scores leaves, so long after its request was read; queued_s: until the device began."""
        labels, within = self._labels[scenario], seconds <= self._slo_s[scenario]
        self.answers.labels("ok", outcome, *labels).inc()
        self.ranking_seconds.labels(outcome, *labels).observe(seconds)
        self.queued_seconds.observe(queued_s)
        if within:
            (self.within_slo.labels(*labels) if labels else self.within_slo).inc()
        for each in self._told(scenario):
            each.ranked(outcome, seconds, within=within)

    def _told(self, scenario: str) -> tuple[Answered, ...]:
        return (self.whole, self.of[scenario]) if scenario else (self.whole,)

    def _advance(self, counter: Counter, label: str | None, total: float) -> None:
        """Bring a counter (of one label, or none) up to a running total kept elsewhere."""
        key = (counter, label)
        step = total - self._totals.get(key, 0.0)
        if step > 0:
            (counter if label is None else counter.labels(label)).inc(step)
            self._totals[key] = total
