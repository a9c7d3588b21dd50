"""Signatures of records on `worker-status`: whoever may write the topic cannot speak for others without the secret.

HMAC-SHA256 over the topic's name, the record's key, its other relay headers and its value, with a key derived from
`handover.secret`. Knows nothing of what the records say.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from relaygr_stream.wire.messages import HEADER_SIGNATURE
from relaygr_stream.wire.records import Record

# Keys from the secret that a fleet shares (`handover.secret`): one for each purpose, none of which tells another.


#: scrypt (RFC 7914) with 32 MiB, three times: 0.6 s of one core here. OWASP's password storage cheat sheet names these
#: numbers as equal to N = 2^17, p = 1, which takes 128 MiB, at a start beside other workers.
SCRYPT: Final = {"n": 1 << 15, "r": 8, "p": 3}
SCRYPT_BYTES: Final = 64 << 20
#: A salt of its own for each fleet would have to be shared as well; a fixed one keeps tables of other programs useless.
SALT: Final = b"relaygr fleet secret 1"
KEY_BYTES: Final = 32


def purpose_key(secret: str, purpose: str) -> bytes:
    """32 bytes, the same in every process that knows the secret. Slow the first time (use a thread), then kept.

    purpose: a short text of the caller's own, "worker-status 1" say. Raises ValueError without a secret.
    """
    if not secret:
        raise ValueError("no key can be derived from an empty secret")
    # HKDF-Expand (RFC 5869) for one block.
    return hmac.digest(_stretched(secret), purpose.encode() + b"\x01", "sha256")


@lru_cache(maxsize=4)
def _stretched(secret: str) -> bytes:
    return hashlib.scrypt(secret.encode(), salt=SALT, **SCRYPT, maxmem=SCRYPT_BYTES, dklen=KEY_BYTES)


#: What the key is for (fleet_secret.py); another form of the signature is another purpose.
PURPOSE: Final = "worker-status 1"
#: Headers of this prefix are covered; others are whatever proxies and tracers add on the way.
OWN_HEADERS: Final = "relaygr-"

Headers = Iterable[tuple[str, bytes]]


class Signer:
    """Signs and verifies records with a key derived from `secret`, which takes half a second the first time."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def prepare(self) -> None:
        """Derive the key, on a thread that may wait."""
        purpose_key(self._secret, PURPOSE)

    @classmethod
    def of(cls, secret: str) -> Signer | None:
        """None without a secret: nothing is signed then, and everything believed."""
        return cls(secret) if secret else None

    def sign(self, topic: str, key: bytes, value: bytes | None, headers: Headers = ()) -> list[tuple[str, bytes]]:
        """The headers with the record's signature behind them."""
        own = list(headers)
        return [*own, (HEADER_SIGNATURE, self._mac(topic, key, value, own))]

    def verifies(self, record: Record) -> bool:
        """Whether someone who has the secret wrote this record, with this key, to this topic."""
        stated = [value for name, value in record.headers if name == HEADER_SIGNATURE]
        own = [(name, value) for name, value in record.headers if name != HEADER_SIGNATURE]
        mac = self._mac(record.topic, record.key or b"", record.value, own)
        return len(stated) == 1 and hmac.compare_digest(stated[0] or b"", mac)

    def _mac(self, topic: str, key: bytes, value: bytes | None, headers: Headers) -> bytes:
        named = [
            part for name, text in headers if name.startswith(OWN_HEADERS) for part in (name.encode(), text or b"")
        ]
        mac = hmac.new(purpose_key(self._secret, PURPOSE), digestmod=hashlib.sha256)
        for part in (topic.encode(), key, *named, b"" if value is None else b"\x01" + value):
            mac.update(len(part).to_bytes(8, "little"))  # so that no two lists of parts have the same bytes
            mac.update(part)
        return mac.digest()
