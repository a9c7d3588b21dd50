"""The old owner's side of a session: it offers the entries of the requested lanes, the most valuable first.

It leases and sends one copy at a time, in slices, within the bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from relaygr_stream.cache.transit import Lease
from relaygr_stream.handover.channel import Bandwidth, Channel, PeerError
from relaygr_stream.handover.desk import Desk, HandoverMetrics
from relaygr_stream.handover.wire import (
    MAX_ASK,
    MAX_CHOICE,
    MAX_TEXT,
    SLICE_BYTES,
    Ask,
    End,
    Enough,
    Identity,
    Offer,
    Refused,
    Skip,
    Take,
)

#: The time limit of an answer to an offer. It waits for the taker's device thread: milliseconds, or a second in a long
#: step.
CHOICE_S: Final = 10.0


@dataclass
class SessionProgress:
    """The entries and bytes that a session has moved so far."""

    peer: str = ""
    lanes: frozenset[int] = frozenset()
    entries: int = 0
    nbytes: int = 0
    ended: bool = False  # complete: all entries were offered, or the taker wants no more


class Giver:
    """Serves sessions, one call of `serve` each."""

    def __init__(self, identity: Identity, desk: Desk, bandwidth: Bandwidth, metrics: HandoverMetrics) -> None:
        self._identity = identity
        self._desk = desk
        self._bandwidth = bandwidth
        self._metrics = metrics

    async def serve(self, channel: Channel, progress: SessionProgress) -> None:
        """Serve one session and record it in `progress`. Raises PeerError."""
        ask = await channel.receive(Ask, MAX_ASK)
        progress.lanes = frozenset(ask.lanes)
        if difference := self._identity.difference(ask.identity):
            await channel.send(Refused(difference[:MAX_TEXT]))
            raise PeerError(f"was refused: {difference}")
        for user_id in await self._desk.most_valuable_first(progress.lanes):
            async with self._desk.lease(user_id) as lease:
                if lease is not None and not await self._offer(channel, user_id, lease, progress):
                    progress.ended = True
                    return
        await channel.send(End())
        progress.ended = True

    async def _offer(self, channel: Channel, user_id: str, lease: Lease, progress: SessionProgress) -> bool:
        """Offer one entry, and send it if the taker takes it. Returns False if the taker wants no more."""
        nbytes = lease.data.numel()
        await channel.send(Offer.of(user_id, lease.tokens, lease.capacity, nbytes))
        choice = await channel.receive(Take | Skip | Enough, MAX_CHOICE, CHOICE_S)
        if isinstance(choice, Take):
            data = lease.data.numpy()
            for start in range(0, nbytes, SLICE_BYTES):
                piece = data[start : start + SLICE_BYTES].tobytes()
                await self._bandwidth.take(len(piece))
                await channel.send_copy(piece)
                self._metrics.bytes.labels("given").inc(len(piece))
            progress.entries += 1
            progress.nbytes += nbytes
            self._metrics.entries.labels("given").inc()
        return not isinstance(choice, Enough)
