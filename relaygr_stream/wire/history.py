"""A reference to a history in place of the history: its length, its version, and digests that the behaviours must have.

The digest of the first n behaviours is a chain over blocks of BLOCK behaviours, so that it is known after an append
from the last block alone:

    d(0) = H(layout)    d(64·k) = H(d(64·(k-1)) ‖ block k)    d(64·k + r) = H(d(64·k) ‖ the r behaviours behind)

H is BLAKE2b with 16 bytes. A block is its items, actions and times as in messages, then its feature columns by key;
`layout` lists these columns as KEY=BYTES of a row, joined by commas, in UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from struct import Struct
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from relaygr_stream.wire.behaviours import Behaviours

DIGEST_BYTES: Final = 16
#: Behaviours in a block: one call of BLAKE2b takes about as long as hashing a block of 13 bytes a behaviour.
BLOCK: Final = 64
#: Most earlier lengths whose digests a reference states: as many appends may lie between two requests of a user.
MAX_POSITIONS: Final = 32
#: A position: a length and its digest.
POSITION: Final = Struct("<I16s")
#: The schema version of messages with a reference: readers of version 1 refuse them.
HISTORY_VERSION: Final = 2

Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Length = Annotated[int, Meta(ge=1, lt=1 << 32)]


class HistoryReference(msgspec.Struct, frozen=True, kw_only=True):
    """The first `length` behaviours of a user's history, as the store had them at `version`.

    The user is that of the message. positions: lengths and digests of some of their beginnings, packed (`positioned`),
    so that a reader who has such a beginning knows it for one, and reads only the rest.
    """

    length: Length
    digest: Digest
    version: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    positions: Annotated[bytes, Meta(max_length=MAX_POSITIONS * POSITION.size)] = b""

    @classmethod
    def from_behaviours(
        cls, behaviours: Behaviours, version: int = 0, positions: Iterable[int] = ()
    ) -> HistoryReference:
        """The reference of these behaviours, at least one, with the digests at these earlier lengths."""
        wanted = sorted({each for each in positions if 0 < each < len(behaviours)})[-MAX_POSITIONS:]
        found = digests(behaviours, [*wanted, len(behaviours)])
        return cls(
            length=len(behaviours),
            digest=found[len(behaviours)],
            version=version,
            positions=positioned((each, found[each]) for each in wanted),
        )

    def stated(self) -> dict[int, bytes]:
        """Every length whose digest it states, its own among them."""
        earlier = {at: digest for at, digest in POSITION.iter_unpack(self.positions) if 0 < at < self.length}
        return {**earlier, self.length: self.digest}

    def checked(self, error: type[Exception]) -> HistoryReference:
        """Returns self if the positions are whole; otherwise raises `error`."""
        if len(self.positions) % POSITION.size:
            raise error(f"positions have {len(self.positions)} bytes, not a multiple of {POSITION.size}")
        return self


def positioned(positions: Iterable[tuple[int, bytes]]) -> bytes:
    """Lengths and digests, packed: unpacked for every event they would cost a trigger 3 µs."""
    return b"".join(POSITION.pack(at, digest) for at, digest in positions)


def digests(behaviours: Behaviours, lengths: Iterable[int], start: int = 0, state: bytes = b"") -> dict[int, bytes]:
    """The digests of a history at these lengths.

    behaviours: the history from `start` on, a multiple of BLOCK, where its digest is `state`; by default all of it.
    lengths: from `start` to the length of the history.
    """
    found: dict[int, bytes] = {}
    state = state or blake2b(layout(behaviours).encode(), digest_size=DIGEST_BYTES).digest()
    at = start
    for length in sorted(lengths):
        while at + BLOCK <= length:
            state = _hashed(state, behaviours, at - start, at + BLOCK - start)
            at += BLOCK
        found[length] = state if at == length else _hashed(state, behaviours, at - start, length - start)
    return found


def row_bytes(behaviours: Behaviours) -> dict[str, int]:
    """Bytes of a row of each feature column, by key."""
    rows = len(behaviours)
    return {key: len(data) // rows for key, data in sorted(behaviours.table.items())} if rows else {}


def layout(behaviours: Behaviours) -> str:
    """The feature columns, as in the digest of no behaviours."""
    return ",".join(f"{key}={size}" for key, size in row_bytes(behaviours).items())


def _hashed(state: bytes, behaviours: Behaviours, start: int, stop: int) -> bytes:
    part = behaviours.slice(start, stop)
    table = part.table
    digest = blake2b(state, digest_size=DIGEST_BYTES)
    for data in (part.items, part.actions, part.times, *(table[key] for key in sorted(table))):
        digest.update(data)
    return digest.digest()
