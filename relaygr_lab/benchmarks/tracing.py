"""What tracing costs a worker's event loop for each ranking, from its record to its answer: off, and sampling 0 and 1.

The same work is timed in turn in processes of four kinds. `without`: the lines for traces are taken out of the code
that answers. `off`: telemetry.traces = false. `0`, `1`: on, for requests that their client does not trace, or does;
spans go to an OTLP receiver on this machine. The scheduler and the device make no spans and are left out, so the shares
are of the event loop's work alone.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import importlib.util
import os
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from typing import Any, Final

from judge import judge
from msgspec.structs import replace

MODES: Final = ("without", "off", "0", "1")
TOKENS, CANDIDATES = 256, 100
REQUESTS: Final = 1500
#: Off may cost this share more than code without it: what alternation cannot tell apart.
MOST_OFF: Final = 1.03


class _Without(ast.NodeTransformer):
    """Takes the lines for traces out."""

    def visit_If(self, node: ast.If) -> ast.If | None:
        self.generic_visit(node)
        return None if "trace" in ast.unparse(node.test) else node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        if "trace_headers" in ast.unparse(node.value):
            node.value = ast.copy_location(ast.List([], ast.Load()), node.value)
        return node


def take_out(name: str) -> None:
    """Load a module without its lines for traces."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:  # noqa: PTH123
        tree = _Without().visit(ast.parse(file.read()))
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(ast.fix_missing_locations(tree), spec.origin, "exec"), module.__dict__)


def ranking_record(mode: str, topic: str) -> Any:
    """A ranking request as it is read from Kafka; its client traces it where the mode is 1."""
    import numpy as np

    from relaygr_stream.wire.behaviours import Behaviours, pack_items
    from relaygr_stream.wire.codec import encode
    from relaygr_stream.wire.messages import RankingRequest
    from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION, Record

    behaviours = Behaviours.from_arrays(np.arange(TOKENS), np.ones(TOKENS, int), np.arange(TOKENS))
    request = RankingRequest(
        request_id="r", user_id="u", prefix=behaviours, candidates=pack_items(list(range(CANDIDATES))), timeout_ms=1e6
    )
    headers = [(HEADER_CORRELATION, b"c" * 16), (HEADER_REPLY_PARTITION, b"1")]
    if mode in {"0", "1"}:
        flags = b"01" if mode == "1" else b"00"
        headers.append(("traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-" + flags))
    return Record(topic, 1, 0, 0, b"u", encode(request), tuple(headers))


async def measure(mode: str) -> float:  # noqa: PLR0915
    """Microseconds a ranking, the least of five runs."""
    if mode == "without":
        take_out("relaygr_stream.worker.replies")
    import numpy as np
    from prometheus_client import CollectorRegistry

    from relaygr_stream.engine.commands import Answer, Measured
    from relaygr_stream.settings.schema import Kafka, Relay, Settings, Telemetry
    from relaygr_stream.telemetry.background import Background
    from relaygr_stream.telemetry.logs import configure_logging
    from relaygr_stream.telemetry.otlp import tracing_of
    from relaygr_stream.telemetry.tracing import OFF
    from relaygr_stream.wire.records import Record
    from relaygr_stream.wire.topic_files import load_topics
    from relaygr_stream.worker.context import WorkerConnections, WorkerContext
    from relaygr_stream.worker.effects import Reply
    from relaygr_stream.worker.intake import Intake, IntakeLimits
    from relaygr_stream.worker.metrics import WorkerMetrics
    from relaygr_stream.worker.replies import Outbox, Sending

    configure_logging(Telemetry(), "bench")

    class Sink:
        async def send_and_wait(self, *_: Any, **__: Any) -> int:
            return 0

    topics, registry, sink = load_topics(Kafka(partitions=8)), CollectorRegistry(), Sink()
    over = asyncio.Event()
    left = 0

    def done(_: Record) -> None:
        nonlocal left
        left -= 1
        if not left:
            over.set()

    model: Any = types.SimpleNamespace(tasks=("click", "like"), version="bench")
    background = Background()
    context = WorkerContext(Settings(), "w", WorkerMetrics(registry), registry, OFF, background)
    outbox = Outbox(context, WorkerConnections(topics, sink, sink, None), model)  # type: ignore[arg-type]

    async def send(sending: Sending) -> None:
        await outbox.send(sending)
        done(sending.origin.record)

    intake = Intake(IntakeLimits(Relay(), 1e6, 8, 1 << 20))
    record = ranking_record(mode, topics.ranking.name)
    scores = np.zeros((CANDIDATES, 2), np.float32)
    async with tracing_of(Telemetry(traces=mode in {"0", "1"}), "worker", registry) as tracing:
        best = float("inf")
        for _ in range(5):
            left = REQUESTS
            over.clear()
            started = time.perf_counter()
            for number in range(REQUESTS):
                origin = intake.route(record)
                if tracing.on:  # as Requests._ranking does
                    origin = replace(origin, trace=tracing.receive("relaygr.ranking", record))
                rank = intake.ranking(record, origin, time.monotonic())
                arrived = rank.task.arrived
                measured = Measured("hbm", started=arrived, finished=arrived, score_ms=0.001)
                background.start(send(outbox.reply(Reply(Answer(rank, "ok", scores, measured=measured), ""))))
                if number % 16 == 15:
                    await asyncio.sleep(0)
            await over.wait()
            best = min(best, (time.perf_counter() - started) / REQUESTS * 1e6)
        if mode == "1":
            assert tracing.on
    return best


@contextlib.contextmanager
def receiver() -> Iterator[str]:
    """An OTLP receiver; yields its address."""
    from relaygr_stream.ops.brokers.distribution import free_ports

    (port,) = free_ports(1)
    command = [sys.executable, "-u", "-m", "oteltap", "--port", str(port)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert running.stdout is not None
    running.stdout.readline()  # that it listens
    drain = subprocess.Popen(["cat"], stdin=running.stdout, stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait()
        drain.wait()


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind, in turn")
    parser.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(asyncio.run(measure(arguments.child)))
        return []
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    with receiver() as endpoint:
        environment = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_MAX_QUEUE_SIZE": "65536"}
        for turn in range(arguments.rounds):
            for mode in MODES if turn % 2 else MODES[::-1]:
                command = [sys.executable, __file__, "--child", mode]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                times[mode].append(float(done.stdout.splitlines()[-1]))
    print(
        f"a ranking of {TOKENS} behaviours and {CANDIDATES} candidates, from its record to its answer, event loop only"
    )
    base = statistics.median(times["without"])
    for mode, each in times.items():
        middle = statistics.median(each)
        print(f"{mode:>8}: {middle:7.1f} µs ({min(each):.1f}–{max(each):.1f})  {middle / base:5.3f} × without")
    off = statistics.median(off / without for off, without in zip(times["off"], times["without"], strict=True))
    print(f"off / without, median of {arguments.rounds} pairs: {off:.3f}")
    return [f"off costs {off:.3f} of without; bound: at most {MOST_OFF}"] if off > MOST_OFF else []


if __name__ == "__main__":
    judge(main)
