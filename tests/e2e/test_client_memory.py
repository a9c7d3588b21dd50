"""A client whose brokers are away, under a load that would fill the machine: it buffers a bounded part of it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.ops.brokers.local import local_broker
from relaygr_stream.ops.children import write_settings
from relaygr_stream.settings.schema import Client, Kafka, Settings

MIB = 1 << 20
LANES = 4
#: Offered while the broker is away.
OFFERED_BYTES = 450 * MIB
#: Grown by 91 MiB when 300 were offered, 167 of 1,500 and 174 of 3,000: what waits until the silence is noticed, and
#: the allocator. A client that kept what it is asked would have grown by all of it.
GROWTH_BYTES = 250 * MIB
SERVICE = """
import asyncio
import json
import sys

import numpy as np
import psutil

from relaygr_stream import Behaviours, RankingRequest, RelayClient, RequestEvent
from relaygr_stream.settings.load import load_settings
from relaygr_stream.errors import RelayError

TOKENS, OFFERED = 4000, int(sys.argv[2])
past = Behaviours.from_arrays(np.arange(TOKENS), np.zeros(TOKENS, int), np.arange(TOKENS))
size = past.nbytes()


async def call(relay, number):
    try:
        await relay.announce(RequestEvent(request_id=f"r{number}", user_id=f"u{number}", prefix=past, candidates=20))
    except RelayError as error:
        ends[type(error).__name__] = ends.get(type(error).__name__, 0) + 1
    try:
        request = RankingRequest(request_id=f"r{number}", user_id=f"u{number}", prefix=past, candidates=bytes(80))
        await relay.rank(request)
    except RelayError as error:
        ends[type(error).__name__] = ends.get(type(error).__name__, 0) + 1


async def main():
    async with RelayClient(settings=load_settings([sys.argv[1]]).settings) as relay:
        await asyncio.gather(*(call(relay, n) for n in range(200)))
        process, numbers = psutil.Process(), iter(range(200, 200 + OFFERED // (2 * size)))
        print("up", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        before = most = process.memory_info().rss

        async def caller():
            nonlocal most
            for number in numbers:
                await call(relay, number)
                most = max(most, process.memory_info().rss)

        await asyncio.gather(*(caller() for _ in range(200)))
        print(json.dumps({"before": before, "most": most, "size": size, "ends": ends}), flush=True)


ends = {}
asyncio.run(main())
"""


@pytest.mark.stack
async def test_while_the_broker_is_away_a_client_keeps_a_bounded_part_of_what_it_is_asked(tmp_path: Path) -> None:
    async with local_broker("embedded", folder=tmp_path) as broker:
        kafka = broker.kafka_settings(Kafka(prefix="memory.", partitions=LANES))
        await apply_topics(kafka)
        config = write_settings(tmp_path / "settings.toml", Settings(kafka=kafka, client=Client(timeout_ms=200)))
        service = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SERVICE, config, str(OFFERED_BYTES)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,  # aiokafka complains of each try to connect
        )
        assert service.stdin is not None
        assert service.stdout is not None
        try:
            assert await service.stdout.readline() == b"up\n"
            broker.stop()
            service.stdin.write(b"\n")
            lines = [line async for line in service.stdout]  # warnings, and the figures
            (found,) = (json.loads(line) for line in lines if line.startswith(b"{"))
        finally:
            if service.returncode is None:
                service.kill()
            await service.communicate()
    grown = found["most"] - found["before"]
    print(f"\n{OFFERED_BYTES / MIB:.0f} MiB offered, grown by {grown / MIB:.1f} MiB, {found['ends']}")
    assert grown < GROWTH_BYTES, found
    assert {*found["ends"]} <= {"BrokerUnavailable", "DeadlineExceeded"}, found
