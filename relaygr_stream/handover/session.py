"""One session: the old owner of lanes gives the copies of their users' entries, the new one takes them.

The giver offers the entries of the requested lanes, the most valuable first, AHEAD of the copy that it sends, in one
piece, at its pace. The taker decides on every offer, and fills its DRAM tier. It trusts an authenticated peer
for the contents of a copy only: it checks lengths, shapes, users and order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

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
#: Offers made before the copy of the oldest is sent, so that their answers come while it is. Each holds a copy's memory
#: at the taker.
AHEAD: Final = 1


@dataclass
class SessionProgress:
    """The entries and bytes that a session has moved so far."""

    peer: str = ""
    lanes: frozenset[int] = frozenset()
    entries: int = 0
    nbytes: int = 0
    ended: bool = False  # complete: all entries were offered, or the taker wants no more
    useless: bool = False  # the taker can use none of them


@dataclass
class Offers:
    """The offers of a session as its taker sees them. waiting: for their copies; None: declined. full: in a row."""

    waiting: deque[Reservation | None] = field(default_factory=deque)
    full: int = 0
    follow: bool = True  # a message comes before the next copy
    all_made: bool = False
    enough: bool = False  # the taker wants no more

    @property
    def done(self) -> bool:
        """Whether no copy is to come."""
        return (self.all_made or self.enough) and not any(self.waiting)


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
        users = await self._desk.most_valuable_first(progress.lanes, ask.identity.lanes, ask.max_tokens)
        offered, all_offered, ahead = deque[Lease](), False, min(ask.ahead, AHEAD)
        try:
            while True:
                while not all_offered and len(offered) <= ahead:
                    lease = await self._next_lease(users, ask.max_tokens)
                    if lease is None:
                        all_offered = True
                        await channel.send(End())
                    else:
                        offered.append(lease)
                        await channel.send(_offer_of(lease, more=len(offered) <= ahead))
                if not offered:
                    break
                choice = await channel.receive(Take | SkipOffer | Enough, MAX_CHOICE, CHOICE_S)
                if isinstance(choice, Enough):
                    break
                if isinstance(choice, Take):
                    await self._send(channel, offered[0], progress)
                self._desk.give_back(offered.popleft())
        finally:
            for lease in offered:
                self._desk.give_back(lease)
        progress.ended = True

    async def _next_lease(self, users: Iterator[str], max_tokens: int) -> Lease | None:
        """A lease of the next user's copy that fits; None: there is none."""
        for user_id in users:
            lease = await self._desk.lend(user_id)
            if lease is not None and _fits(lease, max_tokens):
                return lease
            if lease is not None:
                self._desk.give_back(lease)
        return None

    async def _send(self, channel: Channel, lease: Lease, progress: SessionProgress) -> None:
        data = lease.data.numpy().data
        if lease.file is None:
            await channel.send_copy(data, self._pace)
        else:  # the taker has it once the last byte is there
            await asyncio.to_thread(lease.fetch)
            last = bytes(data[-1:])
            await channel.send_copy(data[:-1], self._pace)
            lease.file.check()
            await channel.send_copy(memoryview(last), self._pace)
        progress.entries += 1
        progress.nbytes += lease.data.numel()
        self._metrics.entries.labels("given").inc()
        self._metrics.bytes.labels("given").inc(lease.data.numel())


def _offer_of(lease: Lease, *, more: bool) -> Offer:
    nbytes = lease.data.numel()
    return Offer.from_tokens(lease.entry.user_id, lease.tokens, lease.capacity, nbytes, lease.uses, more=more)


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
        progress.lanes = lanes
        await channel.send(Ask(self.identity, tuple(sorted(lanes)), self._max_tokens, AHEAD))
        offers = Offers()
        try:
            while not offers.done:
                while offers.follow:
                    await self._next_message(channel, offers, lanes, wanted)
                if offers.waiting:
                    await self._next_copy(channel, offers, progress)
                offers.follow = not offers.all_made
        finally:
            for place in filter(None, offers.waiting):
                self._desk.discard(place)
        progress.ended = True

    async def _next_message(
        self, channel: Channel, offers: Offers, lanes: frozenset[int], wanted: Collection[int]
    ) -> None:
        """Read a message, and take or decline what it offers."""
        longest = max_offer_bytes(self._max_tokens, self._token_bytes)
        message = await channel.receive(Offer | End | SessionRefused, longest, LOOK_THROUGH_S)
        if isinstance(message, SessionRefused):
            raise PeerError(f"refused: {message.reason}")
        if isinstance(message, End):
            offers.all_made, offers.follow = True, False
            return
        assert isinstance(message, Offer)
        offers.follow = message.more
        if len(offers.waiting) > AHEAD:
            raise PeerError(f"made more than {AHEAD + 1} offers before a copy")
        if offers.enough:
            offers.waiting.append(None)
        elif not lanes & set(wanted) or offers.full >= FULL_IN_A_ROW:
            offers.enough = True
            offers.waiting.append(None)
            await channel.send(Enough())
        else:
            place = await self._place(message, lanes, wanted)
            offers.full = offers.full + 1 if place == "full" else 0
            offers.waiting.append(place if isinstance(place, Reservation) else None)
            await channel.send(Take() if isinstance(place, Reservation) else SkipOffer())

    async def _place(
        self, offer: Offer, lanes: frozenset[int], wanted: Collection[int]
    ) -> Reservation | Literal["held", "full", "lost"]:
        """A reservation for the offered copy, or why it is declined."""
        lane = lane_of_key(offer.user_id, self.identity.lanes)
        if lane not in lanes:
            raise PeerError(f"offered an entry of lane {lane}, which was not asked for")
        if lane not in wanted:
            return "lost"
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
        place = await self._desk.reserve(offer.user_id, tokens, offer.capacity, offer.uses)
        if not isinstance(place, Reservation):
            self._metrics.declined.labels(place).inc()
        return place

    async def _next_copy(self, channel: Channel, offers: Offers, progress: SessionProgress) -> None:
        """Receive the copy of the oldest offer, if it was taken, and make it the user's entry."""
        place = offers.waiting[0]
        if place is not None:
            if place.file is not None:
                await asyncio.to_thread(place.fetch)
            await channel.receive_copy(place.data.numpy().data, self._pace)
            self._metrics.bytes.labels("taken").inc(place.data.numel())
        offers.waiting.popleft()
        if place is None:
            return
        if await self._desk.fill(place):
            progress.entries += 1
            progress.nbytes += place.data.numel()
            self._metrics.entries.labels("taken").inc()
        else:
            self._metrics.declined.labels("held").inc()
