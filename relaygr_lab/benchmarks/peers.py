"""Our engine against runtimes that others use: the same layers, weights and inputs, one thread, in turns in one run.

    python relaygr_lab/benchmarks/peers.py [--quick] [--json FILE]      CHECK=1: non-zero, bounds not kept

Ours runs through the model API as a worker calls it, embedding included. A peer runs in a process of its own, in the
environment that `make bench-peers` makes, and gets embedded rows. It must compute what ours does: logits of a ranking,
K/V of a prefill. All take turns; ratios are of shortest times. A ranking goes round copies of its prefix KV.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from engine_load import COLD_BYTES, EngineLoad
from floors import Cost, Floors, Machine, dtype_name
from judge import judge
from peers_child import PEERS, turn
from peers_process import PeerProcess
from peers_report import Result, Row, broken, head

from relaygr_stream import settings
from relaygr_stream.models.hstu_model import HSTUModel

CHILD: Final = Path(__file__).with_name("peers_child.py")
#: A runtime that is not told otherwise starts a thread per core.
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
#: How long one peer, ours and the floors each run in a round.
TURN_S: Final = 0.1
#: A row takes at least so many rounds, however long its runs are.
ROUNDS: Final = 2
#: Of a peer's outputs from ours, relative to the largest. Each runtime rounds to bfloat16 at other places.
TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Operation:
    """A row of the table on our side: `inputs` is what a peer gets, `expected` what it must compute."""

    name: str
    run: Callable[[], object]
    cost: Cost
    inputs: dict[str, Any]
    expected: list[torch.Tensor]
    copies: int


class PeersBench:
    """All rows of one dtype."""

    def __init__(
        self, load: EngineLoad, machine: Machine, processes: dict[str, PeerProcess], folder: Path, seconds: float,
        until: float = math.inf,
    ) -> None:  # fmt: skip
        assert isinstance(load.model, HSTUModel)
        self.load = load
        self.dtype = dtype_name(load.dtype)
        self.model = load.model
        self.machine = machine
        self.processes = processes
        self.folder = folder
        self.seconds = seconds
        self.until = until

    def run(self, prefixes: list[int], candidates: list[int]) -> list[Row]:
        """All rows that begin before `until`, a time of time.monotonic()."""
        print(head(self.dtype), flush=True)
        makers = [
            maker
            for prefix in prefixes
            for maker in (
                *(partial(self.ranking, prefix, count) for count in candidates),
                partial(self.prefill, prefix),
            )
        ]
        rows = []
        for number, maker in enumerate(makers):
            if time.monotonic() > self.until:
                print(f"left out, the time is over: {len(makers) - number} rows", flush=True)
                break
            rows.append(self.row(maker()))
        return rows

    def ranking(self, prefix: int, candidates: int) -> Operation:
        load, kv = self.load, self.load.region(prefix)
        self.model.prefill(kv, load.tokens(prefix))
        one = load.ranking(kv, candidates)
        alike = load.alike(one)
        inputs = {
            "head": self.model.head.state_dict(),
            "x": self.model.embedding.rankings([(one.suffix, prefix, one.candidates)]),
            "kv": _layers_of(kv),
        }
        copies = math.ceil(COLD_BYTES / kv.layout.nbytes(prefix))
        return Operation(
            f"score {candidates} on {prefix}", lambda: self.model.score([next(alike)]), load.score_cost(one), inputs,
            self.model.score([one]), copies,
        )  # fmt: skip

    def prefill(self, prefix: int) -> Operation:
        load, kv, history = self.load, self.load.region(prefix), self.load.tokens(prefix)

        def run() -> None:
            kv.length = 0
            self.model.prefill(kv, history)

        run()
        inputs = {"head": {}, "x": self.model.embedding.behaviours(history, 0), "kv": []}
        return Operation(f"prefill {prefix}", run, load.extend_cost(0, prefix), inputs, _layers_of(kv), 1)

    def row(self, operation: Operation) -> Row:
        """Prepare all, then take turns."""
        path = self.folder / "row.pt"
        self.save(operation, path)
        peers = [self._prepared(name, operation, path) for name in self.processes]
        path.unlink()
        ours = Result("ours", deviation=0.0)
        floors, until, rounds = Floors(0, 0, 0, 0, 0), time.perf_counter() + self.seconds, 0
        while rounds < ROUNDS or time.perf_counter() < until:
            ours.times += turn(operation.run, TURN_S)
            for peer in peers:
                self._turn(peer)
            floors = floors.best(self.machine.floors(self.load.dtype, TURN_S))
            rounds += 1
        row = Row(self.dtype, operation.name, floors.seconds(operation.cost), ours, peers)
        print("\n".join(row.lines()), flush=True)
        return row

    def save(self, operation: Operation, path: Path) -> None:
        """Write what a peer needs (peers_runtimes.py, `build`)."""
        torch.save(operation.inputs | self._weights(), path)

    def _prepared(self, name: str, operation: Operation, path: Path) -> Result:
        """Empty, or with the reason why the peer has no turns in this row."""
        if sys.stderr.isatty():
            print(f"{operation.name}: {name:16} prepares", end="\r", file=sys.stderr, flush=True)
        outputs = self.folder / "outputs.pt"
        outputs.unlink(missing_ok=True)
        answer = self.processes[name].ask(
            {"prepare": str(path), "copies": operation.copies, "folder": str(self.folder)}
        )
        result = Result(name, version=answer.get("version", ""))
        if "unsupported" in answer:
            result.problem, result.unsupported = answer["unsupported"], True
        elif "failed" in answer:
            result.problem = answer["failed"]
        else:
            result.deviation = deviation(torch.load(outputs), operation.expected)
            if not result.deviation <= TOLERANCE[self.load.dtype]:
                result.problem = f"its outputs deviate by {result.deviation:.1e} (allowed {TOLERANCE[self.load.dtype]})"
        return result

    def _turn(self, peer: Result) -> None:
        if peer.problem:
            return
        answer = self.processes[peer.name].ask({"turn": TURN_S})
        peer.problem = answer.get("failed", "")
        peer.times += answer.get("times", [])

    def _weights(self) -> dict[str, Any]:
        config = self.model.config
        shape = {name: getattr(config, name) for name in ("heads", "dqk", "dv", "scale_tokens")}
        return {"shape": shape, "layers": [dict(layer.state_dict()) for layer in self.model.stack.stu_layers()]}


def deviation(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference of a tensor, relative to its largest expected value; infinite for other shapes."""
    if [part.shape for part in found] != [part.shape for part in expected]:
        return math.inf
    return max(
        float((mine.float() - ours.float()).abs().max() / ours.float().abs().max())
        for mine, ours in zip(found, expected, strict=True)
    )


def _layers_of(kv: Any) -> list[torch.Tensor]:
    return [part.clone() for index in range(kv.layout.layers) for part in kv.layer(index)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the Python that has the peers; default: this one")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS), help="which peers take part")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=("float32", "bfloat16"))
    parser.add_argument("--prefix", type=int, nargs="+", default=[512, 2048, 8192], help="prefix tokens")
    parser.add_argument("--candidates", type=int, nargs="*", default=[64, 512], help="candidates of a ranking")
    parser.add_argument("--seconds", type=float, default=6.0, help="time of a row's turns; preparing comes on top")
    parser.add_argument("--minutes", type=float, default=9.0, help="no row begins later than that")
    parser.add_argument(
        "--quick", action="store_true", help="64 candidates and 2,048 tokens alone: two or three minutes"
    )
    parser.add_argument("--json", type=Path, default=Path("out/peers/report.json"), help="where the report goes")
    options = parser.parse_args()
    if options.quick:
        options.prefix, options.candidates, options.minutes = [2048], [64], 2.5
    return options


def main() -> list[str]:
    options = parse()
    torch.set_num_threads(1)
    until = time.monotonic() + options.minutes * 60
    machine = Machine(torch.device("cpu"))
    shape = settings.Model(layers=8, dim=256, heads=4, dqk=64, dv=64)
    for line in machine.describe():
        print(line)
    print(f"model     {shape.layers} layers, D {shape.dim}, {shape.heads} heads × {shape.dqk}, random weights")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        processes = {
            name: PeerProcess([options.python, str(CHILD), name], options.json.parent / f"{name}.log", ONE_THREAD)
            for name in options.peers
        }
        try:
            for dtype in options.dtype:
                load = EngineLoad(shape, torch.device("cpu"), getattr(torch, dtype))
                bench = PeersBench(load, machine, processes, Path(folder), options.seconds, until)
                rows += bench.run(options.prefix, options.candidates)
        finally:
            for process in processes.values():
                process.stop()
    versions = {peer.name: peer.version for row in rows for peer in row.peers if peer.version}
    print("\nversions  " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    outside = broken(rows)
    found = {"machine": machine.describe(), "rows": [row.as_json() for row in rows], "broken": outside}
    options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(f"report    {options.json}\n")
    return outside


if __name__ == "__main__":
    judge(main)
