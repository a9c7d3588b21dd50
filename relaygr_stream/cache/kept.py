"""What a DRAM tier writes into its file of each copy, beside its bytes: whose it is, its tokens, a digest of both.

A copy's extent holds K and V, then the tokens. The digest is computed by a copy thread; only then the copy is whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha1
from typing import Final

import numpy as np
import torch

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.copy import CopyTicket
from relaygr_stream.cache.entry import Entry, StoredCopy
from relaygr_stream.cache.tier_file import SlotRecord, TierFile
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.kv import KVLayout

#: Tokens begin at a multiple of this behind K and V.
WORD: Final = 8


class DigestTicket(CopyTicket):
    """The digest of a kept copy, computed by a copy thread."""

    def __init__(self, kept: KeptCopies, copy: StoredCopy) -> None:
        nothing = torch.empty(0)
        super().__init__(nothing, nothing)
        self._kept, self._copy = kept, copy
        self.digest = b""

    def run(self, stream: torch.Stream | None) -> None:
        """Compute it, once; no stream takes part."""
        del stream
        try:
            self.digest = self._kept.digest(self._copy)
        except Exception as error:
            self.finish(error)
        else:
            self.finish(None)


@dataclass
class Restored:
    """What a restarted worker has found again. dropped: records that were not taken, by why."""

    entries: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, why: str) -> None:
        """Count a record that was not taken."""
        self.dropped[why] = self.dropped.get(why, 0) + 1


class KeptCopies:
    """The copies of a tier in its file. layout: of a region."""

    def __init__(self, file: TierFile, layout: KVLayout) -> None:
        self.file: Final = file
        self._layout = layout
        self._token_bytes = file.shape.token_bytes
        self._began = file.holds

    @property
    def waits(self) -> bool:
        """Whether the file holds copies of an earlier process that are neither taken nor dropped."""
        return self._began

    def taken(self) -> None:
        """They are."""
        self._began = False

    def nbytes(self, capacity: int) -> int:
        """Bytes of an extent for a copy of a region of this capacity."""
        return kept_bytes(self._layout.nbytes(capacity), capacity, self._token_bytes)

    def write_tokens(self, copy: StoredCopy, tokens: Tokens) -> None:
        """Write the copy's tokens behind its K and V."""
        self._token_words(copy)[:] = tokens.array[:, : copy.length]

    def tokens(self, copy: StoredCopy) -> Tokens:
        """The copy's tokens, in the file itself: whoever keeps them longer than the copy lives copies them."""
        return Tokens(self._token_words(copy))

    def fetch_tokens(self, copy: StoredCopy) -> None:
        """Have the copy's tokens in memory. Raises DeviceError where the file's disk does not give them."""
        at = self._tokens_at(copy.capacity)
        self.file.fetch(Extent(copy.extent.offset + at, copy.extent.size - at))

    def digest(self, copy: StoredCopy) -> bytes:
        """Of all its bytes. SHA-1, the fastest where processors have it: it finds damage, and no one else may write."""
        self.file.fetch(copy.extent)
        start = copy.extent.offset
        digest = sha1(self.file.data[start : start + self._layout.nbytes(copy.capacity)].data, usedforsecurity=False)
        digest.update(np.ascontiguousarray(self._token_words(copy)).data)
        return digest.digest()

    def commit(self, entry: Entry, digest: bytes, uses: float) -> None:
        """The entry's copy is whole."""
        copy = entry.stored
        assert copy is not None
        record = SlotRecord(copy.extent, entry.user_id, digest, copy.capacity, copy.length, uses, entry.source.value)
        self.file.commit(record)

    def freed(self, copy: StoredCopy, *, erased: bool) -> None:
        """The copy's extent is free: no tokens are left of it, and of an erased user nothing at all."""
        tokens = slice(self._tokens_at(copy.capacity), copy.extent.size)
        self.file.clear(copy.extent, None if erased else tokens)

    def _tokens_at(self, capacity: int) -> int:
        return -(-self._layout.nbytes(capacity) // WORD) * WORD

    def _token_words(self, copy: StoredCopy) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        start = copy.extent.offset + self._tokens_at(copy.capacity)
        words = self.file.data[start : start + self._token_bytes * copy.length].view(np.int64)
        return words.reshape(self._token_bytes // WORD, copy.length)


def kept_bytes(kv_bytes: int, capacity: int, token_bytes: int) -> int:
    """Bytes of a copy with its tokens."""
    return -(-kv_bytes // WORD) * WORD + capacity * token_bytes
