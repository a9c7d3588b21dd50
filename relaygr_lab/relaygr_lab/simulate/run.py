"""Runs a scenario's groups in parallel on the machine's cores. The result does not depend on the number of cores."""

from __future__ import annotations

import gc
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from functools import partial
from itertools import takewhile
from typing import Final

from relaygr_lab.pools import pool_of
from relaygr_lab.simulate.fleet import Fleet
from relaygr_lab.simulate.scenario import Group, Scenario
from relaygr_lab.simulate.story import ALLOWED_LATE, Story, is_late, joined, signals_of, story_of
from relaygr_stream.ops.stopping import signals_later

#: report(groups done, groups in all)
Report = Callable[[int, int], None]
#: How often in the measured time requests that are late are counted, to end what is decided.
COUNTS: Final = 50


class TooLateError(Exception):
    """More requests are late than the SLO allows, whatever becomes of the others."""


def run_group(scenario: Scenario, group: Group, within_ms: float = math.inf) -> Story:
    """Simulate one group, in this process. Raises TooLateError once more than ALLOWED_LATE of the requests that will be
    measured are certain to take longer than within_ms, which saves the rest of the simulation."""
    started = time.process_time()
    fleet = Fleet(scenario, group)
    if within_ms < math.inf:
        _end_when_late(fleet, scenario, within_ms)
    busy: list[list[float]] = []
    before: Counter[str] = Counter()

    def begin(now: float) -> None:
        busy_at(now)
        before.update(signals_of(fleet))

    def busy_at(now: float) -> None:
        busy.append([worker.model.busy_until(now) for worker in fleet.workers])

    fleet.timeline.at(fleet.start + scenario.warm_s, begin)
    fleet.timeline.at(fleet.start + scenario.warm_s + scenario.seconds, busy_at)
    gc.disable()  # objects live as long as the group, so collections would find nothing
    try:
        fleet.run()
    finally:
        gc.enable()
    for worker in fleet.workers:
        worker.scheduler.check_integrity()
    worked = [until - since for since, until in zip(*busy, strict=True)]
    return story_of(fleet, scenario, worked, time.process_time() - started, before)


def _end_when_late(fleet: Fleet, scenario: Scenario, within_ms: float) -> None:
    begin, pause = fleet.start + scenario.warm_s, scenario.seconds / COUNTS
    until = begin + scenario.seconds
    coming = takewhile(lambda arrival: fleet.start + arrival.at < until, fleet.ahead())
    most = ALLOWED_LATE * sum(fleet.start + arrival.rank_at >= begin for arrival in coming)

    def count(now: float) -> None:
        measured = [request for request in fleet.requests if request.ranked and begin <= request.rank_at <= now]
        if sum(is_late(request, now, within_ms) for request in measured) > most:
            raise TooLateError
        if now < until:
            fleet.timeline.at(now + pause, count)

    fleet.timeline.at(begin, count)


def run_scenario(scenario: Scenario, processes: int = 0, report: Report = lambda done, of: None) -> Story:
    """Simulate all groups. processes: 0: one per core. report(done, of): called after each group."""
    groups = scenario.groups
    processes = min(processes or os.cpu_count() or 1, len(groups))
    report(0, len(groups))
    stories: dict[int, Story] = {}
    for done, (index, story) in enumerate(_stories(scenario, groups, processes), 1):
        stories[index] = story
        report(done, len(groups))
    return joined([stories[group.index] for group in groups])


def _stories(scenario: Scenario, groups: list[Group], processes: int) -> Iterator[tuple[int, Story]]:
    if processes == 1:
        yield from ((group.index, run_group(scenario, group)) for group in groups)
        return
    with pool_of(processes) as pool:
        with signals_later():  # the first submission starts the processes
            futures = {pool.submit(partial(run_group, scenario), group): group.index for group in groups}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)
