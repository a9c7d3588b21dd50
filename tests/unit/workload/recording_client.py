"""A client in this process whose speed and failures a test sets: what the driver does is judged by what arrives here.

It scores each candidate by its id, so that the quality of its rankings is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import RelayError
from relaygr_stream.wire.messages import Outcome, RankingRequest, RequestEvent


@dataclass(frozen=True)
class GivenRanking:
    scores: npt.NDArray[np.float32]
    outcome: Outcome
    model_version: str = "by-id"
    admission: str = "admitted"


class RecordingClient:
    def __init__(self, seconds: float = 0.0, fail: Callable[[RankingRequest], RelayError | None] | None = None) -> None:
        self.announced: dict[str, float] = {}  # loop time by request id
        self.ranked: dict[str, float] = {}
        self.modes: list[str] = []
        self.most_in_flight = 0
        self._in_flight = 0
        self._seconds = seconds
        self._fail = fail

    async def announce(self, event: RequestEvent, /) -> None:
        self.announced[event.request_id] = asyncio.get_running_loop().time()

    async def rank(self, request: RankingRequest, /, *, timeout: float) -> GivenRanking:
        assert request.request_id not in self.ranked
        assert timeout > 0
        self.ranked[request.request_id] = asyncio.get_running_loop().time()
        self.modes.append(request.mode)
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        await asyncio.sleep(self._seconds)
        self._in_flight -= 1
        if self._fail is not None and (error := self._fail(request)) is not None:
            raise error
        ids = np.frombuffer(request.candidates, np.uint32).astype(np.float32)
        return GivenRanking(np.stack([-ids, ids], axis=1), "hbm")
