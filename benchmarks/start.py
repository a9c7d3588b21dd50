"""What a starting worker costs those that serve on the same machine: two workers under a steady load, a third one
starts beside them, again and again, with worker.start_nice and without it in turn. Real processes, the broker at hand
(Kafka where KAFKA_HOME is set), random weights. CHECK=1 judges and exits non-zero naming the targets missed."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import uvloop
from targets import end

from relaygr_stream.bench.interference import CpuTimes
from relaygr_stream.bus.local import BrokerKind, local_broker
from relaygr_stream.bus.records import Record
from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.children import Child, settings_as_toml, stop_all
from relaygr_stream.client import RelayClient
from relaygr_stream.errors import RelayError
from relaygr_stream.messages import Behaviours, RankingRequest, pack_items
from relaygr_stream.settings import Client, Kafka, Relay, Settings, Worker
from relaygr_stream.status.reader import worker_statuses
from relaygr_stream.topics import apply_topics, load_topics

MIB: Final = 1 << 20
LANES: Final = 16
TOKENS: Final = 256
CANDIDATES: Final = 100
#: Between two starts, so that the lanes' move of one is over before the next.
CALM_S: Final = 2.5
TIMEOUT_S: Final = 20.0
#: Of what a start adds to the delay of the neighbours' rankings, niceness may leave this share.
MOST_LEFT: Final = 0.7
#: Where a start adds less than this share of what there is without one, the cores had time for it: nothing to leave.
LEAST_ADDED: Final = 0.2


@dataclass
class Starts:
    """All starts of one kind: how long each took until its model was loaded, and the neighbours' rankings meanwhile."""

    seconds: list[float] = field(default_factory=list)
    ms: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # cores that programs of others kept busy


class Neighbours:
    """Two workers and a client's load on them; `start` has a third one come and go."""

    def __init__(self, kafka: Kafka, folder: Path, rate: float) -> None:
        self.settings = Settings(
            kafka=msgspec.structs.replace(kafka, prefix="start.", partitions=LANES, replication=1),
            relay=Relay(max_prefix_tokens=TOKENS, max_suffix_tokens=16, max_candidates=CANDIDATES),
            worker=Worker(hbm_bytes=64 * MIB, dram_bytes=0, audit_share=0.0, forward=False),
            # A hedge would ask a worker that has time: what is measured is the one that has not.
            client=Client(hedge_ms=0.0, silence_ms=60_000.0),
        )
        self.asked: list[tuple[float, float]] = []  # when sent, milliseconds
        self.failed = 0
        self._folder = folder
        self._rate = rate
        self._lanes: dict[str, int] = {}
        self._children: dict[str, Child] = {}
        self._random = np.random.default_rng(1)

    async def play(self, kinds: Sequence[int], starts: int) -> tuple[dict[int, Starts], list[float]]:
        """So many starts with each niceness, in turn; and the milliseconds of rankings while nothing started."""
        await apply_topics(self.settings.kafka)
        topics = load_topics(self.settings.kafka)
        found: dict[int, Starts] = {kind: Starts() for kind in kinds}
        calm: list[float] = []
        async with AsyncExitStack() as stack:
            stack.push_async_callback(lambda: stop_all(list(self._children.values())))
            tail = TopicTail(self.settings.kafka, topics.worker_status.name, [0], "earliest", self._on_statuses)
            await stack.enter_async_context(tail)
            for name in ("w1", "w2"):
                self._start(name, 0)
            await self._owned("w1", "w2")
            client = await stack.enter_async_context(RelayClient(settings=self.settings))
            load = asyncio.create_task(self._load(client))
            stack.callback(load.cancel)
            await asyncio.sleep(CALM_S)
            for number in range(starts):
                for nice in kinds if number % 2 else kinds[::-1]:
                    await self._start_beside(nice, found[nice], calm)
            load.cancel()
        return found, calm

    async def _start_beside(self, nice: int, found: Starts, calm: list[float]) -> None:
        """Start the third worker and stop it again."""
        before = time.monotonic()
        await asyncio.sleep(CALM_S)
        begun, cpu = time.monotonic(), CpuTimes.now()
        child = self._start("w3", nice)
        while "model loaded" not in child.log_tail():  # noqa: ASYNC110
            await asyncio.sleep(0.05)  # a start takes seconds; after it lanes move, which is another matter
        ended = time.monotonic()
        if cpu is not None and (now := CpuTimes.now()) is not None:
            found.others.append(now.others_since(cpu))
        await self._owned("w1", "w2", "w3")
        child.terminate()
        await child.wait()
        await self._owned("w1", "w2")
        await asyncio.sleep(CALM_S)
        found.seconds.append(ended - begun)
        found.ms += self._between(begun, ended)
        calm += self._between(before, begun)

    def _between(self, begin: float, end: float) -> list[float]:
        return [ms for at, ms in self.asked if begin <= at < end]

    def _start(self, name: str, nice: int) -> Child:
        file = self._folder / "settings.toml"
        file.write_text(settings_as_toml(self.settings), encoding="utf-8")
        arguments = ["worker", "--config", str(file), "--set", f"worker.name={name}"]
        self._lanes.pop(name, None)
        child = Child(name, [*arguments, "--set", f"worker.start_nice={nice}"], self._folder)
        self._children[name] = child
        return child

    async def _owned(self, *names: str) -> None:
        """Until these workers share the lanes."""
        async with asyncio.timeout(90):
            while sum(self._lanes.get(name, 0) for name in names) != LANES or not all(map(self._lanes.get, names)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # the tail fills it

    async def _load(self, client: RelayClient) -> None:
        """Open loop, however slow the answers are."""
        start, number = time.monotonic(), 0
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._rank(client, number))
                number += 1
                await asyncio.sleep(start + number / self._rate - time.monotonic())

    async def _rank(self, client: RelayClient, number: int) -> None:
        random = self._random
        request = RankingRequest(
            request_id=f"{number}",
            user_id=f"user-{number}",
            prefix=Behaviours.of(
                random.integers(0, 50_000, TOKENS), random.integers(1, 4, TOKENS), np.arange(TOKENS) * 1000
            ),
            candidates=pack_items(np.arange(CANDIDATES)),
        )
        at = time.monotonic()
        try:
            await client.rank(request, timeout=TIMEOUT_S)
        except RelayError:
            self.failed += 1
            return
        self.asked.append((at, (time.monotonic() - at) * 1e3))

    def _on_statuses(self, records: list[Record]) -> None:
        for status in worker_statuses(records):
            self._lanes[status.name] = len(status.lanes) if status.state == "serving" else 0


async def measure(options: argparse.Namespace) -> list[str]:
    """The table on standard output; the targets missed."""
    kind: BrokerKind = "kafka" if os.environ.get("KAFKA_HOME") else "embedded"
    kinds = (0, *options.nice)
    with tempfile.TemporaryDirectory() as folder:
        async with local_broker(kind, folder=Path(folder)) as broker:
            neighbours = Neighbours(broker.kafka_settings(Kafka()), Path(folder), options.rate)
            found, calm = await neighbours.play(kinds, options.starts)
    print(f"2 workers, {options.rate:g} rankings a second of {TOKENS} tokens in full, broker: {kind}; a third starts\n")
    columns = ("seconds", "longest", "rankings", "mean ms", "P50 ms", "P99 ms", "others")
    print(f"{'':<26}{''.join(f'{column:>10}' for column in columns)}")
    print(f"{'nothing starts':<26}{'':>20}{_row(calm)}")
    for nice, starts in found.items():
        seconds = f"{np.median(starts.seconds):>10.1f}{max(starts.seconds):>10.1f}"
        others = f"{np.mean(starts.others):>10.1f}" if starts.others else ""
        print(f"{f'worker.start_nice = {nice}':<26}{seconds}{_row(starts.ms)}{others}")
    print("\nothers: cores that other programs kept busy meanwhile")
    missed = []
    for what, figure in (("mean", np.mean), ("P99", lambda ms: np.percentile(ms, 99))):
        calmly = float(figure(calm))
        added = {kind: float(figure(starts.ms)) - calmly for kind, starts in found.items()}
        print(f"a start adds {added[0]:.1f} ms to the neighbours' {what} of {calmly:.1f} ms", end="")
        if added[0] < LEAST_ADDED * calmly:
            print(": too little for niceness to show")
            continue
        shares = {nice: added[nice] / added[0] for nice in options.nice}
        print("".join(f", with niceness {nice} {share:.2f} of it" for nice, share in shares.items()))
        left = ((nice, share) for nice, share in shares.items() if share > MOST_LEFT)
        missed += [f"niceness {nice}: {share:.2f} of what a start adds to the {what} is left" for nice, share in left]
    if neighbours.failed:
        missed.append(f"{neighbours.failed} rankings failed")
    return missed


def _row(ms: Sequence[float]) -> str:
    return f"{len(ms):>10}" + "".join(f"{value:>10.1f}" for value in (np.mean(ms), *np.percentile(ms, [50, 99])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=15.0, help="rankings a second")
    parser.add_argument("--starts", type=int, default=5, help="of each kind")
    parser.add_argument("--nice", type=int, nargs="+", default=[Worker().start_nice], help="compared with 0")
    options = parser.parse_args()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # topics made a moment ago have no leaders yet
    end(uvloop.run(measure(options)))


if __name__ == "__main__":
    main()
