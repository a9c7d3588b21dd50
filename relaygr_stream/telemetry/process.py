"""The frame of every long-running process: logging, signals, health, metrics, exit codes.

`run_process("worker", settings, main)` runs `main(ctx)` on an event loop until it returns, and returns the exit code.
`main` tells when the process is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import gc
import logging
import os
import platform
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry, GCCollector, Info, ProcessCollector
from prometheus_client.registry import Collector

from relaygr_stream.errors import CapacityError, ConfigError, DeviceError, ModelError, RelayError, Superseded
from relaygr_stream.settings.load import injected_names
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.limiter import flush_limiters
from relaygr_stream.telemetry.logs import configure_logging, writes_json
from relaygr_stream.telemetry.loopwatch import LoopWatch
from relaygr_stream.telemetry.printable import printable
from relaygr_stream.telemetry.server import Check, TelemetryServer

EXIT_OK: Final = 0
EXIT_ERROR: Final = 1  # a RelayError, reported in one line
EXIT_SUPERSEDED: Final = 3  # a later incarnation of this worker's name runs
EXIT_SETTINGS: Final = 78  # EX_CONFIG of sysexits.h: a process of SERVING cannot start with these settings
EXIT_UNEXPECTED: Final = 70  # EX_SOFTWARE of sysexits.h: a bug, with its traceback in the log
EXIT_SIGNAL: Final = 128  # plus the signal's number, as in shells: 130 for SIGINT, 143 for SIGTERM

#: The processes that a supervisor keeps running.
SERVING: Final = frozenset({"worker", "trigger", "gateway"})
#: Errors of settings, and of what they name: a restart meets them again.
_OF_SETTINGS: Final = (ConfigError, ModelError, CapacityError, DeviceError)

#: Seconds for a process that is stopped while it starts to close its connections, each of which takes milliseconds.
START_END_S: Final = 4.0

STDERR: Final = 2
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class ProcessContext:
    """The argument of a process's main function.

    settings: the effective settings. stop: set by the first SIGTERM or SIGINT; main then completes accepted work and
    returns. registry: takes the process's metrics. log: a bound structlog logger. metrics_port: the chosen port.
    conditions: callbacks that return why the process is not ready despite `set_ready`, or None; any thread calls them,
    and they do not wait.
    """

    def __init__(
        self, settings: Settings, stop: asyncio.Event, registry: CollectorRegistry, watch: LoopWatch | None = None
    ) -> None:
        self.settings = settings
        self.stop = stop
        self.registry = registry
        self.log: Any = structlog.get_logger(__name__).bind()
        self.metrics_port = 0
        self.started = False  # set by main or `set_ready`; from then on a stop does not cancel main
        self.had_started = False  # before it last began
        self.conditions: list[Check] = []
        self.about: Final[dict[str, str]] = {}  # what it serves, said by /readyz while it is ready
        self.doing = ""  # until it is ready again, /readyz says this beside the reason
        self._lasting: frozenset[Collector] | None = None  # they stay when main begins anew
        self._watch = watch
        self._not_ready: str | None = "starting"
        self._not_live: str | None = None

    def begin(self, name: str, settings: Settings) -> None:
        """Main begins, or begins anew with other settings: what it had among metrics and conditions is gone.

        name: of the process. Until main has started again, a stop cancels it.
        """
        collectors = frozenset(self.registry._collector_to_names)
        self._lasting = collectors if self._lasting is None else self._lasting
        for collector in collectors - self._lasting:
            self.registry.unregister(collector)
        self.conditions.clear()
        self.settings = settings
        self.about.update(scenario=settings.scenario) if settings.scenario else self.about.clear()
        self.had_started, self.started = self.had_started or self.started, False
        _describe(self.registry, name, settings.scenario)

    def set_ready(self, ready: bool, reason: str = "not ready") -> None:
        """Set the answer of /readyz, with the reason if not ready. Any thread may call it. A stop ends readiness."""
        if ready:
            self.doing, self.started = "", True
        self._not_ready = None if ready else f"{self.doing}: {reason}" if self.doing else reason

    def set_live(self, live: bool, reason: str = "not live") -> None:
        """Set the answer of /healthz, with the reason if not live. Any thread may call it; a stuck loop is not live."""
        self._not_live = None if live else reason

    def why_not_ready(self) -> str | None:
        """Why the process should get no work, or None."""
        if self.stop.is_set():
            return "stopping"
        return self._not_ready or self.why_not_live() or next(filter(None, (why() for why in self.conditions)), None)

    def why_not_live(self) -> str | None:
        """Why the process should be restarted, or None."""
        return self._not_live or (None if self._watch is None else self._watch.stalled())


Main = Callable[[ProcessContext], Awaitable[None]]
#: Makes event loops.
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


@contextlib.asynccontextmanager
async def process(
    settings: Settings, name: str, *, registry: CollectorRegistry | None = None, stop: asyncio.Event | None = None
) -> AsyncIterator[ProcessContext]:
    """Logging, metrics and health during the `async with`; needs a running loop and installs no signal handlers.

    registry: takes the process's metrics; stop: the context's event; both are new by default. Raises ConfigError if the
    metrics address cannot be bound or the port file cannot be written.
    """
    telemetry = settings.telemetry
    configure_logging(telemetry, name, **_who(name, settings))
    registry = CollectorRegistry() if registry is None else registry
    watch = LoopWatch(registry, telemetry.stall_ms / 1e3)
    ctx = ProcessContext(settings, asyncio.Event() if stop is None else stop, registry, watch)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    server = TelemetryServer(registry, telemetry.host, telemetry.port, ctx.why_not_live, ctx.why_not_ready, ctx.about)
    ctx.begin(name, settings)
    watch.start()
    server.start()
    ctx.metrics_port = server.port
    try:
        with _port_file(telemetry.port_file, server.port):
            ctx.log.info("started", version=version(), pid=os.getpid(), metrics=f"http://{server.address}/metrics")
            yield ctx
    finally:
        server.stop()
        watch.stop()
        flush_limiters(all_windows=True)


def run_process(name: str, settings: Settings, main: Main) -> int:
    """Run main(ctx) to its end on a new event loop (uvloop if installed) and return the exit code.

    SIGTERM or SIGINT sets ctx.stop; main then completes accepted work and returns. A second signal ends the process at
    once. Call it on the main thread.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(STDERR)  # where a mapped file has no bytes, or native code fails, it says at which line
    configure_logging(settings.telemetry, name, **_who(name, settings))
    logging.captureWarnings(True)  # libraries' warnings become log lines
    log = structlog.get_logger(__name__)
    if ignored := injected_names(os.environ):
        log.debug("ignored environment variables that a cluster injected for its services", ignored=ignored)

    stop = asyncio.Event()
    started = False

    async def whole() -> None:
        nonlocal started
        async with process(settings, name, stop=stop) as ctx:
            try:
                await _run_main(main, ctx)
            finally:
                started = ctx.started or ctx.had_started
            ctx.log.info("stopped")

    # A worker's modules are 190,000 objects. Each full garbage collection went through them, which stopped event loop
    # and device thread for 0.1 s. What is loaded by now is left out.
    gc.collect()
    gc.freeze()
    runner = asyncio.Runner(loop_factory=loop_factory())
    try:
        with _stop_on_signals(runner.get_loop(), stop, log), runner:
            runner.run(whole())
    except Exception as error:
        return _reported(error, name, settings, log, started)
    finally:
        flush_limiters(all_windows=True)
        gc.unfreeze()
    return EXIT_OK


async def _run_main(main: Main, ctx: ProcessContext) -> None:
    """Run main. A stop before it has started cancels it: it has accepted no work, and it may wait for a broker for
    longer than the supervisor's timeout."""
    work, stop = asyncio.ensure_future(main(ctx)), asyncio.ensure_future(ctx.stop.wait())
    try:
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not (work.done() or ctx.started):
            work.cancel()
            await asyncio.wait({work}, timeout=START_END_S)
            if not work.done():
                ctx.log.warning("stopped while starting, and the start does not end; exiting", after_s=START_END_S)
                flush_limiters(all_windows=True)
                os._exit(EXIT_OK)
        with contextlib.suppress(asyncio.CancelledError) if ctx.stop.is_set() else contextlib.nullcontext():
            await work
    finally:
        stop.cancel()
        work.cancel()


def version() -> str:
    """The installed version of this package."""
    try:
        return metadata.version("relaygr-stream")
    except metadata.PackageNotFoundError:
        return "unknown"


def _describe(registry: CollectorRegistry, name: str, scenario: str = "") -> None:
    about = {"version": version(), "process": name, "python": platform.python_version()}
    of = {"scenario": scenario} if scenario else {}
    Info("relaygr_build", "What runs here, and for which scenario, if any", registry=registry).info(about | of)


@contextlib.contextmanager
def _port_file(name: str, port: int) -> Iterator[None]:
    """Write the port to a file, atomically, and remove the file at the end."""
    if not name:
        yield
        return
    path = Path(name)
    try:
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(f"{port}\n", encoding="ascii")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"cannot write the port to {name} (telemetry.port_file): {error}; name a file in a writable folder"
        ) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def _stop_on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, log: Any) -> Iterator[None]:
    """First signal: set the event, on the loop. Second signal: exit at once.

    The handlers are the interpreter's, not the loop's, so that the second signal works when the loop is stuck.
    """
    seen: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        if seen:
            # No cleanup: a second signal means that the first one took too long.
            with contextlib.suppress(OSError):
                os.write(2, f"second {signal.Signals(number).name}: leaving at once\n".encode())
            os._exit(EXIT_SIGNAL + number)
        seen.append(number)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            loop.call_soon_threadsafe(begin, signal.Signals(number).name)

    def begin(name: str) -> None:
        log.info("stopping", signal=name)
        stop.set()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def error_code(error: RelayError, name: str, started: bool = False) -> int:
    """The exit code of this error in a process or command of this name; started: it had begun to serve."""
    if isinstance(error, Superseded):
        return EXIT_SUPERSEDED
    return EXIT_SETTINGS if name in SERVING and not started and isinstance(error, _OF_SETTINGS) else EXIT_ERROR


def _reported(error: BaseException, name: str, settings: Settings, log: Any, started: bool) -> int:
    """Say why the process ends; returns its exit code."""
    causes = [each for each in _leaves(error) if isinstance(each, RelayError)]
    if len(causes) < len(list(_leaves(error))):
        log.error("unexpected error", exc_info=error)
        return EXIT_UNEXPECTED
    cause = next((c for c in causes if isinstance(c, Superseded)), causes[0])
    what = " ".join(str(cause).split())
    if writes_json(settings.telemetry):
        log.error(printable(f"error: {what}"), kind=type(cause).__name__)
    else:
        who = "".join(f" ({value})" for value in _who(name, settings).values())
        print(printable(f"error{who}: {what}"), file=sys.stderr)
    return error_code(cause, name, started)


def _who(name: str, settings: Settings) -> dict[str, str]:
    """The fields that tell this process's lines from those of others beside it."""
    return {"name": settings.worker.name} if name == "worker" and settings.worker.name else {}


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The single exceptions of a group (of a TaskGroup), or the exception itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def loop_factory() -> LoopFactory | None:
    """The factory of event loops: uvloop's if installed; None: asyncio's own."""
    try:
        import uvloop  # noqa: PLC0415  (absent on Windows)
    except ImportError:
        return None
    return uvloop.new_event_loop
