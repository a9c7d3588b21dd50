"""Signatures of records on `worker-status`: whoever may write the topic cannot speak for others without the secret.

HMAC-SHA256 over the topic's name, the record's key, its other relay headers and its value, with a key derived from
`handover.secret`. Knows nothing of what the records say.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

from relaygr_stream.bus.records import Record
from relaygr_stream.fleet_secret import purpose_key
from relaygr_stream.messages import HEADER_SIGNATURE

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
