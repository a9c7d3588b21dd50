"""The ledger finds workers that break a promise although every request gets its scores: real ones, with a fault built
in at the edge to aiokafka, and hedges that make good what they lose."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from relaygr_stream.client import RelayClient
from relaygr_stream.settings.schema import Client, Kafka
from relaygr_stream.workload.driver import drive
from tests.e2e.fleet import serving_fleet, traffic
from tests.faults.witness import Witness
from tests.waiting import until

#: Run by every Python process that has its folder on its path, before anything else (site.py).
DISCARDS_EVERY_30TH = """
import sys

if "worker" in sys.orig_argv:
    from aiokafka import AIOKafkaConsumer

    getmany = AIOKafkaConsumer.getmany

    async def without_every_30th(self, *partitions, **options):
        found = await getmany(self, *partitions, **options)
        for partition in [p for p in found if "ranking" in p.topic]:
            found[partition] = [record for record in found[partition] if record.offset % 30 != 1]
        return {partition: records for partition, records in found.items() if records}

    AIOKafkaConsumer.getmany = without_every_30th
"""
#: Its answers hang, too, so that it dies between a commit and the answer.
COMMITS_WHAT_IT_READ = """
import asyncio
import sys

if "worker.name=w1" in sys.orig_argv:
    from aiokafka import AIOKafkaConsumer
    from aiokafka.producer.message_accumulator import MessageBatch

    getmany, commit, append = AIOKafkaConsumer.getmany, AIOKafkaConsumer.commit, MessageBatch.append
    read = {}

    async def noting(self, *partitions, **options):
        found = await getmany(self, *partitions, **options)
        for partition, records in found.items():
            read[partition] = records[-1].offset + 1
        return found

    async def commit_what_was_read(self, offsets=None):
        await commit(self, {**(offsets or {}), **{p: at for p, at in read.items() if p in self.assignment()}})

    def hang_with_scores(self, *arguments, **options):
        if self.tp.topic.endswith("scores"):
            return asyncio.get_running_loop().create_future()
        return append(self, *arguments, **options)

    AIOKafkaConsumer.getmany, AIOKafkaConsumer.commit = noting, commit_what_was_read
    MessageBatch.append = hang_with_scores
"""


@pytest.fixture
def mutant(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers started from now on have this fault."""
    folder = tmp_path / "mutant"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(request.param)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")


@pytest.mark.stack
@pytest.mark.parametrize("mutant", [DISCARDS_EVERY_30TH], indirect=True, ids=["discards"])
async def test_a_worker_that_discards_rankings_is_found(mutant: None, embedded_settings: Kafka, tmp_path: Path) -> None:
    async with serving_fleet(embedded_settings, tmp_path, "w1", "w2") as fleet:
        settings = msgspec.structs.replace(fleet.settings, client=Client(hedge_ms=50.0))
        async with Witness(fleet.settings) as witness, RelayClient(settings=settings) as client:
            await drive(
                client, witness.ledger.sending(traffic(seconds=5, rate=15)), timeout=20.0, on_result=witness.result
            )
            # A lane whose last record was discarded is never committed to its end: each gets three more, of no request.
            for lane in 3 * list(range(fleet.topics.lanes)):
                await client.cancel(lane, "nobody's")
            await witness.rest()
        ledger = witness.ledger
        assert sum("scores" in ends for ends in ledger.ends.values()) > len(ledger.ends) / 2, "hedges made it good"
        with pytest.raises(AssertionError, match="records committed and not done"):
            ledger.check()


@pytest.mark.stack
@pytest.mark.parametrize("mutant", [COMMITS_WHAT_IT_READ], indirect=True, ids=["commits"])
async def test_a_worker_that_commits_what_it_has_read_is_found(
    mutant: None, embedded_settings: Kafka, tmp_path: Path
) -> None:
    # Without delegates: w1 would pass rankings on, which are done then, and commits of other records count for nothing.
    async with serving_fleet(embedded_settings, tmp_path, "w1", "w2", delegate=False) as fleet:
        async with Witness(fleet.settings) as witness, RelayClient(settings=fleet.settings) as client:
            ledger, victim = witness.ledger, fleet.children.pop("w1")
            lanes = {(fleet.topics.ranking.name, lane.lane) for lane in fleet.statuses["w1"].lanes}
            items = ledger.sending(traffic(seconds=6, rate=15))
            load = asyncio.create_task(drive(client, items, timeout=20.0, on_result=witness.result))
            # A skip shows only until its hedge is answered, and hedges are few: several looks within that time.
            async with witness.noting_offsets() as note:

                async def skipped() -> bool:
                    await note()
                    return bool(ledger.skipped_on(lanes))

                await until(skipped, "a record committed and not done")
            await asyncio.to_thread(victim.kill)
            await fleet.lanes_settled("w2")
            await load
            await witness.rest()
        assert {*map(tuple, ledger.ends.values())} == {("scores",)}, "hedges made it good"
        with pytest.raises(AssertionError, match="records committed and not done"):
            ledger.check()
