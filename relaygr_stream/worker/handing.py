"""The hand-over of prefix KV as a worker sees it (handover/service.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.worker.context import WorkerContext
from relaygr_stream.worker.device import Device


class LaneHandover(Protocol):
    """Prefix KV of lanes that move between workers."""

    @property
    def address(self) -> str:
        """host:port that other workers reach it under."""

    async def start(self) -> None:
        """Listen for other workers."""

    def lanes_changed(self, gained: Iterable[int], lost: Iterable[int]) -> None:
        """Fetch for the lanes gained, offer those lost."""

    def leaving(self, lanes: Iterable[int]) -> None:
        """The worker is about to leave the group, and with it these lanes."""

    async def farewell(self, seconds: float) -> None:
        """Wait until the next owners have fetched the lanes that it left, for so long at most."""

    @property
    def failed(self) -> asyncio.Future[None]:
        """A future that completes, with the error, only by a defect in it."""

    async def stop(self) -> None:
        """Close everything."""


#: Makes a worker's hand-over, with the topics, whose lanes may grow, and what peers state; None: it is off.
MakeHandover = Callable[[WorkerContext, Device, TopicSet, OwnerDirectory], LaneHandover | None]
