"""Messages for a private Java broker to compile itself by, before anything is measured.

A broker in service has run for days; one that was started for a bench takes half again as long for a message until it
has carried some ten thousand. Knows nothing of the relay: the topic has a ranking's shape, but nobody else reads it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics, load_topics
from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.records import Record

#: Some 25,000 messages on two cores; what a request costs the broker before and after: docs/decisions.md.
SECONDS: Final = 10.0
#: As large as a ranking of 500 behaviours, and as its scores.
SIZES: Final = (12 * 1024, 256)
#: Under way at once: enough that the broker does not wait for us, few enough that its compilers get a core.
LANES: Final = 4


async def compile_broker(kafka: Kafka, tell: Callable[[str], object], seconds: float = SECONDS) -> int:
    """Send and read messages for so long, one on each lane at least; returns how many.

    Raises BrokerUnavailable, BrokerError.

    tell: shown once, as it takes longer than anything else before the first probe.
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
        until = time.monotonic() + seconds  # from here on: a busy machine connects for longer than that
        sending = asyncio.gather(*map(send, range(LANES)))
        ends: set[asyncio.Future[Any]] = {sending, tail.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():  # nothing arrives any more
            sending.cancel()
            tail.failed.result()
        return sum(await sending)
