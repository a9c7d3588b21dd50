"""Health: tells /readyz and /healthz whether the device thread and the brokers are alive and the scores right, and ends
a worker whose device hangs."""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from relaygr_stream import settings
from relaygr_stream.bus.broker_errors import no_broker
from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer
from relaygr_stream.engine.commands import Measured, RankTask
from relaygr_stream.errors import DeviceError
from relaygr_stream.telemetry.logs import request_log_fields
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.worker.device import DeviceThread
from relaygr_stream.worker.metrics import WorkerMetrics

log = structlog.get_logger(__name__)

WATCH_S: Final = 0.25  # health is as fresh as worker-status is by default
#: Relayed scores may differ from full inference by this much (engine/audit.py: audit_deviation). In half precision it
#: is 16 units of roundoff (2^-9 and 2^-12): a model of 8 layers stays below 8, another history comes to more than 32
#: (tests/unit/engine/test_audit.py).
AUDIT_TOLERANCE: Final = {"float32": 1e-5, "bfloat16": 16 * 2.0**-9, "float16": 16 * 2.0**-12}
#: After this many deviating audits the process is no longer ready. A flipped bit spoils one user's
#: prefix KV, which are evicted by the first audit that finds it; two may be chance. Three times means a device, a
#: kernel or a model that computes something else each time. At the default share of 0.01 it takes about 300 relayed
#: rankings.
DEVIATIONS_TO_UNREADY: Final = 3
#: The thread's pulse may pause for one long operation; past this share of the poll limit the worker is not ready, and
#: its lanes are given up at the limit.
STALL_SHARE: Final = 0.5


class Watch:
    """Looks at the device thread, the consumer and the audits several times a second."""

    def __init__(self, context: ProcessContext, device: DeviceThread, limit_s: float, audits: AuditReport) -> None:
        self._audits = audits
        self._context = context
        self._device = device
        self._limit_s = limit_s
        self._stuck_s = 0.0

    @property
    def progressing(self) -> bool:
        """The device thread moves, as far as the group is concerned."""
        return self._stuck_s < STALL_SHARE * self._limit_s

    async def run(self, consumer: LaneConsumer, *producers: Producer) -> None:
        """For ever. Raises DeviceError when the device thread has not moved for the limit.

        Time counts as it passes here: a process that was stopped and continued has not hung.
        """
        turns = self._device.turns
        while True:
            if self._stuck_s >= self._limit_s:
                reason = f"the device thread has not moved for {self._stuck_s:.1f} s"
                self._context.set_live(False, reason)
                self._context.set_ready(False, reason)
                raise DeviceError(
                    f"{reason}: the device hangs, or one operation takes longer than kafka.max_poll_interval_ms"
                )
            if not self.progressing:
                self._context.set_ready(False, f"the device thread has not moved for {self._stuck_s:.1f} s")
            else:
                troubles = [consumer.trouble, *(producer.trouble for producer in producers), self._audits.distrust]
                trouble = next(filter(None, troubles), None)
                silence = no_broker(self._context.settings.kafka.bootstrap)
                self._context.set_ready(consumer.healthy and not trouble, trouble or silence)
            await asyncio.sleep(WATCH_S)
            moved, turns = self._device.turns != turns, self._device.turns
            self._stuck_s = 0.0 if moved else self._stuck_s + WATCH_S


class AuditReport:
    """Turns audits into metrics, errors and readiness. Called on the device thread; prometheus_client allows that."""

    def __init__(self, worker: settings.Worker, metrics: WorkerMetrics) -> None:
        self._tolerance = AUDIT_TOLERANCE[worker.dtype]
        self._metrics = metrics
        self._deviated = 0

    @property
    def distrust(self) -> str:
        """Why this worker's scores cannot be trusted; "" while they can. It stays until the process ends."""
        if self._deviated < DEVIATIONS_TO_UNREADY:
            return ""
        return f"{self._deviated} audits deviated from full inference; see the log, then restart the worker"

    def __call__(self, task: RankTask, measured: Measured, deviation: float, ms: float) -> bool:
        """Whether the deviation is too large.

        deviation: relative, of the relayed scores from full inference. ms: device time of the audit.
        """
        agreed = deviation <= self._tolerance
        self._metrics.audits.labels("agreed" if agreed else "deviated", "exact").inc()
        self._metrics.device_seconds.labels("audit").inc(ms / 1e3)
        if not agreed:
            self._deviated += 1
            log.error(
                "a relayed score deviates from full inference",
                **request_log_fields(task.request_id, task.user_id, task.lane, measured.outcome),
                deviation=deviation,
                tolerance=self._tolerance,
            )
        return not agreed
