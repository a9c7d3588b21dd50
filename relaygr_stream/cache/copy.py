"""Copies of whole extents between tiers, converted on the way where the tiers keep different forms, off the scoring
path. Knows nothing of entries or of who waits, nor of what a conversion does.

Two lanes, one thread each: reloads, which a ranking request may be waiting for, never queue behind spills, and an
accelerator's two copy directions run at once. On an accelerator each lane has a stream of its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from relaygr_stream.errors import DeviceError

#: How long `close` waits for the copies under way: 100 times what a 1 GiB extent takes at 5 GB/s, 0.2 s.
CLOSE_TIMEOUT_S = 20.0

#: convert(dst, src): fill dst from src, on the current stream, which need not be waited for.
Convert = Callable[[torch.Tensor, torch.Tensor], None]


def unchanged(dst: torch.Tensor, src: torch.Tensor) -> None:
    """The conversion that is none."""
    dst.copy_(src, non_blocking=True)


class CopyTicket:
    """One copy, under way or done. seconds: how long it took once it began, when it is done."""

    __slots__ = ("_convert", "_done", "_dst", "_error", "_ready", "_src", "seconds")

    def __init__(
        self, dst: torch.Tensor, src: torch.Tensor, ready: torch.Event | None, convert: Convert = unchanged
    ) -> None:
        self._dst: torch.Tensor | None = dst
        self._src: torch.Tensor | None = src
        self._convert = convert
        self._ready = ready
        self.seconds = 0.0
        self._error: Exception | None = None
        self._done = threading.Event()

    def done(self) -> bool:
        """Whether it is over, without waiting; if so, all of the destination is there for any stream.

        Raises DeviceError if the copy failed, once; the destination's contents are then undefined.
        """
        if not self._done.is_set():
            return False
        error, self._error = self._error, None
        if error is not None:
            raise DeviceError(f"copying between tiers failed: {error}") from error
        return True

    def wait(self) -> None:
        """Return when it is over; raises as `done`."""
        self._done.wait()
        self.done()

    def _run(self, stream: torch.Stream | None) -> None:
        """In the lane's thread, whose current stream is `stream`."""
        assert self._dst is not None and self._src is not None
        try:
            start = time.perf_counter()
            if stream is not None and self._ready is not None:
                stream.wait_event(self._ready)
            self._convert(self._dst, self._src)
            if stream is not None:
                finished = torch.Event(stream.device, blocking=True)  # sleeps rather than spins
                finished.record(stream)
                finished.synchronize()
            self.seconds = time.perf_counter() - start
        except Exception as error:
            if stream is not None:
                with suppress(Exception):  # what was begun must not write into memory that others get next
                    stream.synchronize()
            self._finish(error)
        else:
            self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        self._error = error
        self._dst = self._src = self._ready = None
        self._done.set()


class _Lane:
    """A thread that makes one copy after the other, on a stream of its own where the device has streams."""

    def __init__(self, name: str, device: torch.device, wake: Callable[[], None]) -> None:
        self._device = device
        self._wake = wake
        self._waiting: deque[CopyTicket] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"relaygr-{name}", daemon=True)
        self._thread.start()

    def submit(self, ticket: CopyTicket) -> None:
        with self._changed:
            if not self._closed:
                self._waiting.append(ticket)
                self._changed.notify()
                return
        ticket._finish(DeviceError("the copy engine is closed"))

    def close(self) -> None:
        """Fail what waits; what is being copied goes on."""
        with self._changed:
            self._closed = True
            abandoned, self._waiting = list(self._waiting), deque()
            self._changed.notify()
        for ticket in abandoned:
            ticket._finish(DeviceError("the copy engine was closed before this copy began"))

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        stream = None
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device)
            stream = torch.Stream(self._device)
            torch.accelerator.set_stream(stream)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                ticket = self._waiting.popleft()
            ticket._run(stream)
            self._wake()


class CopyEngine:
    """Copies tensors in the background; submitted to and polled from the thread that owns the device.

    device: where the faster tier is; with "cpu" both tiers are host memory.
    wake: called after each copy, from the engine's threads: it must be quick and must not raise. With it the device
        thread can sleep until there is something to poll.
    """

    def __init__(self, device: torch.device, wake: Callable[[], None] = lambda: None) -> None:
        self._device = device
        self._lanes = {urgent: _Lane(name, device, wake) for urgent, name in ((True, "reload"), (False, "spill"))}

    def submit(
        self, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False, convert: Convert = unchanged
    ) -> CopyTicket:
        """Copy `src` into `dst`, converted, after all work that is now on the current stream.

        Until the ticket is done `src` must not be written, `dst` neither written nor read. `urgent` (a reload) does
        not wait for copies that are not. After `close` the ticket fails at once. ValueError if the tensors do not match
        and nothing converts them.
        """
        if convert is unchanged and (dst.shape != src.shape or dst.dtype != src.dtype):
            raise ValueError(
                f"cannot copy {tuple(src.shape)} of {src.dtype} into {tuple(dst.shape)} of {dst.dtype}: "
                "extents are copied whole, without conversion"
            )
        ready = None
        if self._device.type != "cpu":
            ready = torch.Event(self._device)
            ready.record(torch.accelerator.current_stream(self._device))
        ticket = CopyTicket(dst, src, ready, convert)
        self._lanes[urgent].submit(ticket)
        return ticket

    def close(self) -> None:
        """Finish the copies under way; those still waiting fail with DeviceError. May be called again.

        DeviceError when one does not finish within CLOSE_TIMEOUT_S; its thread then ends with the process.
        """
        for lane in self._lanes.values():
            lane.close()
        for lane in self._lanes.values():
            if not lane.join(CLOSE_TIMEOUT_S):
                raise DeviceError(
                    f"a copy between tiers on {self._device} has not finished {CLOSE_TIMEOUT_S:g} s after close"
                )
