"""A script that sleeps repeatedly and writes the time and the delay of each wake, as two doubles.

wakes.py starts it as a process, so that it waits only for a core: it has no event loop and shares no interpreter lock.
It ends when its output is closed. It imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import time

PERIOD_S = 0.005
#: Wakes per write, at ten writes a second; each is a WAKE: time.monotonic() and the delay in seconds.
TOLD = 20
WAKE = struct.Struct("=dd")


def main() -> None:
    """Run until the pipe breaks."""
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
