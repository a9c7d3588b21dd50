"""Runs one child process, and cleans up after its owner has ended.

kept.py starts it as a script, with a pipe from the owner as standard input. One byte on the pipe means "kill the child,
keep the folder". The end of the pipe means that the owner has ended in any way: the child is killed and the folder is
removed. If this process itself is killed, Linux kills the child (PR_SET_PDEATHSIG). It exits with the child's status as
soon as the child ends. It imports nothing of this package, so that it starts fast.

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
    """Run the command until it or its owner ends; returns its exit status, negative if a signal killed it."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_keeper() -> None:
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    # preexec_fn is safe here: this process has no other thread yet.
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
    _kill_group(child.pid)  # processes that the child started and left
    if orphaned.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return status


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # ended already; a zombie group is EPERM on macOS
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]) & 0xFF)
