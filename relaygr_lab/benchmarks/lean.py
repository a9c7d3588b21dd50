"""What the relay's own way costs: worker, trigger and client beside a bare aiokafka echo of the same records.

    python relaygr_lab/benchmarks/lean.py [--rounds 3] [--seconds 6] [--broker kafka] [--quick]
        with CHECK=1 exits non-zero, naming the bounds not kept

The worker's model computes nothing: its device is emulated, and takes 0.1 ms. A request is an event with BEHAVIOURS
behaviours and, 50 ms later, a ranking of CANDIDATES candidates behind the same history. The relay is a trigger and a
worker; the echo is one process that sends each event on as a signal and answers each ranking, and decodes nothing
(lean_child.py). Both have topics of the same kind on one broker, and a client process each. They take turns at every
rate. Processor time is of each process, for one request; the largest rate is the last of a series at which all requests
were answered with a P99 within 50 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
from judge import judge
from lean_child import BEHAVIOURS, CANDIDATES
from relaygr_lab.cpu_times import process_s
from relaygr_lab.emulate.process import FACTORY, MODULE
from relaygr_lab.processes import start_relay
from relaygr_lab.simulate.costs import KV, DeviceCosts
from relaygr_lab.verdicts import above_0

from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.ops.brokers.local import broker_at_hand, local_broker
from relaygr_stream.ops.children import Child, stop_all, write_settings
from relaygr_stream.settings.schema import Kafka, Relay, Settings
from relaygr_stream.settings.worker import Model, Worker

CHILD = Path(__file__).with_name("lean_child.py")
COSTS = DeviceCosts(
    source="computes nothing",
    kv=KV(layers=1, heads=1, dqk=16, dv=16, dtype="bfloat16"),
    prefill_ms=(0.05, 0.0, 0.0),
    score_ms=(0.05, 0.0, 0.0),
    reload_bytes_per_s=10e9,
    spill_bytes_per_s=10e9,
)
RATES = (50, 300, 500)
SLO_MS = 50.0
#: The series of rates in the search for the largest.
FIRST_RATE = 200.0
STEP = 1.25
MOST_RATE = 6000.0
ARMS = ("relay", "echo")

#: Bounds of relay / echo: at most, or at least.
MOST_PROCESSES, MOST_CLIENT, MOST_P99, LEAST_RATE = 2.0, 1.5, 2.0, 0.5


class Script:
    """A child of this script that is asked by lines, or only says that it is ready."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, str(CHILD), *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    async def line(self) -> str:
        assert self._process.stdout is not None
        if not (line := await asyncio.to_thread(self._process.stdout.readline)):
            raise SystemExit(f"{' '.join(map(str, self._process.args))} has ended")  # type: ignore[arg-type]
        return line

    async def ask(self, **question: float) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(await self.line())  # type: ignore[no-any-return]

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


class Arm:
    """The relay or the echo: its client, and the other processes whose time counts."""

    def __init__(self, client: Script, pids: list[int]) -> None:
        self._client = client
        self._pids = pids

    async def block(self, rate: float, seconds: float) -> dict[str, float]:
        """What the client says, with processor times in ms a request."""
        before = sum(map(process_s, self._pids))
        found = await self._client.ask(rate=rate, seconds=seconds)
        used = sum(map(process_s, self._pids)) - before
        requests = max(1.0, found["answered"] + found["lost"])
        return found | {"client_ms": 1e3 * found["cpu_s"] / requests, "processes_ms": 1e3 * used / requests}

    async def largest(self, seconds: float) -> float:
        """Requests/s: the last of a rising series that goes well, which begins as low as it must; 0: none does."""
        rate = FIRST_RATE
        while not await self._goes_well(rate, seconds):
            rate /= STEP
            if rate < RATES[0]:
                return 0.0
        if rate < FIRST_RATE:  # the next of the series has failed
            return rate
        while rate * STEP <= MOST_RATE and await self._goes_well(rate * STEP, seconds):
            rate *= STEP
        return rate

    async def _goes_well(self, rate: float, seconds: float) -> bool:
        for _ in range(2):  # it may fail once, by a disturbance
            found = await self.block(rate, seconds)
            if not found["lost"] and found["p99"] <= SLO_MS:
                return True
        return False


Found = dict[tuple[str, float], list[dict[str, float]]]


async def measure(kafka: Kafka, rounds: int, seconds: float, folder: Path) -> tuple[Found, dict[str, float]]:
    """The blocks by arm and rate; the arms' largest rates."""
    costs = folder / "costs.toml"
    costs.write_text(COSTS.as_toml(), encoding="utf-8")
    relay = Settings(
        kafka=msgspec.structs.replace(kafka, prefix="relay."),
        relay=Relay(max_prefix_tokens=2 * BEHAVIOURS),
        worker=Worker(name="w1", hbm_bytes=256 << 20, dram_bytes=0, audit_share=0.0),
        model=Model(factory=FACTORY, checkpoint=str(costs)),
    )
    echo = msgspec.structs.replace(relay, kafka=msgspec.structs.replace(kafka, prefix="echo."))
    configs = {}
    for name, settings in zip(ARMS, (relay, echo), strict=True):
        await apply_topics(settings.kafka)
        configs[name] = write_settings(folder / f"{name}-client.toml", settings)
    children: list[Child] = start_relay(relay, folder, "trigger", ["w1"], MODULE)
    scripts: list[Script] = []
    try:
        await asyncio.gather(*(child.wait_ready() for child in children))
        scripts += [Script("echo", configs["echo"]), *(Script("client", name, configs[name]) for name in ARMS)]
        for script in scripts:
            await script.line()
        server, *clients = scripts
        pids = ([child.pid for child in children], [server.pid])
        arms = {name: Arm(client, each) for name, client, each in zip(ARMS, clients, pids, strict=True)}
        found: Found = defaultdict(list)
        for arm in arms.values():  # warms code, connections and the broker
            await arm.block(RATES[0], seconds)
            await arm.block(RATES[1], seconds)
        for turn in range(rounds):
            for rate in RATES:
                for name in ARMS if turn % 2 else ARMS[::-1]:
                    found[name, rate].append(await arms[name].block(rate, seconds))
                    print(".", end="", file=sys.stderr, flush=True)
        largest = {name: await arm.largest(seconds / 2) for name, arm in arms.items()}
        print(file=sys.stderr)
    finally:
        for script in scripts:
            script.end()
        await stop_all(children)
    return found, largest


def report(found: Found, largest: dict[str, float]) -> list[str]:
    """Print the arms side by side; return the bounds not kept."""

    for (arm, rate), blocks in found.items():
        for each in blocks:
            above_0(each["answered"], f"the number of requests that {arm} has answered at {rate:g}/s")

    def middle(arm: str, rate: float, what: str) -> float:
        return statistics.median(each[what] for each in found[arm, rate])

    def quotient(rate: float, what: str) -> float:
        """The median of the rounds' quotients, relay / echo."""
        pairs = zip(found["relay", rate], found["echo", rate], strict=True)
        return statistics.median(relay[what] / max(1e-9, echo[what]) for relay, echo in pairs)

    print("requests/s            processes ms  client ms    P50 ms    P99 ms   lost")
    for rate in RATES:
        for arm in ARMS:
            row = [middle(arm, rate, what) for what in ("processes_ms", "client_ms", "p50", "p99")]
            lost = sum(each["lost"] for each in found[arm, rate])
            print(f"{rate:10g}  {arm:8} {row[0]:13.2f} {row[1]:10.2f} {row[2]:9.1f} {row[3]:9.1f} {lost:6g}")
        row = [quotient(rate, what) for what in ("processes_ms", "client_ms", "p50", "p99")]
        print(f"{'':10}  quotient {row[0]:13.2f} {row[1]:10.2f} {row[2]:9.2f} {row[3]:9.2f}")
    for arm, rate in largest.items():
        above_0(rate, f"the largest rate of {arm} at a P99 of {SLO_MS:g} ms, {RATES[0]:g}/s or more,")
    rates = largest["relay"] / largest["echo"]
    print(f"largest rate at P99 ≤ {SLO_MS:g} ms: relay {largest['relay']:.0f}/s, echo {largest['echo']:.0f}/s, "
          f"quotient {rates:.2f}")  # fmt: skip
    bounds: list[tuple[bool, str, float, str]] = [
        (quotient(300, "processes_ms") <= MOST_PROCESSES, "worker and trigger at 300/s", quotient(300, "processes_ms"),
         f"at most {MOST_PROCESSES:g} × the echo"),
        (quotient(300, "client_ms") <= MOST_CLIENT, "the client at 300/s", quotient(300, "client_ms"),
         f"at most {MOST_CLIENT:g} × the echo's"),
        (quotient(50, "p99") <= MOST_P99, "P99 at 50/s", quotient(50, "p99"), f"at most {MOST_P99:g} × the echo's"),
        (rates >= LEAST_RATE, "the largest rate", rates, f"at least {LEAST_RATE:g} × the echo's"),
    ]  # fmt: skip
    return [f"{what}: {value:.2f}; bound: {bound}" for well, what, value, bound in bounds if not well]


async def main(given: Any) -> list[str]:
    """Run, print, return the bounds not kept."""
    print(f"{given.broker} broker, {BEHAVIOURS} behaviours, {CANDIDATES} candidates, a device that computes nothing")
    with tempfile.TemporaryDirectory() as folder:
        async with local_broker(given.broker, folder=Path(folder)) as started:
            kafka = started.kafka_settings(msgspec.structs.replace(Kafka(), replication=1))
            found, largest = await measure(kafka, given.rounds, given.seconds, Path(folder))
    return report(found, largest)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each arm at each rate")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a block")
    parser.add_argument("--broker", choices=["embedded", "kafka"], default=broker_at_hand())
    parser.add_argument("--quick", action="store_true", help="one round of 4 s")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 4.0
    judge(lambda: asyncio.run(main(arguments)))
