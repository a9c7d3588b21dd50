"""Peers that do not keep to the protocol, on either side: nothing of theirs gets in, and the books balance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from relaygr_stream.handover.channel import Channel, PeerError
from relaygr_stream.handover.giver import Handed
from relaygr_stream.handover.wire import HEADER, MESSAGE, Ask, End, Hello, Offer, Take, encode
from relaygr_stream.models.tokens import Tokens
from relaygr_stream.topics import lane_of
from tests.unit.handover.peers import ALL, LANES, SECRET, connect, peers
from tests.unit.worker.worlds import history
from tests.waiting import until

# ---- hostile takers ----


@pytest.mark.parametrize(
    "opening",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(2**32 - 1, MESSAGE),
        HEADER.pack(10, 7) + b"x" * 10,
        HEADER.pack(5, MESSAGE) + b"\xc1\xc1\xc1\xc1\xc1",
        HEADER.pack(len(encode(End())), MESSAGE) + encode(End()),
        HEADER.pack(len(encode(Hello(99, b"n" * 16))), MESSAGE) + encode(Hello(99, b"n" * 16)),
        b"",
    ],
    ids=["http", "4 GiB", "kind", "garbage", "out of turn", "version", "nothing"],
)
async def test_a_stranger_is_hung_up_on(opening: bytes) -> None:
    async with peers() as (old, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(old.handover.address.rpartition(":")[2]))
        writer.write(opening)
        writer.write_eof()
        with suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(-1), 10)
        writer.close()
        await until(lambda: old.total("failed", way="given") == 1 and not old.handover._sessions)
        assert old.total("bytes", way="given") == 0


async def test_a_taker_that_vanishes_lets_go_of_what_was_lent() -> None:
    async with peers() as (old, _):
        channel = await connect(old)
        await channel.greet(SECRET, "taker")
        await channel.send(Ask("w", old.identity, tuple(ALL)))
        assert isinstance(await channel.receive(Offer, 10**6), Offer)
        await channel.close()
        await until(lambda: old.total("failed", way="given") == 1)
        await old.at_rest()


# ---- hostile givers ----


SIXTY_FOUR = history(0, 64)


def user_of(lane: int) -> str:
    return next(f"v{n}" for n in range(1000) if lane_of(f"v{n}", LANES) == lane)


def an_offer(user: str, tokens: Tokens = SIXTY_FOUR, capacity: int = 64, nbytes: int = 64 * 256) -> Offer:
    return Offer.of(user, tokens, capacity, nbytes)


async def half_a_copy(channel: Channel) -> None:
    await channel.send(an_offer(user_of(0)))
    await channel.receive(Take, 100)
    await channel.send_copy(bytes(8 * 1024))


async def too_much(channel: Channel) -> None:
    await channel.send(an_offer(user_of(0)))
    await channel.receive(Take, 100)
    for _ in range(3):
        await channel.send_copy(bytes(8 * 1024 - 1))
    await channel.receive(Take, 100)  # until it hangs up


async def forged(channel: Channel) -> None:
    await channel.send(an_offer(user_of(0)))
    await channel.receive(Take, 100)
    assert channel._ours is not None
    channel._ours._count += 1
    await channel.send_copy(bytes(8 * 1024))


def offering(offer: Offer) -> Callable[[Channel], Awaitable[None]]:
    async def talk(channel: Channel) -> None:
        await channel.send(offer)
        await channel.receive(Take, 100)  # until it hangs up

    return talk


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        (half_a_copy, "hung up"),
        (too_much, "expected 1 and 2"),
        (forged, "wrong seal"),
        (offering(an_offer(user_of(1))), "not asked for"),
        (offering(an_offer(user_of(0), nbytes=64 * 256 + 1)), "bytes with room for"),
        (offering(an_offer(user_of(0), capacity=10**9, nbytes=10**9 * 256)), "bytes with room for"),
        (offering(an_offer(user_of(0), history(0, 192), 64)), "an offer that is none"),
        (offering(Offer(user_of(0), 64, b"123", 64 * 256)), "an offer that is none"),
        (offering(Offer(user_of(0), 64, bytes(10**6), 64 * 256)), "a frame of kind 0 and 1000"),
    ],
    ids=["half", "more", "forged", "lane", "bytes", "huge", "long", "shape", "frame"],
)
async def test_a_false_giver_brings_nothing_in(talk: Callable[[Channel], Awaitable[None]], words: str) -> None:
    over = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        with suppress(PeerError):
            await channel.greet(SECRET, "giver")
            await channel.receive(Ask, 10**5)
            await talk(channel)
        await channel.close()
        over.set()

    async with peers() as (_, new):
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        channel = Channel(*await asyncio.open_connection(*server.sockets[0].getsockname()))
        with pytest.raises(PeerError, match=words):
            await new.handover._taker.take(channel, frozenset({0}), {0}, Handed())
        await channel.close()
        await over.wait()
        server.close()
        await new.at_rest()
        assert await new.users() == set()
