"""Keeps a set of processes running until told to stop, and says what each is doing whenever that changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from relaygr_stream.supervisor.child import Child
from relaygr_stream.supervisor.restarts import Restarts

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
