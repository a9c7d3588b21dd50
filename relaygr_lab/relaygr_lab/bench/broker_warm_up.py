"""A broker for measurements. A private Java one is sent messages first, so that Java compiles its code.

A broker in production has run for days; a fresh one takes half again as long per message for its first ten thousand.
The topic is separate from the relay's, with messages of a ranking's size.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from relaygr_lab.processes import cluster
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.ops.brokers.distribution import LASTING_RELAY
from relaygr_stream.ops.brokers.local import BrokerKind
from relaygr_stream.settings.schema import Kafka, Settings
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import load_topics

#: About 25,000 messages on two cores: more than twice what a fresh broker is slow for.
SECONDS: Final = 10.0
#: Bytes of a ranking request with 500 behaviours, and of its scores.
SIZES: Final = (12 * 1024, 256)
#: Messages in flight: enough that the broker does not wait, few enough that its compilers get a core.
LANES: Final = 4


@asynccontextmanager
async def warm_cluster(
    kind: BrokerKind | None, settings: Settings, folder: Path, say: Callable[[str], object]
) -> AsyncIterator[tuple[Settings, str]]:
    """As `cluster`, with a broker that has been compiled."""
    async with cluster(kind, settings, folder, LASTING_RELAY, say) as (connected, name):
        if kind == "kafka":
            await compile_broker(connected.kafka, say)
        yield connected, name


async def compile_broker(kafka: Kafka, tell: Callable[[str], object], seconds: float = SECONDS) -> int:
    """Send and read messages for `seconds`, at least one on each lane; returns their number.

    tell(line): shows progress. Raises BrokerUnavailable, BrokerError.
    """
    tell(f"the broker compiles what it will run, {seconds:.0f} s …")
    kafka = msgspec.structs.replace(kafka, prefix=f"{kafka.prefix}warm-up.", partitions=LANES)
    await apply_topics(kafka)
    topic = load_topics(kafka).ranking.name
    arrived = [asyncio.Event() for _ in range(LANES)]

    def on_records(records: Sequence[Record]) -> None:
        for record in records:
            arrived[record.lane].set()

    async def send(lane: int) -> int:
        messages = 0
        while not messages or time.monotonic() < until:
            await producer.send_and_wait(topic, bytes(SIZES[messages % len(SIZES)]), partition=lane)
            await arrived[lane].wait()
            arrived[lane].clear()
            messages += 1
        return messages

    async with (
        Producer(kafka, client_id="warm-up", acks=1) as producer,
        TopicTail(kafka, topic, range(LANES), "latest", on_records) as tail,
    ):
        until = time.monotonic() + seconds  # counts from the connection, which may take longer on a busy machine
        sending = asyncio.gather(*map(send, range(LANES)))
        ends: set[asyncio.Future[Any]] = {sending, tail.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():  # the tail has failed
            sending.cancel()
            tail.failed.result()
        return sum(await sending)
