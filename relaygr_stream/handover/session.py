"""One session: the old owner of lanes gives the copies of their users' entries, the new one takes them.

The giver offers the entries of the requested lanes, the most valuable first; it leases and sends one copy at a time, in
one piece, at its pace. The taker decides on every offer, and fills its DRAM tier. It trusts an authenticated peer
for the contents of a copy only: it checks lengths, shapes, users and order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from relaygr_stream.cache.tiers import capacity_for
from relaygr_stream.cache.transit import Lease, Reservation
from relaygr_stream.errors import DecodeError
from relaygr_stream.handover.channel import Channel, PeerError
from relaygr_stream.handover.desk import Desk, HandoverMetrics
from relaygr_stream.handover.pace import CopyPace
from relaygr_stream.handover.wire import (
    MAX_ASK,
    MAX_CHOICE,
    MAX_TEXT,
    TOKEN_BYTES,
    Ask,
    End,
    Enough,
    Offer,
    PrefixIdentity,
    SessionRefused,
    SkipOffer,
    Take,
    max_offer_bytes,
)
from relaygr_stream.models.kv import KVLayout
from relaygr_stream.wire.topic_files import lane_of_key

#: The time limit of an answer to an offer. It waits for the taker's device thread: milliseconds, or a second in a long
#: step.
CHOICE_S: Final = 10.0
#: The time limit of the first offer. The old owner sorts its entries before: at 2 µs each and a few milliseconds
#: between runs of 256, ten seconds for a million entries.
LOOK_THROUGH_S: Final = 30.0
#: The session ends after this many offers in a row without room. The most valuable entries come first, but a smaller
#: entry may still find a hole.
FULL_IN_A_ROW: Final = 8


@dataclass
class SessionProgress:
    """The entries and bytes that a session has moved so far."""

    peer: str = ""
    lanes: frozenset[int] = frozenset()
    entries: int = 0
    nbytes: int = 0
    ended: bool = False  # complete: all entries were offered, or the taker wants no more
    useless: bool = False  # the taker can use none of them


class Giver:
    """Serves sessions, one call of `serve` each."""

    def __init__(self, identity: PrefixIdentity, desk: Desk, pace: CopyPace, metrics: HandoverMetrics) -> None:
        self._identity = identity
        self._desk = desk
        self._pace = pace
        self._metrics = metrics

    async def serve(self, channel: Channel, progress: SessionProgress) -> None:
        """Serve one session and record it in `progress`. Raises PeerError."""
        ask = await channel.receive(Ask, MAX_ASK)
        progress.lanes = frozenset(ask.lanes)
        if difference := self._identity.difference(ask.identity):
            progress.useless = True
            await channel.send(SessionRefused(difference[:MAX_TEXT]))
            raise PeerError(f"was refused: {difference}")
        for user_id in await self._desk.most_valuable_first(progress.lanes, ask.identity.lanes, ask.max_tokens):
            async with self._desk.lease(user_id) as lease:
                if lease is None or not _fits(lease, ask.max_tokens):
                    continue
                if not await self._offer(channel, user_id, lease, progress):
                    progress.ended = True
                    return
        await channel.send(End())
        progress.ended = True

    async def _offer(self, channel: Channel, user_id: str, lease: Lease, progress: SessionProgress) -> bool:
        """Offer one entry, and send it if the taker takes it. Returns False if the taker wants no more."""
        nbytes = lease.data.numel()
        await channel.send(Offer.of(user_id, lease.tokens, lease.capacity, nbytes, lease.uses))
        choice = await channel.receive(Take | SkipOffer | Enough, MAX_CHOICE, CHOICE_S)
        if isinstance(choice, Take):
            count = self._metrics.bytes.labels("given")
            await channel.send_copy(lease.data.numpy().data, self._pace, count)
            progress.entries += 1
            progress.nbytes += nbytes
            self._metrics.entries.labels("given").inc()
        return not isinstance(choice, Enough)


def _fits(lease: Lease, max_tokens: int) -> bool:
    """Whether a taker with this limit (0: not stated) takes the copy: an entry may grow after it was listed."""
    if not max_tokens:
        return True
    return len(lease.tokens) <= max_tokens and lease.capacity <= capacity_for(max_tokens)


class Taker:
    """Runs sessions. max_tokens: the longest sequence. layout: of a copy in the DRAM tier.

    token_bytes: of a token in an offer.
    """

    def __init__(
        self,
        identity: PrefixIdentity,
        desk: Desk,
        pace: CopyPace,
        metrics: HandoverMetrics,
        max_tokens: int,
        layout: KVLayout,
        token_bytes: int = TOKEN_BYTES,
    ) -> None:
        self._token_bytes = token_bytes
        self._pace = pace
        self.identity = identity
        self._desk = desk
        self._metrics = metrics
        self._max_tokens = max_tokens
        self._layout = layout

    async def take(
        self, channel: Channel, lanes: frozenset[int], wanted: Collection[int], progress: SessionProgress
    ) -> None:
        """Run one session and record it in `progress`. wanted: the lanes that this worker still owns.

        Raises PeerError.
        """
        identity = self.identity
        await channel.send(Ask(identity, tuple(sorted(lanes)), self._max_tokens))
        progress.lanes = lanes
        full, longest = 0, max_offer_bytes(self._max_tokens, self._token_bytes)
        while True:
            message = await channel.receive(Offer | End | SessionRefused, longest, LOOK_THROUGH_S)
            if isinstance(message, SessionRefused):
                raise PeerError(f"refused: {message.reason}")
            if isinstance(message, End):
                break
            assert isinstance(message, Offer)
            if not lanes & set(wanted) or full >= FULL_IN_A_ROW:
                await channel.send(Enough())
                break
            lane = lane_of_key(message.user_id, identity.lanes)
            if lane not in lanes:
                raise PeerError(f"offered an entry of lane {lane}, which was not asked for")
            if lane in wanted:
                full = 0 if await self._judge(channel, message, progress) else full + 1
            else:
                await channel.send(SkipOffer())
        progress.ended = True

    async def _judge(self, channel: Channel, offer: Offer, progress: SessionProgress) -> bool:
        """Take or skip one offer. Returns False if there was no room for it."""
        try:
            tokens = offer.sequence(self._max_tokens, self._token_bytes)
        except DecodeError as error:
            raise PeerError(f"sent an invalid offer: {error.detail}") from error
        if offer.capacity > capacity_for(self._max_tokens) or offer.nbytes != self._layout.nbytes(offer.capacity):
            most = capacity_for(self._max_tokens)
            raise PeerError(
                f"offered {offer.nbytes} bytes with room for {offer.capacity} tokens; the largest copy here has room "
                f"for {most} tokens in {self._layout.nbytes(most)} bytes"
            )
        async with self._desk.reservation(offer.user_id, tokens, offer.capacity, offer.uses) as place:
            if not isinstance(place, Reservation):
                self._metrics.declined.labels(place).inc()
                await channel.send(SkipOffer())
                return place != "full"
            await channel.send(Take())
            count = self._metrics.bytes.labels("taken")
            await channel.receive_copy(place.data.numpy().data, self._pace, count)
        if not place.filled:
            self._metrics.declined.labels("held").inc()
            return True
        progress.entries += 1
        progress.nbytes += offer.nbytes
        self._metrics.entries.labels("taken").inc()
        return True
