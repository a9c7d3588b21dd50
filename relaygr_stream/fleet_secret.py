"""Keys from the secret that a fleet shares (`handover.secret`): one for each purpose, none of which tells another."""

from __future__ import annotations

import hashlib
import hmac
from functools import lru_cache
from typing import Final

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
