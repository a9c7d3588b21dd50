"""How many events a second one trigger process decides on: the real `relaygr trigger` on one core, a broker on the
other, a log of events waiting. Its floor is a bare aiokafka consumer that reads the same log and does nothing."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import uvloop
from aiokafka import AIOKafkaConsumer, TopicPartition
from msgspec import UNSET

from relaygr_stream.bus.ages import LogEnds
from relaygr_stream.bus.aiokafka_compat import client_options
from relaygr_stream.bus.lane_reader import FETCH_BYTES
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.errors import RelayError
from relaygr_stream.ops.brokers.local import BrokerKind, local_broker
from relaygr_stream.ops.children import Child, stop_all, write_settings
from relaygr_stream.settings.schema import Kafka, Relay, Settings, Telemetry, Trigger
from relaygr_stream.trigger.service import CHECK_CRCS
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.history import HistoryReference
from relaygr_stream.wire.messages import CostModel, LaneStatus, RequestEvent, WorkerStatus, with_version
from relaygr_stream.wire.topic_files import TopicSet, load_topics

LANES: Final = 16
COSTS: Final = CostModel(c0=1.0, c1=0.0, c2=0.0, c3=0.0)
#: The rate is that between these shares of the events: neither the start nor the last batches count.
FROM_SHARE, TO_SHARE = 0.15, 0.9
CORES: Final = sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Mix:
    """Events of one size, a share of them worth admitting."""

    tokens: int
    admitted: float
    events: int
    by_reference: bool = False  # events refer to the behaviours instead of having them


@dataclass(frozen=True)
class Rate:
    """What one run measured. The floor is what a consumer takes that only reads."""

    mix: Mix
    event_bytes: int
    per_second: float
    cpu_us: float
    floor_per_second: float
    floor_cpu_us: float


@contextmanager
def on_core(core: int) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def measure_rates(kind: BrokerKind, mixes: Sequence[Mix], show: Callable[[Rate], None], *, floor: bool = True) -> None:
    """One broker, one trigger process per mix; each is shown as soon as it was measured. floor: measure it, too."""
    uvloop.run(_measure(kind, mixes, show, floor))


async def _measure(kind: BrokerKind, mixes: Sequence[Mix], show: Callable[[Rate], None], floor: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with on_core(CORES[0]):  # inherited
            local = local_broker(kind, folder=Path(folder))
            broker = await local.__aenter__()
        try:
            for number, mix in enumerate(mixes):
                base = Kafka(prefix=f"rate{number}.", partitions=LANES)
                show(await _measure_one(broker.kafka_settings(base), mix, Path(folder), floor))
        finally:
            await local.__aexit__(None, None, None)


async def _measure_one(kafka: Kafka, mix: Mix, folder: Path, floor: bool) -> Rate:
    settings = Settings(
        kafka=kafka,
        relay=Relay(max_prefix_tokens=mix.tokens),
        # The log waits for the trigger here, so nothing in it may count as late.
        trigger=Trigger(max_event_age_ms=3.6e6, max_status_age_ms=10_000),
        telemetry=Telemetry(log_format="json"),
    )
    await apply_topics(kafka)
    topics = load_topics(kafka)
    async with Producer(kafka, client_id="bench") as producer, LogEnds(kafka, "bench") as ends:
        size = await _publish(producer, topics, mix)
        config = write_settings(folder / f"{kafka.prefix}toml", settings)
        owner = asyncio.create_task(_own(producer, topics, ends))
        child = Child(f"{kafka.prefix}trigger", ("trigger", "--config", config), folder)
        os.sched_setaffinity(child.pid, {CORES[-1]})
        try:
            per_second, cpu_us = await _watch(child, mix.events)
        finally:
            await stop_all([child])
            owner.cancel()
            await asyncio.gather(owner, return_exceptions=True)
    if not floor:
        return Rate(mix, size, per_second, cpu_us, 0.0, 0.0)
    with on_core(CORES[-1]):
        floor_per_second, floor_cpu_us = await _read_only(kafka, topics, mix.events)
    return Rate(mix, size, per_second, cpu_us, floor_per_second, floor_cpu_us)


async def _publish(producer: Producer, topics: TopicSet, mix: Mix) -> int:
    """Fill the log; returns the size of an event. What is not to be admitted is one behaviour too long."""
    admitted, too_long = (
        Behaviours.from_arrays(np.arange(count), np.zeros(count, np.uint8), np.arange(count))
        for count in (mix.tokens, mix.tokens + 1)
    )
    every = max(1, round(1 / mix.admitted)) if mix.admitted else mix.events + 1
    size = 0
    sent = []
    for number in range(mix.events):
        prefix = admitted if number % every == every - 1 else too_long
        reference = HistoryReference.from_behaviours(prefix, 1, range(0, mix.tokens, 64)) if mix.by_reference else UNSET
        event = RequestEvent(
            request_id=f"request-{number:012d}",
            user_id=f"user-{number}",
            prefix=Behaviours() if mix.by_reference else prefix,
            **with_version(reference),
        )
        value = encode(event)
        size = len(value)
        sent.append(await producer.send(topics.retrieval.name, value, key=event.user_id.encode()))
    await asyncio.gather(*sent)
    return size


async def _own(producer: Producer, topics: TopicSet, ends: LogEnds) -> None:
    """State all lanes ten times a second, as a worker that reads every signal at once and has room for all."""
    while True:
        read_to = await ends.ask(topics.pre_infer.name, range(LANES))
        lanes = tuple(
            LaneStatus(lane=lane, budget_bytes=1 << 50, pinned_bytes=0, pre_infer_offset=end.offset)
            for lane, end in sorted(read_to.items())
        )
        status = WorkerStatus(
            name="bench",
            incarnation=1,
            host="bench",
            pid=1,
            sent_ms=int(time.time() * 1000),
            state="serving",
            lanes=lanes,
            costs=COSTS,
            bytes_per_token=4096,
            alloc_bytes=4096 * 64,
            queue_ms=0.0,
            model_version="bench",
        )
        await producer.send_and_wait(topics.worker_status.name, encode(status), key=b"bench")
        await asyncio.sleep(0.1)


async def _watch(child: Child, events: int) -> tuple[float, float]:
    """Decisions a second and CPU microseconds a decision, over the middle of the log."""
    begun: tuple[float, float, float] | None = None
    while True:
        if child.exit_code is not None:
            raise RelayError(f"the trigger has ended: {child.log_tail()}")
        decided, at, cpu = await asyncio.to_thread(_decided, child), time.perf_counter(), _cpu_s(child.pid)
        if begun is None and decided >= FROM_SHARE * events:
            begun = decided, at, cpu
        elif begun is not None and decided >= TO_SHARE * events:
            count = decided - begun[0]
            return count / (at - begun[1]), (cpu - begun[2]) / count * 1e6
        await asyncio.sleep(0.1)


def _decided(child: Child) -> float:
    return sum(one.value for one in child.samples() if one.name == "relaygr_trigger_decisions_total")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _read_only(kafka: Kafka, topics: TopicSet, events: int) -> tuple[float, float]:
    """The floor: aiokafka reads the log and hands out its records, and nobody looks at them."""
    consumer = AIOKafkaConsumer(
        **client_options(kafka, "floor"),
        group_id=None,
        fetch_max_wait_ms=kafka.fetch_max_wait_ms,
        fetch_max_bytes=FETCH_BYTES,
        check_crcs=CHECK_CRCS,
    )
    await consumer.start()
    try:
        partitions = [TopicPartition(topics.retrieval.name, lane) for lane in range(LANES)]
        consumer.assign(partitions)
        await consumer.seek_to_beginning()
        seen = 0
        start, cpu = time.perf_counter(), time.process_time()
        while seen < events:
            seen += sum(map(len, (await consumer.getmany(timeout_ms=1000)).values()))
        return events / (time.perf_counter() - start), (time.process_time() - cpu) / events * 1e6
    finally:
        await consumer.stop()
