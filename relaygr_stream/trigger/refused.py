"""Tells the owners why requests were not admitted: gathered over all lanes, a record per owner every FLUSH_S.

The record takes an offset of a lane's signal log, so it is booked there as a signal of no bytes (ledger.py).
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Final

from relaygr_stream.bus.producer import Producer
from relaygr_stream.errors import BrokerError
from relaygr_stream.trigger.ledger import LaneLedger, Pending
from relaygr_stream.wire.messages import HEADER_KIND
from relaygr_stream.wire.refusals import KIND, MOST_IDS, encode_refusals

#: A ranking comes tens of milliseconds behind its event; records for fewer events each would cost the trigger more.
FLUSH_S: Final = 0.02
#: Requests gathered for one owner between two flushes: more are not told of. 200,000 events a second.
MOST: Final = 4096
#: Not told of: there is nobody to tell, or it was admitted before.
UNTOLD: Final = frozenset({"no_owner", "duplicate"})


class Refused:
    """Gathers (request id, reason) by owner, and sends them on a lane of its."""

    def __init__(self, topic: str, producer: Producer) -> None:
        self._topic = topic
        self._producer = producer
        self._gathered: dict[str, list[tuple[str, str]]] = {}
        self._ways: dict[str, tuple[int, LaneLedger]] = {}  # owner → a lane of its, and that lane's books

    def add(self, owner: str, lane: int, ledger: LaneLedger, request_id: str, reason: str) -> None:
        """Leaves with the next `flush`."""
        gathered = self._gathered.setdefault(owner, [])
        if len(gathered) < MOST:
            gathered.append((request_id, reason))
            self._ways[owner] = lane, ledger

    async def flush(self) -> None:
        """Hand everything to the producer."""
        gathered, ways = self._gathered, self._ways
        if not gathered:
            return
        self._gathered, self._ways = {}, {}
        for owner, refused in gathered.items():
            lane, ledger = ways[owner]
            for first in range(0, len(refused), MOST_IDS):
                await self._send(lane, ledger, encode_refusals(refused[first : first + MOST_IDS]))

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
