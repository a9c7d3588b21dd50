"""A child process that does not outlive this one: a keeper kills it and removes its folder then.

`KeptProcess` starts this file as a script, the keeper, with a pipe from the owner as standard input. One byte on the
pipe means "kill the child, keep the folder". The end of the pipe means that the owner has ended in any way: the child
is killed and the folder is removed. If the keeper itself is killed, Linux kills the child (PR_SET_PDEATHSIG). It exits
with the child's status as soon as the child ends. This file imports nothing of the package, so that the keeper starts
fast.

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
from collections.abc import Mapping, Sequence
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


class KeptProcess:
    """Runs `command` under a keeper; appends its output to `log`. The keeper removes `folder` if this process dies."""

    def __init__(self, folder: Path, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with open(log, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as output:
            self._keeper = subprocess.Popen(
                # -I -S: a bare interpreter starts in 15 ms and ignores the user's environment.
                [sys.executable, "-I", "-S", __file__, str(folder), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C on the terminal reaches only this process
            )

    @property
    def keeper_pid(self) -> int:
        """The keeper's process id; the command is its only child."""
        return self._keeper.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._keeper.poll()

    def wait(self, timeout_s: float) -> int:
        """Wait for its end and return its exit code. Raises subprocess.TimeoutExpired."""
        code = self._keeper.wait(timeout_s)
        self._close()
        return code

    def kill(self) -> None:
        """Send SIGKILL and wait; the folder stays. No effect on a process that has ended."""
        self._close(b"k")
        self._keeper.wait()

    def _close(self, last_word: bytes = b"") -> None:
        """Close the pipe to the keeper; no effect if the keeper has ended."""
        assert self._keeper.stdin is not None
        if self._keeper.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._keeper.stdin.write(last_word)
            self._keeper.stdin.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]) & 0xFF)
