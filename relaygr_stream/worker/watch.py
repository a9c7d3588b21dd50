"""Health: tells /readyz and /healthz whether the device thread and the brokers are alive and the scores right, and ends
a worker whose device hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from relaygr_stream.bus.lanes import LaneConsumer
from relaygr_stream.bus.producer import Producer
from relaygr_stream.errors import DeviceError
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.worker.device import DeviceThread

WATCH_S: Final = 0.25  # health is as fresh as worker-status is by default
#: The thread's pulse may pause for one long operation; past this share of the poll limit the worker is not ready, and
#: its lanes are given up at the limit.
STALL_SHARE: Final = 0.5


class Watch:
    """Looks at the device thread and the consumer several times a second. distrust(): why scores cannot be trusted; ""
    while they can."""

    def __init__(
        self, context: ProcessContext, device: DeviceThread, limit_s: float, distrust: Callable[[], str] = str
    ) -> None:
        self._distrust = distrust
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
                troubles = [consumer.trouble, *(producer.trouble for producer in producers), self._distrust()]
                trouble = next(filter(None, troubles), None)
                self._context.set_ready(consumer.healthy and not trouble, trouble or "no broker answers")
            await asyncio.sleep(WATCH_S)
            moved, turns = self._device.turns != turns, self._device.turns
            self._stuck_s = 0.0 if moved else self._stuck_s + WATCH_S
