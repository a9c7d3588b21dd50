"""A child process that does not outlive us: its keeper (keeper.py) ends it and removes its folder when we are gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from relaygr_stream.ops.brokers import keeper


class KeptProcess:
    """Runs `command` under a keeper; its output is appended to `log`. `folder` goes with an owner that dies."""

    def __init__(self, folder: Path, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as output:
            self._keeper = subprocess.Popen(
                # -I -S: a bare interpreter starts in 15 ms and is not led astray by the user's environment.
                [sys.executable, "-I", "-S", keeper.__file__, str(folder), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C on the terminal is for us, not for the child
            )

    @property
    def keeper_pid(self) -> int:
        """The keeper's process id; the process itself is its only child."""
        return self._keeper.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._keeper.poll()

    def wait(self, timeout_s: float) -> int:
        """Its exit code, once it has ended by itself. Raises subprocess.TimeoutExpired."""
        code = self._keeper.wait(timeout_s)
        self._close()
        return code

    def kill(self) -> None:
        """SIGKILL, and wait; the folder stays. No effect on a process that has ended."""
        self._close(b"k")
        self._keeper.wait()

    def _close(self, last_word: bytes = b"") -> None:
        """Close the pipe to the keeper, which has no effect on one that is gone."""
        assert self._keeper.stdin is not None
        if self._keeper.stdin.closed:
            return
        with suppress(BrokenPipeError):
            self._keeper.stdin.write(last_word)
            self._keeper.stdin.close()
