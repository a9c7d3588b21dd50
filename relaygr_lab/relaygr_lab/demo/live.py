"""The demo's live view: a table on a terminal, otherwise a line every two seconds.

run.py updates `LiveState`, and `LiveView` reads it, both on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relaygr_stream.bus.away import ranges
from relaygr_stream.telemetry.printable import SafeConsole, printable
from relaygr_stream.wire.messages import Outcome, WorkerStatus
from relaygr_stream.workload.quantiles import quantile

#: Rates and quantiles cover this many seconds.
WINDOW_S: Final = 5.0
RECENT: Final = 2000  # latencies kept; far more than a window has at the demo's rates
TERMINAL_EVERY_S: Final = 0.25
PLAIN_EVERY_S: Final = 2.0
#: A worker publishes its status every 250 ms; after this long without one it is shown as silent.
SILENT_S: Final = 2.0

_MIB: Final = 1 << 20


@dataclass
class LiveState:
    """The state of the demo: totals since its start, the latest latencies, and each worker's latest status."""

    clock: Callable[[], float] = time.monotonic
    phase: str = "starting"
    phase_ends: float | None = None  # on `clock`
    events: int = 0
    rankings: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)  # requests without scores, by type
    latencies: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=RECENT))  # (when, ms)
    workers: dict[str, tuple[float, WorkerStatus]] = field(default_factory=dict)  # (when received, status) by name

    def enter(self, phase: str, seconds: float | None = None) -> None:
        """Begin a phase and clear the latencies shown. seconds: the phase's length; None: unknown."""
        self.phase = phase
        self.phase_ends = None if seconds is None else self.clock() + seconds
        self.latencies.clear()

    def announced(self) -> None:
        """Count a published request event."""
        self.events += 1

    def ranked(self, latency_ms: float, outcome: Outcome) -> None:
        """Count a ranking request with scores."""
        self.rankings += 1
        self.outcomes[outcome] += 1
        self.latencies.append((self.clock(), latency_ms))

    def failed(self, kind: str) -> None:
        """Count a ranking request without scores; kind: the type of its error."""
        self.errors[kind] += 1

    def worker(self, status: WorkerStatus) -> None:
        """Apply a worker's status. Statuses of an earlier incarnation, or older than the one shown, are ignored."""
        shown = self.workers.get(status.name)
        if shown is None or (status.incarnation, status.sent_ms) >= (shown[1].incarnation, shown[1].sent_ms):
            self.workers[status.name] = (self.clock(), status)

    def owned(self, names: Iterable[str]) -> list[int]:
        """The number of lanes of each of these workers; 0 before its first status."""
        return [len(self.workers[name][1].lanes) if name in self.workers else 0 for name in names]

    def recent_ms(self) -> list[float]:
        """Latencies within the window."""
        since = self.clock() - WINDOW_S
        return [ms for when, ms in self.latencies if when >= since]


class LiveView:
    """Shows a LiveState during an `async with`.

    On a terminal, the table is redrawn in place, and log lines appear above it.
    """

    def __init__(self, state: LiveState, console: Console | None = None) -> None:
        self._state = state
        self._console = SafeConsole() if console is None else console
        self._live: Live | None = None
        self._task: asyncio.Task[None] | None = None
        # (when, events, rankings), for the rates
        self._samples: deque[tuple[float, int, int]] = deque([(state.clock(), state.events, state.rankings)])

    async def __aenter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._task = asyncio.create_task(self._run(), name="live-view")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._live is not None:
            self._live.stop()

    def line(self) -> str:
        """The state of the demo in one line."""
        state = self._state
        events, rankings = self._rates()
        parts = [
            _phase(state),
            f"{events:.0f} events/s, {rankings:.0f} rankings/s",
            "hits: " + ", ".join(f"{name} {state.outcomes[name]}" for name in ("hbm", "dram", "joined", "full")),
            _latency(state),
            *(
                f"{name}: lanes {_lanes(status)}, HBM {status.hbm_used_bytes / _MIB:.0f} and DRAM "
                f"{status.dram_used_bytes / _MIB:.0f} MiB"
                for name, (_, status) in sorted(state.workers.items())
            ),
        ]
        if state.errors:
            parts.append(_errors(state))
        return "; ".join(parts)

    def table(self) -> RenderableType:
        """The state of the demo as a table for a terminal."""
        state = self._state
        events, rankings = self._rates()
        answered = max(1, state.outcomes.total())
        top = Table.grid(padding=(0, 2))
        top.add_row(Text("phase", style="cyan"), _phase(state))
        top.add_row(Text("rates", style="cyan"), f"{events:.0f} events/s   {rankings:.0f} rankings/s")
        hits = "   ".join(
            f"{name} {state.outcomes[name]:,} ({state.outcomes[name] / answered:.0%})"
            for name in ("hbm", "dram", "joined", "full")
        )
        top.add_row(Text("prefix found", style="cyan"), hits)
        top.add_row(Text("ranking", style="cyan"), _latency(state))
        if state.errors:
            top.add_row(Text("no scores", style="bold red"), _errors(state))
        return Group(top, self._workers())

    def _workers(self) -> Table:
        table = Table("worker", "state", "lanes", "HBM", "DRAM", "queue", "device", header_style="cyan")
        now = self._state.clock()
        for name, (when, status) in sorted(self._state.workers.items()):
            silence = now - when
            silent = silence > SILENT_S and status.state != "stopped"
            table.add_row(
                printable(name),
                f"silent for {silence:.0f} s" if silent else printable(status.state),
                _lanes(status),
                _used(status.hbm_used_bytes, status.hbm_bytes),
                _used(status.dram_used_bytes, status.dram_bytes),
                f"{status.queue_ms:.1f} ms",
                printable(status.device),
                style="red" if silent else None,
            )
        return table

    async def _run(self) -> None:
        every = PLAIN_EVERY_S if self._live is None else TERMINAL_EVERY_S
        while True:
            self._sample()
            if self._live is not None:
                self._live.update(self.table(), refresh=True)
            await asyncio.sleep(every)
            if self._live is None:
                self._sample()
                self._console.print(self.line(), soft_wrap=True, highlight=False, markup=False)

    def _sample(self) -> None:
        state, now = self._state, self._state.clock()
        self._samples.append((now, state.events, state.rankings))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()

    def _rates(self) -> tuple[float, float]:
        """Events and rankings per second over the window."""
        when, events, rankings = self._samples[0]
        seconds = self._state.clock() - when
        if seconds <= 0:
            return 0.0, 0.0
        return (self._state.events - events) / seconds, (self._state.rankings - rankings) / seconds


def _lanes(status: WorkerStatus) -> str:
    return ranges(lane.lane for lane in status.lanes) or "none"


def _phase(state: LiveState) -> str:
    if state.phase_ends is None:
        return state.phase
    return f"{state.phase}, {max(0.0, state.phase_ends - state.clock()):.0f} s left"


def _latency(state: LiveState) -> str:
    recent = state.recent_ms()
    p50, p99 = quantile(recent, 0.5), quantile(recent, 0.99)
    shown = [f"{name} {value:.1f} ms" for name, value in (("P50", p50), ("P99", p99)) if value is not None]
    return ", ".join(shown) if shown else "no answers yet"


def _errors(state: LiveState) -> str:
    return "no scores: " + ", ".join(f"{kind} {count}" for kind, count in sorted(state.errors.items()))


def _used(used: int, size: int) -> str:
    return f"{used / _MIB:,.0f} of {size / _MIB:,.0f} MiB"
