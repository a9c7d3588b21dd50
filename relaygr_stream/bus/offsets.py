"""What of one topic's lane was read, what is done, and therefore what may be committed. Knows nothing of Kafka."""

from __future__ import annotations

from collections import deque


class OffsetLedger:
    """Read and done offsets of one partition, from the offset at which this owner started.

    `committable` never passes a record that was read and is not done, at any interleaving. A ledger lives as long as
    the lane is owned without a break; the next ownership gets a new one, so that a record of the former ownership
    that is done late counts for nothing, unless it was read anew.
    """

    __slots__ = ("_order", "_position", "_undone")

    def __init__(self, start: int) -> None:
        self._position = start
        self._order: deque[int] = deque()  # offsets read, ascending, from the first undone one on
        self._undone: set[int] = set()

    @property
    def position(self) -> int:
        """The next offset to be read."""
        return self._position

    @property
    def undone(self) -> int:
        """Records read and not done."""
        return len(self._undone)

    @property
    def committable(self) -> int:
        """Every record below this offset that was read is done: what a next owner may start from."""
        return self._order[0] if self._order else self._position

    def has(self, offset: int) -> bool:
        """The record was read and is not done."""
        return offset in self._undone

    def read(self, offset: int) -> bool:
        """Note that a record was read; False if it was read before, and must not be handed out again.

        Offsets ascend, with gaps where the topic is compacted.
        """
        if offset < self._position:
            return False
        self._position = offset + 1
        self._order.append(offset)
        self._undone.add(offset)
        return True

    def done(self, offset: int) -> bool:
        """Note that a record needs no more work; False if it is not one of ours, or was done already."""
        if offset not in self._undone:
            return False
        self._undone.remove(offset)
        while self._order and self._order[0] not in self._undone:
            self._order.popleft()
        return True
