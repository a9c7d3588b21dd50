"""Lanes that follow measured load, on a served fleet: three workers with emulated devices, one of them twice as fast.

The workers begin with as many lanes each, since no load is known. When one has been busier than fair for long enough it
asks for another assignment, and lanes move by what was measured. One fleet, one load: users of Zipf's law who return.
An emulated device's K and V have no bytes to hand over: users whose lanes move are inferred in full once.

How many rankings a second follows from how many messages this machine takes to its broker and back: on a slower one
every time of the load and of the devices is longer by one factor.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from relaygr_lab.bench.broker_warm_up import SECONDS, compile_broker
from relaygr_lab.bench.statistics import ratio_bounds
from relaygr_lab.cpu_times import CpuTimes, disturbance
from relaygr_lab.emulate.process import FACTORY, MODULE
from relaygr_lab.rollouts import ChangingFleet, Sample, Traffic
from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_lab.verdicts import NotValid, above_0, some

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.ops.brokers.local import broker_at_hand, local_broker
from relaygr_stream.settings.schema import Client, Kafka, Relay, Settings
from relaygr_stream.settings.worker import Model, Worker
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.wire.worker_status import worker_statuses
from relaygr_stream.worker.fair_share import ASK_S
from relaygr_stream.workload.quantiles import quantile

COSTS: Final = Path(__file__).parent.parent / "relaygr_lab" / "emulate" / "costs" / "cpu.toml"
LANES: Final = 64
SPEEDS: Final[Mapping[str, float]] = {"first-1": 1.0, "first-2": 1.0, "first-3": 2.0}
#: A device of speed 1 takes 19 ms for a hit and 90 ms for full inference, so that two cores carry the rest.
SLOWED: Final = 10.0
TOKENS: Final = 300
#: Hits alone take 57 % of the devices' time.
RATE: Final = 120.0
USERS, SKEW = 800, 0.8
#: Messages to the broker and back, four at a time, in the time of a ranking: so the whole fleet's processes leave half
#: of the processors idle.
ROUND_TRIPS: Final = 20.0
#: A machine that is slower by more than this is too slow: the fleet's own intervals do not become longer with the rest.
MOST_SLOWED: Final = 4.0
#: Lanes that moved have been read for so long before it is judged: most of their users have been there once.
SETTLE_S: Final = 20.0
WINDOW_S: Final = 45.0
#: A worker asks after ASK_S; the longest wait for the first move, in these.
PATIENCE: Final = 4.0
#: Of the largest load over its fair share by number, as in the simulation (simulate_lanes.py).
LARGEST: Final = 0.85


@dataclass(frozen=True)
class Seen:
    """A stretch of the load, under one assignment. largest: load of the worker with most, over its fair share.
    of_largest: that worker's rankings."""

    lanes: Mapping[str, int]
    largest: float
    busy: Mapping[str, float]
    hits: float
    p50_ms: float
    p99_ms: float
    rankings: int
    lost: int
    of_largest: int


class LaneWatch:
    """Who owns which lane, by the workers' statuses, and what moved when."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self.owners: dict[int, str] = {}
        self.moves: list[tuple[float, int]] = []
        self._busy: list[tuple[float, str, float]] = []

    def take(self, records: list[Record]) -> None:
        """Some are new."""
        now = time.monotonic()
        for status in worker_statuses(records):
            if status.state != "serving":
                continue
            self._busy.append((now, status.name, status.busy_share))
            for lane in status.lanes:
                if self.owners.get(lane.lane, status.name) != status.name:
                    self.moves.append((now, lane.lane))
                self.owners[lane.lane] = status.name

    def busy(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Mean busy shares of that time."""
        stated = {
            name: [share for at, who, share in self._busy if who == name and begin_s <= at < end_s] for name in SPEEDS
        }
        return {name: sum(shares) / max(1, len(shares)) for name, shares in stated.items()}

    def seen(self, samples: Sequence[Sample], end_s: float) -> Seen:
        """The window that ends then, with the lanes of now."""
        begin_s = end_s - self._window_s
        those = [sample for sample in samples if begin_s <= sample.at_s < end_s]
        some(those, f"rankings in the last {self._window_s:.0f} s")
        loads = Counter(self.owners[lane_of(f"user-{sample.user}", LANES)] for sample in those)
        fair = len(those) / sum(SPEEDS.values())
        most = max(SPEEDS, key=lambda name: loads[name] / SPEEDS[name])
        latencies = [sample.latency_ms for sample in those if not sample.lost]
        return Seen(
            Counter(self.owners.values()),
            loads[most] / (fair * SPEEDS[most]),
            self.busy(begin_s, end_s),
            sum(sample.hit for sample in those) / len(those),
            quantile(latencies, 0.5) or float("nan"),
            quantile(latencies, 0.99) or float("nan"),
            len(those),
            sum(sample.lost for sample in those),
            loads[most],
        )


def report(numbers: Seen, measured: Seen, moved: Sequence[int], lost: int, rankings: int) -> list[str]:
    """Print both; returns the bounds not kept. moved: lanes, each as often as it moved; lost: of all rankings.

    Raises NotValid for too few rankings to tell.
    """
    print(f"{'lanes':<14} {'of each':>9} {'largest / fair':>15} {'busy':>16} {'hits':>5} {'P50 ms':>7} {'P99 ms':>7}")
    for name, seen in (("by number", numbers), ("by what is measured", measured)):
        of_each = " ".join(str(seen.lanes.get(each, 0)) for each in SPEEDS)
        busy = " ".join(f"{seen.busy[each]:.2f}" for each in SPEEDS)
        print(
            f"{name:<19} {of_each:>9} {seen.largest:>10.2f} {busy:>16} {seen.hits:>5.0%} {seen.p50_ms:>7.0f} "
            f"{seen.p99_ms:>7.0f}"
        )
    again = len(moved) - len(set(moved))
    print(f"{len(set(moved))} of {LANES} lanes moved, {again} again; {lost} of {rankings} rankings lost")
    broken = [f"lanes: {lost} rankings lost; bound: none"] if lost else []
    ratio = measured.largest / above_0(numbers.largest, "the largest load by number")
    shares = ratio_bounds(measured.rankings, measured.of_largest, numbers.rankings, numbers.of_largest)
    of_share = ratio * numbers.of_largest / numbers.rankings / (measured.of_largest / measured.rankings)
    low, high = (bound * of_share for bound in shares)
    told = f"largest load by load {ratio:.2f} × that by number, {low:.2f} to {high:.2f} with 95 % confidence"
    print(told)
    if low <= LARGEST and high >= 1.0:
        raise NotValid(f"lanes: {told}: too few rankings to tell {LARGEST:g} from 1")
    if low > LARGEST:
        broken.append(f"lanes: {told}; bound: at most {LARGEST:g}")
    if measured.p99_ms > above_0(numbers.p99_ms, "P99 by number"):
        broken.append(f"lanes: P99 {measured.p99_ms:.0f} ms by load; bound: {numbers.p99_ms:.0f} by number")
    if again:
        broken.append(f"lanes: {again} moved more than once; bound: none")
    return broken


async def slowed_by(kafka: Kafka) -> float:
    """The factor of all times of load and devices with which this machine carries them. Raises NotValid if too slow."""
    trips = await compile_broker(kafka, print) / SECONDS
    slowed = max(1.0, ROUND_TRIPS * RATE / trips)
    print(f"{trips:.0f} messages a second to the broker and back: times {slowed:.2f} ×, {RATE / slowed:.0f} rankings/s")
    if slowed > MOST_SLOWED:
        raise NotValid(f"this machine is too slow, or too busy, for {RATE / MOST_SLOWED:g} rankings a second")
    return slowed


async def play(fleet: ChangingFleet, averaging: float, slowed: float) -> list[str]:
    """Watch both assignments under the fleet's load."""
    watch, topics = LaneWatch(WINDOW_S * slowed), load_topics(fleet.settings.kafka)
    began_s = time.monotonic()
    async with TopicTail(fleet.settings.kafka, topics.worker_status.name, [0], "latest", watch.take):
        last_s = began_s + PATIENCE * averaging * ASK_S
        by_number: list[Seen] = []  # of each second; the last one counts

        async def until(condition: Callable[[], bool]) -> None:
            while not condition():
                fleet.check_running()
                await asyncio.sleep(1.0)
                if len(watch.owners) == LANES and fleet.samples and not watch.moves:
                    by_number.append(watch.seen(fleet.samples, time.monotonic()))

        await until(lambda: bool(watch.moves) or time.monotonic() > last_s)
        if not (watch.moves and by_number):
            return [f"lanes: none moved within {last_s - began_s:.0f} s"]
        print(f"lanes move {watch.moves[0][0] - began_s:.0f} s after the load began", flush=True)
        await until(lambda: time.monotonic() > watch.moves[-1][0] + (SETTLE_S + WINDOW_S) * slowed)
        measured = watch.seen(fleet.samples, time.monotonic())
        since = [sample for sample in fleet.samples if sample.at_s >= began_s]
        lost = sum(sample.lost for sample in since)
        return report(by_number[-1], measured, [lane for _, lane in watch.moves], lost, len(since))


async def lanes(*, quick: bool) -> list[str]:
    """Play, print the table, and return the bounds not kept."""
    averaging = 0.3 if quick else 1.0
    kind = broker_at_hand()
    print(
        f"lanes by load: {LANES} lanes, {USERS} users of Zipf's law {SKEW:g}, emulated devices of speeds "
        f"{' '.join(f'{each:g}' for each in SPEEDS.values())}; loads averaged over {averaging * ASK_S:.0f} s; "
        f"broker: {kind}"
    )
    with tempfile.TemporaryDirectory() as name:
        async with local_broker(kind, folder=Path(name)) as broker:
            kafka = broker.kafka_settings(Kafka(partitions=LANES, replication=1, prefix="lanes."))
            slowed = await slowed_by(kafka)
            traffic = Traffic(users=USERS, rate=RATE / slowed, tokens=TOKENS, skew=SKEW)
            settings = Settings(
                kafka=kafka,
                relay=Relay(
                    slo_ms=traffic.timeout_s * 1e3, max_prefix_tokens=512, max_suffix_tokens=16, max_candidates=64
                ),
                worker=Worker(hbm_bytes=4 << 30, dram_bytes=0, audit_share=0.0),
                model=Model(factory=FACTORY, checkpoint=str(COSTS)),
                client=Client(hedge_ms=0.0),  # on a busy machine all devices would soon compute in full for all users
            )
            options = []
            for speed in SPEEDS.values():
                file = Path(name) / f"speed-{speed:g}.toml"
                costs = DeviceCosts.read(COSTS).dilated(slowed * SLOWED / speed)
                file.write_text(costs.as_toml(), encoding="utf-8")
                options.append(("--averaging", f"{averaging:g}", "--set", f"model.checkpoint={file}"))
            fleet = ChangingFleet(settings, Path(name), traffic, MODULE, print, options)
            async with fleet.serving():
                before = CpuTimes.now()
                broken = await play(fleet, averaging, slowed)
                disturbed = disturbance(before, CpuTimes.now())
    if disturbed:
        raise NotValid(f"lanes: {disturbed}")
    return broken
