"""Asks every worker and trigger to drop a user, on `worker-status`: header relaygr-kind = erase, key = erase/ID.

The user is named by a keyed hash: the topic is compacted, and must not keep whom it forgets. Where the fleet has a
secret, the hash is keyed with it, so that readers of the topic cannot try user ids; else its key stands in the record.
A worker or trigger states in its status which of these it has carried out. The command that asked then removes the
record with a tombstone; the log keeps both for KEPT_MS, for workers that are away and come back with what they kept.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from relaygr_stream.errors import DecodeError
from relaygr_stream.wire.messages import LeastVersion, UnixMillis
from relaygr_stream.wire.records import Record
from relaygr_stream.wire.versions import SCHEMA_VERSION, VersionedDecoder
from relaygr_stream.wire.worker_status import StatusReader

#: The value of HEADER_KIND, and how keys begin.
KIND: Final = "erase"
KEY_PREFIX: Final = "erase/"
MARK_BYTES: Final = 16
#: The schema version of a request whose user is named with the fleet's secret. Readers of an earlier one would compare
#: another hash, find nobody, and confirm: they refuse it instead.
KEYED_VERSION: Final = 3
#: What the key of that hash is made for (signature.purpose_key).
PURPOSE: Final = "erase 1"
HOUR_MS: Final = 3_600_000
#: For so long `worker-status` keeps every request (min_compaction_lag_ms), though its tombstone came: a worker that
#: keeps prefix KV in a file may be away for AWAY_MS, with CLOCK_MS for its clock and for the broker's, each.
KEPT_MS: Final = 1_200_000
AWAY_MS: Final = 600_000
CLOCK_MS: Final = 300_000
#: Users compared with one to erase before the loop goes on: a hash of each, 0.3 ms.
NAMES_AT_ONCE: Final = 256


class Erase(msgspec.Struct, frozen=True, kw_only=True):
    """On `worker-status`, header relaygr-kind = erase: drop what is kept of a user."""

    v: int = SCHEMA_VERSION
    min_v: LeastVersion = 0
    id: Annotated[str, Meta(pattern=r"\A[!-~]{16,64}\Z")]  # random, of this request; ASCII, as the key of a hash
    user: Annotated[bytes, Meta(min_length=MARK_BYTES, max_length=MARK_BYTES)]  # user_mark
    sent_ms: UnixMillis  # signed with it: an old record cannot be written again
    hour_mark: Annotated[bytes, Meta(max_length=MARK_BYTES)] = b""  # user_mark of the hour; empty: an earlier release

    @property
    def hour(self) -> str:
        """What names its user beside its id, and those of all requests of its hour: no id has a space."""
        return f"hour {self.sent_ms // HOUR_MS}"

    @property
    def mark_keys(self) -> tuple[bytes, ...]:
        """The keys of user_mark by which it may name its user."""
        return (b"",)

    def names(self, user_key: str) -> bool:
        """Whether it is about this user (messages.tenant_key)."""
        return any(user_mark(self.id, user_key, key) == self.user for key in self.mark_keys)

    @classmethod
    def request(cls, erase_id: str, user_key: str, sent_ms: int, reader: StatusReader) -> Erase:
        """A request that names this user (messages.tenant_key), with the reader's secret if it has one."""
        v, key = (SCHEMA_VERSION, b"") if reader.signer is None else (KEYED_VERSION, reader.signer.keys(PURPOSE)[0])
        made = cls(v=v, min_v=v if key else 0, id=erase_id, user=user_mark(erase_id, user_key, key), sent_ms=sent_ms)
        return msgspec.structs.replace(made, hour_mark=user_mark(made.hour, user_key, key))


class Everyone(Erase, frozen=True, kw_only=True):
    """As if it named each user: requests may have been missed. On no topic."""

    def names(self, user_key: str) -> bool:
        """It does."""
        del user_key
        return True


class _Keyed(Erase, frozen=True, kw_only=True):
    """A request as a process with the fleet's secret reads it. keys: of the secrets that it believes."""

    keys: tuple[bytes, ...]

    @property
    def mark_keys(self) -> tuple[bytes, ...]:
        return self.keys


class ErasedUsers:
    """The users whom requests name. To look one up takes a hash for each hour in which they were sent, and one for each
    request of an earlier release."""

    def __init__(self, erases: Iterable[Erase]) -> None:
        self._marks = defaultdict[tuple[str, bytes], set[bytes]](set)
        for erase in erases:
            salt, mark = (erase.hour, erase.hour_mark) if len(erase.hour_mark) == MARK_BYTES else (erase.id, erase.user)
            for key in erase.mark_keys:
                self._marks[salt, key].add(mark)

    def __contains__(self, user_key: str) -> bool:
        """Whether one is about this user (messages.tenant_key)."""
        return any(user_mark(salt, user_key, key) in marks for (salt, key), marks in self._marks.items())


def user_mark(salt: str, user_key: str, key: bytes = b"") -> bytes:
    """BLAKE2b of the salt (a request's id or hour) and the user's key (messages.tenant_key), keyed with 32 bytes made
    of the secret.

    key empty: of the user's key alone, keyed with the salt, which stands in the record.
    """
    if not key:
        return blake2b(user_key.encode(), key=salt.encode(), digest_size=MARK_BYTES).digest()
    return blake2b(f"{salt}\0{user_key}".encode(), key=key, digest_size=MARK_BYTES).digest()


_encoder = msgspec.msgpack.Encoder()
_decoder = VersionedDecoder(Erase, min_v=1)


def encode_erase(erase: Erase) -> bytes:
    """The message as MessagePack."""
    return _encoder.encode(erase)


def read_erase(record: Record, reader: StatusReader, *, fresh: bool = True) -> Erase | None:
    """What a record asks for; None: it is of another kind, or a tombstone.

    fresh: refuse a time further back than KEPT_MS. So long a process without a broker may read a request late, and a
    stranger may repeat it: that drops the user once more.

    Raises DecodeError, `unsigned` without a valid signature where the fleet has a secret, or for an old time; `invalid`
    for a user named with a secret that this process has not.
    """
    erase = reader.other(record, KIND, _decoder)
    if erase is None:
        return None
    if fresh:
        reader.check_fresh(erase.sent_ms, KEPT_MS / 1e3)
    if erase.v < KEYED_VERSION:
        return erase
    if reader.signer is None:
        raise DecodeError("invalid", "it names its user with handover.secret, which this process has not")
    return _Keyed(**msgspec.structs.asdict(erase), keys=reader.signer.keys(PURPOSE))


async def filter_named_users(users: Sequence[str], erase: Erase) -> set[str]:
    """Those whom it names; the loop goes on after each NAMES_AT_ONCE of them."""
    found: set[str] = set()
    for start in range(0, len(users), NAMES_AT_ONCE):
        found.update(filter(erase.names, users[start : start + NAMES_AT_ONCE]))
        await asyncio.sleep(0)
    return found
