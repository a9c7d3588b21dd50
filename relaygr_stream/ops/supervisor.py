"""Keeps a set of processes running until it is stopped, and reports each change of a process's state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relaygr_stream.ops.children import end_with_parent, probe, read_port, relaygr_command
from relaygr_stream.telemetry.background import Background
from relaygr_stream.telemetry.process import EXIT_SETTINGS

#: Pauses before restarts double from the first to the second of these; after a run of STABLE_S they begin anew.
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0
STABLE_S: Final = 60.0
#: Exit codes without a restart (docs/how-to/deploying.md): stopped in order, wrong options, superseded.
FINAL_CODES: Final = frozenset({0, 2, 3})
#: After SIGTERM: 143 and the signal itself are of a process that was still loading.
STOPPED_CODES: Final = frozenset({0, 128 + signal.SIGTERM, -signal.SIGTERM})


@dataclass
class Restarts:
    """Decides when one process is restarted."""

    count: int = 0
    _pause_s: float = FIRST_PAUSE_S

    def pause_s(self, exit_code: int, ran_s: float) -> float | None:
        """Seconds to wait before the restart; None: no restart. ran_s: seconds that the process ran."""
        if exit_code in FINAL_CODES:
            return None
        if ran_s >= STABLE_S:
            self._pause_s = FIRST_PAUSE_S
        pause, self._pause_s = self._pause_s, min(MAX_PAUSE_S, 2 * self._pause_s)
        self.count += 1
        return pause


#: Longest time until a process has a telemetry port: about ten times that of its imports on two slow cores. A process
#: that is stuck in its imports cannot be probed.
START_S: Final = 120.0


#: What the state of a process that is ready begins with.
READY: Final = "ready"


@dataclass(frozen=True)
class Health:
    """A process's health. not_ready, not_live: the reasons of /readyz and /healthz; None: it is ready, it is live.

    ending: it closed its telemetry, which it does last of all. scenario: that it serves; "": none.
    """

    not_ready: str | None
    not_live: str | None
    ending: bool = False
    scenario: str = ""

    @property
    def state(self) -> str:
        """In words."""
        if self.not_ready is not None:
            return self.not_ready
        return f"{READY}, serves {self.scenario}" if self.scenario else READY


class Supervised:
    """A process `relaygr ARGUMENTS…` in its own session; it logs to this process's stderr and ends with it.

    folder: for the file with its telemetry port. host: of its telemetry. state: as text. final: the exit code after
    which it was not restarted. rolling: its next end is wanted, and it starts again at once. start_wanted: set to
    start it after its end.
    """

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, host: str = "127.0.0.1") -> None:
        self.name = name
        self._host = host
        self._port_file = folder / f"{name}.port"
        self._port: int | None = None  # kept: what cleans the folder of temporary files may remove it
        self._command = relaygr_command(arguments, self._port_file)
        self._process: asyncio.subprocess.Process | None = None
        self._started_s = 0.0
        self.restarts = Restarts()
        self.state = ""
        self.final: int | None = None
        self.was_ready = False
        self.rolling = False
        self.start_wanted: Final = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id; 0 while it does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    @property
    def ran_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started_s

    async def start(self) -> None:
        """Start or restart it. Raises OSError where the system starts no process."""
        self._port_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._port_file.unlink(missing_ok=True)
        self._port = None
        self._started_s = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only this process, which stops its children in order
            preexec_fn=end_with_parent,
        )

    async def ended(self) -> int:
        """Wait for its end; returns the exit code, negative if a signal ended it."""
        assert self._process is not None
        return await self._process.wait()

    async def health(self) -> Health:
        """Its health, from its telemetry port."""
        self._port = self._port or read_port(self._port_file)
        return await asyncio.to_thread(self._probe, self._port)

    async def stop(self, within_s: float) -> bool:
        """Send SIGTERM, on which it drains; kill it after within_s seconds. Returns whether it ended in order."""
        process = self._process
        if process is None or process.returncode is not None:
            return True
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(within_s):
                await process.wait()
        except TimeoutError:
            self.kill()
            await process.wait()
        return process.returncode in STOPPED_CODES

    def kill(self) -> None:
        """Send SIGKILL."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def _probe(self, port: int | None) -> Health:
        if port is None:
            late = f"has no port after {START_S:.0f} s" if self.ran_s > START_S else None
            return Health("starting", late)
        live = probe(port, "/healthz", self._host)
        if live.refused:
            return Health("stopping", "does not end", ending=True)
        if not live.ok:
            why = live.body.strip() or "not live"
            return Health(why, why)
        ready = probe(port, "/readyz", self._host)
        if not ready.ok:
            return Health(ready.body.strip() or "not ready", None)
        with contextlib.suppress(ValueError, AttributeError):  # not of this program
            return Health(None, None, scenario=str(json.loads(ready.body).get("scenario", "")))
        return Health(None, None)


#: Probes a second, and seconds between them: often enough for a person who watches.
PROBES_PER_S: Final = 2
PROBE_S: Final = 1 / PROBES_PER_S
#: Consecutive failed probes of /healthz before a process is killed: after 13 s if each probe times out (2 s), after
#: telemetry.stall_ms plus 2.5 s if the event loop is stuck. Counted, not timed: a suspended machine fails only one.
PROBES_UNTIL_HUNG: Final = 5


#: A process that is not ready for so long after its start says for how long; again after twice, four times, … as long.
SLOW_START_S: Final = 10.0


def _since(seconds: float) -> str:
    """How long a start has taken, as text: so that a person sees that it goes on."""
    if seconds < SLOW_START_S:
        return ""
    return f", for {SLOW_START_S * 2 ** int(math.log2(seconds / SLOW_START_S)):.0f} s"


class Supervisor:
    """Runs processes and restarts those that fail or hang.

    stop_s: time of each process to drain. changed(process): called when its state changes. first: the processes that
    end before the others are stopped: triggers, so that they admit nothing for workers that stop.
    """

    def __init__(
        self,
        processes: Sequence[Supervised],
        stop_s: float,
        changed: Callable[[Supervised], None],
        first: Sequence[Supervised] = (),
    ) -> None:
        self.processes = processes
        self._stop_s = stop_s
        self._changed = changed
        self._first = first
        self._over = asyncio.Event()  # nothing is left to keep, or a process can never start
        self._roll_wanted = asyncio.Event()
        self._rolled: asyncio.Future[str] | None = None  # of the roll that is wanted

    def roll(self) -> asyncio.Future[str]:
        """Restart all processes, one at a time, each once the one before is ready; start those that were stopped.

        A process that ends instead of becoming ready ends the roll: the others run on as they were. The future
        completes with the name and state of that process; "": all are ready.
        """
        if self._rolled is None:
            self._rolled = asyncio.get_running_loop().create_future()
        self._roll_wanted.set()
        return self._rolled

    async def run(self, stop: asyncio.Event) -> bool:
        """Run until `stop` is set, all have ended for good, or a process that was never ready ends by its settings;
        then stop `first`, and after them the others.

        Returns whether all ended in order.
        """
        background = Background()
        for process in self.processes:
            background.start(self._keep(process, background))
        background.start(self._rolls())
        ends = {background.start(stop.wait()), background.start(self._over.wait())}
        try:
            await background.until(asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED))
        finally:
            await background.end()
            try:
                for process in self.processes:
                    if process.pid:
                        self._set_state(process, "stopping")
            finally:
                rest = [process for process in self.processes if process not in self._first]
                ends_well = []
                for some in (self._first, rest):
                    ends_well += await asyncio.gather(*(process.stop(self._stop_s) for process in some))
        background.check()
        return all(ends_well) and all(process.final in (None, 0) for process in self.processes)

    def kill(self) -> None:
        """Kill all processes."""
        for process in self.processes:
            process.kill()

    async def _keep(self, process: Supervised, background: Background) -> None:
        while True:
            try:
                await process.start()
            except OSError as error:  # no memory, or no process left: the others go on
                self._set_state(process, f"cannot be started ({error}), is tried again in {MAX_PAUSE_S:g} s")
                await asyncio.sleep(MAX_PAUSE_S)
                continue
            self._set_state(process, "starting")
            watch = background.start(self._watch(process))
            try:
                code = await process.ended()
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
            if process.rolling:
                process.rolling = False
                continue
            pause = process.restarts.pause_s(code, process.ran_s)
            refused = code == EXIT_SETTINGS and not process.was_ready
            if pause is None or refused:
                process.final = code
                self._set_state(process, f"ended with exit code {code}, not started again")
                if refused or all(each.final is not None for each in self.processes):
                    self._over.set()
                await process.start_wanted.wait()
                process.start_wanted.clear()
                process.final = None
                continue
            how = f"exit code {code}" if code >= 0 else f"signal {-code}"
            self._set_state(process, f"ended with {how}, starts again in {pause:g} s")
            await asyncio.sleep(pause)

    async def _rolls(self) -> None:
        while True:
            await self._roll_wanted.wait()
            self._roll_wanted.clear()
            rolled, self._rolled = self._rolled, None
            failed = await self._roll_all()
            if rolled is not None and not rolled.done():
                rolled.set_result(failed)

    async def _roll_all(self) -> str:
        """As `roll`, whose future has the result."""
        for process in (*(each for each in self.processes if each not in self._first), *self._first):
            if process.pid:
                process.rolling = True
                self._set_state(process, "stopping, to start again")
                await process.stop(self._stop_s)
            elif process.final is not None:
                process.start_wanted.set()
            restarts = process.restarts.count
            while process.pid == 0 or process.rolling or not process.state.startswith(READY):
                ended = process.final is not None and not process.start_wanted.is_set()
                if ended or process.restarts.count > restarts:
                    return f"{process.name} {process.state}"
                await asyncio.sleep(PROBE_S)  # its probes' pace
        return ""

    async def _watch(self, process: Supervised) -> None:
        """Report the process's state; kill it if it hangs, so that it is restarted like after any other end."""
        failures, was_ready = 0, False
        while True:
            health = await process.health()
            if process.rolling:  # `stop` gives it its time
                return
            failures = 0 if health.not_live is None else failures + 1
            if failures >= PROBES_UNTIL_HUNG + (int(PROBES_PER_S * self._stop_s) if health.ending else 0):
                self._set_state(process, f"hangs ({health.not_live}), is killed")
                process.kill()
                return
            process.was_ready = process.was_ready or health.not_ready is None
            was_ready = was_ready or health.not_ready is None
            waits = "" if was_ready else _since(process.ran_s)
            self._set_state(process, health.state if health.not_ready is None else health.state + waits)
            await asyncio.sleep(PROBE_S)

    def _set_state(self, process: Supervised, state: str) -> None:
        if state != process.state:
            process.state = state
            with contextlib.suppress(OSError):  # its reader has gone, or the disk is full: the processes run on
                self._changed(process)
