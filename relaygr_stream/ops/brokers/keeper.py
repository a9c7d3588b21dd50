"""Runs one child process and outlives its owner just long enough to clean up after both.

Started as a script of its own by local.py, with a pipe from the owner as standard input. One byte on the pipe means
"kill the child, keep the folder"; the end of the pipe means that the owner is gone, by whatever death, and then the
child dies and the folder goes. Should this process itself be killed, Linux kills the child (PR_SET_PDEATHSIG). Exits
with the child's status as soon as the child ends. Knows nothing of Kafka and imports nothing of this package.

usage: keeper.py FOLDER COMMAND [ARGUMENT…]
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main(folder: Path, command: list[str]) -> int:
    """Run the command until it ends or the owner says so; returns its exit status (negative: killed by a signal)."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_keeper() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    # A fork hook is safe here, and only here: this process has no other thread yet.
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with_keeper,  # noqa: PLW1509
    )
    orphaned = threading.Event()

    def wait_for_owner() -> None:
        if not os.read(0, 1):
            orphaned.set()
        _kill_group(child.pid)

    owner = threading.Thread(target=wait_for_owner, daemon=True)
    owner.start()
    status = child.wait()
    _kill_group(child.pid)  # what the child may have started and left behind
    if orphaned.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # already gone; a zombie group is EPERM on macOS
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]) & 0xFF)
