"""A child process that does not outlive this one: its keeper (keeper.py) kills it and removes its folder then."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from relaygr_stream.ops.brokers import keeper


class KeptProcess:
    """Runs `command` under a keeper; appends its output to `log`. The keeper removes `folder` if this process dies."""

    def __init__(self, folder: Path, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as output:
            self._keeper = subprocess.Popen(
                # -I -S: a bare interpreter starts in 15 ms and ignores the user's environment.
                [sys.executable, "-I", "-S", keeper.__file__, str(folder), *command],
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
        with suppress(BrokenPipeError):
            self._keeper.stdin.write(last_word)
            self._keeper.stdin.close()
