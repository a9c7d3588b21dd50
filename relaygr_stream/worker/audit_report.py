"""What an audit found, as metrics and, where scores deviate, as an error and a reason not to be ready.

Knows nothing of how audits are made.
"""

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
#: Audits that deviate, of one process, at which it is not ready any more. A flipped bit spoils one user's prefix KV,
#: which are evicted by the first audit that finds it; two may be chance. Three times means a device, a kernel or a
#: model that computes something else each time. At the default share of 0.01 it takes about 300 relayed rankings.
DEVIATIONS_TO_UNREADY: Final = 3


class AuditReport:
    """Called on the device thread after each audit; prometheus_client's objects take that."""

    def __init__(self, worker: settings.Worker, metrics: WorkerMetrics) -> None:
        self._tolerance = {"exact": AUDIT_TOLERANCE[worker.dtype]}
        self._tolerance["int8"] = max(self._tolerance["exact"], worker.dram_int8_deviation)
        self._metrics = metrics
        self._deviated = 0

    @property
    def distrust(self) -> str:
        """Why this worker's scores are not to be relied on; "" while they are. Stays until the process ends."""
        if self._deviated < DEVIATIONS_TO_UNREADY:
            return ""
        return f"{self._deviated} audits deviated from full inference; see the log, then restart the worker"

    def __call__(self, task: RankTask, deviation: float, ms: float) -> bool:
        """Whether that is too much. deviation: of the relayed scores from full inference, relative. ms: device time
        that the audit took."""
        storage = "int8" if task.approximate else "exact"
        tolerance = self._tolerance[storage]
        agreed = deviation <= tolerance
        self._metrics.audits.labels("agreed" if agreed else "deviated", storage).inc()
        self._metrics.device_seconds.labels("audit").inc(ms / 1e3)
        if not agreed:
            self._deviated += 1
            log.error(
                "a relayed score deviates from full inference",
                **request_log_fields(task.request_id, task.user_id, task.lane, task.outcome),
                deviation=deviation,
                tolerance=tolerance,
                storage=storage,
            )
        return not agreed
