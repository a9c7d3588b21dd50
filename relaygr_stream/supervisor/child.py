"""One supervised process: start, readiness, stop. Knows nothing of restarts."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relaygr_stream.telemetry.probe import probe, read_port

PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>
#: Imports before a process has a port, on the slowest machine: some ten times what they take on two slow cores. A
#: process that is stuck in them answers nothing that could be asked.
START_S: Final = 120.0


@dataclass(frozen=True)
class Health:
    """not_ready, not_live: what /readyz and /healthz say against it; None: nothing."""

    not_ready: str | None
    not_live: str | None


class Child:
    """`relaygr ARGUMENTS…` in a session of its own, its log on our stderr; ends with us.

    host: of its telemetry.
    """

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, host: str = "127.0.0.1") -> None:
        self.name = name
        self._host = host
        self._port_file = folder / f"{name}.port"
        self._command = [
            *(sys.executable, "-P", "-m", "relaygr_stream", *arguments),
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

    async def health(self) -> Health:
        """What it says of itself, or that it says nothing."""
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

    def _probe(self) -> Health:
        port = read_port(self._port_file)
        if port is None:
            late = f"has no port after {START_S:.0f} s" if self.ran_s > START_S else None
            return Health("starting", late)
        live = probe(port, "/healthz", self._host)
        if not live.ok:
            why = live.body.strip() or "not live"
            return Health(why, why)
        ready = probe(port, "/readyz", self._host)
        return Health(None if ready.ok else ready.body.strip() or "not ready", None)


def _end_with_parent() -> None:
    """Should the supervisor be killed, its children drain and end (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
