"""The requests of a day in dilated time, from one client, and what became of each."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec.structs import replace

from relaygr_lab.rollouts import Sample
from relaygr_lab.simulate.groups import Day, Surface
from relaygr_lab.tides.traffic import requests_of
from relaygr_stream.bus.producer import Outgoing
from relaygr_stream.client import RelayClient
from relaygr_stream.client.connection import Connection
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.messages import HITS, MISSES, Outcome, RankingRequest, ScoreReply
from relaygr_stream.workload.driver import OnResult, Result, drive

#: An answer that comes this much later than its request allows was late and not lost.
LATE_S: Final = 5.0
#: A ranking with one of these errors had its answer: a worker refused it, or its client.
REFUSED: Final = ("Overloaded", "BrokerUnavailable")
#: What DeadlineExceeded says where a worker has answered so, and where the client was too late to send: what has
#: another reason counts as lost.
NOT_LOST: Final = ("the deadline passed", "the timeout is", "sent ", "not sent ")
#: Longest wait until a worker of each scenario serves.
SERVES_S: Final = 90.0
#: From when, until when, by the monotonic clock.
Span = tuple[float, float]


class Served(NamedTuple):
    """Of one scenario from one time to another. hits: of the `scored`, the share that found prefix KV."""

    asked: int
    within: float
    hits: float
    refused: int
    scored: int


class PatientClient(RelayClient):
    """Waits LATE_S longer than workers are told, so that each ranking without an answer is known by name."""

    async def _ask(self, connection: Connection, request: RankingRequest, message: Outgoing) -> ScoreReply:
        longer = replace(request, timeout_ms=request.timeout_ms + LATE_S * 1e3)
        return await super()._ask(connection, longer, message)


class DayLoad:
    """The rankings of a day, by scenario. day: undilated; factor: of its times. pooled: without scenarios.

    timeout_s: for which clients wait; None: for their SLO, so that one pool, too, knows when each is due.
    """

    def __init__(self, day: Day, factor: float, *, pooled: bool) -> None:
        self.samples: dict[str, list[Sample]] = {each.scenario.name: [] for each in day.surfaces}
        self.misses: list[tuple[float, str]] = []  # when a ranking was sent that found no prefix KV, and why
        self.unanswered: list[str] = []  # each ranking without an answer, not even a late one, in words
        self.sent_late_ms: list[float] = []
        self.start_s = 0.0
        self.timeout_s: float | None = None
        self._day, self._factor, self._pooled = day, factor, pooled

    @property
    def begins_s(self) -> float:
        """When the day begins, by the monotonic clock: until then users become known."""
        return self.start_s + self._factor * self._day.warm_s

    def slo_ms(self, scenario: str) -> float:
        """Its SLO on the clock."""
        return self._factor * next(
            each.scenario.slo_ms for each in self._day.surfaces if each.scenario.name == scenario
        )

    def served(self, scenario: str, *spans: Span) -> Served:
        """What became of the rankings that were sent in these spans."""
        return served(self.samples[scenario], self.slo_ms(scenario), *spans)

    def missed(self, *spans: Span) -> Counter[str]:
        """Of those that found no prefix KV, how many by each cause."""
        return Counter(why for at_s, why in self.misses if _within(at_s, spans))

    async def run(self, settings: Settings, seconds: float, stop: asyncio.Event | None) -> None:
        """Send them for so long, or until stopped, and wait for their answers."""
        # Of each ranking one copy: an answer that comes late is another one's.
        alone = replace(settings, client=replace(settings.client, hedge_ms=0))
        async with PatientClient(settings=alone) as client:
            for surface in self._day.surfaces:
                await client.worker_serves(SERVES_S, "" if self._pooled else surface.scenario.name)
            self.start_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for number, surface in enumerate(self._day.surfaces):
                    group.create_task(self._send(client, surface, seconds, self._day.seed + number, stop))

    async def _send(
        self, client: RelayClient, surface: Surface, seconds: float, seed: int, stop: asyncio.Event | None
    ) -> None:
        name = surface.scenario.name
        timeout_s = self.timeout_s or self.slo_ms(name) / 1e3
        requests = requests_of(surface, seconds, self._factor, seed, "" if self._pooled else name)
        summary = await drive(client, requests, timeout=timeout_s, on_result=self._on_result(name), stop=stop)
        self.sent_late_ms.extend(summary.late_ms)

    def _on_result(self, name: str) -> OnResult:
        def note(result: Result) -> None:
            scored = result.error is None
            refused = result.error in REFUSED or result.detail.startswith(NOT_LOST)
            latency_ms = result.latency_ms if scored else math.nan
            at_s = self.start_s + result.item.rank_at
            sample = Sample(at_s, result.outcome in HITS, latency_ms, refused=refused)
            self.samples[name].append(sample)
            if result.outcome in MISSES and result.ranking is not None:
                self.misses.append((at_s, why_missed(result.outcome, result.ranking.admission)))
            if sample.lost:
                when = f"{result.item.request.request_id}, after {result.item.rank_at:.1f} s"
                self.unanswered.append(f"{when}: {result.error}: {result.detail}")
                print(f"no answer: {self.unanswered[-1]}", flush=True)  # at once: the day may end early

        return note


def why_missed(outcome: Outcome | None, admission: str) -> str:
    """Why a ranking found no prefix KV. admission: what its worker knows of the trigger's decision."""
    if not admission:
        return "its worker read no signal of it"
    if admission != "admitted":
        return f"the trigger: {admission}"
    return "its prefix KV were not ready" if outcome == "full" else "it was cut"


def served(samples: Sequence[Sample], slo_ms: float, *spans: Span) -> Served:
    """Of the rankings that were sent in these spans."""
    mine = [each for each in samples if _within(each.at_s, spans)]
    scored = [each for each in mine if not math.isnan(each.latency_ms)]
    return Served(
        len(mine),
        sum(each.latency_ms <= slo_ms for each in scored) / len(mine) if mine else math.nan,
        sum(each.hit for each in scored) / len(scored) if scored else math.nan,
        sum(each.refused for each in mine),
        len(scored),
    )


def _within(at_s: float, spans: Sequence[Span]) -> bool:
    return any(since_s <= at_s < until_s for since_s, until_s in spans)
