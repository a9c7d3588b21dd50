"""The functions of the package that a ranking that hits goes through, from the record to the model.

    python -m tests.unit.worker.hit_path [--calls]       (make trace-hit)

One worker's requests, device thread and built-in model, without a broker. A first ranking warms up. Calls are those
that a profiler sees on the event loop, and on the device thread from `Scheduler.handle` until `score` of the model
begins.

A function hands the hit on if it returns it, alone or in a list (FORMS), or is on the stack where it changes hands
(HANDS): into the inbox of the device thread, into the queue of ready rankings, into the model.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Sequence, Set
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import numpy as np

import relaygr_stream
from relaygr_stream.bus.ages import now_ms
from relaygr_stream.engine.build import build
from relaygr_stream.engine.commands import Query, Rank
from relaygr_stream.engine.ranking import Ranking
from relaygr_stream.engine.scheduler import Snapshot
from relaygr_stream.models.api import ScoreInput
from relaygr_stream.settings.schema import Relay, Settings
from relaygr_stream.settings.worker import Model, Worker
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.codec import decode, encode
from relaygr_stream.wire.messages import PreInferSignal, RankingRequest, ScoreReply
from relaygr_stream.wire.records import HEADER_CORRELATION, HEADER_REPLY_PARTITION, Record
from relaygr_stream.wire.topic_files import Topic, load_topics
from relaygr_stream.worker.device import DeviceThread
from relaygr_stream.worker.effects import Submit
from tests.done import DoneRecords
from tests.unit.worker.made import made_requests
from tests.waiting import until

PACKAGE: Final = str(Path(relaygr_stream.__file__).parent) + "/"
FORMS: Final = Rank | Submit | Ranking | ScoreInput
MODEL: Final = "HSTUModel.score"
DEVICE: Final = "Scheduler.handle"
HANDS: Final = {"DeviceThread.submit", "WorkQueue.add", MODEL}
MIB: Final = 1 << 20
LANE, HISTORY = 3, 200
LONG_MS: Final = 60_000.0
SETTINGS: Final = Settings(
    worker=Worker(name="w", hbm_bytes=8 * MIB, dram_bytes=8 * MIB),
    relay=Relay(
        slo_ms=LONG_MS, max_prefix_tokens=256, max_suffix_tokens=16, max_candidates=64, life_window_ms=LONG_MS
    ),  # no ranking is overdue, however slow the machine
    model=Model(layers=2, dim=16, heads=2, dqk=8, dv=8, vocab=101, max_positions=512, scale_tokens=64),
)


class Call(NamedTuple):
    """One call. file: from the package's folder; depth: of the package's calls around it."""

    file: str
    function: str
    on_loop: bool
    depth: int


class Function(NamedTuple):
    """A function of the package. file: from the package's folder."""

    file: str
    name: str


class HitPath(NamedTuple):
    """The calls before the model, in order; the functions that they execute, and those that hand the hit on."""

    calls: Sequence[Call]
    functions: Set[Function]
    hands: Set[Function]

    def __str__(self) -> str:
        return f"{_counted(self.functions)}, handed on by {_counted(self.hands)}"


def _counted(functions: Set[Function]) -> str:
    return f"{len(functions)} functions in {len({each.file for each in functions})} files"


class _Recorder:
    """Sees the calls of all threads that start after it, and keeps the package's while it is on."""

    def __init__(self) -> None:
        self.on = self.on_device = False
        self.calls: list[Call] = []
        self.hands: set[Function] = set()
        self.met: set[str] = set()  # of HANDS
        self._loop = threading.get_ident()

    @property
    def path(self) -> HitPath:
        """What it saw. What was called before it was on is no part of it."""
        functions = {Function(call.file, call.function) for call in self.calls}
        assert self.met == HANDS, f"the hit does not go through {HANDS - self.met}"
        return HitPath(self.calls, functions, self.hands & functions)

    def __call__(self, frame: FrameType, event: str, returned: Any) -> None:
        if not self.on or (function := _function(frame)) is None:
            return
        on_loop = threading.get_ident() == self._loop
        self.on_device = self.on_device or function.name == DEVICE
        if not (on_loop or self.on_device):  # an idle thread looks for work now and then
            return
        if event == "return":
            first = returned[0] if isinstance(returned, list) and returned else returned
            if isinstance(first, FORMS):
                self.hands.add(function)
        elif event == "call":
            stack = list(filter(None, map(_function, _stack(frame))))
            if function.name in HANDS:
                self.met.add(function.name)
                self.hands.update(stack)
            if function.name == MODEL:
                self.on = False
            else:
                self.calls.append(Call(*function, on_loop, len(stack) - 1))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _function(frame: FrameType) -> Function | None:
    code = frame.f_code
    inside = code.co_filename.startswith(PACKAGE)
    return Function(code.co_filename.removeprefix(PACKAGE), code.co_qualname) if inside else None


class _Producer:
    """Acknowledges all at once, and keeps what it was given."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    async def send(self, topic: str, value: bytes, **_: Any) -> asyncio.Future[int]:
        self.sent.append(value)
        acknowledged: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        acknowledged.set_result(0)
        return acknowledged

    async def send_and_wait(self, topic: str, value: bytes, **more: Any) -> int:
        return await (await self.send(topic, value, **more))


async def trace_hit() -> HitPath:
    """Follow one ranking whose prefix KV is ready in the HBM tier."""
    recorder = _Recorder()
    threading.setprofile(recorder)  # of the device thread, which starts below
    device = DeviceThread(asyncio.get_running_loop())
    try:
        runtime = await device.start(lambda: build(SETTINGS, lambda *_: False, device.wake))
    finally:
        threading.setprofile(None)
    topics, scores = load_topics(SETTINGS.kafka), _Producer()
    done = DoneRecords()
    requests, _, background, _ = made_requests(
        SETTINGS, topics, (scores, _Producer()), device, runtime.model, reader=done
    )
    device.deliver_to(requests)
    requests.on_lanes(frozenset(range(topics.lanes)), frozenset())
    history = Behaviours.from_arrays(np.arange(HISTORY) % 100, np.zeros(HISTORY, np.uint8), 10**12 + np.arange(HISTORY))
    try:
        for number in range(2):  # the first one warms up
            request_id = f"r{number}"
            signal = PreInferSignal(
                request_id=request_id, user_id="u", prefix=history, admitted_ms=now_ms(), life_ms=LONG_MS
            )
            requests.on_records([_record(topics.pre_infer, number, encode(signal))])
            await until(partial(_is_ready, device), "the prefix KV is ready")
            ranking = RankingRequest(
                request_id=request_id,
                user_id="u",
                prefix=history,
                candidates=pack_items(range(32)),
                suffix=Behaviours(),
                sent_ms=now_ms(),
                timeout_ms=LONG_MS,
            )
            route = ((HEADER_CORRELATION, b"c"), (HEADER_REPLY_PARTITION, b"1"))
            record = _record(topics.ranking, number, encode(ranking), route)
            recorder.calls.clear()
            recorder.hands.clear()
            recorder.on, recorder.on_device = True, False
            sys.setprofile(recorder)
            try:
                requests.on_records([record])
            finally:
                sys.setprofile(None)
            await until(lambda: len(done) == 2 * len(scores.sent) == 2 * number + 2, "the ranking is answered")  # noqa: B023
    finally:
        await device.stop(LONG_MS / 1e3)
        await background.end()
    outcomes = [decode(ScoreReply, value).outcome for value in scores.sent]
    assert outcomes[1] == "hbm", f"the ranking was no hit: {outcomes}"
    return recorder.path


async def _is_ready(device: DeviceThread) -> bool:
    """Whether the signal's prefix KV is pinned, and nothing of it is left to compute."""
    found: Snapshot = await device.ask(Query())
    return found.pins == 1 and found.pre_infer_waiting_ms == 0


def _record(topic: Topic, offset: int, value: bytes, headers: tuple[tuple[str, bytes], ...] = ()) -> Record:
    return Record(topic.name, LANE, offset, now_ms(), b"u", value, headers)


def main() -> None:
    """Print the path."""
    path = asyncio.run(trace_hit())
    if "--calls" in sys.argv[1:]:
        for call in path.calls:
            hand = ">" if Function(call.file, call.function) in path.hands else " "
            print("loop  " if call.on_loop else "device", hand, "  " * call.depth + call.function, call.file)
    print(path)


if __name__ == "__main__":
    main()
