"""What an audit found, as metrics and, where scores deviate, as an error. Knows nothing of how audits are made."""

from __future__ import annotations

from typing import Final

import structlog

from relaygr_stream import settings
from relaygr_stream.telemetry.logs import request_log_fields
from relaygr_stream.worker.metrics import WorkerMetrics
from relaygr_stream.worker.tasks import RankTask

log = structlog.get_logger(__name__)

#: A relayed score may differ from full inference by this much, relative (DESIGN §8: 1e-5 in float32). In half
#: precision the two paths round differently; a hundredth is two bfloat16 steps.
AUDIT_TOLERANCE: Final = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


class AuditReport:
    """Called on the device thread after each audit; prometheus_client's objects take that."""

    def __init__(self, worker: settings.Worker, metrics: WorkerMetrics) -> None:
        self._tolerance = {"exact": AUDIT_TOLERANCE[worker.dtype]}
        self._tolerance["int8"] = max(self._tolerance["exact"], worker.dram_int8_deviation)
        self._metrics = metrics

    def __call__(self, task: RankTask, deviation: float, ms: float) -> None:
        """deviation: of the relayed scores from full inference, relative. ms: device time that the audit took."""
        storage = "int8" if task.approximate else "exact"
        tolerance = self._tolerance[storage]
        agreed = deviation <= tolerance
        self._metrics.audits.labels("agreed" if agreed else "deviated", storage).inc()
        self._metrics.device_seconds.labels("audit").inc(ms / 1e3)
        if not agreed:
            log.error(
                "a relayed score deviates from full inference",
                **request_log_fields(task.request_id, task.user_id, task.lane, task.outcome),
                deviation=deviation,
                tolerance=tolerance,
                storage=storage,
            )
