"""A worker, the client or the broker is cut off from the others without a word, then back, or behind a cable that loses
and delays what passes; each on its own machine.

On the embedded broker: what is seen is the network's fault alone, and a broker's own faults are in test_brokers.py.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relaygr_stream.client import RelayClient
from relaygr_stream.ops.brokers.keeper import KeptProcess
from relaygr_stream.ops.brokers.local import _embedded_command
from relaygr_stream.settings.schema import Kafka
from tests import needs
from tests.e2e.fleet import Fleet
from tests.faults.load import TIMEOUT_S, Load
from tests.faults.network import HERE, HINT, Network, network, permitted
from tests.faults.scene import HEALTHY, LANES, RATE, Scene
from tests.faults.witness import Witness
from tests.waiting import until

PORT = 9092
#: Longer than the session timeout (3 s), so that a cut worker loses its lanes, and than a request's (3 s).
CUT_S = 6.0
#: In each direction. TCP sends again after 200 ms at the earliest, then after twice that, and so on: what is lost three
#: times running (one segment in 8,000) is a second late, with everything behind it on its connection.
LOSS, DELAY_S, JITTER_S = 0.05, 0.02, 0.005
WORN_S = 12.0
#: Of the requests meanwhile, so many get scores, the others end typed.
SERVED = 0.99
#: For workers to load what they need, on a crowded machine: their health pages are on loopbacks that are not ours.
START_S = 120.0

pytestmark = [pytest.mark.faults, pytest.mark.timeout(800)]


@pytest.fixture
def machines() -> Iterator[Network]:
    if not permitted():
        needs.without(HINT)
    with network("broker", "trigger", "w1", "w2") as found:
        yield found


@asynccontextmanager
async def stage_on(machines: Network, folder: Path, timeout_s: float = TIMEOUT_S) -> AsyncIterator[Scene]:
    """A broker, a trigger and two workers, each on its machine; load from here; the ledger is checked at the end."""
    address = machines.address("broker")
    own = folder / "broker"
    own.mkdir()
    command = [word.replace("127.0.0.1", address) for word in _embedded_command(own, PORT)]
    with machines.inside("broker"):
        broker = KeptProcess(own, command, {}, own / "broker.log")
    kafka = Kafka(
        prefix=f"n-{uuid.uuid4().hex[:8]}.",
        partitions=LANES,
        replication=1,
        session_timeout_ms=3000,
        bootstrap=f"{address}:{PORT}",
    )
    try:
        await listening(address)
        async with Fleet(kafka, folder) as fleet:
            for name in ("trigger", "w1", "w2"):
                with machines.inside(name):
                    fleet.start("trigger" if name == "trigger" else "worker", name)
            await until(lambda: fleet.statuses.keys() >= {"w1", "w2"}, "workers that speak", START_S)
            await fleet.lanes_settled("w1", "w2")
            async with Witness(fleet.settings) as witness:
                async with RelayClient(settings=fleet.settings) as relay:
                    stage = Scene(fleet, relay, Load(relay, witness, RATE, timeout_s=timeout_s), witness)
                    try:
                        await stage.load.answered(HEALTHY)
                        yield stage
                    finally:
                        await stage.load.stop()
                await witness.rest()
            witness.ledger.check()
    finally:
        await asyncio.to_thread(broker.kill)


async def listening(address: str) -> None:
    for _ in range(300):
        try:
            _, writer = await asyncio.open_connection(address, PORT)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return
    raise AssertionError(f"no broker at {address}")


NAMES = {"w1": "a worker", "broker": "the broker", HERE: "the client"}


async def test_cut_off_and_back(machines: Network, tmp_path: Path) -> None:
    async with stage_on(machines, tmp_path) as stage:
        for turn, (machine, name) in enumerate(NAMES.items()):
            if turn:
                await stage.another()
            stage.begins()
            machines.cut(machine)
            owned_s = await stage.owned("w2") if machine == "w1" else None
            await asyncio.sleep(max(0.0, CUT_S - stage.since_fault()))
            machines.join(machine)
            stage.ends()
            if machine == "broker":
                stage.witness.ledger.absences.append((time.time() - stage.since_fault(), time.time()))
            await stage.fleet.lanes_settled("w1", "w2")
            await stage.calm()
            cost = await stage.cost(f"{name} cut off for {CUT_S:.0f} s (namespaces)", owned_s)
            assert cost.served if machine == "w1" else cost.recovered(7.7), cost
            nobody_restarted(stage)


async def test_packets_are_lost_and_late(machines: Network, tmp_path: Path) -> None:
    cables = {machine: machines.splice(machine) for machine in NAMES}
    # Of one connection, three frames may be lost one after the other: 1.4 s by TCP's timers, beside a busy machine's.
    async with stage_on(machines, tmp_path, timeout_s=8.0) as stage:
        for turn, (machine, cable) in enumerate(cables.items()):
            if turn:
                await stage.another()
            stage.begins()
            cable.wear(delay_s=DELAY_S, jitter_s=JITTER_S, loss=LOSS)
            await asyncio.sleep(WORN_S)
            stage.ends()
            cable.mend()
            await stage.fleet.lanes_settled("w1", "w2")
            await stage.calm()
            what = f"{NAMES[machine]} behind {LOSS:.0%} loss, {1e3 * DELAY_S:.0f} ms (namespaces)"
            cost = await stage.cost(what)
            nobody_restarted(stage)
            assert cost.scored >= SERVED * cost.sent, cost


def nobody_restarted(stage: Scene) -> None:
    assert all(child.exit_code is None for child in stage.fleet.children.values()), "nobody had to be restarted"
