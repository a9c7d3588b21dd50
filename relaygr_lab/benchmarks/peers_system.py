"""A serving system beside ours: candidates on one cached prefix by vLLM, by our model, by our worker over its bus.

    python relaygr_lab/benchmarks/peers_system.py --python FILE [--seconds 10] [--dtype bfloat16] [--json FILE]

A softmax transformer of one shape (8 layers, D 256, 4 heads × 64, random weights); one thread computes in each. vLLM is
called in its own process, without HTTP. Ours over the bus is the time from rank() to its answer: client, broker, worker
and back. All take turns. KAFKA_HOME: Apache Kafka; otherwise the embedded broker, which wakes no long poll.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from engine_load import EngineLoad
from floors import Machine
from judge import judge
from peers import ONE_THREAD
from peers_child import turn
from peers_process import PeerProcess
from peers_report import Result
from relaygr_lab.bench.pipeline import Pipeline

from relaygr_stream.client import RelayClient
from relaygr_stream.ops.brokers.distribution import BRIEF_RELAY
from relaygr_stream.ops.brokers.local import broker_at_hand, local_broker
from relaygr_stream.settings.load import load_settings
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Model
from relaygr_stream.workload.quantiles import nearest_rank

VLLM: Final = Path(__file__).with_name("peers_vllm.py")
#: vLLM imports for half a minute and compiles its graph on its first start.
START_S: Final = 400.0
TURN_S: Final = 0.5
#: vLLM binds no thread to a core, asks no model hub, sends no statistics.
VLLM_ENVIRONMENT: Final = ONE_THREAD | {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


async def over_bus(client: RelayClient, prefix: int, candidates: int, seconds: float) -> list[float]:
    """Seconds of rankings, one after the other, of a user whose prefix KV the worker keeps."""
    items = np.arange(prefix) * 37 % 1000
    history = (items, np.zeros(prefix, np.uint8), np.arange(prefix) * 1000)
    times: list[float] = []
    until = time.perf_counter() + seconds
    while True:
        ranking = await client.request("user", history, candidates=candidates).rank(np.arange(candidates), timeout=10)
        if ranking.outcome == "hbm":
            times.append(ranking.latency_s)
        if time.perf_counter() > until:
            return times


def configured(options: argparse.Namespace) -> Settings:
    """The transformer in a worker of one thread, and a client that takes its time."""
    flags = {
        "worker.dtype": options.dtype, "client.hedge_ms": 0,
    }  # fmt: skip
    factory = "relaygr_stream.models.transformer:make"
    model = Model(factory=factory, layers=8, dim=256, heads=4, dqk=64, dv=64)
    return msgspec.structs.replace(load_settings(files=["cpu"], flags=flags).settings, model=model)


async def measure(options: argparse.Namespace, vllm: PeerProcess, folder: Path) -> list[Result]:
    settings = configured(options)
    prefix, candidates = options.prefix, options.candidates
    load = EngineLoad(settings.model, torch.device("cpu"), getattr(torch, options.dtype))
    kv = load.region(prefix)
    load.model.prefill(kv, load.tokens(prefix))
    alike = load.alike(load.ranking(kv, candidates))
    model, bus, peer = Result("ours, the model"), Result("ours, over the bus"), Result("vLLM")
    print("vLLM starts (a minute or two) …", flush=True)
    answer = await asyncio.to_thread(vllm.ask, {}, START_S)
    peer.problem, peer.version = answer.get("failed", ""), answer.get("version", "")
    print(f"vLLM      {peer.version or peer.problem}, {answer.get('cached', 0)} tokens of each prompt in its cache")
    kind = broker_at_hand()
    async with local_broker(kind, folder=folder, node=BRIEF_RELAY) as broker:
        print(f"broker    {kind}; a trigger and a worker start …", flush=True)
        settings = msgspec.structs.replace(settings, kafka=broker.kafka_settings(settings.kafka))
        async with Pipeline("peers", settings, 1, folder) as pipeline:
            await over_bus(pipeline.client, prefix, candidates, TURN_S)  # the first is full inference
            until = time.perf_counter() + options.seconds
            while time.perf_counter() < until:
                model.times += turn(lambda: load.model.score([next(alike)]), TURN_S)
                bus.times += await over_bus(pipeline.client, prefix, candidates, TURN_S)
                if not peer.problem:
                    answer = await asyncio.to_thread(vllm.ask, {"turn": TURN_S})
                    peer.problem = answer.get("failed", "")
                    peer.times += answer.get("times", [])
    if not bus.times:
        bus.problem = "no ranking found its prefix KV at the worker"
    return [model, bus, peer]


def shown(results: list[Result]) -> None:
    print(f"\n{'':20} {'ms':>9} {'median':>9} {'P99':>9} {'runs':>6}")
    for result in results:
        if not result.ran:
            print(f"{result.name:20} failed: {result.problem}")
            continue
        figures = (result.shortest, statistics.median(result.times), nearest_rank(result.times, 0.99))
        print(f"{result.name:20} " + " ".join(f"{each * 1e3:9.2f}" for each in figures) + f" {len(result.times):6}")


def judged(results: list[Result]) -> list[str]:
    """Ours over the bus must have the smaller median."""
    _, bus, peer = results
    failed = [f"{each.name} failed: {each.problem}" for each in (bus, peer) if not each.ran]
    if failed:
        return failed
    ratio = statistics.median(peer.times) / statistics.median(bus.times)
    return [] if ratio > 1 else [f"vLLM takes {ratio:.2f} × ours over the bus; bound: above 1"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the Python that has vLLM; default: this one")
    parser.add_argument("--prefix", type=int, default=2048, help="tokens of the cached prefix")
    parser.add_argument("--candidates", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--seconds", type=float, default=30.0, help="time of all turns together")
    parser.add_argument("--json", type=Path, default=Path("out/peers/system.json"), help="where the report goes")
    return parser.parse_args()


def main() -> list[str]:
    options = parse()
    torch.set_num_threads(1)
    machine = Machine(torch.device("cpu")).describe()
    print("\n".join(machine))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    arguments = [str(VLLM), str(options.prefix), str(options.candidates), options.dtype]
    vllm = PeerProcess([options.python, *arguments], options.json.parent / "vllm.log", VLLM_ENVIRONMENT)
    try:
        with tempfile.TemporaryDirectory() as folder:
            results = asyncio.run(measure(options, vllm, Path(folder)))
    finally:
        vllm.stop()
    shown(results)
    found = [{"name": each.name, "version": each.version, "problem": each.problem, "s": each.times} for each in results]
    options.json.write_text(json.dumps({"machine": machine, "results": found}, indent=1), encoding="utf-8")
    print(f"report    {options.json}\n")
    return judged(results)


if __name__ == "__main__":
    judge(main)
