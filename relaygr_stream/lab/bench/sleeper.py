"""Sleeps a little, again and again, and writes when it woke and how late that was, as two doubles.

Started as a script by wakes.py, so that it waits for a core and for nothing else: no event loop, no lock of an
interpreter that has other work. Ends when nobody reads any more. Imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import time

PERIOD_S = 0.005
#: Wakes told at once, ten times a second; each as WAKE: time.monotonic() and seconds too late.
TOLD = 20
WAKE = struct.Struct("=dd")


def main() -> None:
    """Until the pipe breaks."""
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        while True:
            told = bytearray()
            while len(told) < TOLD * WAKE.size:
                due = time.monotonic() + PERIOD_S
                time.sleep(PERIOD_S)
                now = time.monotonic()
                told += WAKE.pack(now, now - due)
            sys.stdout.buffer.write(told)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
