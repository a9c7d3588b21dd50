"""Predicted work of rankings, ordered by deadline: sums up to a deadline, and whose deadline a further one would miss.

A balanced search tree (a treap). A ranking's slack is its deadline less all the work up to and including its own; each
node knows the work, and the least and the largest slack, of its subtree. Deadlines are seconds, work and slack
milliseconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

#: What orders rankings: the deadline, and a number that no two share.
Key = tuple[float, int]


class _Node(Generic[T]):
    """A ranking. total: work of the subtree; least, most: slack in it, as if nothing were before the subtree."""

    __slots__ = ("item", "key", "least", "left", "most", "priority", "right", "total", "work_ms")

    def __init__(self, key: Key, work_ms: float, item: T, priority: float) -> None:
        self.key = key
        self.work_ms = work_ms
        self.item = item
        self.priority = priority
        self.left: _Node[T] | None = None
        self.right: _Node[T] | None = None
        self.total = work_ms
        self.least = self.most = key[0] * 1e3 - work_ms

    def pull(self) -> None:
        """Compute what is known of the subtree from its parts."""
        left, right = self.left, self.right
        total = self.work_ms if left is None else left.total + self.work_ms
        least = most = self.key[0] * 1e3 - total
        if left is not None:
            least, most = min(least, left.least), max(most, left.most)
        if right is not None:
            least, most = min(least, right.least - total), max(most, right.most - total)
            total += right.total
        self.total, self.least, self.most = total, least, most


class WorkTree(Generic[T]):
    """Items with their work, by key (deadline, number). Changes and sums take O(log n).

    `first_within` does too, unless many items on both sides of the range are mixed.
    """

    def __init__(self) -> None:
        self._root: _Node[T] | None = None
        self._random = random.Random(0)  # of the shape alone

    def __bool__(self) -> bool:
        return self._root is not None

    @property
    def total_ms(self) -> float:
        """The work of all items."""
        return 0.0 if self._root is None else self._root.total

    def first(self) -> float:
        """The earliest deadline; there is one."""
        node = self._root
        assert node is not None
        while node.left is not None:
            node = node.left
        return node.key[0]

    def add(self, key: Key, work_ms: float, item: T) -> None:
        """Add an item; its key is new."""
        new = _Node(key, work_ms, item, self._random.random())
        self._root = new if self._root is None else _insert(self._root, new)

    def remove(self, key: Key) -> None:
        """Remove the item with this key; there is one."""
        self._root = _remove(self._root, key)

    def change(self, key: Key, work_ms: float) -> None:
        """Set the work of the item with this key; there is one."""
        path, node = [], self._root
        while node is not None:
            path.append(node)
            if node.key == key:
                break
            node = node.left if key < node.key else node.right
        assert node is not None
        node.work_ms = work_ms
        for each in reversed(path):
            each.pull()

    def until(self, deadline: float) -> float:
        """The work of the items with this deadline or an earlier one."""
        total, node = 0.0, self._root
        while node is not None:
            if node.key[0] > deadline:
                node = node.left
            else:
                total += node.work_ms + (0.0 if node.left is None else node.left.total)
                node = node.right
        return total

    def first_within(self, after: float, low_ms: float, high_ms: float) -> float | None:
        """The first deadline later than `after` whose slack is in low_ms ≤ slack < high_ms; None: there is none."""
        return _first_within(self._root, after, low_ms, high_ms, 0.0)

    def backwards(self, deadline: float) -> Iterator[T]:
        """The items with this deadline or an earlier one, the last one first."""
        stack: list[_Node[T]] = []
        node = self._root
        while node is not None or stack:
            if node is None:
                node = stack.pop()
                yield node.item
                node = node.left
            elif node.key[0] > deadline:
                node = node.left
            else:
                stack.append(node)
                node = node.right


def _insert(root: _Node[T] | None, new: _Node[T]) -> _Node[T]:
    if root is None:
        return new
    if new.priority < root.priority:
        new.left, new.right = _split(root, new.key)
        new.pull()
        return new
    if new.key < root.key:
        root.left = _insert(root.left, new)
    else:
        root.right = _insert(root.right, new)
    root.pull()
    return root


def _split(root: _Node[T] | None, key: Key) -> tuple[_Node[T] | None, _Node[T] | None]:
    """The items before the key, and those behind it."""
    if root is None:
        return None, None
    if root.key < key:
        root.right, behind = _split(root.right, key)
        root.pull()
        return root, behind
    before, root.left = _split(root.left, key)
    root.pull()
    return before, root


def _remove(root: _Node[T] | None, key: Key) -> _Node[T] | None:
    assert root is not None, "no such key"
    if key == root.key:
        return _merged(root.left, root.right)
    if key < root.key:
        root.left = _remove(root.left, key)
    else:
        root.right = _remove(root.right, key)
    root.pull()
    return root


def _merged(before: _Node[T] | None, behind: _Node[T] | None) -> _Node[T] | None:
    if before is None or behind is None:
        return before or behind
    if before.priority < behind.priority:
        before.right = _merged(before.right, behind)
        before.pull()
        return before
    behind.left = _merged(before, behind.left)
    behind.pull()
    return behind


def _first_within(node: _Node[T] | None, after: float, low_ms: float, high_ms: float, before_ms: float) -> float | None:
    """As WorkTree.first_within, in a subtree that so much work is before."""
    if node is None or node.most - before_ms < low_ms or node.least - before_ms >= high_ms:
        return None
    deadline, here_ms = node.key[0], before_ms + node.work_ms + (0.0 if node.left is None else node.left.total)
    if deadline > after:
        found = _first_within(node.left, after, low_ms, high_ms, before_ms)
        if found is not None:
            return found
        if low_ms <= deadline * 1e3 - here_ms < high_ms:
            return deadline
    return _first_within(node.right, after, low_ms, high_ms, here_ms)
