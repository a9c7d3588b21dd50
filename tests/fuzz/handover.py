"""What a worker reads from another one: frames of the hand-over, bad in their lengths, kinds, messages and order.

A proven worker may still be a broken one. Whatever comes, the reader ends with a typed error, takes no more than it
allowed, and what it accepts can be used: an offer's tokens have a length that its capacity holds.
"""

from __future__ import annotations

import asyncio
import io
import random
from contextlib import ExitStack
from typing import Any, Final, cast

import msgspec
import numpy as np

from relaygr_stream.errors import DecodeError
from relaygr_stream.handover.certificates import identity_problem, worker_name
from relaygr_stream.handover.channel import Channel, PeerError
from relaygr_stream.handover.tls import TlsSocket
from relaygr_stream.handover.wire import (
    HEADER,
    MAX_ASK,
    MAX_CHOICE,
    Ask,
    End,
    Enough,
    Message,
    Offer,
    PrefixIdentity,
    SessionRefused,
    SkipOffer,
    Take,
    encode,
    max_offer_bytes,
)
from relaygr_stream.models.api import Tokens
from tests.fuzz.checks import holds
from tests.fuzz.mutate import NUMBERS, TEXTS, Mutator

MAX_TOKENS: Final = 64
IDENTITY: Final = PrefixIdentity(
    model_version="m", layers=1, heads=1, dqk=4, dv=4, dtype="float32", storage="exact", device="cpu", lanes=8
)
#: What is read in each state of a session, and how much of it.
STATES: Final[list[tuple[Any, int]]] = [
    (Ask, MAX_ASK),
    (Offer | End | SessionRefused, max_offer_bytes(MAX_TOKENS)),
    (Take | SkipOffer | Enough, MAX_CHOICE),
]


class Handover:
    """Feeds a few frames to one end's reader, in each of its states."""

    def __init__(self, stack: ExitStack) -> None:
        self._loop = asyncio.new_event_loop()
        stack.callback(self._loop.close)

    def __call__(self, rng: random.Random) -> None:
        self._loop.run_until_complete(self._one(rng))
        names = (("URI", rng.choice(TEXTS)), ("DNS", rng.choice(TEXTS)), ("IP Address", rng.choice(TEXTS)))
        holds(worker_name({"subjectAltName": names[: rng.randrange(4)]}) == "", "a name out of nothing")
        holds(identity_problem({"subjectAltName": names}, "w", rng.choice(TEXTS)), "somebody else is nobody strange")

    async def _one(self, rng: random.Random) -> None:
        channel = Channel(cast(TlsSocket, Fed(b"".join(_frame(rng) for _ in range(rng.randrange(1, 4))))))
        try:
            while True:
                kind, most = rng.choice(STATES)
                message = await channel.receive(kind, most)
                holds(len(encode(message)) <= 2 * most, "a message larger than allowed")
                if isinstance(message, Offer):
                    tokens = message.sequence(MAX_TOKENS)
                    holds(1 <= len(tokens) <= min(MAX_TOKENS, message.capacity), "an offer's tokens")
        except (PeerError, DecodeError) as error:
            holds(len(str(error)) < 2000, f"an error of {len(str(error))} characters")


class Fed:
    """The other end's bytes, and then its end."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    async def receive(self, nbytes: int) -> bytes:
        """As TlsSocket.receive."""
        if len(data := self._data.read(nbytes)) < nbytes:
            raise EOFError
        return data


def _frame(rng: random.Random) -> bytes:
    payload = encode(_message(rng))
    if rng.random() < 0.7:
        payload = Mutator(rng).value(dict(msgspec.msgpack.decode(payload)))
    length = len(payload) if rng.random() < 0.8 else rng.choice(_lengths(len(payload)))
    frame = HEADER.pack(length) + payload
    return Mutator(rng).garbled(frame) if rng.random() < 0.2 else frame


def _lengths(true: int) -> list[int]:
    return [0, 1, max(0, true - 1), true + 1, MAX_ASK, MAX_ASK + 1, (1 << 31) - 1, (1 << 32) - 1]


def _message(rng: random.Random) -> Message:
    length = rng.randrange(1, MAX_TOKENS + 2)
    tokens = Tokens(np.full((3, length), rng.randrange(-(1 << 62), 1 << 62), np.int64))
    capacity = rng.choice([length, 64, 1, *(n for n in NUMBERS if isinstance(n, int) and 0 < n < 1 << 62)])
    messages: list[Message] = [
        Ask(IDENTITY, tuple(rng.randrange(8) for _ in range(rng.randrange(9))), rng.choice((0, 64, 10_000))),
        Offer.from_tokens(f"u{rng.randrange(9)}", tokens, capacity, rng.randrange(1, 1 << 40)),
        SessionRefused(rng.choice(["another model", "x" * 512])),
        *(Take(), SkipOffer(), Enough(), End()),
    ]
    return rng.choice(messages)
