"""The bench's side of one peer's process: a crash or a silence of the peer becomes a reason in its row."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any, Final

#: The longest that one answer may take: compiling a layer, or one long prefill beside other processes.
ANSWER_S: Final = 150.0


class PeerProcess:
    """Starts `command` (peers_child.py) when it is first asked, and again after it ended. Its words go to `log`."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self._command = command
        self._log = log
        self._environment = os.environ | (environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any], timeout: float = ANSWER_S) -> dict[str, Any]:
        """The peer's answer. {"failed": reason} where it ended, or was silent for `timeout` seconds and is killed."""
        try:
            process = self._started()
        except OSError as error:
            return {"failed": f"{self._command[0]} does not start: {error.strerror}"}
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            ready = select.select([process.stdout], [], [], timeout)[0]
            line = process.stdout.readline() if ready else b""
        except BrokenPipeError:
            ready, line = [process.stdout], b""
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if not ready:
            self.stop()
            return {"failed": f"no answer within {timeout:.0f} s"}
        code = process.wait()
        self.stop()
        return {"failed": f"its process ended with {code}; {self._last_words()}"}

    def stop(self) -> None:
        """End the process, if it runs, and those that it started: vLLM's engine runs in two of its own."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,  # a group of processes, which ends as one
                )
        return self._process

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"its last words: {lines[-1][:160]}" if lines else "it said nothing"
