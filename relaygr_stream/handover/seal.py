"""Proof that a frame comes from a worker that knows the secret, in this session, in this place, unchanged.

Both sides bring a nonce; HMAC-SHA256 of both under the secret gives a key per direction, and every frame carries a
keyed BLAKE2b (RFC 7693) of its number, header and payload. So nothing can be forged, replayed, reordered, reflected or
cut out; a truncated stream is a missing frame. It hides nothing: what travels can be read on the way.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, Literal

TAG_BYTES: Final = 16

Side = Literal["giver", "taker"]


class Seal:
    """The frames of one direction, in order."""

    def __init__(self, secret: str, taker_nonce: bytes, giver_nonce: bytes, sender: Side) -> None:
        context = b"relaygr hand-over 1 " + sender.encode() + taker_nonce + giver_nonce
        self._key = hmac.digest(secret.encode(), context, "sha256")
        self._count = 0

    def tag(self, header: bytes, payload: bytes) -> bytes:
        """The seal of the next frame."""
        state = hashlib.blake2b(key=self._key, digest_size=TAG_BYTES)
        state.update(self._count.to_bytes(8, "big") + header)
        state.update(payload)
        self._count += 1
        return state.digest()

    def agrees(self, header: bytes, payload: bytes, tag: bytes) -> bool:
        """Whether this is the next frame, as it was sent."""
        return hmac.compare_digest(self.tag(header, payload), tag)
