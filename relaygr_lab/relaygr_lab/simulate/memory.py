"""The memory that a share of hits needs, from reuse distances in bytes of one worker's users.

With least-recently-used eviction, a return finds its prefix KV if its reuse distance, the bytes used since the user's
last request, is at most the memory. This is an estimate for the search; the simulation judges the real policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from relaygr_stream.workload.quantiles import nearest_rank
from relaygr_stream.workload.visits import Arrival


class _Sums:
    """Prefix sums over positions 1…n with O(log n) updates and queries (a Fenwick tree)."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)

    def add(self, position: int, value: int) -> None:
        while position < len(self._tree):
            self._tree[position] += value
            position += position & -position

    def up_to(self, position: int) -> int:
        total = 0
        while position:
            total += self._tree[position]
            position &= position - 1
        return total


def reuse_bytes(requests: Iterable[Arrival], nbytes: Callable[[int], int]) -> npt.NDArray[np.int64]:
    """For each return, the bytes used since the user's last request, its own included. nbytes(tokens): of a prefix."""
    ordered = list(requests)
    sums = _Sums(len(ordered))
    last: dict[tuple[int, int], tuple[int, int]] = {}  # history → position, bytes
    found = []
    total = 0
    for position, request in enumerate(ordered, 1):
        size = nbytes(request.prefix)
        before = last.get((request.user, request.life))
        if before is not None:
            since = total - sums.up_to(before[0])
            found.append(since + size)
            sums.add(before[0], -before[1])
            total -= before[1]
        sums.add(position, size)
        total += size
        last[request.user, request.life] = (position, size)
    return np.array(found, np.int64)


def bytes_for(distances: npt.NDArray[np.int64], share: float) -> int:
    """The least memory with which this share of the returns hits; 0 without any return."""
    return int(nearest_rank(distances, share)) if len(distances) else 0
