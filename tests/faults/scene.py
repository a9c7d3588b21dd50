"""A fleet of real processes under load, to which something is about to happen; and what is true whatever happens."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relaygr_stream.client import RelayClient
from relaygr_stream.ops.children import Child, stop_all
from relaygr_stream.settings.schema import Kafka
from tests.e2e.fleet import Fleet, serving_fleet
from tests.faults.cluster import ThreeBrokers
from tests.faults.load import Impact, Load, impact
from tests.faults.measured import record
from tests.faults.witness import Witness
from tests.waiting import until

RATE: Final = 20.0
#: Answers before a fault, so that what is healthy is known.
HEALTHY: Final = 60
LANES: Final = 8


@dataclass
class Scene:
    """fault_s, over_s: by the loop's clock, when the fault was injected, and when its cause had gone."""

    fleet: Fleet
    client: RelayClient
    load: Load
    witness: Witness
    fault_s: float = 0.0
    over_s: float = 0.0

    def begins(self) -> None:
        """The fault is injected now."""
        self.fault_s = asyncio.get_running_loop().time()

    def ends(self) -> None:
        """Its cause is gone now."""
        self.over_s = asyncio.get_running_loop().time()

    def since_fault(self) -> float:
        """Seconds."""
        return asyncio.get_running_loop().time() - self.fault_s

    async def owned(self, *workers: str) -> float:
        """Until these workers own all lanes; seconds since the fault."""
        await self.fleet.lanes_settled(*workers)
        return self.since_fault()

    async def asked(self, question: Callable[[Child], bool]) -> list[bool]:
        """Every process of the fleet, in threads: who does not answer takes seconds, and the load is sent from here."""
        return await asyncio.gather(*(asyncio.to_thread(question, child) for child in self.fleet.children.values()))

    async def until_ready(self, ready: bool, seconds: float = 60.0) -> None:
        """Until all processes of the fleet say so, or all say that they are not."""
        deadline = self.since_fault() + seconds
        while set(await self.asked(Child.ready)) != {ready}:
            assert self.since_fault() < deadline, f"within {seconds:.0f} s: not all of them ready: {ready}"
            await asyncio.sleep(0.1)

    async def calm(self, seconds: float = 3.0) -> None:
        """Until every request of the last seconds got its scores."""
        loop = asyncio.get_running_loop()

        def quiet() -> bool:
            now = loop.time()
            recent = [note for note in self.load.notes if note.sent > now - seconds - 1 and note.ended < now]
            return len(recent) >= seconds * RATE / 2 and all(note.scored for note in recent)

        await until(quiet, "requests get their scores again", 90.0)

    async def another(self) -> None:
        """After `cost`, another fault is to come: a load of its own, healthy."""
        self.load = self.load.next()
        await self.load.answered(HEALTHY)

    async def cost(self, fault: str, owned_s: float | None = None) -> Impact:
        """Stop the load; what the fault cost it, kept for the table."""
        await self.load.stop()
        hedge_s = self.fleet.settings.client.hedge_ms / 1000
        cost = impact(self.load.notes, self.fault_s, self.over_s, hedge_s)
        record(fault, cost, owned_s=owned_s)
        return cost


def relay_on(cluster: ThreeBrokers, topics_dir: Path | None = None) -> Kafka:
    """Settings with names that no other test uses; topics_dir: see ThreeBrokers.kafka_settings."""
    base = Kafka(prefix=f"f-{uuid.uuid4().hex[:8]}.", partitions=LANES, session_timeout_ms=3000)
    return cluster.kafka_settings(base, topics_dir=topics_dir)


@asynccontextmanager
async def scene(
    cluster: ThreeBrokers, kafka: Kafka, folder: Path, *workers: str, rate: float = RATE, one_model: bool = True
) -> AsyncIterator[Scene]:
    """A trigger and these workers under load, healthy; after the block every broker is back, the load has ended, and
    the ledger is checked (ledger.py). one_model: False where answers of another model are what is tested."""
    async with (
        serving_fleet(kafka, folder, *workers) as fleet,
        Witness(fleet.settings) as witness,
    ):
        async with RelayClient(settings=fleet.settings) as relay:
            stage = Scene(fleet, relay, Load(relay, witness, rate), witness)
            try:
                await stage.load.answered(HEALTHY)
                yield stage
            finally:
                await stage.load.stop()
        await cluster.heal()
        await witness.rest()
        witness.expect_exits(await stop_all(list(fleet.children.values())))
    await cluster.forget(fleet.topics)
    witness.ledger.absences = cluster.absences
    if one_model:
        witness.ledger.check()
