"""The protocol between two workers: messages and frames.

    new owner → Ask              old owner → Refused | Offer … | End
    per Offer: new owner → Take | Skip | Enough; after Take the old owner sends the copy's bytes

Answers and copies have the order of the offers. The old owner sends a message, and then the copy of the oldest offer
that waits for its own, if that is taken; but after an offer with `more` it sends another message first. So answers and
the next offers travel while a copy does. A worker of the last release states no `ahead` and no `more`.

TLS (connection.py) authenticates the workers, encrypts the connection, and negotiates the protocol's version. A message
is its length (4 bytes, big-endian), and that many bytes of MessagePack. A copy's bytes are sent unchanged, as one
contiguous region without a frame: its length was offered.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta

from relaygr_stream.errors import DecodeError
from relaygr_stream.models.api import ROWS, Tokens
from relaygr_stream.settings.schema import MAX_LANES
from relaygr_stream.wire.features import FeatureSchema
from relaygr_stream.wire.versions import NOT_DECODED

HEADER: Final = struct.Struct(">I")
#: Largest payload of Take, Skip and Enough, which have a tag alone.
MAX_CHOICE: Final = 64
#: Largest payload of Ask: 10,000 lanes (the settings' bound) of 3 bytes, and an identity.
MAX_ASK: Final = 64 * 1024
#: Bytes of a token of a model that reads no features: int64 item, action and gap.
TOKEN_BYTES: Final = 8 * ROWS

MAX_TEXT: Final = 512
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
#: messages.tenant_key: a tenant of 128 characters, NUL, a user id of 256.
UserKey = Annotated[str, Meta(min_length=1, max_length=385)]


class PrefixIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that two workers must share for prefix KV of one to serve at the other.

    lanes: of how many the lanes are that the asking worker names; workers learn of more lanes one by one.
    """

    model_version: Text
    layers: int
    heads: int
    dqk: int
    dv: int
    dtype: Text
    storage: Text = "exact"  # earlier workers may have copies of other forms
    device: Text
    lanes: Annotated[int, Meta(ge=1, le=MAX_LANES)]
    state: int = 0  # elements beside the tokens

    def difference(self, other: PrefixIdentity) -> str:
        """The first difference in words, from the viewpoint of `self`; "" if there is none."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs and name != "lanes":
                return f"{name.replace('_', ' ')} is {ours} here and {theirs} there"
        return ""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Asks for the entries of these lanes' users. max_tokens: longer entries are not offered; 0: all are.

    ahead: offers that may be made before the copy of the oldest has been sent.
    """

    identity: PrefixIdentity
    lanes: Annotated[tuple[int, ...], Meta(max_length=10_000)]
    max_tokens: Annotated[int, Meta(ge=0)] = 0
    ahead: Annotated[int, Meta(ge=0)] = 0


class SessionRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Refuses the session, with the reason."""

    reason: Text


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Offers one entry, the most valuable first. tokens: (rows, length) int64, little-endian, row-major.

    Item, action and gap are the first rows; a model that reads features has more, as both sides know by its version.
    more: another message follows before the copy of any offer.
    """

    user_id: UserKey
    capacity: Annotated[int, Meta(ge=1)]
    tokens: bytes
    nbytes: Annotated[int, Meta(ge=1)]
    uses: Annotated[float, Meta(ge=0, le=1e9)] = 1.0  # faded, as the old owner counts them
    more: bool = False

    @classmethod
    def from_tokens(
        cls, user_id: str, tokens: Tokens, capacity: int, nbytes: int, uses: float = 1.0, *, more: bool = False
    ) -> Offer:
        """The offer of a copy."""
        return cls(user_id, capacity, tokens.array.astype("<i8").tobytes(), nbytes, uses, more)

    def sequence(self, max_tokens: int, token_bytes: int = TOKEN_BYTES) -> Tokens:
        """The entry's tokens. Raises DecodeError unless there are 1 to max_tokens and at most `capacity`."""
        length, rest = divmod(len(self.tokens), token_bytes)
        if rest or not 1 <= length <= min(max_tokens, self.capacity):
            raise DecodeError(
                "invalid",
                f"an offer has {len(self.tokens)} bytes of tokens and capacity for {self.capacity}; at {token_bytes} "
                f"bytes a token it must have 1 to {max_tokens} tokens, and at most its capacity",
            )
        return Tokens(np.frombuffer(self.tokens, "<i8").astype(np.int64).reshape(-1, length))


class Take(msgspec.Struct, frozen=True, tag="take"):
    """Accepts the offer: the copy's bytes follow."""


class SkipOffer(msgspec.Struct, frozen=True, tag="skip"):
    """Declines the offer; the next one may follow."""


class Enough(msgspec.Struct, frozen=True, tag="enough"):
    """Declines the offer and ends the session."""


class End(msgspec.Struct, frozen=True, tag="end"):
    """Ends the session: all entries were offered."""


Message = Ask | SessionRefused | Offer | Take | SkipOffer | Enough | End

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The payload of a message."""
    return _encoder.encode(message)


def decode(payload: bytes) -> Message:
    """The message of a payload. Raises DecodeError for bytes that are no message of this protocol."""
    try:
        return _decoder.decode(payload)
    except NOT_DECODED as error:
        raise DecodeError("malformed", str(error)[:MAX_TEXT]) from error  # bounded, since it quotes the input


def token_bytes(schema: FeatureSchema) -> int:
    """Bytes of a token of a model that reads these features."""
    return TOKEN_BYTES + 8 * schema.words


def max_offer_bytes(max_tokens: int, token_bytes: int = TOKEN_BYTES) -> int:
    """The largest payload of an offer, and so of every message of the old owner."""
    return max_tokens * token_bytes + 2048
