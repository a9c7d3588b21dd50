"""What happened in the cache, as running totals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CacheCounters:
    """Running totals."""

    opened: int = 0
    extended_in_place: int = 0
    extended_by_move: int = 0
    cut_short: int = 0  # computations that nobody wanted any more, kept as far as they were
    evicted_clean: int = 0
    evicted_lost: int = 0  # given up without a DRAM copy
    spilled: int = 0
    spilled_bytes: int = 0
    loaded: int = 0
    loaded_bytes: int = 0
    distrusted: int = 0  # dropped from both tiers: an audit deviated, or scores from it were not finite
    forgotten: int = 0  # dropped from DRAM to make room there
    copy_failures: int = 0
    no_room: int = 0  # allocations that failed even after eviction

    def as_dict(self) -> dict[str, int]:
        """Name → total."""
        return dict(vars(self))
