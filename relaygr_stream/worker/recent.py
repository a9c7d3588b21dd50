"""A bounded memory of request ids."""

from __future__ import annotations

from collections import deque


class RecentIds:
    """The last `limit` ids added."""

    def __init__(self, limit: int) -> None:
        self._order: deque[str] = deque()
        self._ids: set[str] = set()
        self._limit = limit

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request_id: str) -> None:
        """Remember an id; the oldest one goes when there are too many."""
        if request_id in self._ids:
            return
        self._ids.add(request_id)
        self._order.append(request_id)
        if len(self._order) > self._limit:
            self._ids.discard(self._order.popleft())
