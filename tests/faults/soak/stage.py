"""The processes of a soak: which run, which are down, and bringing them back while the next fault comes.

Knows nothing of which faults there are.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import deque
from collections.abc import Coroutine
from typing import Any, Final

import msgspec

from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.ops.children import Child, stop_all
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.wire.messages import WorkerStatus
from relaygr_stream.wire.records import Record
from tests.e2e.fleet import TEST_SETTINGS, Fleet
from tests.faults.cluster import ThreeBrokers
from tests.faults.proxy import Link
from tests.faults.soak.traffic import Clients, Traffic
from tests.faults.witness import Witness
from tests.waiting import until

WORKERS: Final = ("w1", "w2", "w3")
TRIGGERS: Final = ("t1", "t2")
#: The worker that joins and leaves.
EXTRA: Final = "w4"
#: A worker of a fleet of its own that nobody asks: what the start of a process costs the others, whatever it serves.
CONTROL: Final = "control"
#: Ranking P99 on a machine where a dozen processes, brokers included, share two cores.
SLO_MS: Final = 250.0
#: Records kept to be sent again: several seconds' worth.
REMEMBERED: Final = 200


def soak_settings(base: Settings = TEST_SETTINGS) -> Settings:
    """The tests' small model, with an SLO that such a machine can hold."""
    return msgspec.structs.replace(base, relay=msgspec.structs.replace(base.relay, slo_ms=SLO_MS))


class Stage:
    """cluster, links: none where the broker is a single one, which no fault touches. direct: past the links.

    defects: what no invariant names: a process died by itself, or did not come back.
    """

    def __init__(
        self,
        fleet: Fleet,
        traffic: Traffic,
        clients: Clients,
        witness: Witness,
        rng: random.Random,
        cluster: ThreeBrokers | None,
        links: dict[int, Link],
        direct: Kafka,
    ) -> None:
        self.fleet, self.traffic, self.clients, self.witness = fleet, traffic, clients, witness
        self.rng, self.cluster, self.links, self.direct = rng, cluster, links, direct
        self.down: set[str] = set()  # processes and brokers on which a fault is, or which are on their way back
        self.defects: list[str] = []
        self.recent: deque[Record] = deque(maxlen=REMEMBERED)  # signals and rankings that were just sent
        self._control_prefix = f"{CONTROL}-{direct.prefix}"
        self._numbers = itertools.count(1)
        self._children: dict[str, Child] = {}
        self._returning: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start triggers and workers; returns when all lanes are owned."""
        await apply_topics(msgspec.structs.replace(self.direct, prefix=self._control_prefix))
        for name in (*TRIGGERS, *WORKERS):
            self._start(name)
        await asyncio.gather(*(child.wait_ready() for child in self._children.values()))
        await self.owned()

    async def close(self) -> None:
        """Bring everything back and end it; the codes go to the ledger."""
        await self.whole()
        self.witness.expect_exits(await stop_all(list(self._children.values())))
        self._children.clear()

    async def abandon(self) -> None:
        """Leave nothing behind, whatever state this is in."""
        for task in self._returning:
            task.cancel()
        await asyncio.gather(*self._returning, return_exceptions=True)
        self.traffic.abandon()
        for child in self._children.values():
            if child.exit_code is None:
                os.kill(child.pid, signal.SIGCONT)
        await stop_all(list(self._children.values()))
        for link in self.links.values():
            link.mend()

    async def whole(self) -> None:
        """Until everything that was down is back."""
        while self._returning:
            await asyncio.gather(*self._returning, return_exceptions=True)
        if self.cluster is not None:
            await self.cluster.heal()
        self.look()

    def look(self) -> None:
        """Note who died without our doing."""
        for name, child in list(self._children.items()):
            if name not in self.down and child.exit_code is not None:
                self.defects.append(f"{name} ended by itself with {child.exit_code}:\n{child.log_tail()}")
                self._children.pop(name)
                self.later(name, self.back(name))

    def up(self, names: tuple[str, ...]) -> list[str]:
        """Those of the names that run undisturbed."""
        return [name for name in names if name in self._children and name not in self.down]

    def child(self, name: str) -> Child:
        """The process that has this name now."""
        return self._children[name]

    def later(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Do this while the next fault may come; until it is done, `name` is down."""
        self.down.add(name)
        task = asyncio.create_task(self._watched(name, work))
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def end(self, name: str) -> None:
        """SIGTERM; it must end with 0."""
        child = self._children.pop(name)
        child.terminate()
        code = await child.wait()
        self.witness.expect_exits({child.name: code})
        if code:
            self.defects.append(f"{child.name} was asked to end and ended with {code}:\n{child.log_tail()}")

    async def kill(self, name: str) -> None:
        """SIGKILL."""
        await asyncio.to_thread(self._children.pop(name).kill)

    async def back(self, name: str) -> None:
        """A new process of this name, as a supervisor would start it; returns when it is ready."""
        await self._start(name).wait_ready()

    async def owned(self) -> None:
        """Until every worker that runs owns lanes, and together all."""
        running = {name for name in (*WORKERS, EXTRA) if name in self._children}
        lanes = set(range(self.fleet.topics.lanes))
        await until(lambda: {*self.owners()} == lanes and {*self.owners().values()} == running, f"lanes of {running}")

    def owners(self) -> dict[int, str]:
        """Lane → worker, by what they state."""
        serving = [s for s in self.fleet.statuses.values() if s.state == "serving" and self._alive(s)]
        return {lane.lane: status.name for status in serving for lane in status.lanes}

    def _start(self, name: str) -> Child:
        command = "trigger" if name in TRIGGERS else "worker"
        changes = [f"kafka.prefix={self._control_prefix}"] if name == CONTROL else []
        child = self.fleet.start(command, f"{name}.{next(self._numbers)}", *changes, worker_name=name)
        self._children[name] = child
        return child

    def _alive(self, status: WorkerStatus) -> bool:
        return status.name in self._children and self._children[status.name].pid == status.pid

    async def _watched(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # whatever a fault brings about is what a soak is to find
            self.defects.append(f"{name} did not come back: {type(error).__name__}: {error}")
        finally:
            self.down.discard(name)
