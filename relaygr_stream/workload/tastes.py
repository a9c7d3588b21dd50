"""What generated users take next: a structure that a ranking model can learn, and that a longer history shows better.

Items are in series: item i is in series i // SERIES_ITEMS, which is as popular as its items together. A user has an
endless list of interests P[0], P[1], …, series drawn by popularity. At behaviour t the user has the INTERESTS of them
from P[t // TURNOVER] on: one is replaced every TURNOVER behaviours, and each lasts for INTERESTS · TURNOVER. The series
of behaviour t is

    that of behaviour t - 1: the session goes on        with probability STAY
    one of the user's interests, uniformly              with probability RETURN
    any series, by popularity                           otherwise

and its item is any of the series, uniformly.

So the session stands in the last behaviours, and the interests stand in hundreds: a user returns to each about once in
INTERESTS / RETURN behaviours.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_stream.workload.items import sample_others

SERIES_ITEMS: Final = 5
INTERESTS: Final = 64
TURNOVER: Final = 128
STAY: Final = 0.4
RETURN: Final = 0.58
#: Share of the candidates beside the next item that are of the user's interests, as a retrieval by similarity finds
#: them. The others are popular items.
NEAR_SHARE: Final = 0.05

Ints = npt.NDArray[np.int64]


class Tastes:
    """The items, their popularity, and what a user takes next. The same numbers from `rng` give the same items.

    popularity (items,): probabilities, Zipf. Memory: 16 bytes an item.
    """

    def __init__(self, items: int, exponent: float) -> None:
        self.items = items
        self._law = zipf(items, exponent)
        self.popularity = np.diff(self._law, prepend=0.0)

    def interests(self, rng: np.random.Generator, behaviours: int) -> Ints:
        """A new user's list P, long enough for so many behaviours."""
        return self._popular(rng.random(INTERESTS + behaviours // TURNOVER)) // SERIES_ITEMS

    def following(self, rng: np.random.Generator, interests: Ints, last: int | None, start: int, count: int) -> Ints:
        """The items (count,) of a user's behaviours start, start + 1, …; last: the item before, None for none."""
        drawn, own = rng.random(count), np.arange(count)
        # What a draw has above the bound of its case is uniform, too, and chooses within the case.
        alive = np.clip((drawn - STAY) * (INTERESTS / RETURN), 0, INTERESTS - 1).astype(np.int64)
        series = interests[(start + own) // TURNOVER + alive]
        explores = drawn >= STAY + RETURN
        series[explores] = self._popular((drawn[explores] - STAY - RETURN) / (1 - STAY - RETURN)) // SERIES_ITEMS
        if last is not None and drawn[0] < STAY:
            series[0] = last // SERIES_ITEMS
        begins = np.maximum.accumulate(np.where(drawn < STAY, 0, own))  # where each behaviour's session began
        return self._any_of(rng, series[begins])

    def candidates(self, rng: np.random.Generator, interests: Ints, behaviours: int, target: int, count: int) -> Ints:
        """At most `count` different items without `target`, as retrieval finds them for a user with so many behaviours.

        Where popularity gives too few different ones, the others are drawn uniformly.
        """
        near = round(NEAR_SHARE * count)
        alive = interests[behaviours // TURNOVER + rng.integers(INTERESTS, size=near)]
        found = np.concatenate([self._any_of(rng, alive), self._popular(rng.random(2 * (count - near)))])
        places = np.unique(found, return_index=True)[1]
        places.sort()
        found = found[places]
        found = found[found != target][:count]
        if len(found) < count:
            more = sample_others(rng, self.items, np.append(found, target), count - len(found))
            found = np.concatenate([found, more])
        return found

    def _popular(self, drawn: npt.NDArray[np.float64]) -> Ints:
        """Items by popularity, from numbers within [0, 1)."""
        return np.minimum(np.searchsorted(self._law, drawn, side="right"), self.items - 1)

    def _any_of(self, rng: np.random.Generator, series: Ints) -> Ints:
        """An item of each of these series. The last series may have fewer items than the others."""
        first = series * SERIES_ITEMS
        sizes = np.minimum(SERIES_ITEMS, self.items - first)
        return first + (rng.random(len(series)) * sizes).astype(np.int64)


def zipf(size: int, exponent: float) -> npt.NDArray[np.float64]:
    """Cumulative probabilities of ranks 1…size with weights rank^-exponent."""
    law = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -exponent)
    law /= law[-1]
    return law
