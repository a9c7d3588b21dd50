"""Copies whole extents between tiers in background threads, byte for byte.

There are two copy lanes with one thread each. Reloads, which a ranking request may wait for, never queue behind spills,
and an accelerator's two copy directions run at once. On an accelerator each lane has its own stream. A third thread
computes digests, for a tier that keeps its copies in a file.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from relaygr_stream.errors import DeviceError

#: Seconds that `close` waits for the copies in progress: 100 times the 0.2 s of a 1 GiB extent at 5 GB/s.
CLOSE_TIMEOUT_S = 20.0


#: Has the device thread look for work, because a copy is over; callable from any thread.
Wake = Callable[[], None]
#: What a copy's thread does before it; what it raises is the copy's failure.
Before = Callable[[], None]


class CopyTicket:
    """One copy, in progress or complete."""

    __slots__ = ("_before", "_done", "_dst", "_error", "_ready", "_src")

    def __init__(
        self, dst: torch.Tensor, src: torch.Tensor, ready: torch.Event | None = None, before: Before | None = None
    ) -> None:
        self._dst: torch.Tensor | None = dst
        self._src: torch.Tensor | None = src
        self._ready = ready
        self._before = before
        self._error: Exception | None = None
        self._done = threading.Event()

    def done(self) -> bool:
        """Whether the copy is complete; does not wait. If it is, every stream may read the whole destination.

        Raises DeviceError, once, if the copy failed; the destination's contents are then undefined.
        """
        if not self._done.is_set():
            return False
        error, self._error = self._error, None
        if error is not None:
            raise DeviceError(f"copying between tiers failed: {error}") from error
        return True

    def wait(self) -> None:
        """Wait until the copy is complete; raises as `done`."""
        self._done.wait()
        self.done()

    def run(self, stream: torch.Stream | None) -> None:
        """Make the copy, once. stream: the current stream of this thread, the lane's; None on a CPU."""
        assert self._dst is not None and self._src is not None
        try:
            if self._before is not None:
                self._before()
            if stream is not None and self._ready is not None:
                stream.wait_event(self._ready)
            self._dst.copy_(self._src, non_blocking=True)
            if stream is not None:
                finished = torch.Event(stream.device, blocking=True)  # sleeps rather than spins
                finished.record(stream)
                finished.synchronize()
        except Exception as error:
            if stream is not None:
                with suppress(Exception):  # the failed copy must not write into memory that is reused
                    stream.synchronize()
            self.finish(error)
        else:
            self.finish(None)

    def finish(self, error: Exception | None) -> None:
        """Complete the ticket. error: why there is no copy."""
        self._error = error
        self._dst = self._src = self._ready = self._before = None
        self._done.set()


class _CopyLane:
    """A thread that makes one copy after the other, on its own stream if the device has streams."""

    def __init__(self, name: str, device: torch.device, wake: Wake) -> None:
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
        ticket.finish(DeviceError("the copy engine is closed"))

    def close(self) -> None:
        """Fail the waiting copies; the copy in progress continues."""
        with self._changed:
            self._closed = True
            abandoned, self._waiting = list(self._waiting), deque()
            self._changed.notify()
        for ticket in abandoned:
            ticket.finish(DeviceError("the copy engine was closed before this copy began"))

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
            ticket.run(stream)
            self._wake()


class CopyEngine:
    """Copies tensors in the background. The thread that owns the device submits copies and polls their tickets.

    device: the device of the faster tier; with "cpu" both tiers are host memory.
    wake: called after each copy from the engine's threads; it must be quick and must not raise. It lets the device
        thread sleep until a copy is complete.
    """

    def __init__(self, device: torch.device, wake: Wake = lambda: None) -> None:
        self._device = device
        self._wake = wake
        self._closed = False
        self._digests: _CopyLane | None = None
        self._lanes = {urgent: _CopyLane(name, device, wake) for urgent, name in ((True, "reload"), (False, "spill"))}

    def submit(
        self, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False, before: Before | None = None
    ) -> CopyTicket:
        """Copy `src` into `dst`, after the work that is now on the current stream.

        Until the ticket is complete, the caller must not write `src`, nor write or read `dst`. An urgent copy (a
        reload) does not wait for copies that are not urgent. After `close` the ticket fails at once.
        Raises ValueError if the tensors differ in shape or type.
        """
        if dst.shape != src.shape or dst.dtype != src.dtype:
            raise ValueError(
                f"cannot copy {tuple(src.shape)} of {src.dtype} into {tuple(dst.shape)} of {dst.dtype}: "
                "extents are copied whole, without conversion"
            )
        ready = None
        if self._device.type != "cpu":
            ready = torch.Event(self._device)
            ready.record(torch.accelerator.current_stream(self._device))
        return self.enqueue(CopyTicket(dst, src, ready, before), urgent=urgent)

    def enqueue(self, ticket: CopyTicket, *, urgent: bool) -> CopyTicket:
        """Have a lane's thread make this copy, after those that it has."""
        self._lanes[urgent].submit(ticket)
        return ticket

    def compute(self, ticket: CopyTicket) -> CopyTicket:
        """Have the thread for digests run this ticket, after those that it has."""
        if self._digests is None:
            self._digests = _CopyLane("digest", torch.device("cpu"), self._wake)
            if self._closed:
                self._digests.close()
        self._digests.submit(ticket)
        return ticket

    def close(self) -> None:
        """Finish the copies in progress; waiting copies fail with DeviceError. A second call is harmless.

        Raises DeviceError if a copy does not finish within CLOSE_TIMEOUT_S; its thread then ends with the process.
        """
        self._closed = True
        lanes = [*self._lanes.values(), *([self._digests] if self._digests else [])]
        for lane in lanes:
            lane.close()
        for lane in lanes:
            if not lane.join(CLOSE_TIMEOUT_S):
                raise DeviceError(
                    f"a copy between tiers on {self._device} has not finished {CLOSE_TIMEOUT_S:g} s after close"
                )
