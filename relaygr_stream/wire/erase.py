"""Asks every worker to drop a user, on `worker-status`: header relaygr-kind = erase, key = erase/ID.

The user is named by a keyed hash: the topic is compacted, and must not keep whom it forgets. A worker states in its
status which of these it has carried out. The command that asked then removes the record with a tombstone.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from relaygr_stream.wire.messages import LeastVersion, UnixMillis
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.versions import SCHEMA_VERSION, VersionedDecoder
from relaygr_stream.wire.worker_status import StatusReader

#: The value of HEADER_KIND, and how keys begin.
KIND: Final = "erase"
KEY_PREFIX: Final = "erase/"
MARK_BYTES: Final = 16


class Erase(msgspec.Struct, frozen=True, kw_only=True):
    """On `worker-status`, header relaygr-kind = erase: drop what is kept of a user."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    id: Annotated[str, Meta(pattern=r"\A[!-~]{16,64}\Z")]  # random, of this request; ASCII, as the key of a hash
    user: Annotated[bytes, Meta(min_length=MARK_BYTES, max_length=MARK_BYTES)]  # user_mark
    sent_ms: UnixMillis  # signed with it: an old record cannot be written again

    def names(self, user_key: str) -> bool:
        """Whether it is about this user (messages.tenant_key)."""
        return user_mark(self.id, user_key) == self.user


def user_mark(erase_id: str, user_key: str) -> bytes:
    """BLAKE2b of the user's key (messages.tenant_key), keyed with the request's id."""
    return blake2b(user_key.encode(), key=erase_id.encode(), digest_size=MARK_BYTES).digest()


_encoder = msgspec.msgpack.Encoder()
_decoder = VersionedDecoder(Erase, min_v=1)


def encode_erase(erase: Erase) -> bytes:
    """The message as MessagePack."""
    return _encoder.encode(erase)


def read_erase(record: Record, reader: StatusReader) -> Erase | None:
    """What a record asks for; None: it is of another kind, or a tombstone.

    Raises DecodeError, `unsigned` without a valid signature where the fleet has a secret, or for an old time.
    """
    erase = reader.other(record, KIND, _decoder)
    if erase is not None:
        reader.check_fresh(erase.sent_ms)
    return erase
