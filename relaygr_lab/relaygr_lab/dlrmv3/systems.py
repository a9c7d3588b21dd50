"""What ranks behind LoadGen: a relay's processes over the bus, or an engine in this process without one."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, Self

import numpy as np
from msgspec import structs

from relaygr_lab.bench.modes import Mode
from relaygr_lab.bench.pipeline import Pipeline
from relaygr_lab.dlrmv3.workload import Item
from relaygr_stream.engine.build import WorkerRuntime, build
from relaygr_stream.engine.commands import Answer, Placed, Prefill, PrefillTask, Rank, RankTask, Times
from relaygr_stream.errors import DeviceError, Overloaded, WorkerFailed
from relaygr_stream.models.api import Tokens, schema_of
from relaygr_stream.settings.schema import Settings
from relaygr_stream.wire.behaviours import ITEM_DTYPE, Behaviours
from relaygr_stream.wire.features import NO_TABLES
from relaygr_stream.wire.messages import CostModel
from relaygr_stream.worker.device import DeviceThread

#: Longest start of a model's device thread: warm-up and kernels that are compiled.
START_S: Final = 300.0
#: What the warm-up announces is pinned for so long, unless it is ranked before.
LIFE_S: Final = 20.0


class Relay:
    """A pipeline's client, in one mode."""

    def __init__(self, pipeline: Pipeline, mode: Mode) -> None:
        self._client, self._mode = pipeline.client, mode

    async def announce(self, item: Item) -> None:
        """Publish the request event."""
        await self._client.announce(item.event)

    async def rank(self, item: Item, timeout_s: float) -> str:
        """Ask the relay."""
        request = structs.replace(item.request, mode=self._mode.request)
        return (await self._client.rank(request, timeout=timeout_s)).outcome


class Engine:
    """An async context: a worker's engine on its device thread, without Kafka. Prefix KV of earlier visits are kept."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._waiting: dict[str, asyncio.Future[Answer]] = {}
        self._runtime: WorkerRuntime
        self._thread: DeviceThread

    async def __aenter__(self) -> Self:
        self._thread = DeviceThread(asyncio.get_running_loop(), self)
        make = self._thread.start(lambda: build(self._settings, lambda *_: True, self._thread.wake))
        async with asyncio.timeout(START_S):
            self._runtime = await make
        self._schema = schema_of(self._runtime.model)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._thread.stop(10.0)

    @property
    def costs(self) -> CostModel:
        """As the engine fitted them."""
        return self._runtime.executor.costs.model()

    @property
    def bytes_per_token(self) -> int:
        """Prefix KV of a token."""
        return self._runtime.bytes_per_token

    async def announce(self, item: Item) -> None:
        """Have its prefix KV computed, as a pre-infer signal does. Only the warm-up announces here."""
        event, now = item.event, time.monotonic()
        user = (event.columns or NO_TABLES).user
        tokens, ends = Tokens.from_behaviours(event.prefix, None, self._schema, user), now + LIFE_S
        self._thread.submit(
            Prefill(PrefillTask(event.request_id, event.user_id, 0, tokens, due=ends, expires=ends, arrived=now))
        )

    async def rank(self, item: Item, timeout_s: float) -> str:
        """Submit it, and wait for its answer."""
        request, now = item.request, time.monotonic()
        columns = request.columns or NO_TABLES
        name = request.request_id
        task = RankTask(
            request_key=name,
            user_key=request.user_id,
            lane=0,
            tokens=Tokens.from_behaviours(request.prefix, None, self._schema, columns.user),
            suffix=Tokens.from_behaviours(Behaviours(), None, self._schema),
            candidates=np.frombuffer(request.candidates, ITEM_DTYPE).astype(np.int64),
            times=Times.from_timeout(now, timeout_s * 1e3, self._settings.relay.slo_ms, 0.0, age_ms=0.0),
            full=request.mode == "full",
            client="loadgen",
            features=self._schema.values("candidate", columns.candidate) if columns.candidate else {},
        )
        future = self._waiting[name] = asyncio.get_running_loop().create_future()
        try:
            self._thread.submit(Rank(task))
            ends: set[asyncio.Future[Any]] = {future, self._thread.failed}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise DeviceError("the device thread has ended") from self._thread.failed.exception()
            answer = future.result()
        finally:
            del self._waiting[name]
        if answer.status != "ok":
            refused = answer.status in ("overloaded", "deadline_exceeded")
            raise (Overloaded if refused else WorkerFailed)(f"{answer.status}: {answer.detail}")
        return str(answer.measured.outcome)

    def on_answers(self, answers: list[Answer]) -> None:
        """Of the device thread."""
        for answer in answers:
            if (future := self._waiting.get(answer.task.request_id)) is not None and not future.done():
                future.set_result(answer)

    def on_placed(self, placed: list[Placed]) -> None:
        """Of the device thread: there are no signals here."""
