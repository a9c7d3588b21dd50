"""Hand-over: its speed, and what it does to the rankings of who gives.

Prefix KV go from one worker's DRAM tier to another's, in turns with the same bytes by the same TLS over one plain
socket between the same two processes, whose connection is open and whose bytes nobody has offered; then in turns with
pauses, while the giver ranks. Beside the speeds stands each side's processor time: where a plain socket keeps both of
two cores busy, hand-over is slower by as much as it takes more of it. Both workers run their cache on their own device
thread, with a model of random weights; what is in the cache is filled in, not computed. No broker takes part.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from itertools import chain
from multiprocessing.connection import Connection
from statistics import median
from types import SimpleNamespace
from typing import Final, NamedTuple, cast

import numpy as np
import torch
import uvloop
from prometheus_client import CollectorRegistry, Counter
from relaygr_lab.bench.results import STALL_MS
from relaygr_lab.bench.wakes import Wakes
from relaygr_lab.verdicts import NotValid, some

from relaygr_stream.cache.transit import Fill, Reservation, Reserve
from relaygr_stream.engine.build import WorkerRuntime, build
from relaygr_stream.engine.commands import Answer, EraseUser, Placed, Rank, RankTask, Times
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.handover.build import identity_of
from relaygr_stream.handover.certificates import make_credentials
from relaygr_stream.handover.desk import Desk, HandoverMetrics
from relaygr_stream.handover.service import HandoverService
from relaygr_stream.models.api import Tokens
from relaygr_stream.settings.schema import Relay, Settings
from relaygr_stream.settings.worker import Handover, Model, Worker
from relaygr_stream.wire.erase import MARK_BYTES, Erase
from relaygr_stream.wire.messages import CostModel, WorkerStatus
from relaygr_stream.worker.device import DeviceThread
from relaygr_stream.workload.quantiles import nearest_rank

MIB: Final = 1 << 20
LANES: Final = 16
TOKENS: Final = 1024  # 16 MiB of float32 K and V with 8 layers of width 256
COPY_MIB: Final = 16
USERS: Final = 24
#: Of the plain socket's speed.
LEAST_OF_FLOOR: Final = 0.8
#: P99 of the giver's rankings while it gives, of that without.
MOST_SLOWER: Final = 1.1
#: Bytes of one call at a plain socket.
CALL_BYTES: Final = MIB
#: A ranking: full inference of so many behaviours, as many a second as take half of the device.
RANKED_TOKENS: Final = 128
DUTY: Final = 0.5
GIVER, TAKER = "giver", "taker"


SETTINGS: Final = Settings(
    relay=Relay(max_prefix_tokens=TOKENS, max_suffix_tokens=16, max_candidates=50),
    worker=Worker(hbm_bytes=128 * MIB, dram_bytes=(USERS + 2) * COPY_MIB * MIB, audit_share=0.0),
    model=Model(layers=8, dim=256, heads=4, dqk=64, dv=64, vocab=5000),
    handover=Handover(secret="of this benchmark only"),
)


class LoneWorker:
    """A worker without a bus."""

    def __init__(self, name: str, thread: DeviceThread, runtime: WorkerRuntime) -> None:
        self.thread = thread
        self.known: dict[str, WorkerStatus] = {}
        self.metrics = HandoverMetrics(CollectorRegistry())
        self.service = HandoverService(
            SETTINGS.handover,
            name,
            identity_of(runtime, LANES),
            Desk(thread),
            cast(OwnerDirectory, SimpleNamespace(workers=lambda: self.known)),
            self.metrics,
            TOKENS,
            runtime.model.layout,
            beside=runtime.scheduler,
        )

    def taken(self, metric: Counter) -> float:
        """What a metric counts of what it took."""
        return float(metric.labels("taken")._value.get())


class Answers:
    """Takes the device thread's answers."""

    def __init__(self) -> None:
        self.waits: dict[str, asyncio.Future[None]] = {}

    def on_answers(self, answers: list[Answer]) -> None:
        """One is there."""
        for answer in answers:
            self.waits.pop(answer.task.request_id).set_result(None)

    def on_placed(self, placed: list[Placed]) -> None:
        """No signals are sent."""


@asynccontextmanager
async def worker(name: str, answers: Answers | None = None) -> AsyncIterator[LoneWorker]:
    """Until it is left."""
    torch.set_num_threads(1)
    thread = DeviceThread(asyncio.get_running_loop(), answers)
    runtime = await thread.start(lambda: build(SETTINGS, lambda *_: True, thread.wake))
    made = LoneWorker(name, thread, runtime)
    await made.service.start()
    try:
        yield made
    finally:
        await made.service.stop()
        await thread.stop(10)


def _serving(name: str, address: str) -> WorkerStatus:
    return WorkerStatus(
        name=name, incarnation=1, host="", pid=0, sent_ms=0, state="serving", lanes=(),
        costs=CostModel(c0=1, c1=0, c2=0, c3=0), bytes_per_token=1, alloc_bytes=1, queue_ms=0.0, model_version="",
        handover=address,
    )  # fmt: skip


# ---- the giver's process ----


def _give(pipe: Connection) -> None:
    """Serve the hand-over; send plainly (a port), rank (seconds), or tell the processor's time (0.0), when told."""
    uvloop.run(_giving(pipe))


async def _giving(pipe: Connection) -> None:
    answers = Answers()
    async with worker(GIVER, answers) as giver:
        rng = np.random.default_rng(0)
        data = np.frombuffer(rng.bytes(USERS * COPY_MIB * MIB), np.uint8)
        for user, copy in enumerate(np.split(data, USERS)):
            place = await giver.thread.ask(Reserve(f"user-{user}", Tokens(rng.integers(1, 5000, (3, TOKENS))), TOKENS))
            assert isinstance(place, Reservation), place
            place.data.numpy()[:] = copy
            assert await giver.thread.ask(Fill(place))
        pipe.send(giver.service.address)
        giver.known = {TAKER: _serving(TAKER, await asyncio.to_thread(pipe.recv))}
        context = make_credentials(SETTINGS.handover, GIVER, "127.0.0.1").context(ssl.Purpose.CLIENT_AUTH)
        while (told := await asyncio.to_thread(pipe.recv)) is not None:
            if isinstance(told, int):
                await asyncio.to_thread(_send_plainly, told, data, context)
            elif told:
                pipe.send(await _rank(giver, answers, told, pipe))
            else:
                pipe.send(time.process_time())


def _send_plainly(port: int, data: np.ndarray, context: ssl.SSLContext) -> None:
    with socket.create_connection(("127.0.0.1", port)) as raw, context.wrap_socket(raw, server_side=True) as plain:
        for at in range(0, len(data), CALL_BYTES):
            plain.sendall(data.data[at : at + CALL_BYTES])


async def _rank(giver: LoneWorker, answers: Answers, seconds: float, pipe: Connection) -> list[tuple[float, float]]:
    """When each ranking was answered, and after how many seconds; open loop at DUTY of what the device can. Tells when
    it begins."""

    async def one(number: int) -> float:
        now = time.monotonic()
        random = np.random.default_rng(number)
        task = RankTask(
            f"r{number}", "stranger", 0, Tokens(random.integers(1, 5000, (3, RANKED_TOKENS))),
            Tokens(np.full((3, 1), 1, np.int64)), np.arange(50), Times(now, now + 60, now + 60), full=True,
        )  # fmt: skip
        done = answers.waits[task.request_id] = asyncio.get_running_loop().create_future()
        giver.thread.submit(Rank(task))
        await done
        found.append((time.monotonic(), time.monotonic() - now))
        return found[-1][1]

    found: list[tuple[float, float]] = []
    pause, number = median([await one(number) for number in range(30)]) / DUTY, 0
    found.clear()
    pipe.send(None)
    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        while time.monotonic() < start + seconds:
            group.create_task(one(number))
            number += 1
            await asyncio.sleep(start + number * pause - time.monotonic())
    return found


# ---- the taker's process ----


def _receive_plainly(pipe: Connection, into: np.ndarray, context: ssl.SSLContext) -> float:
    """Seconds for all of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        raw, _ = server.accept()
        with raw, context.wrap_socket(raw, server_hostname="127.0.0.1") as plain:
            view, start = into.data, time.monotonic()
            while view:
                got = plain.recv_into(view[:CALL_BYTES])
                assert got, "the giver hung up"
                view = view[got:]
            return time.monotonic() - start


async def _take(taker: LoneWorker, address: str) -> float:
    """Seconds of a session that takes all users' prefix KV."""
    lanes, metrics = range(LANES), taker.metrics
    seconds, entries = taker.taken(metrics.seconds), taker.taken(metrics.entries)
    taker.known = {GIVER: _serving(GIVER, address)}
    taker.service.lanes_changed(lanes, ())
    while taker.taken(metrics.seconds) == seconds:  # noqa: ASYNC110  # a counter tells nobody
        await asyncio.sleep(0.02)
    if (taken := taker.taken(metrics.entries) - entries) != USERS:
        raise NotValid(f"{taken:.0f} of {USERS} users' prefix KV were taken in one session")
    return taker.taken(metrics.seconds) - seconds


async def _drop(taker: LoneWorker) -> None:
    """Drop what it took."""
    taker.service.lanes_changed((), range(LANES))
    users = {f"user-{user}" for user in range(USERS)}
    await taker.thread.ask(EraseUser(Erase(id="0" * 16, user=bytes(MARK_BYTES), sent_ms=0), users, users))


async def wire(*, quick: bool) -> list[str]:
    """Prints both tables and returns the bounds not kept."""
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    child = spawn.Process(target=_give, args=(theirs,), daemon=True)
    child.start()
    try:
        async with worker(TAKER) as taker:
            address = await asyncio.to_thread(pipe.recv)
            pipe.send(taker.service.address)
            broken = await _speed(taker, pipe, address, 8 if quick else 16)
            broken += await _felt(taker, pipe, address, 90.0 if quick else 240.0)
        pipe.send(None)
    finally:
        child.join(20)
    return broken


class Taken(NamedTuple):
    """One way, once: seconds, and the processors' seconds of both sides."""

    wall_s: float
    giver_s: float
    taker_s: float

    @property
    def cpu_s(self) -> float:
        """Of both."""
        return self.giver_s + self.taker_s

    def shown(self, mib: float) -> str:
        """MiB/s, and µs of giver and taker for a MiB."""
        return f"{mib / self.wall_s:>8.0f} {1e6 * self.giver_s / mib:>6.0f} {1e6 * self.taker_s / mib:>6.0f}"


async def _speed(taker: LoneWorker, pipe: Connection, address: str, repeats: int) -> list[str]:
    context = make_credentials(SETTINGS.handover, TAKER, "127.0.0.1").context(ssl.Purpose.SERVER_AUTH)
    mib, into = USERS * COPY_MIB, np.zeros(USERS * COPY_MIB * MIB, np.uint8)

    async def measured(take: Awaitable[float]) -> Taken:
        giver_s, taker_s = await _cpu_s(pipe), time.process_time()
        wall_s = await take
        return Taken(wall_s, await _cpu_s(pipe) - giver_s, time.process_time() - taker_s)

    async def plainly() -> Taken:
        return await measured(asyncio.to_thread(_receive_plainly, pipe, into, context))

    async def handed_over() -> Taken:
        taken = await measured(_take(taker, address))
        await _drop(taker)
        return taken

    await handed_over()
    await plainly()  # both memories have their pages now
    print(f"\nhand-over of {USERS} users' prefix KV, {COPY_MIB} MiB each: MiB/s, and µs of the processors for a MiB")
    print("the plain socket's speed and time are the means of those before and after")
    print("hand-over  giver  taker   socket  giver  taker   speed  by time")
    speeds, times, before = [], [], await plainly()
    for _ in range(repeats):
        ours, after = await handed_over(), await plainly()
        plain = Taken(*((one + other) / 2 for one, other in zip(before, after, strict=True)))
        speeds.append(plain.wall_s / ours.wall_s)
        times.append(plain.cpu_s / ours.cpu_s)
        print(f" {ours.shown(mib)} {plain.shown(mib)} {speeds[-1]:>7.2f} {times[-1]:>8.2f}", flush=True)
        before = after
    for what, each in (("speed", speeds), ("bytes for a second of the processors", times)):
        print(f"{what}: {median(each):.2f} of the plain socket's, {min(each):.2f} to {max(each):.2f}")
    if (share := median(speeds)) < LEAST_OF_FLOOR:
        return [f"hand-over: {share:.2f} of a plain socket's speed; bound: at least {LEAST_OF_FLOOR}"]
    return []


async def _cpu_s(pipe: Connection) -> float:
    """The giver's."""
    pipe.send(0.0)
    there: float = await asyncio.to_thread(pipe.recv)
    return there


async def _felt(taker: LoneWorker, pipe: Connection, address: str, seconds: float) -> list[str]:
    """While the giver ranks, it gives for a while and pauses for as long, in turns. Those in which the machine stood
    still, which a process that only sleeps tells, do not count: one such second has the P99 of a thousand rankings."""
    pipe.send(seconds)
    await asyncio.to_thread(pipe.recv)
    until, every = time.monotonic() + seconds, list[tuple[float, float, float]]()
    async with Wakes() as wakes:
        await asyncio.sleep(1)
        while (start := time.monotonic()) < until:
            await _take(taker, address)
            given = time.monotonic()
            await _drop(taker)
            await asyncio.sleep(given - start)
            every.append((start, given, time.monotonic()))
        ranked: list[tuple[float, float]] = await asyncio.to_thread(pipe.recv)
    turns = [turn for turn in every if max(wakes.late_ms(turn[0], turn[2]), default=0.0) < STALL_MS]
    if 2 * len(turns) < len(every):
        raise NotValid(
            f"the machine stood still for {STALL_MS:g} ms in {len(every) - len(turns)} of {len(every)} turns"
        )
    pairs = [
        (
            [each for at, each in ranked if start <= at <= given],
            [each for at, each in ranked if given < at - each and at <= end],
        )
        for start, given, end in turns
    ]
    during, apart = ([pair[side] for pair in pairs if all(pair)] for side in (0, 1))
    print(f"\n{'the giver ranks':<24} {'rankings':>9} {'P50 ms':>8} {'P99 ms':>8}")
    for name, parts in (("and gives", during), ("only", apart)):
        each = some(list(chain(*parts)), f"rankings where the giver ranks {name}")
        print(f"{name:<24} {len(each):>9} {nearest_rank(each, 0.5) * 1e3:>8.1f} {nearest_rank(each, 0.99) * 1e3:>8.1f}")
    given_s = sum(given - start for start, given, _ in turns)
    print(f"given meanwhile: {len(turns) * USERS * COPY_MIB / given_s:.0f} MiB/s")
    slower, (least, most) = _slower(during, apart), _interval(during, apart)
    counted = f"{len(turns)} of {len(every)} turns"
    print(f"P99 while giving: {slower:.2f} × that without; {counted}, 95 %: {least:.2f} to {most:.2f}")
    return (
        [f"P99 while giving: {slower:.2f} × that without; bound: at most {MOST_SLOWER:g}"]
        if slower > MOST_SLOWER
        else []
    )


def _slower(during: list[list[float]], apart: list[list[float]]) -> float:
    return nearest_rank(list(chain(*during)), 0.99) / nearest_rank(list(chain(*apart)), 0.99)


def _interval(during: list[list[float]], apart: list[list[float]]) -> tuple[float, float]:
    """Of `_slower`: what 95 % of 1,000 bootstraps have, which draw whole turns, since rankings of one are alike."""
    draws, number = np.random.default_rng(0), len(during)
    drawn = [draws.integers(number, size=number) for _ in range(1000)]
    found = [_slower([during[turn] for turn in each], [apart[turn] for turn in each]) for each in drawn]
    return nearest_rank(found, 0.025), nearest_rank(found, 0.975)
