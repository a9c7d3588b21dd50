"""The process `relaygr planner`: watches the groups of all scenarios, decides, and publishes what it proposes."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Gauge

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import verify_topics
from relaygr_stream.errors import BrokerError, ConfigError
from relaygr_stream.ops.planner.observing import observed
from relaygr_stream.ops.planner.plan import Memory, Observation, decide
from relaygr_stream.ops.status.overview import LISTEN_S, Overview, listening
from relaygr_stream.settings.scenarios import Scenario
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.process import ProcessContext, version
from relaygr_stream.wire.planner_status import KEY_PREFIX, KIND, FleetPlan, PlannerStatus, encode_planner
from relaygr_stream.wire.records import HEADER_KIND
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader, rising_ms

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: Longest wait for a last status: stopping must not wait for a broker that is away.
FAREWELL_S: Final = 2.0


@dataclass(frozen=True)
class PlannerOptions:
    """period_s: between two decisions. record: a file that gets each observation; None: none."""

    period_s: float = 10.0
    record: Path | None = None


class PlannerMetrics:
    """What it proposes, by scenario."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, meaning: str) -> Gauge:
            return Gauge(f"relaygr_{name}", meaning, ["scenario"], registry=registry)

        self._wanted = gauge("workers_wanted", "Workers that the scenario's traffic needs, min_workers at least.")
        self._current = gauge("workers_current", "Workers that serve the scenario.")
        self._headroom = gauge(
            "slo_headroom_seconds", "The scenario's SLO less the P99 of its rankings, on the worker."
        )

    def show(self, plan: FleetPlan) -> None:
        """Of the newest plan."""
        for name, each in plan.scenarios.items():
            self._wanted.labels(name).set(each.wanted)
            self._current.labels(name).set(each.workers)
            headroom_ms = float("nan") if each.headroom_ms is None else each.headroom_ms
            self._headroom.labels(name).set(headroom_ms / 1e3)


def scenarios_of(settings: Settings) -> Sequence[Scenario]:
    """The scenarios to plan for. Raises ConfigError if there are none."""
    if not settings.scenarios:
        raise ConfigError("there is no scenario to plan for: give the fleet's file, with [scenario.NAME], by --config")
    return settings.scenarios


class Planner:
    """Observes the groups, by scenario, and decides again and again. file: gets each observation as a line of JSON."""

    def __init__(self, scenarios: Sequence[Scenario], views: Mapping[str, Overview], file: IO[bytes] | None) -> None:
        self._scenarios, self._views, self._file = scenarios, views, file
        self._memory = Memory()

    def look(self, at_s: float) -> FleetPlan:
        """Observe, and decide. at_s: Unix time."""
        seen = Observation(at_s=at_s, groups={name: observed(view) for name, view in self._views.items()})
        if self._file is not None:
            self._write(self._file, seen)
        self._memory, plan = decide(self._memory, seen, self._scenarios)
        return plan

    def _write(self, file: IO[bytes], seen: Observation) -> None:
        try:
            file.write(msgspec.json.encode(seen) + b"\n")
            file.flush()
        except OSError as error:  # the plan does not depend on it
            limited(log.warning, "record")("an observation is not recorded", file=file.name, error=str(error))


class PlannerStatements:
    """Publishes the plan on the `worker-status` of these settings; a broker that is away misses one."""

    def __init__(self, settings: Settings, producer: Producer) -> None:
        topics = load_topics(settings.kafka)
        self.reader: Final = StatusReader.of(settings, topics)
        self._topic, self._producer = topics.worker_status.name, producer
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._started_ms = self._sent_ms = now_ms()

    async def publish(self, plan: FleetPlan) -> None:
        """Publish it now."""
        self._sent_ms = rising_ms(self._sent_ms, now_ms())
        status = PlannerStatus(
            name=self._name,
            incarnation=self._started_ms,
            sent_ms=self._sent_ms,
            state="serving",
            plan=plan,
            version=version(),
        )
        await self._send(encode_planner(status))

    async def withdraw(self) -> None:
        """Remove the record: the planner stops in order."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._send(None)
        except TimeoutError:
            log.warning("the planner's record is not removed")

    async def _send(self, value: bytes | None) -> None:
        key, headers = (KEY_PREFIX + self._name).encode(), [(HEADER_KIND, KIND.encode())]
        if self.reader.signer is not None:
            headers = self.reader.signer.sign(self._topic, key, value, headers)
        try:
            await self._producer.send_and_wait(self._topic, value, key=key, headers=headers)
        except BrokerError as error:
            limited(log.warning, "silent")("the plan is not published", error=str(error))


async def run_planner(context: ProcessContext, options: PlannerOptions) -> None:
    """Plan until it is stopped. Raises ConfigError without scenarios, TopicError, BrokerError."""
    settings, scenarios = context.settings, scenarios_of(context.settings)
    metrics = PlannerMetrics(context.registry)
    async with AsyncExitStack() as stack:
        file = None if options.record is None else stack.enter_context(options.record.open("ab"))
        await verify_topics(settings.kafka)
        views, tails = {}, []
        for scenario in scenarios:
            group = settings.serving(scenario.name)
            await verify_topics(group.kafka)
            views[scenario.name], tail = await stack.enter_async_context(listening(group, load_topics(group.kafka)))
            tails.append(tail)
        producer = await stack.enter_async_context(Producer(settings.kafka, client_id="relaygr-planner"))
        statements = PlannerStatements(settings, producer)
        await statements.reader.prepare()
        planner = Planner(scenarios, views, file)
        await _wait(context, LISTEN_S)
        said = ""
        while not context.stop.is_set():
            plan = planner.look(time.time())
            metrics.show(plan)
            await statements.publish(plan)
            context.set_ready(True)
            move = "" if plan.move is None else plan.move.reason
            if move != said and plan.move is not None:
                log.info("proposes a move", source=plan.move.source, target=plan.move.target, reason=move)
            said = move
            await _wait(context, options.period_s)
            for tail in tails:
                if tail.failed.done():
                    tail.failed.result()
        await statements.withdraw()


async def _wait(context: ProcessContext, seconds: float) -> None:
    """For so long, or until the process is stopped."""
    try:
        async with asyncio.timeout(seconds):
            await context.stop.wait()
    except TimeoutError:
        pass
