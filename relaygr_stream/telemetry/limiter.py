"""A limit on repeated log lines: a burst of bad messages gives a few lines and a count."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from relaygr_stream.telemetry.clocks import Clock

#: At this many kinds of line, all counts are written and dropped, to bound memory.
MAX_KINDS: Final = 256

Write = Callable[..., Any]  # a logger's method: write(event, **fields)

_all: weakref.WeakSet[LogLimiter] = weakref.WeakSet()
_all_lock: Final = threading.Lock()


class LogLimiter:
    """Passes the first lines of each kind per interval, counts the rest, and then logs the count.

    The count is logged by `flush`, which `process()` calls every second for every limiter, or before the next line of
    that kind. Thread-safe. first: lines per interval. clock: seconds.
    """

    def __init__(self, first: int = 5, interval_s: float = 10.0, clock: Clock = time.monotonic) -> None:
        self._first = first
        self._interval = interval_s
        self._clock = clock
        self._windows: dict[str, _Window] = {}
        self._lock = threading.Lock()
        with _all_lock:
            _all.add(self)

    def limited(self, write: Write, kind: str) -> Write:
        """`write` (for example log.warning) with the limit of this kind: limited(log.warning, "malformed")("…", …).

        kind: identifies lines that count as the same; it must have few values, so no text from messages.
        """
        return partial(self._write, write, kind)

    def flush(self, *, all_windows: bool = False) -> None:
        """Log the counts of the intervals that have ended. all_windows: of all intervals, at the end of the process."""
        now = self._clock()
        with self._lock:
            over = {kind: w for kind, w in self._windows.items() if all_windows or now >= w.ends}
            for kind in over:
                del self._windows[kind]
        for window in over.values():
            self._summary(window)

    def _write(self, write: Write, kind: str, event: str, **fields: Any) -> None:
        now = self._clock()
        if len(self._windows) >= MAX_KINDS:
            self.flush(all_windows=True)
        with self._lock:
            window, over = self._windows.get(kind), None
            if window is None or now >= window.ends:
                window, over = _Window(write, event, now + self._interval), window
                self._windows[kind] = window
            window.passed += 1
            passes = window.passed <= self._first
            window.held += not passes
        if over is not None:
            self._summary(over)
        if passes:
            write(event, **fields)

    def _summary(self, window: _Window) -> None:
        if window.held:
            window.write(f"more of these: {window.event}", held_back=window.held, interval_s=self._interval)


def flush_limiters(*, all_windows: bool = False) -> None:
    """Flush every limiter of this Python process."""
    with _all_lock:
        limiters = list(_all)
    for limiter in limiters:
        limiter.flush(all_windows=all_windows)


class LibraryLines(logging.Filter):
    """Limits repeated lines of a library inside another program, whose logging is not ours: a filter of its loggers.

    Lines of one logger and template are of one kind, for a line names another node or partition each time.
    """

    def __init__(self, limiter: LogLimiter | None = None) -> None:
        super().__init__()
        self._limiter = limiter or LogLimiter()

    def attach(self, library: str) -> None:
        """Limit the lines of all loggers that the library has by now. A second call changes nothing."""
        for name in list(logging.root.manager.loggerDict):
            if name == library or name.startswith(f"{library}."):
                logging.getLogger(name).addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line passes."""
        if hasattr(record, "relaygr_held_back"):
            return True
        name, level, passes = record.name, record.levelno, False

        def write(event: str, held_back: int = 0, interval_s: float = 0.0) -> None:
            nonlocal passes
            passes = True
            if held_back:
                counted = {"relaygr_held_back": held_back}
                logging.getLogger(name).log(level, "%s (%d in %g s)", event, held_back, interval_s, extra=counted)

        template = str(record.msg).partition("\n")[0]
        self._limiter.limited(write, f"{name}: {template}")(template)
        return passes


#: Of this Python process, for the library below its Kafka clients.
library_lines: Final = LibraryLines()


class _Window:
    """One kind of line in one interval."""

    __slots__ = ("ends", "event", "held", "passed", "write")

    def __init__(self, write: Write, event: str, ends: float) -> None:
        self.write = write
        self.event = event
        self.ends = ends
        self.passed = 0
        self.held = 0
