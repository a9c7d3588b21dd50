"""The new owner's side of a session: asks for its lanes, judges every offer, and writes what comes into its DRAM tier.

Trusts a proven peer for the contents of a copy, and for nothing else: lengths, shapes, users and order are checked.
Knows nothing of when and why lanes move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

import numpy as np

from relaygr_stream.bus.topics import lane_of
from relaygr_stream.cache.tiers import capacity_for
from relaygr_stream.cache.transit import Arrival
from relaygr_stream.errors import DecodeError
from relaygr_stream.handover.channel import Channel, PeerError
from relaygr_stream.handover.desk import Desk, HandoverMetrics
from relaygr_stream.handover.giver import Handed
from relaygr_stream.handover.wire import Ask, End, Enough, Identity, Offer, Refused, Skip, Take, max_offer_bytes
from relaygr_stream.wire.messages import without_tenant

#: Until the first offer the old owner looks through its entries: at 2 µs each and some milliseconds between slices of
#: 256, ten seconds for a million.
LOOK_THROUGH_S: Final = 30.0
#: Offers in a row for which there was no room, after which no more are wanted: they come the most valuable first, but
#: what they need differs, and a smaller one may still find a hole.
FULL_IN_A_ROW: Final = 8


class Taker:
    """max_tokens: the longest sequence. nbytes_of(capacity): bytes of a copy in the tier's storage."""

    def __init__(
        self,
        identity: Identity,
        desk: Desk,
        metrics: HandoverMetrics,
        max_tokens: int,
        nbytes_of: Callable[[int], int],
    ) -> None:
        self._identity = identity
        self._desk = desk
        self._metrics = metrics
        self._max_tokens = max_tokens
        self._nbytes_of = nbytes_of

    async def take(self, channel: Channel, lanes: frozenset[int], wanted: Collection[int], handed: Handed) -> None:
        """One session, noted in `handed` as it goes. wanted: the lanes that are still ours. Raises PeerError."""
        await channel.send(Ask(self._identity, tuple(sorted(lanes))))
        handed.lanes = lanes
        full = 0
        while True:
            said = await channel.receive(Offer | End | Refused, max_offer_bytes(self._max_tokens), LOOK_THROUGH_S)
            if isinstance(said, Refused):
                raise PeerError(f"refused: {said.reason}")
            if isinstance(said, End):
                break
            assert isinstance(said, Offer)
            if not lanes & set(wanted) or full >= FULL_IN_A_ROW:
                await channel.send(Enough())
                break
            lane = lane_of(without_tenant(said.user_id), self._identity.lanes)
            if lane not in lanes:
                raise PeerError(f"offered an entry of lane {lane}, which was not asked for")
            if lane in wanted:
                full = 0 if await self._judge(channel, said, handed) else full + 1
            else:
                await channel.send(Skip())
        handed.ended = True

    async def _judge(self, channel: Channel, offer: Offer, handed: Handed) -> bool:
        """Take it, or not. False: there was no room for it."""
        try:
            tokens = offer.sequence(self._max_tokens)
        except DecodeError as error:
            raise PeerError(f"sent an offer that is none: {error.detail}") from error
        if offer.capacity > capacity_for(self._max_tokens) or offer.nbytes != self._nbytes_of(offer.capacity):
            most = capacity_for(self._max_tokens)
            raise PeerError(
                f"offered {offer.nbytes} bytes with room for {offer.capacity} tokens; here the longest has room for "
                f"{most}, in {self._nbytes_of(most)} bytes"
            )
        async with self._desk.arrival(offer.user_id, tokens, offer.capacity) as place:
            if not isinstance(place, Arrival):
                self._metrics.declined.labels(place).inc()
                await channel.send(Skip())
                return place != "full"
            await channel.send(Take())
            data, filled = place.data.numpy(), 0
            while filled < offer.nbytes:
                piece = await channel.receive_copy(offer.nbytes - filled)
                data[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
                filled += len(piece)
                self._metrics.bytes.labels("taken").inc(len(piece))
        handed.entries += 1
        handed.nbytes += offer.nbytes
        self._metrics.entries.labels("taken").inc()
        return True
