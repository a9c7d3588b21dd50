"""Where a real service has a database: users' histories, and which items follow which, both in memory."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from itertools import islice
from typing import Final, NamedTuple

#: Behaviours kept of a user. Beyond them the oldest quarter goes at once: until then a history begins all later ones.
LONGEST: Final = 2048
#: Items that are looked at to retrieve candidates: a user's newest.
SEEDS: Final = 20


class Behaviour(NamedTuple):
    """One thing a user did."""

    item: int
    action: int
    at_ms: int


class Histories:
    """Users' behaviours, oldest first."""

    def __init__(self) -> None:
        self._of: defaultdict[str, list[Behaviour]] = defaultdict(list)

    def of(self, user: str) -> list[Behaviour]:
        """A copy of a user's history; empty for one who is unknown."""
        return list(self._of[user]) if user in self._of else []

    def add(self, user: str, item: int, action: int) -> None:
        """Note a behaviour; times never go back, whatever the clock does."""
        history = self._of[user]
        now_ms = int(time.time() * 1e3)
        history.append(Behaviour(item, action, max(now_ms, history[-1].at_ms if history else 0)))
        if len(history) > LONGEST:
            del history[: LONGEST // 4]


class Catalogue:
    """Retrieval: items that followed a user's newest ones in anybody's history, then what is popular."""

    def __init__(self) -> None:
        self._next: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._popular: Counter[int] = Counter()

    def follows(self, item: int, following: int) -> None:
        """Somebody went from one item to another."""
        self._next[item][following] += 1
        self._popular[following] += 1

    def retrieve(self, history: list[Behaviour], count: int) -> list[int]:
        """At most `count` item ids that the user's last ten are not among, best first."""
        found: Counter[int] = Counter()
        for age, behaviour in enumerate(reversed(history[-SEEDS:]), 1):
            for item, times in list(self._next.get(behaviour.item, {}).items()):
                found[item] += times * SEEDS // age
        seen = {behaviour.item for behaviour in history[-10:]}
        followed = [item for item, _ in found.most_common()]
        popular = (item for item, _ in self._popular.copy().most_common(count) if item not in found)
        return list(islice((item for item in [*followed, *popular] if item not in seen), count))
