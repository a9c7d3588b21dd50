"""A process that starts leaves the CPU to its neighbours until it has something to offer.

Importing torch and making a model takes seconds of a core, which workers that serve on the same machine miss. Linux
lets anyone make a thread nicer, but not less nice again; what can be taken back is the niceness of a whole session
(autogroup), and sessions are what the CPU is shared out among where nothing else is set up. So a process that leads a
session, as under `relaygr up` and systemd, makes that nice, and undoes it.

No effect where cgroups share the CPU out (containers; units with CPU weights), where autogroups are off, and outside
of Linux. Knows nothing of what starts.
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

SESSION: Final = Path("/proc/self/autogroup")
#: The kernel takes one change in 100 ms on the whole machine from those without privileges: others may want one, too.
PAUSE_S: Final = 0.02
#: Workers that start at once get their turns within this, or start as they are.
PATIENCE_S: Final = 0.5
#: Beside many busy neighbours a start could take minutes; after this it is a process like any other.
MOST_S: Final = 10.0


class Yielding:
    """nice: 1 to 19 as of nice(1), 0: not at all. Begins when made; ends at `end`, or by itself after most_s."""

    def __init__(self, nice: int, most_s: float = MOST_S) -> None:
        self._lock = threading.Lock()
        self._before: int | None = None  # what there is to go back to
        self._timer = threading.Timer(most_s, self.end)
        self._timer.daemon = True
        before = _session_nice()
        if before is not None and 0 <= before < nice and _lower(nice):  # below zero there is no way back
            self._before = before
            self._timer.start()

    def end(self) -> None:
        """Be as before; returns when that is so. Any thread may call it, any number of times."""
        self._timer.cancel()
        with self._lock:
            while self._before is not None and not _set_session_nice(self._before):
                time.sleep(PAUSE_S)
            self._before = None


def _lower(nice: int) -> bool:
    patient_until = time.monotonic() + PATIENCE_S
    while not (done := _set_session_nice(nice)) and time.monotonic() < patient_until:
        time.sleep(PAUSE_S)
    return done


def _session_nice() -> int | None:
    """None: there is no such thing here, or this process does not lead the session, which others are in."""
    with suppress(OSError, AttributeError):  # AttributeError: Windows has no sessions
        if os.getsid(0) == os.getpid() and (found := re.search(r"nice (-?\d+)", SESSION.read_text(encoding="ascii"))):
            return int(found[1])
    return None


def _set_session_nice(nice: int) -> bool:
    """False: not now."""
    try:
        SESSION.write_text(str(nice), encoding="ascii")
    except OSError:
        return False
    return True
