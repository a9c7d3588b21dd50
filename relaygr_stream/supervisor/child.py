"""One supervised process: start, readiness, stop. Knows nothing of restarts."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>
#: /readyz answers from a thread of its own in milliseconds; longer means that the process hangs or is gone.
PROBE_TIMEOUT_S: Final = 2.0


class Child:
    """`relaygr ARGUMENTS…` in a session of its own, its log on our stderr; ends with us."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path) -> None:
        self.name = name
        self._port_file = folder / f"{name}.port"
        self._command = [
            *(sys.executable, "-P", "-m", "relaygr_stream.cli", *arguments),
            *("--set", f"telemetry.port_file={self._port_file}"),
        ]
        self._process: asyncio.subprocess.Process | None = None
        self._started_s = 0.0

    @property
    def pid(self) -> int:
        """Process id, 0 while there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    @property
    def ran_s(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._started_s

    async def start(self) -> None:
        """Start it anew."""
        self._port_file.unlink(missing_ok=True)
        self._started_s = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us, who stop the children in order
            preexec_fn=_end_with_parent,
        )

    async def ended(self) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    async def why_not_ready(self) -> str | None:
        """What /readyz says against it, None when it is ready."""
        return await asyncio.to_thread(self._probe)

    async def stop(self, within_s: float) -> None:
        """Ask it to drain and end; kill it where that takes longer."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(within_s):
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _probe(self) -> str | None:
        try:
            port = int(self._port_file.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return "starting"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=PROBE_TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            with error:
                return error.read().decode("utf-8", "replace").strip() or "not ready"
        except OSError as error:
            return f"does not answer ({error})"


def _end_with_parent() -> None:
    """Should the supervisor be killed, its children drain and end (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
