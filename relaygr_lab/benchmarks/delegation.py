"""First visits that come together, with and without delegation, and three ways of choosing the delegate.

    python relaygr_lab/benchmarks/delegation.py [--seconds 30] [--status-ms 250]
    with CHECK=1 exits non-zero, naming the bounds not kept; --status-ms 1000: choices under older statuses

Four worker processes with two lanes each and a trigger over the embedded broker, real but for the model: its operations
sleep (forwarding_model.py), so that four devices fit into a machine of two cores. Every request is a new user's, 195
tokens and 8 candidates: 200 ms of the device (all times are dilated by SLEEPER_DILATION, 2). The client announces it
and ranks it HEAD_START_S later; arrivals are Poisson, on lanes at random; clients do not hedge. In turn without
delegation and with each policy (delegation_policies.py), at 80 % of the devices' time and at 8 %, where each finds its
worker idle. All runs have the same arrivals. Times are the client's, from `rank` to the scores, the timeout for
requests without scores; a hit found prefix KV ready or joined their prefill.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("SLEEPER_DILATION", "2")  # the workers import forwarding_model, too

import msgspec
import numpy as np
from delegation_policies import POLICIES
from forwarding import CANDIDATES, CAPACITY_PER_S, DISTURBED, SERVICE_MS, TIMEOUT_S, TOKENS, Lanes, share_model
from forwarding_model import DILATION, ITEMS
from judge import judge
from relaygr_lab.verdicts import NotValid

from relaygr_stream.bus.tail import TopicTail
from relaygr_stream.bus.topics import apply_topics
from relaygr_stream.client import RelayClient
from relaygr_stream.errors import Overloaded, RelayError
from relaygr_stream.ops import children
from relaygr_stream.ops.brokers.local import local_broker
from relaygr_stream.ops.children import Child, stop_all, write_settings
from relaygr_stream.settings.schema import Client, Kafka, Relay, Settings, Trigger
from relaygr_stream.settings.worker import Model, Worker
from relaygr_stream.wire.messages import HITS
from relaygr_stream.wire.topic_files import lane_of, load_topics
from relaygr_stream.workload.quantiles import nearest_rank

FLEET = tuple(f"w{number}" for number in range(1, 5))
EACH = 2
#: Three times a first visit's own time: three that come together are ready in time at one worker.
HEAD_START_S = 3e-3 * SERVICE_MS
LOADS = {"busy": 0.8, "idle": 0.08}
WARM_S = 4.0 * DILATION
#: Statuses that may be missing before a worker counts as silent.
STATUSES = 8
#: Bound of the P99 of first visits at 80 % load: times that without delegation.
MOST_OF_P99 = 0.7
#: Without load two runs differ by as much.
NOISE = 1.15


@dataclass
class Run:
    """What became of the requests of one load."""

    sent: int = 0
    refused: int = 0
    failed: int = 0
    wrong: int = 0
    hits: int = 0
    delegated: int = 0
    delegated_hits: int = 0
    latencies: list[float] = field(default_factory=list)
    device_ms: list[float] = field(default_factory=list)

    def p(self, q: float) -> float:
        """The quantile over all requests: those without scores took the whole timeout."""
        all_ms = self.latencies + [TIMEOUT_S * 1e3] * (self.refused + self.failed)
        return nearest_rank(all_ms, q) if all_ms else float("nan")


def settings(kafka: Kafka, delegate: bool, status_ms: float) -> Settings:
    """The defaults, but for a small memory, and for all times of requests and statuses, which are dilated.

    status_ms: between two statuses of a worker, undilated.
    """
    relay, trigger, client = Relay(), Trigger(), Client()
    return Settings(
        kafka=kafka,
        relay=Relay(
            max_prefix_tokens=256,
            max_suffix_tokens=0,
            max_candidates=64,
            slo_ms=DILATION * relay.slo_ms,
            life_window_ms=DILATION * relay.life_window_ms,
        ),
        trigger=Trigger(
            delegate=delegate,
            max_event_age_ms=DILATION * trigger.max_event_age_ms,
            max_status_age_ms=DILATION * max(trigger.max_status_age_ms, STATUSES * status_ms),
        ),
        worker=Worker(
            hbm_bytes=16 << 20,
            dram_bytes=0,
            audit_share=0.0,
            truncate_to=0,
            max_stale_tokens=0,  # the model reads no suffix, with which a stale prefix would be completed
            status_interval_ms=round(DILATION * status_ms),
        ),
        model=Model(factory="forwarding_model:sleeper"),
        client=Client(hedge_ms=0.0, silence_ms=DILATION * max(client.silence_ms, STATUSES * status_ms)),
    )


async def load(client: RelayClient, name: str, share: float, seconds: float, seed: int) -> Run:
    """Poisson arrivals that take this share of all devices."""
    random = np.random.default_rng(seed)
    rate = share * CAPACITY_PER_S * len(FLEET)
    run, calls = Run(), []
    begin, at, number = time.monotonic(), 0.0, 0
    while (at := at + random.exponential(1 / rate)) < seconds:
        lane = int(random.integers(EACH * len(FLEET)))
        while lane_of(user := f"{name}-{number}", EACH * len(FLEET)) != lane:
            number += 1
        number += 1
        items = random.integers(0, ITEMS, TOKENS)
        await asyncio.sleep(max(0.0, begin + at - time.monotonic()))
        calls.append(asyncio.create_task(visit(client, user, items, run)))
    await asyncio.gather(*calls)
    return run


async def visit(client: RelayClient, user: str, items: np.ndarray, run: Run) -> None:
    candidates, history = np.arange(CANDIDATES), (items, np.zeros(TOKENS, int), np.arange(TOKENS))
    run.sent += 1
    try:
        async with client.request(
            user, history, candidates=CANDIDATES, rank_in=HEAD_START_S, request_id=user
        ) as request:
            await asyncio.sleep(HEAD_START_S)
            answer = await request.rank(candidates, timeout=TIMEOUT_S)
    except Overloaded:
        run.refused += 1
    except RelayError:
        run.failed += 1
    else:
        run.wrong += not np.array_equal(answer.scores[:, 0], items.sum() + candidates)
        hit = answer.outcome in HITS
        run.hits += hit
        run.delegated += answer.admission == "delegated"
        run.delegated_hits += hit and answer.admission == "delegated"
        run.latencies.append(answer.latency_s * 1e3)
        if not hit:
            run.device_ms.append(answer.timings.device_ms)


async def run(
    kafka: Kafka, policy: str, seconds: float, status_ms: float, folder: Path
) -> tuple[dict[str, Run], Counter[str]]:
    """All loads on a new fleet, and the trigger's decisions. policy: "off" or one of POLICIES."""
    kafka = msgspec.structs.replace(kafka, prefix=f"delegate-{policy}.", partitions=EACH * len(FLEET), replication=1)
    conf = settings(kafka, policy != "off", status_ms)
    await apply_topics(kafka)
    topics, lanes = load_topics(kafka), Lanes(FLEET, EACH)
    config = write_settings(folder / f"{policy}.toml", conf)
    command = children.relaygr_command

    def with_policy(arguments: Sequence[str], port_file: Path, module: str = "") -> list[str]:  # noqa: ARG001
        python, *_ = command(arguments, port_file)
        rest = command(arguments, port_file)[4:]
        return [python, "-P", str(Path(__file__).with_name("delegation_policies.py")), policy, *rest]

    children.relaygr_command = command if policy == "off" else with_policy
    fleet = [
        Child(f"{policy}-{name}", ["worker", "--config", config, "--set", f"worker.name={name}"], folder)
        for name in FLEET
    ]
    fleet.append(trigger := Child(f"{policy}-trigger", ["trigger", "--config", config], folder))
    children.relaygr_command = command
    try:
        async with (
            TopicTail(kafka, topics.worker_status.name, [0], "latest", lanes.take),
            RelayClient(settings=conf) as client,
        ):
            await asyncio.gather(*(child.wait_ready() for child in fleet))
            await lanes.shared_out.wait()
            await load(client, "warm", 0.5, WARM_S, seed=1)
            runs = {}
            for number, (name, share) in enumerate(LOADS.items()):
                await asyncio.sleep(2 * TIMEOUT_S)
                length = seconds if share > max(LOADS.values()) / 2 else seconds / 2
                runs[name] = await load(client, name, share, length, seed=2 + number)
            decided = (one for one in trigger.samples() if one.name == "relaygr_trigger_decisions_total" and one.value)
            decisions = Counter({one.labels["reason"]: int(one.value) for one in decided})
    finally:
        await stop_all(fleet)
    return runs, decisions


def mean(values: list[float]) -> float:
    """Of no values: 0."""
    return float(np.mean(values)) if values else 0.0


async def main(seconds: float, policies: list[str], status_ms: float) -> list[str]:
    """Run, print, return the bounds not kept."""
    print(
        f"{len(FLEET)} workers of {CAPACITY_PER_S:.0f}/s, a first visit {SERVICE_MS:.0f} ms, {HEAD_START_S:.1f} s ahead"
    )
    print("load  delegates   sent  refused  failed    hits  delegated (hits)   p50 ms   p99 ms   device")
    share_model()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        async with local_broker("embedded", folder=Path(folder)) as broker:
            for policy in policies:
                kafka = broker.kafka_settings(Kafka())
                found[policy], decisions = await run(kafka, policy, seconds, status_ms, Path(folder))
                for name, one in found[policy].items():
                    print(
                        f"{name:5} {policy:9} {one.sent:6} {one.refused / one.sent:8.1%} {one.failed / one.sent:7.1%}"
                        f" {one.hits / one.sent:7.1%} {one.delegated / one.sent:9.1%} {one.delegated_hits:6}"
                        f" {one.p(0.5):8.0f} {one.p(0.99):8.0f} {mean(one.device_ms):8.1f}"
                    )
                    if one.wrong:
                        raise NotValid(f"{name}, {policy}: {one.wrong} answers with wrong scores")
                print(f"      decisions {dict(decisions.most_common())}", flush=True)
    off = found.pop("off", None)
    if off is None:
        return []
    stretched = max(mean(one.device_ms) for one in off.values()) / SERVICE_MS
    for policy, runs in found.items():
        print(
            f"{policy:7} P99 of first visits: busy {runs['busy'].p(0.99) / off['busy'].p(0.99):.2f} times,"
            f" idle {runs['idle'].p(0.99) / off['idle'].p(0.99):.2f} times that without delegation;"
            f" P50 {runs['busy'].p(0.5) / off['busy'].p(0.5):.2f} and {runs['idle'].p(0.5) / off['idle'].p(0.5):.2f}"
        )
    if stretched > DISTURBED:
        raise NotValid(f"the device's sleeps took {stretched:.1f} times as long as they should, others run here")
    broken = []
    if "two" in found:
        two = found["two"]
        if two["busy"].p(0.99) > MOST_OF_P99 * off["busy"].p(0.99):
            broken.append(
                f"busy: P99 {two['busy'].p(0.99):.0f} ms; bound: {MOST_OF_P99:g} × {off['busy'].p(0.99):.0f} without"
            )
        if two["idle"].p(0.5) > NOISE * off["idle"].p(0.5) or two["idle"].refused > off["idle"].refused:
            broken.append("idle: P50 or refusals are worse with delegation; bound: no worse")
    return broken


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the busy load; the idle one's is half")
    parser.add_argument("--policies", nargs="+", default=["off", *POLICIES], choices=["off", *POLICIES])
    parser.add_argument(
        "--status-ms", type=float, default=Worker().status_interval_ms, help="between two statuses of a worker"
    )
    options = parser.parse_args()
    judge(lambda: asyncio.run(main(options.seconds, options.policies, options.status_ms)))
