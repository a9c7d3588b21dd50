"""Finds a DRAM tier's copies again that an earlier process has left in the tier's file.

slot ─► checksum ─► fits this tier? ─► user erased meanwhile? ─► an entry in DRAM, verified when it is first read
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from relaygr_stream.cache.entry import Source, StoredCopy
from relaygr_stream.cache.entry_table import EntryTable
from relaygr_stream.cache.kept import KeptCopies, Restored
from relaygr_stream.cache.tier_file import SlotRecord
from relaygr_stream.cache.tiers import DramTier, capacity_for
from relaygr_stream.errors import CacheCorruption
from relaygr_stream.wire.erase import Erase

#: More uses than any tier counts.
MOST_USES: Final = 1e9


def restore(table: EntryTable, dram: DramTier, kept: KeptCopies, most: int, erases: Sequence[Erase]) -> Restored:
    """See PrefixCache.restore. most: largest capacity of a region."""
    assert not dram.used, "restored into a tier in use: its copies may be overwritten"
    found = Restored()
    for record in kept.file.records():
        if isinstance(record, str):
            found.drop(record)
            continue
        copy = StoredCopy(record.extent, record.capacity, record.length, record.digest)
        if not _fits(record, dram, most) or record.user_id in table.by_user:
            kept.file.forget(record.extent)
            found.drop("unfit")
        elif any(erase.names(record.user_id) for erase in erases):
            kept.freed(copy, erased=True)
            found.drop("erased")
        elif not _held(copy, dram):
            kept.file.forget(record.extent)
            found.drop("overlapping")
        else:
            dram.learn(record.user_id, record.uses)
            table.add_stored(copy, record.user_id, kept.tokens(copy), Source(record.source))
            found.entries += 1
    kept.taken()
    return found


def _fits(record: SlotRecord, dram: DramTier, most: int) -> bool:
    """Whether the tier could have made this copy."""
    known = record.source in Source._value2member_map_ and 0 <= record.uses < MOST_USES and math.isfinite(record.uses)
    within = record.capacity == capacity_for(record.capacity) <= most and 1 <= record.length <= record.capacity
    return known and within and record.extent.size == dram.size_of(record.capacity)


def _held(copy: StoredCopy, dram: DramTier) -> bool:
    try:
        dram.hold(copy)
    except CacheCorruption:
        return False
    return True
