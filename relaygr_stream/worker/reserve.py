"""A worker of the reserve: it stands by, without lanes or a model, until the assignments name a scenario for it.

On the fleet's `worker-status` it states itself as one of RESERVE that has not started, so that no client and no trigger
counts on it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from typing import Final

import msgspec

from relaygr_stream.bus.ages import now_ms
from relaygr_stream.bus.producer import Producer
from relaygr_stream.bus.topics import verified_topics
from relaygr_stream.errors import BrokerError
from relaygr_stream.groups.moves import GroupMoves
from relaygr_stream.settings.scenarios import RESERVE
from relaygr_stream.settings.schema import Settings
from relaygr_stream.telemetry.background import Background, periodically
from relaygr_stream.telemetry.process import ProcessContext, version
from relaygr_stream.wire.codec import encode
from relaygr_stream.wire.messages import CostModel, WorkerStatus
from relaygr_stream.wire.topic_files import TopicSet
from relaygr_stream.wire.worker_status import HEADER_INCARNATION, StatusReader, rising_ms
from relaygr_stream.worker.process import name_of
from relaygr_stream.worker.status import ANNOUNCE_S


async def stand_by(context: ProcessContext, moves: GroupMoves) -> None:
    """Until the process stops, or is to serve a scenario. Raises BrokerError, TopicError where it cannot begin."""
    settings, background = context.settings, Background()
    topics = await verified_topics(settings.kafka)
    reader = StatusReader.from_settings(settings, topics)
    await reader.prepare()
    async with Producer(settings.kafka, client_id=f"{name_of(settings)}-others") as producer:
        stated = _Statements(settings, topics, reader, producer, moves)
        moves.arrive()
        context.set_ready(True)
        background.start(periodically(settings.worker.status_interval_ms / 1e3, stated.publish, "publish the status"))
        try:
            await background.until(moves.until_away(context.stop))
        finally:
            await background.end()
        await stated.withdraw()


class _Statements:
    """Publishes its status, and removes it."""

    def __init__(
        self, settings: Settings, topics: TopicSet, reader: StatusReader, producer: Producer, moves: GroupMoves
    ) -> None:
        self._reader, self._producer, self._moves = reader, producer, moves
        self._topic: Final = topics.worker_status.name
        self._sent_ms = 0
        self._status: Final = WorkerStatus(
            name=name_of(settings),
            incarnation=time.time_ns(),
            host=socket.gethostname(),
            pid=os.getpid(),
            sent_ms=0,
            state="starting",
            lanes=(),
            costs=CostModel(c0=0.0, c1=0.0, c2=0.0, c3=0.0),
            bytes_per_token=0,
            alloc_bytes=0,
            queue_ms=0.0,
            model_version="",
            device=settings.worker.device,
            version=version(),
            scenario=RESERVE,
        )

    async def publish(self) -> None:
        """State it now. Raises BrokerError."""
        self._sent_ms = rising_ms(self._sent_ms, now_ms())
        status = msgspec.structs.replace(self._status, sent_ms=self._sent_ms, **self._moves.stated())
        await self._send(encode(status))

    async def withdraw(self) -> None:
        """Remove its name, within ANNOUNCE_S; where no broker takes that, it is forgotten as a silent one."""
        with suppress(BrokerError, TimeoutError):
            async with asyncio.timeout(ANNOUNCE_S):
                await self._send(None, (HEADER_INCARNATION, str(self._status.incarnation).encode()))

    async def _send(self, value: bytes | None, *headers: tuple[str, bytes]) -> None:
        key = self._status.name.encode()
        signed = self._reader.signed(self._topic, key, value, headers)
        await self._producer.send_and_wait(self._topic, value, key=key, headers=signed)
