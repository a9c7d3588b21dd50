"""Peers that do not keep to the protocol, on either side: nothing of theirs gets in, and the books balance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from relaygr_stream.engine.scheduler import Scheduler
from relaygr_stream.handover import channel as channel_module
from relaygr_stream.handover.channel import PeerError
from relaygr_stream.handover.connection import connect
from relaygr_stream.handover.pace import CopyPace
from relaygr_stream.handover.session import AHEAD, SessionProgress
from relaygr_stream.handover.wire import HEADER, Ask, End, Offer, Take, encode
from relaygr_stream.models.api import Tokens
from relaygr_stream.wire.topic_files import lane_of
from tests.unit.cache.worlds import entries
from tests.unit.engine.worlds import history
from tests.unit.handover.peers import (
    ALL,
    LANES,
    NETWORKS,
    RawChannel,
    connected,
    connected_raw,
    credentials,
    giver,
    peers,
)
from tests.waiting import until

# ---- hostile takers ----


def leases(core: Scheduler) -> int:
    return sum(entry.leases for entry in entries(core.cache))


@pytest.mark.parametrize("ahead", [0, 10**9])
async def test_a_taker_that_vanishes_lets_go_of_what_was_lent(ahead: int) -> None:
    async with peers() as (old, _):
        channel = await connected(old)
        await channel.send(Ask(old.identity, tuple(ALL), ahead=ahead))
        while (await channel.receive(Offer, 10**6)).more:
            pass
        assert await old.on_core(leases) == 1 + min(ahead, AHEAD)
        await channel.close()
        await until(lambda: old.total("failed", way="given") == 1)
        await old.at_rest()


@pytest.mark.parametrize(
    "frames",
    [
        HEADER.pack(2**32 - 1),
        HEADER.pack(5) + b"\xc1\xc1\xc1\xc1\xc1",
        HEADER.pack(len(encode(End()))) + encode(End()),
        b"",
    ],
    ids=["4 GiB", "garbage", "out of turn", "nothing"],
)
async def test_a_proven_taker_that_sends_nonsense_is_hung_up_on(frames: bytes) -> None:
    async with peers() as (old, _):
        channel = await connected_raw(old)
        await channel.write(frames)
        if frames:
            with pytest.raises(PeerError, match="hung up"):
                await channel.receive(Offer, 10**6)
            await channel.close()
        else:
            channel.abort()
        await until(lambda: old.total("failed", way="given") == 1)
        assert old.total("bytes", way="given") == 0


async def test_a_taker_that_reads_nothing_of_its_copy_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "ANSWER_S", 0.5)
    ended = asyncio.Event()

    async def give(channel: RawChannel) -> None:
        with pytest.raises(PeerError, match=r"accepted nothing for 0\.5 s"):
            await channel.send_copy(memoryview(bytes(64 << 20)), CopyPace())
        ended.set()

    async with peers() as (old, _), giver(give, "old") as address:
        channel = await connect(address, "old", credentials("new"), NETWORKS)
        await channel.send(Ask(old.identity, tuple(ALL)))
        await ended.wait()
        channel.abort()


# ---- hostile givers ----


SIXTY_FOUR = history(0, 64)


def user_of(lane: int) -> str:
    return next(f"v{n}" for n in range(1000) if lane_of(f"v{n}", LANES) == lane)


def an_offer(
    user: str, tokens: Tokens = SIXTY_FOUR, capacity: int = 64, nbytes: int = 64 * 256, *, more: bool = False
) -> Offer:
    return Offer.from_tokens(user, tokens, capacity, nbytes, more=more)


async def half_a_copy(channel: RawChannel) -> None:
    await channel.send(an_offer(user_of(0)))
    await channel.receive(Take, 100)
    await channel.write(bytes(8 * 1024))


async def none_of_two_copies(channel: RawChannel) -> None:
    await channel.send(an_offer(user_of(0), more=True))
    await channel.send(an_offer(user_of(0)))
    for _ in range(2):
        await channel.receive(Take, 100)


async def offers_alone(channel: RawChannel) -> None:
    while True:  # until it hangs up
        await channel.send(an_offer(user_of(0), more=True))
        await channel.receive(Take, 100)


async def too_much(channel: RawChannel) -> None:
    await channel.send(an_offer(user_of(0)))
    await channel.receive(Take, 100)
    await channel.send_copy(memoryview(bytes(16 * 1024) + b"\xff" * 8), CopyPace())
    await channel.receive(Take, 100)  # until it hangs up


async def byte_by_byte(channel: RawChannel) -> None:
    await channel.send(an_offer(user_of(0)))
    await channel.receive(Take, 100)
    with suppress(OSError):
        while True:  # until it hangs up
            await channel.write(bytes(1))
            await asyncio.sleep(0.05)


def offering(offer: Offer) -> Callable[[RawChannel], Awaitable[None]]:
    async def talk(channel: RawChannel) -> None:
        await channel.send(offer)
        await channel.receive(Take, 100)  # until it hangs up

    return talk


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        (half_a_copy, "hung up"),
        (none_of_two_copies, "hung up"),
        (offers_alone, "made more than 2 offers before a copy"),
        (too_much, "a frame of 4294967295 bytes"),
        (byte_by_byte, "sent nothing for 0.5 s"),
        (offering(an_offer(user_of(1))), "not asked for"),
        (offering(an_offer(user_of(0), nbytes=64 * 256 + 1)), "bytes with room for"),
        (offering(an_offer(user_of(0), capacity=10**9, nbytes=10**9 * 256)), "bytes with room for"),
        (offering(an_offer(user_of(0), history(0, 192), 64)), "an invalid offer"),
        (offering(Offer(user_of(0), 64, b"123", 64 * 256)), "an invalid offer"),
        (offering(Offer(user_of(0), 64, bytes(10**6), 64 * 256)), "a frame of 1000"),
    ],
    ids=["half", "none", "offers", "more", "trickle", "lane", "bytes", "huge", "long", "shape", "frame"],
)
async def test_a_false_giver_brings_nothing_in(
    talk: Callable[[RawChannel], Awaitable[None]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if talk is byte_by_byte:
        monkeypatch.setattr(channel_module, "ANSWER_S", 0.5)
    async with peers() as (_, new), giver(talk, "false") as address:
        channel = await connect(address, "false", credentials("new"), NETWORKS)
        with pytest.raises(PeerError, match=words):
            await new.taker().take(channel, frozenset({0}), {0}, SessionProgress())
        await channel.close()
        await new.at_rest()
        assert await new.users() <= ({user_of(0)} if talk is too_much else set())
