"""The hand-over's metrics. Their names are part of the interface: docs/operations.md has them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class HandoverMetrics:
    """way: "given" to other workers or "taken" from them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.entries = Counter("relaygr_handover_entries", "Prefix KV handed over", ["way"], registry=registry)
        self.bytes = Counter("relaygr_handover_bytes", "Bytes of them", ["way"], registry=registry)
        self.declined = Counter(
            "relaygr_handover_declined",
            "Offered prefix KV not taken: as good was held, or all there was worth more (full)",
            ["reason"],
            registry=registry,
        )
        self.seconds = Counter(
            "relaygr_handover_seconds", "Time of sessions, waits included", ["way"], registry=registry
        )
        self.failed = Counter(
            "relaygr_handover_failed", "Sessions that were refused or broke off", ["way"], registry=registry
        )
