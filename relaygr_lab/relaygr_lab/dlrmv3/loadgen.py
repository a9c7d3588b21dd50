"""MLCommons' LoadGen, Server scenario: it issues queries from its own thread, and measures and judges them.

`Sut` is its system under test: what LoadGen issues is answered on the event loop. A service knows of a request before
it ranks; LoadGen does not say when it will issue one. But its times follow from its seed (`schedule`), so the request
can be announced before; how far off the times were is part of the result.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from relaygr_lab.bench.statistics import QUANTILE, binomial_at_most
from relaygr_lab.dlrmv3.workload import Item
from relaygr_stream.errors import ConfigError, DeadlineExceeded, Overloaded, RelayError

INSTALL: Final = (
    "mlcommons-loadgen is missing; `pip install mlcommons-loadgen` (or relaygr-lab with its extra `loadgen`)"
)
SUMMARY: Final = "mlperf_log_summary.txt"
CONFIDENCE: Final = 0.99
THREAD: Final = "loadgen"
#: A query without scores is completed this many SLOs after it was issued, so that LoadGen counts it as late.
LATE_SLOS: Final = 4.0
#: Rates in LoadGen's summary have two decimals.
ROUNDED: Final = 0.0051
#: Requests are made before a test up to so many bytes; further ones when they are issued or announced.
MADE_BYTES: Final = 512 << 20
#: LoadGen's thread waits for the interpreter's lock to issue, by default up to 5 ms while the loop computes.
SWITCH_S: Final = 5e-4
#: LoadGen's further files, which are empty.
EMPTY_LOGS: Final = ("mlperf_log_accuracy.json", "mlperf_log_trace.json")


def loadgen() -> Any:
    """The module. Raises ConfigError where it is not installed."""
    try:
        import mlperf_loadgen  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(INSTALL) from error
    return mlperf_loadgen


def leave(code: int) -> None:
    """End the process at once if LoadGen has not ended: it cannot be told to, and does not survive an orderly exit."""
    if any(thread.name == THREAD for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@dataclass(frozen=True)
class Load:
    """One run of LoadGen: `queries` queries at `qps` a second, P99 within slo_ms."""

    qps: float
    queries: int
    slo_ms: float
    seed: int

    def schedule(self) -> npt.NDArray[np.float64]:
        """Seconds from the first query to each: exponential gaps from std::mt19937 as libstdc++ draws them, two numbers
        of 32 bits each."""
        generator = np.random.MT19937()
        generator._legacy_seeding(self.seed)
        drawn = generator.random_raw(2 * self.queries).astype(np.float64).reshape(-1, 2)
        gaps = -np.log1p(-(drawn[:, 0] + drawn[:, 1] * 2.0**32) / 2.0**64) / self.qps
        return np.concatenate([[0.0], np.cumsum(gaps[:-1])])


def allowed_late(queries: int) -> int:
    """The most late queries with which LoadGen calls so many VALID; -1: too few queries.

    Its early stopping asks for 99 % confidence that at most 1 % are late: 459 queries if none is, 662 if one is.
    """
    late = -1
    while late < queries and binomial_at_most(late + 1, queries, 1 - QUANTILE) <= 1 - CONFIDENCE:
        late += 1
    return late


class System(Protocol):
    """What ranks."""

    async def announce(self, item: Item) -> None:
        """Say that this request will be ranked."""

    async def rank(self, item: Item, timeout_s: float) -> str:
        """Where prefix KV were found. Raises DeadlineExceeded or Overloaded for a refusal; others end the test."""


@dataclass
class Outcome:
    """What became of a test's queries."""

    valid: bool = False
    p99_ms: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    heads_ms: list[float] = field(default_factory=list)  # from the announcement's start until LoadGen issued
    off_ms: list[float] = field(default_factory=list)  # issued later than scheduled; negative: earlier


class Sut:
    """LoadGen's system under test, over the items of a test. heads_s: head start of each; None: none is announced."""

    def __init__(
        self,
        module: Any,
        test: Load,
        system: System,
        make: Callable[[int, float], Item],
        heads_s: Sequence[float] | None = None,
    ) -> None:
        self._module, self._test, self._system, self._make = module, test, system, make
        self._heads_s = heads_s
        self._loop = asyncio.get_running_loop()
        self._schedule = test.schedule()
        self._began = 0.0  # of LoadGen's schedule, on the monotonic clock
        self._issued = 0
        self._items: dict[int, Item] = {}
        self._announced: dict[int, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._abandoned = False
        self._failure: BaseException | None = None
        self.outcome = Outcome()

    async def run(self, folder: Path) -> Outcome:
        """Run the test; LoadGen's logs go to the folder. Raises what ranking raised, other than RelayErrors."""
        done: asyncio.Future[None] = self._loop.create_future()
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._make_ready()
        # No executor's thread: one cannot leave LoadGen before its last query, and a loop that ends waits for those.
        threading.Thread(target=self._test_thread, args=(folder, done), name=THREAD, daemon=True).start()
        try:
            await done
        except BaseException:
            self._abandoned = True
            raise
        finally:
            sys.setswitchinterval(switch_s)
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure
        for name in EMPTY_LOGS:
            (folder / name).unlink(missing_ok=True)
        self._read(folder / SUMMARY)
        return self.outcome

    def _make_ready(self) -> None:
        left = MADE_BYTES
        for index in range(self._test.queries):
            left -= self._item(index).nbytes()
            if left < 0:
                return

    # ---- on LoadGen's thread ----

    def _test_thread(self, folder: Path, done: asyncio.Future[None]) -> None:
        error: BaseException | None = None
        try:
            self._start(folder)
        except BaseException as raised:  # the loop waits, whatever it is
            error = raised
        if not self._abandoned:
            self._loop.call_soon_threadsafe(_settle, done, error)

    def _start(self, folder: Path) -> None:
        module, test = self._module, self._test
        settings = module.TestSettings()
        settings.scenario, settings.mode = module.TestScenario.Server, module.TestMode.PerformanceOnly
        settings.server_target_qps = test.qps
        settings.server_target_latency_ns = int(test.slo_ms * 1e6)
        settings.server_target_latency_percentile = QUANTILE
        settings.min_query_count, settings.max_query_count, settings.min_duration_ms = test.queries, test.queries, 0
        settings.schedule_rng_seed = test.seed
        output = module.LogOutputSettings()
        output.outdir, output.copy_summary_to_stdout = str(folder), False
        logs = module.LogSettings()
        logs.log_output, logs.enable_trace = output, False
        sut = module.ConstructSUT(self._issue, lambda: None)
        # The order of requests is that of time, so the samples that LoadGen draws say nothing, as in the reference.
        samples = module.ConstructQSL(test.queries, test.queries, lambda _: None, lambda _: None)
        try:
            module.StartTestWithLogSettings(sut, samples, settings, logs, str(folder / "audit.config"))
        finally:
            module.DestroyQSL(samples)
            module.DestroySUT(sut)

    def _issue(self, queries: Sequence[Any]) -> None:
        at = time.monotonic()
        if self._abandoned:  # LoadGen cannot be told to end: it waits here for the process to
            never = threading.Lock()
            never.acquire()
            never.acquire()
        self._loop.call_soon_threadsafe(self._take, [query.id for query in queries], at)

    # ---- on the loop ----

    def _take(self, ids: list[int], at: float) -> None:
        for query in ids:
            index, self._issued = self._issued, self._issued + 1
            if index == 0:
                self._began = at
                self._plan()
            self.outcome.off_ms.append((at - self._began - self._schedule[index]) * 1e3)
            if index in self._announced:
                self.outcome.heads_ms.append((at - self._announced.pop(index)) * 1e3)
            task = self._loop.create_task(self._answer(index, query, at))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _plan(self) -> None:
        """Announce each request its head start before LoadGen will issue it; the first is issued already."""
        for index, head in enumerate(self._heads_s or ()):
            left = self._began + self._schedule[index] - head - time.monotonic()
            if index and left > 0:
                self._loop.call_later(left, self._announce, index)
            elif index:
                self._announce(index)

    def _announce(self, index: int) -> None:
        if index < self._issued or self._abandoned:
            return
        self._announced[index] = time.monotonic()
        task = self._loop.create_task(self._announcing(self._item(index)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _announcing(self, item: Item) -> None:
        try:
            await self._system.announce(item)
        except Exception as error:  # LoadGen goes on, and the test fails behind its end
            self._failure = self._failure or error

    def _item(self, index: int) -> Item:
        if index not in self._items:
            head = self._heads_s[index] if self._heads_s is not None else 0.0
            self._items[index] = self._make(index, head * 1e3)
        return self._items[index]

    async def _answer(self, index: int, query: int, at: float) -> None:
        slo_s = self._test.slo_ms / 1e3
        try:
            found = await self._system.rank(self._item(index), LATE_SLOS * slo_s)
            self.outcome.outcomes[found] += 1
        except (DeadlineExceeded, Overloaded) as error:
            self.outcome.errors[type(error).__name__] += 1
            await asyncio.sleep(max(0.0, at + LATE_SLOS * slo_s - time.monotonic()))
        except Exception as error:  # as above
            self._failure = self._failure or error
        self._module.QuerySamplesComplete([self._module.QuerySampleResponse(query, 0, 0)])
        self._items.pop(index, None)

    def _read(self, summary: Path) -> None:
        text = summary.read_text(encoding="utf-8")
        self.outcome.valid = bool(re.search(r"^Result is : VALID", text, re.M))
        self.outcome.p99_ms = _number(text, r"99\.00 percentile latency \(ns\)") / 1e6
        scheduled = _number(text, r"Scheduled samples per second")
        predicted = (self._test.queries - 1) / float(self._schedule[-1])
        if abs(scheduled - predicted) > ROUNDED + 1e-4 * predicted:
            raise RelayError(
                f"LoadGen scheduled {scheduled:g} queries/s where {predicted:g} were predicted: this release draws "
                f"other times from its seed, so nothing can be announced before it is issued; install "
                f"mlcommons-loadgen 6.0"
            )


def _number(text: str, name: str) -> float:
    found = re.search(rf"^{name}\s*: ([\d.]+)", text, re.M)
    if found is None:
        raise RelayError(f"LoadGen's summary has no {name}")
    return float(found[1])


def _settle(done: asyncio.Future[None], error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)
