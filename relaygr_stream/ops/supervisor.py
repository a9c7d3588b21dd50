"""Keeps a set of processes running until told to stop, and says what each is doing whenever that changes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from relaygr_stream.telemetry.probe import probe, read_port

# When a process that ended is started again. Knows nothing of processes.


#: Pauses before restarts double from the first to the last of these; a process that ran for CALM_S starts over.
FIRST_S: Final = 0.5
MOST_S: Final = 30.0
CALM_S: Final = 60.0
#: Exit codes that a restart cannot mend (docs/operations.md): stopped when asked, a wrong command line, superseded.
FINAL: Final = frozenset({0, 2, 3})


@dataclass
class Restarts:
    """One process's restarts."""

    count: int = 0
    _pause_s: float = FIRST_S

    def pause_s(self, exit_code: int, ran_s: float) -> float | None:
        """Seconds to wait before starting it again, having run so long; None: not again."""
        if exit_code in FINAL:
            return None
        if ran_s >= CALM_S:
            self._pause_s = FIRST_S
        pause, self._pause_s = self._pause_s, min(MOST_S, 2 * self._pause_s)
        self.count += 1
        return pause


# One supervised process: start, readiness, stop. Knows nothing of restarts.


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


#: How often readiness is looked at: often enough for a person who watches, nothing beside the heartbeats.
PROBE_S: Final = 0.5
#: Probes of /healthz in a row that fail before a process is killed: 13 s where nothing answers within 2 s, and 2.5 s
#: beyond telemetry.stall_ms where the event loop is stuck. Counted, not timed: a suspended machine fails one.
PROBES_UNTIL_HUNG: Final = 5


@dataclass(eq=False)
class Supervised:
    """A process, and what it is doing in words."""

    child: Child
    restarts: Restarts = field(default_factory=Restarts)
    state: str = ""
    final: int | None = None  # the exit code after which it was not started again


class Supervisor:
    """changed(process): its state is another. stop_s: what each process gets to drain."""

    def __init__(self, children: Sequence[Child], stop_s: float, changed: Callable[[Supervised], None]) -> None:
        self.processes = [Supervised(child) for child in children]
        self._stop_s = stop_s
        self._changed = changed

    async def run(self, stop: asyncio.Event) -> bool:
        """Until `stop` is set or all have ended for good; stops in the order given. Whether all ended in order."""
        keeping = [asyncio.create_task(self._keep(process), name=process.child.name) for process in self.processes]
        stopping = asyncio.create_task(stop.wait())
        # Not gathered: a gathering that is cancelled reports its children's cancellation as an exception nobody took.
        everyone = asyncio.create_task(asyncio.wait(keeping, return_when=asyncio.FIRST_EXCEPTION))
        try:
            await asyncio.wait([stopping, everyone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopping, everyone, *keeping):
                task.cancel()
            ends = await asyncio.gather(stopping, everyone, *keeping, return_exceptions=True)
            # The first ones alone: no trigger admits work for workers that are leaving.
            for process in self.processes:
                if process.child.pid:
                    self._say(process, "stopping")
            first, *rest = self.processes
            await first.child.stop(self._stop_s)
            await asyncio.gather(*(process.child.stop(self._stop_s) for process in rest))
        for end in ends:
            if isinstance(end, Exception):  # the defect that ended a task
                raise end
        return all(process.final in (None, 0) for process in self.processes)

    def kill(self) -> None:
        """End all at once."""
        for process in self.processes:
            process.child.kill()

    async def _keep(self, process: Supervised) -> None:
        while True:
            await process.child.start()
            self._say(process, "starting")
            watch = asyncio.create_task(self._watch(process))
            try:
                code = await process.child.ended()
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
            pause = process.restarts.pause_s(code, process.child.ran_s)
            if pause is None:
                process.final = code
                self._say(process, f"ended with exit code {code}, not started again")
                return
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            self._say(process, f"ended with {how}, starts again in {pause:g} s")
            await asyncio.sleep(pause)

    async def _watch(self, process: Supervised) -> None:
        """Say how it fares; kill it when it hangs, so that it is started again as after any other end."""
        failures = 0
        while True:
            health = await process.child.health()
            failures = 0 if health.not_live is None else failures + 1
            if failures == PROBES_UNTIL_HUNG:
                self._say(process, f"hangs ({health.not_live}), is killed")
                process.child.kill()
                return
            self._say(process, "ready" if health.not_ready is None else health.not_ready)
            await asyncio.sleep(PROBE_S)

    def _say(self, process: Supervised, state: str) -> None:
        if state != process.state:
            process.state = state
            self._changed(process)
