"""The region for full inference, apart from the cache's entries."""

from __future__ import annotations

from relaygr_stream.models.kv import KVRegion


class Scratch:
    """The region for full inference, reserved at start so that it does not depend on the cache's contents.

    One borrower at a time has it.
    """

    def __init__(self, region: KVRegion) -> None:
        self._region: KVRegion | None = region

    @property
    def free(self) -> bool:
        """Whether no borrower has the region."""
        return self._region is not None

    def borrow(self) -> KVRegion:
        """The region, with length 0. Call it only while the region is free."""
        region, self._region = self._region, None
        assert region is not None, "the scratch region is lent"
        region.length = 0
        return region

    def give_back(self, region: KVRegion) -> None:
        """Return the region that `borrow` returned."""
        assert self._region is None
        self._region = region
