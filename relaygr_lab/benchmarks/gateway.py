"""What the gateway adds to a ranking: the same requests by RelayClient, by MessagePack and by JSON over HTTP.

    python relaygr_lab/benchmarks/gateway.py [--rounds 8] [--seconds 2] [--broker kafka]
        with CHECK=1 exits non-zero, naming the bounds not kept

One worker, one gateway, one broker (Apache Kafka where KAFKA_HOME is set, else the embedded one), each a process of its
own; this process is the client of all. Blocks of requests take turns, RATE a second each, evenly spaced: direct,
MessagePack, JSON, direct, … Every request ranks CANDIDATES candidates behind a history of BEHAVIOURS that the worker
holds. What is judged is the median over the rounds of P50 through the gateway less P50 of the direct block beside it.
"outside the relay": the same of each request alone, its time here less what the gateway says that the relay took.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import httptools
import msgspec
import numpy as np
from judge import judge
from relaygr_lab.processes import servable
from relaygr_lab.verdicts import NotValid

from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.ops.brokers.distribution import free_ports
from relaygr_stream.ops.brokers.local import BrokerKind, broker_at_hand, local_broker
from relaygr_stream.ops.children import Child, stop_all, write_settings
from relaygr_stream.settings.schema import Client, Gateway, Kafka, Relay, Settings
from relaygr_stream.settings.worker import Model, Worker
from relaygr_stream.telemetry.process import loop_factory
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.messages import RankingRequest
from relaygr_stream.workload.quantiles import nearest_rank

RATE = 100
BEHAVIOURS = 512
CANDIDATES = 100
USERS = 16
MOST_ADDED_MS = 2.0
TIMEOUT_S = 10.0
#: Of the direct blocks: a machine on which these differ by more is not quiet enough to judge.
NOISE_MS = 1.0
ARMS = ("direct", "messagepack", "json")


class Http(asyncio.Protocol):
    """A connection that is kept: one request after the other, each waits for its answer. No more than that."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are none by inheritance

    async def post(self, path: str, media: str, body: bytes) -> bytes:
        self._parser, self._body = httptools.HttpResponseParser(self), bytearray()
        self._answer = asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: {media}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        answer = await self._answer
        if self._parser.get_status_code() != 200:
            said = f"{self._parser.get_status_code()}: {answer.decode(errors='replace')}"
            raise NotValid(f"the gateway answered {said}: this machine does not carry {RATE} requests/s")
        return answer

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        assert self._answer is not None
        self._answer.set_result(bytes(self._body))

    def connection_lost(self, _: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the gateway closed"))


class Pool:
    """Connections to the gateway, as many as there are requests under way."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[Http] = []

    async def post(self, media: str, body: bytes) -> bytes:
        if self._free:
            connection = self._free.pop()
        else:
            _, connection = await asyncio.get_running_loop().create_connection(Http, "127.0.0.1", self._port)
        answer = await connection.post("/v1/rank", media, body)
        self._free.append(connection)
        return answer


@dataclass
class Requests:
    """The same rankings in each form. Their bodies are made with each request, as in a service."""

    relay: RelayClient
    pool: Pool
    histories: list[Behaviours] = field(default_factory=list)
    outside: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # ms, by arm

    def __post_init__(self) -> None:
        random = np.random.default_rng(1)
        for _ in range(USERS):
            items = random.integers(0, 5000, BEHAVIOURS)
            times = 1_700_000_000_000 + 60_000 * np.arange(BEHAVIOURS)
            self.histories.append(Behaviours.from_arrays(items, random.integers(0, 5, BEHAVIOURS), times))
        self.lists = [[array.tolist() for array in each.arrays()] for each in self.histories]
        self.candidates = random.integers(0, 5000, CANDIDATES)

    async def direct(self, number: int) -> int:
        request = RankingRequest(
            request_id=f"direct-{number}",
            user_id=f"user-{number % USERS}",
            prefix=self.histories[number % USERS],
            candidates=pack_items(self.candidates),
        )
        return len((await self.relay.rank(request, timeout=TIMEOUT_S)).scores)

    async def messagepack(self, number: int) -> int:
        history = self.histories[number % USERS]
        packed = {"items": history.items, "actions": history.actions, "times": history.times}
        body = {"user_id": f"user-{number % USERS}", "history": packed, "candidates": pack_items(self.candidates)}
        begun = time.perf_counter()
        answer = msgspec.msgpack.decode(await self.pool.post("application/msgpack", msgspec.msgpack.encode(body)))
        self.outside["messagepack"].append((time.perf_counter() - begun) * 1e3 - answer["latency_ms"])
        return len(np.frombuffer(answer["scores"], "<f4").reshape(-1, len(answer["tasks"])))

    async def json(self, number: int) -> int:
        items, actions, times = self.lists[number % USERS]
        history = {"items": items, "actions": actions, "times": times}
        body = {"user_id": f"user-{number % USERS}", "history": history, "candidates": self.candidates.tolist()}
        begun = time.perf_counter()
        answer = msgspec.json.decode(await self.pool.post("application/json", msgspec.json.encode(body)))
        self.outside["json"].append((time.perf_counter() - begun) * 1e3 - answer["latency_ms"])
        return len(answer["scores"])


async def block(ask: Callable[[int], Awaitable[int]], seconds: float, first: int) -> list[float]:
    """Latencies in ms of RATE requests a second, evenly spaced, each from its call to its scores."""
    latencies: list[float] = []

    async def one(number: int) -> None:
        begun = time.perf_counter()
        assert await ask(number) == CANDIDATES
        latencies.append((time.perf_counter() - begun) * 1e3)

    begin = time.perf_counter()
    async with asyncio.TaskGroup() as calls:
        for number in range(round(seconds * RATE)):
            await asyncio.sleep(max(0.0, begin + number / RATE - time.perf_counter()))
            calls.create_task(one(first + number))
    return latencies


Found = dict[str, list[list[float]]]


async def measure(kafka: Kafka, rounds: int, seconds: float, folder: Path) -> tuple[Found, dict[str, list[float]]]:
    """The blocks' latencies by arm, one list a round; of each request the time that it was not on the relay."""
    (port,) = free_ports(1)
    settings = Settings(
        kafka=kafka,
        relay=Relay(slo_ms=TIMEOUT_S * 1e3),  # nothing is refused: what is measured is the way
        worker=Worker(name="w1", hbm_bytes=64 << 20, dram_bytes=0, audit_share=0.0),
        model=Model(layers=2, dim=32, heads=2, dqk=16, dv=16, vocab=5000),
        client=Client(hedge_ms=0.0, timeout_ms=TIMEOUT_S * 1e3),
        gateway=Gateway(port=port),
    )
    await apply_topics(kafka)
    config = write_settings(folder / "settings.toml", servable(settings, folder))
    children = [Child(name, [name, "--config", config], folder) for name in ("worker", "gateway")]
    found: Found = {arm: [] for arm in ARMS}
    try:
        async with RelayClient(settings=settings) as relay:
            await asyncio.gather(*(child.wait_ready() for child in children))
            requests, number = Requests(relay, Pool(port)), 0
            for turn in range(rounds + 1):
                for arm in ARMS:
                    latencies = await block(getattr(requests, arm), seconds, number)
                    number += len(latencies)
                    if turn:  # the first round warms caches, connections and code
                        found[arm].append(latencies)
    finally:
        await stop_all(children)
    return found, requests.outside


def report(found: Found, outside: dict[str, list[float]]) -> list[str]:
    """Print the arms side by side; return the bounds not kept."""
    p50 = {arm: np.array([np.median(each) for each in found[arm]]) for arm in ARMS}
    print("arm           requests   P50 ms   P99 ms   outside the relay   added at P50, ms: median (range over rounds)")
    for arm in ARMS:
        latencies = np.concatenate(found[arm])
        added = p50[arm] - p50["direct"]
        shown = f"{np.median(added):6.2f} ({added.min():.2f}…{added.max():.2f})" if arm != "direct" else ""
        apart = f"{np.median(outside[arm]):14.2f} ms" if arm in outside else ""
        quantiles = f"{np.median(latencies):8.2f} {nearest_rank(latencies, 0.99):8.2f}"
        print(f"{arm:12} {len(latencies):9d} {quantiles} {apart:>19}   {shown}")
    added_ms = float(np.median(p50["messagepack"] - p50["direct"]))
    print(f"through / direct at P50: {np.median(p50['messagepack'] / p50['direct']):.2f} by MessagePack, "
          f"{np.median(p50['json'] / p50['direct']):.2f} by JSON")  # fmt: skip
    spread_ms = float(np.quantile(p50["direct"], 0.75) - np.quantile(p50["direct"], 0.25))
    if spread_ms > NOISE_MS:
        raise NotValid(f"half of the direct blocks differ by {spread_ms:.1f} ms at P50, others run here")
    return (
        []
        if added_ms <= MOST_ADDED_MS
        else [f"the gateway adds {added_ms:.2f} ms at P50 by MessagePack; bound: at most {MOST_ADDED_MS:g} ms"]
    )


async def main(rounds: int, seconds: float, broker: BrokerKind) -> list[str]:
    """Run, print, return the bounds not kept."""
    print(f"{broker} broker, {RATE} requests/s, {BEHAVIOURS} behaviours, {CANDIDATES} candidates")
    with tempfile.TemporaryDirectory() as folder:
        async with local_broker(broker, folder=Path(folder)) as started:
            kafka = started.kafka_settings(msgspec.structs.replace(Kafka(), partitions=8, replication=1))
            found, outside = await measure(kafka, rounds, seconds, Path(folder))
    return report(found, outside)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each arm")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a block")
    parser.add_argument("--broker", choices=["embedded", "kafka"], default=broker_at_hand())
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        judge(lambda: runner.run(main(arguments.rounds, arguments.seconds, arguments.broker)))
