"""What the rankings of each lane ask for, whether they were admitted or not: what budgets are divided by.

Counted at ranking, not at signals: a lane whose budget is too small for its prefixes gets no signals, and would never
be given more. Knows nothing of budgets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

#: A lane's longest prefix is that of the present and the last so many seconds: some requests even of a quiet lane.
EPOCH_S: Final = 30.0


class Demand:
    """Running totals of prefix bytes per lane, and each lane's largest recent prefix."""

    def __init__(self) -> None:
        self.totals: defaultdict[int, int] = defaultdict(int)  # lane → bytes asked for so far
        self._epoch = 0
        self._now: dict[int, int] = {}
        self._before: dict[int, int] = {}

    def ask(self, lane: int, nbytes: int, now: float) -> None:
        """A ranking came whose prefix KV take so many bytes."""
        epoch = int(now / EPOCH_S)
        if epoch != self._epoch:
            self._before = self._now if epoch == self._epoch + 1 else {}
            self._now, self._epoch = {}, epoch
        self.totals[lane] += nbytes
        self._now[lane] = max(nbytes, self._now.get(lane, 0))

    def largest(self, lane: int) -> int:
        """Bytes of the largest prefix of the last EPOCH_S to 2·EPOCH_S; 0: none came."""
        now, before = self._now.get(lane, 0), self._before.get(lane, 0)
        return now if now > before else before

    def lanes_lost(self, lanes: Iterable[int]) -> None:
        """Other workers own these lanes now."""
        for lane in lanes:
            self.totals.pop(lane, None)
            self._now.pop(lane, None)
            self._before.pop(lane, None)
