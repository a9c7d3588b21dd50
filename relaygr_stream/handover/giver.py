"""The old owner's side of a session: entries of the lanes asked for are offered, the best first.

One copy at a time is held and sent, in slices, within the bandwidth. Knows nothing of when and why lanes move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from relaygr_stream.cache.transit import Loan
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

#: What a taker answers to an offer waits for its device thread, which takes milliseconds, a long step a second.
CHOICE_S: Final = 10.0


@dataclass
class Handed:
    """What a session has moved so far."""

    peer: str = ""
    lanes: frozenset[int] = frozenset()
    entries: int = 0
    nbytes: int = 0
    ended: bool = False  # in order: everything there was has been offered, or no more was wanted


class Giver:
    """Serves sessions, one `serve` each."""

    def __init__(self, identity: Identity, desk: Desk, bandwidth: Bandwidth, metrics: HandoverMetrics) -> None:
        self._identity = identity
        self._desk = desk
        self._bandwidth = bandwidth
        self._metrics = metrics

    async def serve(self, channel: Channel, handed: Handed) -> None:
        """One session, noted in `handed` as it goes. Raises PeerError."""
        ask = await channel.receive(Ask, MAX_ASK)
        handed.lanes = frozenset(ask.lanes)
        if difference := self._identity.difference(ask.identity):
            await channel.send(Refused(difference[:MAX_TEXT]))
            raise PeerError(f"was refused: {difference}")
        for user_id in await self._desk.most_valuable_first(handed.lanes):
            async with self._desk.loan(user_id) as loan:
                if loan is not None and not await self._offer(channel, user_id, loan, handed):
                    handed.ended = True
                    return
        await channel.send(End())
        handed.ended = True

    async def _offer(self, channel: Channel, user_id: str, loan: Loan, handed: Handed) -> bool:
        """Offer one, and send it if it is wanted. False: enough."""
        nbytes = loan.data.numel()
        await channel.send(Offer.of(user_id, loan.tokens, loan.capacity, nbytes))
        choice = await channel.receive(Take | Skip | Enough, MAX_CHOICE, CHOICE_S)
        if isinstance(choice, Take):
            data = loan.data.numpy()
            for start in range(0, nbytes, SLICE_BYTES):
                piece = data[start : start + SLICE_BYTES].tobytes()
                await self._bandwidth.take(len(piece))
                await channel.send_copy(piece)
                self._metrics.bytes.labels("given").inc(len(piece))
            handed.entries += 1
            handed.nbytes += nbytes
            self._metrics.entries.labels("given").inc()
        return not isinstance(choice, Enough)
