"""The faults of a soak. Each is injected here; what comes back by itself afterwards (a restart) goes on behind it.

Knows nothing of what a fault costs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import msgpack
from aiokafka import AIOKafkaProducer
from aiokafka.errors import MessageSizeTooLargeError

from relaygr_stream.bus.producer import Producer
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION
from relaygr_stream.wire.versions import READ_VERSION
from tests.faults.cluster import BROKERS
from tests.faults.proxy import Link
from tests.faults.soak.stage import CONTROL, EXTRA, TRIGGERS, WORKERS, Stage

#: Records sent again at once.
AGAIN: Final = 20
#: Beyond what `ranking` and `pre-infer` take, once it is unpacked; the broker looks at the packed size.
OVERSIZED: Final = bytes(1_500_000)
#: Where a bad ranking's sender wants its answer; without it, that is what is wrong with the message.
ROUTE: Final = [(HEADER_CORRELATION, b"bad"), (HEADER_REPLY_PARTITION, b"0")]


@dataclass(frozen=True)
class Kind:
    """inject: returns when the cause has gone, or is left to what goes on behind. hold_s: what it does may show this
    late: a session timeout (3 s), a broker's (2 s), or a leader's election later. weight: relative frequency."""

    name: str
    weight: float
    hold_s: float
    possible: Callable[[Stage], bool]
    inject: Callable[[Stage], Awaitable[None]]


# ---- when ----


def _workers_whole(stage: Stage) -> bool:
    return len(stage.up(WORKERS)) == len(WORKERS) and EXTRA not in stage.down


def _triggers_whole(stage: Stage) -> bool:
    return len(stage.up(TRIGGERS)) == len(TRIGGERS)


def _brokers_whole(stage: Stage) -> bool:
    return not any(_broker(number) in stage.down for number in BROKERS)


def _cluster_whole(stage: Stage) -> bool:
    return stage.cluster is not None and _brokers_whole(stage)


def _linked(stage: Stage) -> bool:
    return bool(stage.links) and _brokers_whole(stage)


def _calm(stage: Stage) -> bool:
    return not stage.down


# ---- workers and triggers ----


async def _terminate(stage: Stage, names: tuple[str, ...]) -> None:
    name = stage.rng.choice(stage.up(names))
    stage.down.add(name)
    await stage.end(name)
    stage.later(name, stage.back(name))


async def _kill(stage: Stage, names: tuple[str, ...]) -> None:
    name = stage.rng.choice(stage.up(names))
    stage.down.add(name)
    await stage.kill(name)
    stage.later(name, stage.back(name))


async def _stop_and_continue(stage: Stage) -> None:
    name = stage.rng.choice(stage.up(WORKERS))
    child = stage.child(name)
    stage.down.add(name)
    os.kill(child.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(stage.rng.uniform(0.5, 5.0))
    finally:
        os.kill(child.pid, signal.SIGCONT)
        stage.down.discard(name)


async def _join(stage: Stage) -> None:
    await stage.back(EXTRA)
    await stage.owned()


async def _leave(stage: Stage) -> None:
    stage.down.add(EXTRA)
    try:
        await stage.end(EXTRA)
        await stage.owned()
    finally:
        stage.down.discard(EXTRA)


async def _start_and_end(stage: Stage) -> None:
    stage.down.add(CONTROL)
    try:
        await stage.back(CONTROL)
        await stage.end(CONTROL)
    finally:
        stage.down.discard(CONTROL)


# ---- brokers ----


def _broker(number: int) -> str:
    return f"broker {number}"


async def _broker_kill(stage: Stage, number: int) -> None:
    assert stage.cluster is not None
    await stage.cluster.brokers[number].kill()
    stage.later(_broker(number), _broker_back(stage, stage.rng.uniform(1.0, 4.0)))


async def _any_broker_kill(stage: Stage) -> None:
    await _broker_kill(stage, stage.rng.choice(BROKERS))


async def _broker_stop(stage: Stage) -> None:
    assert stage.cluster is not None
    number = stage.rng.choice(BROKERS)
    stage.down.add(_broker(number))
    await stage.cluster.brokers[number].terminate()
    stage.later(_broker(number), _broker_back(stage, stage.rng.uniform(0.0, 2.0)))


async def _leader_kill(stage: Stage) -> None:
    """The leader of a lane, or the coordinator of the workers' group."""
    assert stage.cluster is not None
    topics, kafka = stage.fleet.topics, stage.fleet.settings.kafka
    if stage.rng.random() < 0.5:
        await _broker_kill(stage, await stage.cluster.coordinator(f"{kafka.prefix}workers"))
    else:
        lane = stage.rng.randrange(topics.lanes)
        await _broker_kill(stage, await stage.cluster.leader(topics.ranking.name, lane))


async def _broker_back(stage: Stage, after_s: float) -> None:
    assert stage.cluster is not None
    await asyncio.sleep(after_s)
    await stage.cluster.heal()


async def _cut(stage: Stage) -> None:
    """Every connection to one broker is reset, and none let in for a while."""
    await _without(stage, Link.cut)


async def _stall(stage: Stage) -> None:
    """Nothing moves between one broker and all of us, as if packets were dropped."""
    await _without(stage, Link.stall)


async def _without(stage: Stage, fault: Callable[[Link], None]) -> None:
    assert stage.cluster is not None
    link, since = stage.links[stage.rng.choice(BROKERS)], time.time()
    fault(link)
    try:
        await asyncio.sleep(stage.rng.uniform(0.1, 2.0))
    finally:
        link.mend()
        stage.cluster.absences.append((since, time.time()))


# ---- messages ----


async def _bad_messages(stage: Stage) -> None:
    """Nobody can read these: on each topic, each with where to answer."""
    topics = stage.fleet.topics
    nested: list[object] = []
    for _ in range(100):
        nested = [nested]
    values = {
        "malformed": stage.rng.choice([b"\xc1", b"", stage.rng.randbytes(64), msgpack.packb(nested)]),
        "unknown_version": msgpack.packb({"v": stage.rng.choice([0, READ_VERSION + 1, 99]), "request_id": "later"}),
    }
    for topic in (topics.retrieval, topics.pre_infer, topics.ranking):
        for reason, value in values.items():
            key = f"bad-{stage.rng.randrange(1000)}".encode()
            await stage.witness.send_bad(topic.name, value, reason, key=key, headers=ROUTE)
    await _oversized(stage, topics.ranking.name)


async def _oversized(stage: Stage, topic: str) -> None:
    lane = stage.rng.randrange(stage.fleet.topics.lanes)
    producer = AIOKafkaProducer(
        bootstrap_servers=stage.direct.bootstrap, compression_type="gzip", max_request_size=4 << 20
    )
    await producer.start()
    try:
        sent = await producer.send_and_wait(topic, OVERSIZED, partition=lane, headers=ROUTE)
    except MessageSizeTooLargeError:
        return  # Apache Kafka unpacks it and refuses: topics are uncompressed
    finally:
        await producer.stop()
    stage.witness.ledger.bad[topic, lane, sent.offset] = "oversized"


async def _duplicates(stage: Stage) -> None:
    """Signals and rankings of the last seconds once more, byte for byte."""
    bad = stage.witness.ledger.bad
    good = [record for record in stage.recent if (record.topic, record.lane, record.offset) not in bad]
    chosen = stage.rng.sample(good, min(AGAIN, len(good)))
    async with Producer(stage.direct, client_id="again") as producer:
        for record in chosen:
            assert record.value is not None
            await producer.send_and_wait(
                record.topic, record.value, key=record.key, partition=record.lane, headers=list(record.headers)
            )


async def _burst(stage: Stage) -> None:
    await stage.traffic.burst(1.0, 6 * stage.traffic.rate)


SESSION_S: Final = 3.5
#: Moves of lanes, and what they are compared with.
MOVES: Final = ("worker joins", "worker leaves")
CONTROL_KIND: Final = "process starts, takes no lane, ends"
KINDS: Final = (
    Kind("worker SIGTERM, restarted", 3, 0.5, _workers_whole, lambda s: _terminate(s, WORKERS)),
    Kind("worker SIGKILL, restarted", 3, SESSION_S, _workers_whole, lambda s: _kill(s, WORKERS)),
    Kind("worker SIGSTOP 0.5–5 s, SIGCONT", 3, 0.5, _workers_whole, _stop_and_continue),
    Kind(MOVES[0], 3, 0.0, lambda s: _calm(s) and not s.up((EXTRA,)), _join),
    Kind(MOVES[1], 3, 0.0, lambda s: _calm(s) and bool(s.up((EXTRA,))), _leave),
    Kind(CONTROL_KIND, 3, 0.0, _calm, _start_and_end),
    Kind("trigger SIGTERM, restarted", 2, 0.5, _triggers_whole, lambda s: _terminate(s, TRIGGERS)),
    Kind("trigger SIGKILL, restarted", 2, 0.5, _triggers_whole, lambda s: _kill(s, TRIGGERS)),
    Kind("broker killed, restarted", 1.5, SESSION_S, _cluster_whole, _any_broker_kill),
    Kind("broker stopped, restarted", 1.5, 0.5, _cluster_whole, _broker_stop),
    Kind("leader or coordinator killed", 1.5, SESSION_S, _cluster_whole, _leader_kill),
    Kind("connections of a broker cut 0.1–2 s", 3, 0.5, _linked, _cut),
    Kind("packets of a broker lost 0.1–2 s", 3, 0.5, _linked, _stall),
    Kind("bad messages", 3, 0.0, _brokers_whole, _bad_messages),
    Kind("duplicates", 3, 0.0, _brokers_whole, _duplicates),
    Kind("burst of 6 × the load for 1 s", 2, 0.0, lambda s: True, _burst),
)
