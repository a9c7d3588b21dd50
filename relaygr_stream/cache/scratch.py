"""Memory for one full inference, set aside at start so that it never depends on what is cached."""

from __future__ import annotations

from relaygr_stream.models.kv import KVRegion


class Scratch:
    """One region, lent to one borrower at a time."""

    def __init__(self, region: KVRegion) -> None:
        self._region: KVRegion | None = region

    @property
    def free(self) -> bool:
        """It is not lent."""
        return self._region is not None

    def borrow(self) -> KVRegion:
        """The region, empty; only while it is free."""
        region, self._region = self._region, None
        assert region is not None, "the scratch region is lent"
        region.length = 0
        return region

    def give_back(self, region: KVRegion) -> None:
        """Return what `borrow` lent."""
        assert self._region is None
        self._region = region
