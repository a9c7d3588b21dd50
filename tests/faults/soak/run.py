"""A soak from its first process to its report.

The next fault comes once the load has been calm for two whole seconds, or after PATIENCE_S; restarts go on behind, one
worker, one trigger and one broker at a time.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from rich.console import Console

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.ops.brokers.local import local_broker
from relaygr_stream.settings.schema import Kafka
from tests.e2e.fleet import Fleet
from tests.faults.cluster import ThreeBrokers, relay_topics, three_brokers
from tests.faults.proxy import Link, links
from tests.faults.soak.kinds import KINDS, MOVES
from tests.faults.soak.report import Event, broken, outside, progress, show, summary
from tests.faults.soak.stage import Stage, soak_settings
from tests.faults.soak.traffic import Clients, Traffic
from tests.faults.witness import Witness

LANES: Final = 12
#: Load without faults at the beginning, for what is healthy; its first seconds are warm-up.
HEALTHY_S: Final = 8.0
WARM_UP_S: Final = 3.0
#: Whole seconds without a disturbance before the next fault.
CALM_S: Final = 2
PATIENCE_S: Final = 20.0
PROGRESS_S: Final = 10.0


@dataclass(frozen=True)
class Options:
    """brokers: three of Apache Kafka behind proxies, or a single one that no fault touches."""

    seconds: float
    seed: int
    rate: float
    brokers: Literal["three", "kafka", "embedded"]
    folder: Path  # logs; the brokers' data are in it meanwhile


@dataclass
class Soaked:
    """figures: as in report.summary. broken, outside: promises and bounds, see report.py."""

    figures: dict[str, Any]
    broken: list[str]
    outside: list[str]


async def soak(options: Options, console: Console) -> Soaked:
    """Run it. Whatever ends it, Ctrl-C included, nothing is left running."""
    console.print(f"soak: seed {options.seed}, {options.seconds:g} s, {options.rate:g} requests/s, {options.brokers}")
    options.folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        direct, linked, cluster, opened = await stack.enter_async_context(_brokers(options))
        fleet = Fleet(direct, options.folder)
        # The fleet's own tails and the witness look at the brokers directly, whatever is cut.
        fleet.settings = msgspec.structs.replace(soak_settings(), kafka=direct)
        await stack.enter_async_context(fleet)
        fleet.use(msgspec.structs.replace(fleet.settings, kafka=linked))
        witness = await stack.enter_async_context(Witness(msgspec.structs.replace(fleet.settings, kafka=direct)))
        if cluster is not None:
            witness.ledger.absences = cluster.absences
        clients = await stack.enter_async_context(Clients(fleet.settings))
        traffic = Traffic(clients, witness, fleet.topics.lanes, options.rate, options.seed)
        stage = Stage(fleet, traffic, clients, witness, random.Random(options.seed), cluster, opened, direct)
        for topic in (fleet.topics.ranking, fleet.topics.pre_infer):
            tail = TopicTail(direct, topic.name, range(topic.partitions), "latest", stage.recent.extend)
            await stack.enter_async_context(tail)
        try:
            console.print("starting two triggers and three workers …")
            await stage.open()
            return await _play(options, stage, console)
        finally:
            await stage.abandon()


async def _play(options: Options, stage: Stage, console: Console) -> Soaked:
    loop, traffic = asyncio.get_running_loop(), stage.traffic
    start = loop.time()
    traffic.start()
    await asyncio.sleep(WARM_UP_S + HEALTHY_S)
    calm = (start + WARM_UP_S, loop.time())
    events: list[Event] = []
    said = start
    while loop.time() < start + options.seconds:
        events.append(await _fault(stage))
        if len(events) > 1:
            events[-2].until = events[-1].at
        if loop.time() - said > PROGRESS_S:
            said = loop.time()
            console.print(progress(events, said - start, stage.witness.ledger), highlight=False)
        stage.look()
    if events:
        events[-1].until = loop.time()
    seconds = loop.time() - start
    console.print("bringing everything back, and waiting until all is quiet …")
    await stage.whole()
    await traffic.stop()
    await stage.witness.rest()
    await stage.close()
    figures = summary(options.seed, seconds, events, calm, stage)
    soaked = Soaked(figures, broken(stage), outside(figures))
    show(figures, console)
    for reason in (*soaked.broken, *soaked.outside):
        console.print(f"✗ {reason}", markup=False, highlight=False)
    if not soaked.broken:
        console.print("✓ nothing lost, nothing wrong, every promise kept")
    return soaked


async def _fault(stage: Stage) -> Event:
    """Choose one that is possible now, inject it, and wait until the load is calm."""
    loop, traffic = asyncio.get_running_loop(), stage.traffic
    possible = [kind for kind in KINDS if kind.possible(stage)]
    (kind,) = stage.rng.choices(possible, [kind.weight for kind in possible])
    before = stage.owners()
    event = Event(kind.name, loop.time())
    try:
        await kind.inject(stage)
    except Exception as error:  # what a fault brings about is what a soak is to find
        stage.defects.append(f"{kind.name}: {type(error).__name__}: {error}")
    event.over = loop.time()
    if kind.name in MOVES:
        after = stage.owners()
        event.kept = tuple(lane for lane, owner in before.items() if after.get(lane) == owner)
    shown = max(event.over, event.at + kind.hold_s)
    while loop.time() < shown + PATIENCE_S:
        if traffic.calm(shown, CALM_S):
            break
        await asyncio.sleep(0.1)
    return event


@asynccontextmanager
async def _brokers(options: Options) -> AsyncIterator[tuple[Kafka, Kafka, ThreeBrokers | None, dict[int, Link]]]:
    """(settings to reach them directly, the same through the links, the cluster, its links)."""
    base = Kafka(prefix=f"soak-{uuid.uuid4().hex[:8]}.", partitions=LANES, replication=1, session_timeout_ms=3000)
    with tempfile.TemporaryDirectory(prefix="brokers-", dir=options.folder, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if options.brokers != "three":
            async with local_broker(options.brokers, folder=folder) as broker:
                kafka = broker.kafka_settings(base)
                yield kafka, kafka, None, {}
            return
        async with three_brokers(folder / "cluster") as cluster, links(cluster.links) as opened:
            topics = relay_topics(folder / "topics")
            direct = cluster.kafka_settings(base, topics_dir=topics)
            yield direct, cluster.kafka_settings(base, linked=True, topics_dir=topics), cluster, opened


def save(soaked: Soaked, file: Path) -> None:
    """The figures, and what was broken or outside its bounds, as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = {**soaked.figures, "broken": soaked.broken, "outside": soaked.outside}
    file.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
