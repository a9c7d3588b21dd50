"""The children of `lean.py`: a bare aiokafka echo, and the clients that load it or the relay.

`echo CONFIG` moves the same records over the same topics as trigger and worker do, and looks at none of them.
`client relay|echo CONFIG` reads lines of JSON, {"rate": requests/s, "seconds": …}, and answers each with one: how many
requests were answered and lost, quantiles of the ranking's time in ms, and its own processor time in seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import numpy as np
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from relaygr_stream.client import RelayClient
from relaygr_stream.errors import RelayError
from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.process import loop_factory
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import RankingRequest, RequestEvent, ScoreReply
from relaygr_stream.wire.topic_files import load_topics
from relaygr_stream.workload.quantiles import nearest_rank

BEHAVIOURS = 512
CANDIDATES = 100
USERS = 1000
LEAD_S = 0.05
#: An answer that comes later counts as lost.
TIMEOUT_S = 5.0

#: Announces request `number` of a user, waits for LEAD_S, ranks; returns the ranking's time in seconds.
Ask = Callable[[int], Awaitable[float]]


def history() -> Behaviours:
    """What every user did."""
    draw = np.random.default_rng(1)
    times = 1_700_000_000_000 + 60_000 * np.arange(BEHAVIOURS)
    return Behaviours.from_arrays(draw.integers(0, 5000, BEHAVIOURS), draw.integers(0, 5, BEHAVIOURS), times)


def a_producer(settings: Settings) -> AIOKafkaProducer:
    """As the relay's, and bare."""
    return AIOKafkaProducer(bootstrap_servers=settings.kafka.bootstrap, linger_ms=0, acks=1)


def a_consumer(settings: Settings, partitions: list[TopicPartition]) -> AIOKafkaConsumer:
    """It reads what comes from now on."""
    consumer = AIOKafkaConsumer(bootstrap_servers=settings.kafka.bootstrap, enable_auto_commit=False)
    consumer.assign(partitions)
    return consumer


async def echo(settings: Settings) -> None:
    """Until it is killed: event → signal, signal → nothing, ranking → answer."""
    topics = load_topics(settings.kafka)
    answer = encode(
        ScoreReply(
            request_id="r" * 16, status="ok", outcome="hbm", scores=bytes(4 * CANDIDATES), tasks=("click",),
            model_version="emulated", worker="w1",
        )
    )  # fmt: skip
    read = [topics.retrieval.name, topics.pre_infer.name, topics.ranking.name]
    consumer = a_consumer(settings, [TopicPartition(name, lane) for name in read for lane in range(topics.lanes)])
    producer = a_producer(settings)
    await producer.start()
    await consumer.start()
    await consumer.seek_to_end()
    print("ready", flush=True)
    while True:
        for partition, records in (await consumer.getmany(timeout_ms=1000)).items():
            for record in records:
                if partition.topic == topics.retrieval.name:
                    await producer.send(topics.pre_infer.name, record.value, record.key, partition.partition)
                elif partition.topic == topics.ranking.name:
                    await producer.send(topics.scores.name, answer, partition=0, headers=list(record.headers))


@asynccontextmanager
async def of_echo(settings: Settings) -> AsyncIterator[Ask]:
    """A client without code of its own: its messages are made once."""
    topics, prefix = load_topics(settings.kafka), history()
    event = encode(RequestEvent(request_id="r" * 16, user_id="user-1", prefix=prefix, candidates=CANDIDATES))
    candidates = pack_items(list(range(CANDIDATES)))
    ranking = encode(RankingRequest(request_id="r" * 16, user_id="user-1", prefix=prefix, candidates=candidates))
    waiting: dict[bytes, asyncio.Future[None]] = {}
    producer = a_producer(settings)
    consumer = a_consumer(settings, [TopicPartition(topics.scores.name, 0)])
    await producer.start()
    await consumer.start()
    await consumer.seek_to_end()

    async def answers() -> None:
        while True:
            for records in (await consumer.getmany(timeout_ms=1000)).values():
                for record in records:
                    if (future := waiting.pop(record.headers[0][1], None)) is not None:
                        future.set_result(None)

    async def ask(number: int) -> float:
        user, lane = b"user-%d" % (number % USERS), number % topics.lanes
        await producer.send(topics.retrieval.name, event, user, lane)
        await asyncio.sleep(LEAD_S)
        correlation = number.to_bytes(16, "big")
        future = waiting[correlation] = asyncio.get_running_loop().create_future()
        begun = time.perf_counter()
        await producer.send(topics.ranking.name, ranking, user, lane, headers=[("correlation", correlation)])
        async with asyncio.timeout(TIMEOUT_S):
            await future
        return time.perf_counter() - begun

    reading = asyncio.create_task(answers())
    try:
        yield ask
    finally:
        reading.cancel()
        await consumer.stop()
        await producer.stop()


@asynccontextmanager
async def of_relay(settings: Settings) -> AsyncIterator[Ask]:
    """The product's client, as a service uses it."""
    behaviours, candidates = history(), np.arange(CANDIDATES)
    async with RelayClient(settings=settings) as relay:
        await relay.worker_serves(60.0)

        async def ask(number: int) -> float:
            async with relay.request(f"user-{number % USERS}", behaviours, candidates=CANDIDATES) as request:
                await asyncio.sleep(LEAD_S)
                begun = time.perf_counter()
                await request.rank(candidates, timeout=TIMEOUT_S)
                return time.perf_counter() - begun

        yield ask


async def load(ask: Ask, rate: float, seconds: float, first: int) -> dict[str, float]:
    """Poisson arrivals, open loop."""
    draw, taken, lost = random.Random(first), [], 0

    async def one(number: int) -> None:
        nonlocal lost
        try:
            taken.append(await ask(number))
        except (RelayError, TimeoutError):
            lost += 1

    used, begun = time.process_time(), time.perf_counter()
    due, calls = begun, list[asyncio.Task[None]]()
    while (due := due + draw.expovariate(rate)) < begun + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        calls.append(asyncio.create_task(one(first + len(calls))))
    await asyncio.gather(*calls)
    quantiles = {f"p{share:g}": 1e3 * nearest_rank(taken, share / 100) if taken else 0.0 for share in (50, 99)}
    return {"answered": len(taken), "lost": lost, "cpu_s": time.process_time() - used, **quantiles}


async def client(settings: Settings, kind: str) -> None:
    """Until stdin ends."""
    number = int.from_bytes(os.urandom(4), "big") << 24
    async with {"relay": of_relay, "echo": of_echo}[kind](settings) as ask:
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            found = await load(ask, asked["rate"], asked["seconds"], number)
            number += 1 << 20
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    given = load_settings([sys.argv[-1]]).settings
    with asyncio.Runner(loop_factory=loop_factory()) as runner, suppress(KeyboardInterrupt):
        runner.run(echo(given) if sys.argv[1] == "echo" else client(given, sys.argv[2]))
