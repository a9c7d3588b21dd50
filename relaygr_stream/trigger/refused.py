"""Reports to the owners why requests were not admitted, and to which worker the delegated ones went: one record per
owner every FLUSH_S, for all its lanes.

The record occupies an offset of a lane's signal log, so the lane's ledger counts it as a signal of 0 bytes (ledger.py).
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Final

from relaygr_stream.bus.producer import Producer
from relaygr_stream.errors import BrokerError
from relaygr_stream.trigger.ledger import LaneLedger, Pending
from relaygr_stream.wire.records import HEADER_KIND
from relaygr_stream.wire.refusals import KIND, MAX_IDS, Refusal, encode_refusals

#: A ranking follows its event after tens of milliseconds; more frequent records would cost the trigger more.
FLUSH_S: Final = 0.02
#: Most requests reported to one owner per flush: 4096 / 0.02 s = 200,000 events/s. Further ones are not reported.
MAX_GATHERED: Final = 4096
#: Reasons that are not reported: there is no owner, or the request was admitted before.
NOT_REPORTED: Final = frozenset({"no_owner", "duplicate"})


class Refused:
    """Gathers refusals by owner, and sends them on one of the owner's lanes."""

    def __init__(self, topic: str, producer: Producer) -> None:
        self._topic = topic
        self._producer = producer
        self._gathered: dict[str, list[Refusal]] = {}
        self._lanes: dict[str, tuple[int, LaneLedger]] = {}  # owner → one of its lanes, and that lane's ledger

    def add(self, owner: str, lane: int, ledger: LaneLedger, refusal: Refusal) -> None:
        """Gather a request for the next `flush`."""
        gathered = self._gathered.setdefault(owner, [])
        if len(gathered) < MAX_GATHERED:
            gathered.append(refusal)
            self._lanes[owner] = lane, ledger

    async def flush(self) -> None:
        """Hand everything to the producer."""
        gathered, lanes = self._gathered, self._lanes
        if not gathered:
            return
        self._gathered, self._lanes = {}, {}
        for owner, refused in gathered.items():
            lane, ledger = lanes[owner]
            for first in range(0, len(refused), MAX_IDS):
                await self._send(lane, ledger, encode_refusals(refused[first : first + MAX_IDS]))

    async def _send(self, lane: int, ledger: LaneLedger, value: bytes) -> None:
        pending = ledger.admit(0)
        headers = [(HEADER_KIND, KIND.encode())]
        try:
            sent = await self._producer.send(self._topic, value, partition=lane, headers=headers)
        except BrokerError:
            ledger.failed(pending, time.monotonic())
            return
        sent.add_done_callback(partial(_settled, ledger, pending))


def _settled(ledger: LaneLedger, pending: Pending, sent: asyncio.Future[int]) -> None:
    if sent.cancelled() or sent.exception() is not None:
        ledger.failed(pending, time.monotonic())
    else:
        ledger.acknowledged(pending, sent.result(), time.monotonic())
