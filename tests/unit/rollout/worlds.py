"""A relay on a broker whose groups state themselves as workers do, for whole rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.routes import read_routes
from relaygr_stream.ops.rollout.process import RolloutRequest, run_rollout
from relaygr_stream.ops.rollout.run import Plan
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.telemetry.process import ProcessContext
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.routes import group_settings
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.wire.worker_status import WITHIN_SLO, StatusReader
from tests.statuses import lane_statuses, worker_status

LANES = 8


class Group:
    """One worker of a group, by its statuses: it answers a hundred rankings between two of them."""

    def __init__(self, settings: Settings, version: str) -> None:
        self.topic = load_topics(settings.kafka).worker_status.name
        self.version = version
        self.failing = 0.0
        self.interval = 2  # of the latencies
        self.answers = dict.fromkeys(("answers_ok", "answers_failed", "outcome_hbm", WITHIN_SLO), 0.0)

    async def run(self, producer: Producer) -> None:
        sent_ms = 1
        while True:
            ok = 100 * (1 - self.failing)
            for name, more in zip(self.answers, (ok, 100 - ok, ok, ok), strict=True):
                self.answers[name] += more
            sent_ms += 100
            status = worker_status(
                "w",
                lane_statuses(range(LANES)),
                model_version=self.version,
                counters=dict(self.answers),
                hbm_bytes=1 << 30,
                delegated_bytes=1 << 20,
                busy_share=0.0,
                latencies={"hbm": (*[0] * self.interval, int(self.answers["answers_ok"]))},
                sent_ms=sent_ms,
            )
            await producer.send_and_wait(self.topic, encode(status), key=b"w")
            await asyncio.sleep(0.05)


class World:
    """A relay whose users are all in the group "", and what the command says."""

    def __init__(self, kafka: Kafka, producer: Producer) -> None:
        self.settings = Settings(kafka=kafka)
        self.producer = producer
        self.lines: list[str] = []
        self.context = ProcessContext(self.settings, asyncio.Event(), CollectorRegistry())
        self.old = Group(self.settings, "m1")
        self.new_settings = group_settings(self.settings, "next", LANES)
        self.new = Group(self.new_settings, "m2")

    async def share(self, group: str = "next") -> int:
        routes = (await read_routes(self.settings.kafka, load_topics(self.settings.kafka), StatusReader())).get("")
        return 0 if routes is None else routes.share_of(group)

    def say(self, line: str) -> None:
        self.lines.append(line)

    async def roll_out(self, hold_s: float = 0.2, **asked: object) -> None:
        plan = Plan.from_shares([0.05, 0.5, 1.0], hold_s)
        plain: dict[str, Any] = {"unlike": True}  # no rankings to compare
        await run_rollout(self.context, RolloutRequest(plan, **{**plain, **asked}), self.say)

    @asynccontextmanager
    async def stating(self, *groups: Group) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(group.run(self.producer)) for group in groups]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
