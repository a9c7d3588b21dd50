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
from relaygr_stream.wire.erase import Erase, ErasedUsers

#: More uses than any tier counts.
MOST_USES: Final = 1e9


def restore(table: EntryTable, dram: DramTier, kept: KeptCopies, most: int, erases: Sequence[Erase]) -> Restored:
    """See PrefixCache.restore. most: largest capacity of a region."""
    assert not dram.used, "restored into a tier in use: its copies may be overwritten"
    found, taken, end = Restored(), dict[str, tuple[SlotRecord, StoredCopy]](), 0
    erased = ErasedUsers(erases)
    for record in kept.file.records():  # in address order
        if isinstance(record, str):
            found.drop(record)
            continue
        copy, user = StoredCopy(record.extent, record.capacity, record.length, record.digest), record.user_id
        if not _fits(record, dram, most) or user in table.by_user or user in taken:
            kept.file.forget(record.extent)
            found.drop("unfit")
        elif user in erased:
            kept.file.clear(record.extent, slice(None))
            found.drop("erased")
        elif record.extent.offset < end:
            kept.file.forget(record.extent)
            found.drop("overlapping")
        else:
            taken[user], end = (record, copy), record.extent.end
    if "erased" in found.dropped:
        kept.file.sync()
    dram.hold_all(copy for _, copy in taken.values())
    for user, (record, copy) in taken.items():
        dram.learn(user, record.uses)
        table.add_stored(copy, user, kept.tokens(copy), Source(record.source))
    found.entries = len(taken)
    kept.taken()
    return found


def _fits(record: SlotRecord, dram: DramTier, most: int) -> bool:
    """Whether the tier could have made this copy."""
    known = record.source in Source._value2member_map_ and 0 <= record.uses < MOST_USES and math.isfinite(record.uses)
    within = record.capacity == capacity_for(record.capacity) <= most and 1 <= record.length <= record.capacity
    return known and within and record.extent.size == dram.size_of(record.capacity)
