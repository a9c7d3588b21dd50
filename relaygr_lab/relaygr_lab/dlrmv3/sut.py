"""The system under test of LoadGen, which issues queries from its own thread, and measures and judges them.

What LoadGen issues is answered on the event loop. A service knows of a request before it ranks; LoadGen does not say
when it will issue one. But its times follow from its seed (`Load.schedule`), so the request can be announced before;
how far off the times were is part of the result.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from relaygr_lab.bench.statistics import QUANTILE
from relaygr_lab.dlrmv3.loadgen import THREAD, Load, allowed_late
from relaygr_lab.dlrmv3.workload import Item
from relaygr_stream.errors import DeadlineExceeded, Overloaded, RelayError

SUMMARY: Final = "mlperf_log_summary.txt"
#: A query without scores is completed this many SLOs after it was issued, so that LoadGen counts it as late.
LATE_SLOS: Final = 4.0
#: LoadGen ends a test with more queries waiting than this multiple of those that 4 SLOs bring, at least LEAST_WAITING.
WAITING: Final = 2.0
LEAST_WAITING: Final = 16
#: Rates in LoadGen's summary have two decimals.
ROUNDED: Final = 0.0051
#: Requests are made before a test up to so many bytes; further ones when they are issued or announced.
MADE_BYTES: Final = 512 << 20
#: LoadGen's thread waits for the interpreter's lock to issue, by default up to 5 ms while the loop computes.
SWITCH_S: Final = 5e-4
#: LoadGen's further files, which are empty.
EMPTY_LOGS: Final = ("mlperf_log_accuracy.json", "mlperf_log_trace.json")


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
    issued: int = 0
    late: int = 0  # answered behind the SLO, counted from when LoadGen scheduled them, or not at all


class Sut:
    """LoadGen's system under test, over the items of a test. heads_s: head start of each; None: none is announced.

    With more late queries than VALID may have, nothing is ranked and answered any more: LoadGen then ends the test
    early, by its own bound on queries that wait (server_max_async_queries), and what waits is answered.
    """

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
        self._most_late = max(0, allowed_late(test.queries))
        self._ended = asyncio.Event()  # LoadGen issues no more
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
        in_time = WAITING * LATE_SLOS * test.slo_ms / 1e3 * test.qps
        settings.server_max_async_queries = max(LEAST_WAITING, math.ceil(in_time))
        output = module.LogOutputSettings()
        output.outdir, output.copy_summary_to_stdout = str(folder), False
        logs = module.LogSettings()
        logs.log_output, logs.enable_trace = output, False
        sut = module.ConstructSUT(self._issue, self._flush)
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

    def _flush(self) -> None:
        """Called when LoadGen issues no more."""
        if not self._abandoned:
            self._loop.call_soon_threadsafe(self._ended.set)

    # ---- on the loop ----

    @property
    def _lost(self) -> bool:
        """Whether the test is INVALID whatever becomes of its further queries."""
        return self.outcome.late > self._most_late

    def _take(self, ids: list[int], at: float) -> None:
        for query in ids:
            index, self.outcome.issued = self.outcome.issued, self.outcome.issued + 1
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
        if index < self.outcome.issued or self._abandoned or self._lost:
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
        try:
            await self._rank(index, at)
        except Exception as error:  # as above
            self._failure = self._failure or error
        # LoadGen began before the first query came, and reads its clock behind this: late here is late there.
        took_s = time.monotonic() - self._began - float(self._schedule[index])
        self.outcome.late += took_s * 1e3 > self._test.slo_ms
        if self._lost:
            await self._ended.wait()
        self._module.QuerySamplesComplete([self._module.QuerySampleResponse(query, 0, 0)])
        self._items.pop(index, None)

    async def _rank(self, index: int, at: float) -> None:
        if self._lost:
            return
        slo_s = self._test.slo_ms / 1e3
        try:
            found = await self._system.rank(self._item(index), LATE_SLOS * slo_s)
            self.outcome.outcomes[found] += 1
        except (DeadlineExceeded, Overloaded) as error:
            self.outcome.errors[type(error).__name__] += 1
            await asyncio.sleep(max(0.0, at + LATE_SLOS * slo_s - time.monotonic()))

    def _read(self, summary: Path) -> None:
        text = summary.read_text(encoding="utf-8")
        self.outcome.valid = bool(re.search(r"^Result is : VALID", text, re.M))
        self.outcome.p99_ms = _number(text, r"99\.00 percentile latency \(ns\)") / 1e6
        scheduled = _number(text, r"Scheduled samples per second")
        issued = self.outcome.issued
        predicted = (issued - 1) / float(self._schedule[issued - 1])
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
