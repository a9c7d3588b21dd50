"""The process `relaygr planner`: watches the groups of all scenarios, decides, publishes what it proposes, and acts."""

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

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import verified_topics, verify_topics
from relaygr_stream.errors import BrokerError, ConfigError
from relaygr_stream.ops.planner.acting import Acting, acting
from relaygr_stream.ops.planner.metrics import PlannerMetrics
from relaygr_stream.ops.planner.observing import observed, observed_reserve
from relaygr_stream.ops.planner.plan import DAY, Damping, Memory, decide
from relaygr_stream.ops.planner.seen import Observation
from relaygr_stream.ops.status.overview import LISTEN_S, Overview, listening
from relaygr_stream.settings.scenarios import RESERVE, Scenario, groups_of
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.limiter import LogLimiter
from relaygr_stream.telemetry.process import ProcessContext, version
from relaygr_stream.wire.planner_status import KEY_PREFIX, KIND, MOST_TEXT, FleetPlan, PlannerStatus, encode_planner
from relaygr_stream.wire.records import HEADER_KIND
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import StatusReader, rising_ms

log = structlog.get_logger(__name__)
limited: Final = LogLimiter().limited

#: Longest wait for a last status: stopping must not wait for a broker that is away.
FAREWELL_S: Final = 2.0


@dataclass(frozen=True)
class PlannerOptions:
    """period_s: between two decisions. record: a file that gets each observation; None: none. act: carry proposals
    out, while no other planner does."""

    period_s: float = 10.0
    record: Path | None = None
    act: bool = False
    damping: Damping = DAY


def scenarios_of(settings: Settings) -> Sequence[Scenario]:
    """The scenarios to plan for. Raises ConfigError if there are none."""
    if not settings.scenarios:
        raise ConfigError("there is no scenario to plan for: give the fleet's file, with [scenario.NAME], by --config")
    return settings.scenarios


class Planner:
    """Observes the groups, by scenario, and decides again and again. own: the fleet's own group, with those that stand
    by. file: gets each observation as a line of JSON."""

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        views: Mapping[str, Overview],
        own: Overview,
        file: IO[bytes] | None,
        damping: Damping,
        acting: Acting | None,
    ) -> None:
        self._scenarios, self._views, self._own, self._file = scenarios, views, own, file
        self._damping, self._acting = damping, acting
        self._memory = Memory()

    async def turn(self, at_s: float) -> FleetPlan:
        """Observe, decide, and act if it does. at_s: Unix time."""
        groups = {name: observed(view) for name, view in self._views.items()}
        groups[RESERVE] = reserve = observed_reserve(self._own)
        seen = Observation(at_s=at_s, groups=groups, reserve=len(reserve.workers))
        if self._acting is not None:
            seen = await self._acting.follow(seen)
        if self._file is not None:
            self._write(self._file, seen)
        self._memory, plan = decide(self._memory, seen, self._scenarios, self._damping)
        if self._acting is not None:
            await self._acting.act(seen, plan.move)
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
        self.reader: Final = StatusReader.from_settings(settings, topics)
        self._topic, self._producer = topics.worker_status.name, producer
        self.name: Final = f"{socket.gethostname()}-{os.getpid()}"
        self._started_ms = self._sent_ms = now_ms()

    async def publish(self, plan: FleetPlan, acting: Acting | None) -> None:
        """Publish it now."""
        self._sent_ms = rising_ms(self._sent_ms, now_ms())
        status = PlannerStatus(
            name=self.name,
            incarnation=self._started_ms,
            sent_ms=self._sent_ms,
            state="serving" if acting is None or acting.leads else "standby",
            mode="advise" if acting is None else "act",
            moves="" if acting is None else acting.says[:MOST_TEXT],
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
        key = (KEY_PREFIX + self.name).encode()
        headers = self.reader.signed(self._topic, key, value, [(HEADER_KIND, KIND.encode())])
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
        own, tail = await stack.enter_async_context(listening(settings, load_topics(settings.kafka)))
        views, tails = {}, [tail]
        for scenario in groups_of(scenarios):
            group = settings.serving(scenario.name)
            topics = await verified_topics(group.kafka)
            views[scenario.name], tail = await stack.enter_async_context(listening(group, topics))
            tails.append(tail)
        producer = await stack.enter_async_context(Producer(settings.kafka, client_id="relaygr-planner"))
        statements = PlannerStatements(settings, producer)
        await statements.reader.prepare()
        works = None
        if options.act:
            made = acting(settings, statements.name, statements.reader, producer, metrics, options.damping)
            works = await stack.enter_async_context(made)
            context.conditions.append(lambda: works.trouble)
            tails.append(works.tail)
        planner = Planner(scenarios, views, own, file, options.damping, works)
        await _wait(context, LISTEN_S)
        said: tuple[str, str] | None = None
        while not context.stop.is_set():
            plan = await planner.turn(time.time())
            metrics.show(plan)
            await statements.publish(plan, works)
            context.set_ready(True)
            move = None if plan.move is None else (plan.move.source, plan.move.target)
            if works is None and plan.move is not None and move != said:
                log.info("proposes a move", source=plan.move.source, target=plan.move.target, reason=plan.move.reason)
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
