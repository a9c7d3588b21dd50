"""Signatures of records on `worker-status`: without the secret, a writer of the topic cannot forge another's status.

A signature is HMAC-SHA256 over the topic's name, the record's key, its other relay headers and its value. Its key is
derived from `handover.secret`, the secret that a fleet shares; each purpose has a key of its own.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.worker import Handover
from relaygr_stream.wire.records import HEADER_SIGNATURE, Record

#: scrypt (RFC 7914) with 32 MiB, three times. OWASP's password storage cheat sheet counts it as equal to N = 2^17 and
#: p = 1, which takes 128 MiB: too much while other workers start on the same machine.
SCRYPT: Final = {"n": 1 << 15, "r": 8, "p": 3}
SCRYPT_BYTES: Final = 64 << 20
#: Fixed: a salt for each fleet would be another shared value. It makes tables computed for other programs useless.
SALT: Final = b"relaygr fleet secret 1"
KEY_BYTES: Final = 32


def purpose_key(secret: str, purpose: str) -> bytes:
    """A key of 32 bytes, the same in every process with the secret. The first call takes 0.6 s (use a thread).

    purpose: a short text, such as "worker-status 1"; a key of one purpose does not reveal another. Raises ValueError if
    the secret is empty.
    """
    if not secret:
        raise ValueError("no key can be derived from an empty secret")
    # HKDF-Expand (RFC 5869) for one block.
    return hmac.digest(_stretched(secret), purpose.encode() + b"\x01", "sha256")


@lru_cache(maxsize=4)
def _stretched(secret: str) -> bytes:
    return hashlib.scrypt(secret.encode(), salt=SALT, **SCRYPT, maxmem=SCRYPT_BYTES, dklen=KEY_BYTES)


#: The purpose of the signing key; another form of the signature gets another purpose.
PURPOSE: Final = "worker-status 1"
#: Headers with this prefix are signed; proxies and tracers may add others on the way.
OWN_HEADERS: Final = "relaygr-"

Headers = Iterable[tuple[str, bytes]]


class Signer:
    """Signs records with a key derived from `secret`, and verifies those signed with it or with the one of `accepted`.

    accepted: another secret, while the fleet changes from one to the other; empty: there is none.
    """

    def __init__(self, secret: str, accepted: str = "") -> None:
        self._secret = secret
        self._verified = (secret, accepted) if accepted else (secret,)

    def prepare(self) -> None:
        """Derive the keys, which takes 0.6 s each; call it on a thread other than the event loop's."""
        for secret in self._verified:
            purpose_key(secret, PURPOSE)

    def keys(self, purpose: str) -> tuple[bytes, ...]:
        """The keys of this purpose (purpose_key): of the secret that it signs with, then of the accepted one."""
        return tuple(purpose_key(secret, purpose) for secret in self._verified)

    @classmethod
    def from_settings(cls, handover: Handover) -> Signer | None:
        """A signer, or None if there is no secret: records are then neither signed nor verified.

        Raises ConfigError for an accepted secret without one to sign with.
        """
        if handover.accepted_secret and not handover.secret:
            raise ConfigError(
                "`handover.accepted_secret` is set without `handover.secret`: nothing would be signed; set the latter, "
                "or both while the secret is being changed"
            )
        return cls(handover.secret, handover.accepted_secret) if handover.secret else None

    def sign(self, topic: str, key: bytes, value: bytes | None, headers: Headers = ()) -> list[tuple[str, bytes]]:
        """The headers, followed by the record's signature."""
        own = list(headers)
        return [*own, (HEADER_SIGNATURE, _mac(self._secret, topic, key, value, own))]

    def verifies(self, record: Record) -> bool:
        """Whether the record has one valid signature for its topic, key, headers and value."""
        stated = [value for name, value in record.headers if name == HEADER_SIGNATURE]
        own = [(name, value) for name, value in record.headers if name != HEADER_SIGNATURE]
        return len(stated) == 1 and any(
            hmac.compare_digest(stated[0] or b"", _mac(secret, record.topic, record.key or b"", record.value, own))
            for secret in self._verified
        )


def _mac(secret: str, topic: str, key: bytes, value: bytes | None, headers: Headers) -> bytes:
    named = [part for name, text in headers if name.startswith(OWN_HEADERS) for part in (name.encode(), text or b"")]
    mac = hmac.new(purpose_key(secret, PURPOSE), digestmod=hashlib.sha256)
    for part in (topic.encode(), key, *named, b"" if value is None else b"\x01" + value):
        mac.update(len(part).to_bytes(8, "little"))  # so that different lists of parts give different bytes
        mac.update(part)
    return mac.digest()


# ---- answers, by relay.answer_secret ----


def signature(secret: str, *parts: bytes) -> bytes:
    """HMAC-SHA256 with the secret's UTF-8 bytes over the parts, each preceded by its length (4 bytes, big-endian).

    The first part names the purpose, so that a signature for one purpose is never valid for another.
    """
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(secret.encode(), framed, "sha256")


def answer_signature(secret: str, correlation: bytes, value: bytes) -> bytes:
    """The signature of an answer to the call with this correlation id."""
    return signature(secret, b"answer", correlation, value)
