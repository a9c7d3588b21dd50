"""DLRMv3's traffic, written anew from its published facts and generated as it is needed: no file.

A user takes part in a base timestamp and in each of 100 later ones with the same chance, and each time adds behaviours
to the history. At the timestamps behind the training's 90, a user who takes part asks first: the history of all earlier
parts, and candidates. All times are equal. Items open with time, evenly. Categories drift: what a user took often is
taken more often. A rating is the mean of the item's own and of one by the user's taste, whose four levels swing with a
period of eight timestamps. Everything follows from the seed, the user and the timestamp, so a request is made without
those before it.

Two things differ from the published generator: a timestamp's behaviours are not among its candidates, and candidates
do not count for the drift.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, structs

from relaygr_stream.errors import ConfigError
from relaygr_stream.wire.behaviours import Behaviours, pack_items
from relaygr_stream.wire.features import FeatureSchema, FeatureTables
from relaygr_stream.wire.messages import RankingRequest, RequestEvent

USERS: Final = 5_000
TIMESTAMPS: Final = 100
TRAINING: Final = 90
#: The reference warms up with three tenths of the requests: three of the ten timestamps that are served.
WARM_UP: Final = 3
TAKES_PART: Final = 0.7
#: Behaviours of a user and timestamp: mean, standard deviation, least.
MEAN, DEVIATION, LEAST = 100.0, 25.0, 33.0
ITEMS: Final = 10**9
CATEGORIES: Final = 128
CATEGORIES_OF_A_USER: Final = 4
CANDIDATES: Final = 2_048
#: Shares of items whose own rating is 1 to 5.
ITEM_RATINGS: Final = (0.1, 0.2, 0.25, 0.25, 0.2)
#: Of a user's categories in their order: the centres of ratings, the chance of each; a centre swings by SWING.
TASTE: Final = np.array([[4.5, 4.0, 3.5], [4.5, 4.0, 3.5], [3.5, 3.0, 2.5], [2.5, 2.0, 1.5]])
TASTE_CHANCES: Final = np.array([[0.8, 0.2, 0.0], [0.1, 0.8, 0.1], [0.1, 0.8, 0.1], [0.1, 0.8, 0.1]])
SWING: Final = 0.5
SWING_TIMESTAMPS: Final = 8
#: How slowly a user's categories drift, drawn anew for each part: the behaviours that even chances weigh.
EVEN: Final = (1, 500)
#: Seconds since 1970 of everything.
TIME_S: Final = 1


class Visit(NamedTuple):
    """One request. new: behaviours since the user's last request, all of them at the first."""

    user: int
    timestamp: int
    length: int
    new: int


class Drawn(NamedTuple):
    """Behaviours or candidates, each (n,): level of the user's taste, from 0, category, item id, rating from 1 to 5."""

    levels: npt.NDArray[np.int64]
    categories: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    ratings: npt.NDArray[np.float64]


class Item(NamedTuple):
    """A visit as messages."""

    visit: Visit
    event: RequestEvent
    request: RankingRequest

    def nbytes(self) -> int:
        """Bytes of the arrays, which both messages share."""
        columns = self.request.columns
        return self.request.prefix.nbytes() + len(self.request.candidates) + (columns.nbytes() if columns else 0)


@dataclass(frozen=True)
class Workload:
    """scale multiplies the behaviours of a part. Raises ConfigError for numbers out of range."""

    users: int = USERS
    candidates: int = CANDIDATES
    scale: float = 1.0
    seed: int = 7
    items: int = ITEMS  # in the catalogue

    def __post_init__(self) -> None:
        if self.items < CATEGORIES:
            raise ConfigError(f"items = {self.items}: must be at least {CATEGORIES}, one for each category")
        if not 0 < self.scale <= 1:
            raise ConfigError(f"scale = {self.scale:g}: must be above 0 and at most 1")

    @cached_property
    def requests(self) -> tuple[list[Visit], list[Visit]]:
        """The warm-up's last request of each user, and the measured ones: timestamp by timestamp, shuffled within."""
        first = TRAINING + WARM_UP
        last: dict[int, Visit] = {}
        measured: list[list[Visit]] = [[] for _ in range(TIMESTAMPS)]
        for user in range(self.users):
            takes, ends = self._parts(np.random.default_rng([self.seed, user]))
            before = 0
            for timestamp in (np.flatnonzero(takes[1 + TRAINING :]) + TRAINING).tolist():
                length = int(ends[timestamp])
                visit = Visit(user, timestamp, length, length - before)
                before = length
                if timestamp < first:
                    last[user] = visit
                else:
                    measured[timestamp].append(visit)
        for timestamp, visits in enumerate(measured):
            np.random.default_rng([self.seed, self.users + timestamp]).shuffle(visits)
        return list(last.values()), [visit for visits in measured for visit in visits]

    def longest(self) -> int:
        """Behaviours of the longest history."""
        return max(visit.length for visits in self.requests for visit in visits)

    def item(self, visit: Visit, name: str, schema: FeatureSchema, head_start_ms: float = 0.0) -> Item:
        """The messages of a visit. name: of the run, so that no two runs have users in common."""
        history, candidates = self.drawn(visit)
        # The action of a rating is 2 to the power of it, less one.
        actions = 1 << (history.ratings.astype(np.int64) - 1)
        prefix = Behaviours.from_arrays(history.items, actions, np.full(visit.length, 1000 * TIME_S))
        user, columns = f"{name}-{visit.user}", UNSET
        both: FeatureTables | None = None
        if schema:
            values: dict[str, npt.ArrayLike] = {
                "user_id": visit.user,
                "uih_category_id": history.categories,
                "cand_category_id": candidates.categories,
                "cand_query_time": np.full(self.candidates, TIME_S),
            }
            tables = schema.pack(values, {"user": 1, "behaviour": visit.length, "candidate": self.candidates})
            prefix = structs.replace(prefix, columns=tables["behaviour"])
            both = FeatureTables(schema.digest, tables["user"], tables["candidate"])
        request = RankingRequest(
            request_id=f"{user}-{visit.timestamp}",
            user_id=user,
            prefix=prefix,
            candidates=pack_items(candidates.items),
            columns=both or columns,
        )
        event = RequestEvent(
            request_id=request.request_id,
            user_id=user,
            prefix=prefix,
            candidates=self.candidates,
            rank_in_ms=head_start_ms,
            columns=structs.replace(both, candidate={}) if both else columns,
        )
        return Item(visit, event, request)

    def drawn(self, visit: Visit) -> tuple[Drawn, Drawn]:
        """The history of a visit, oldest first, and its candidates."""
        rng = np.random.default_rng([self.seed, visit.user])
        takes, ends = self._parts(rng)
        categories = rng.choice(CATEGORIES, CATEGORIES_OF_A_USER, replace=False)
        drift = _Drift(rng, takes, ends)
        parts = np.repeat(np.arange(len(takes)), np.diff(ends, prepend=0))[: visit.length]
        draws = rng.random((2, len(drift.behaviours)))[:, : visit.length]
        history = self._drawn(draws, categories, drift.behaviours[: visit.length], parts)
        asked = np.random.default_rng([self.seed, visit.user, visit.timestamp])
        part = visit.timestamp + 1
        chosen = asked.choice(CATEGORIES_OF_A_USER, self.candidates, p=drift.chances[part])
        return history, self._drawn(asked.random((2, len(chosen))), categories, chosen, np.full(len(chosen), part))

    def _drawn(
        self,
        draws: npt.NDArray[np.float64],
        categories: npt.NDArray[np.int64],
        chosen: npt.NDArray[np.int64],
        parts: npt.NDArray[np.int64],
    ) -> Drawn:
        """Items, among those that are open at each part, and ratings of a user's `categories[chosen]`; draws (2, n)."""
        each = self.items // CATEGORIES
        opened = np.maximum(each * np.maximum(parts, 1) // TIMESTAMPS, 1)
        items = categories[chosen] * each + (draws[0] * opened).astype(np.int64)
        kind = (draws[1][:, None] > TASTE_CHANCES.cumsum(1)[chosen, :-1]).sum(1)
        taste = TASTE[chosen, kind] + SWING * np.cos((parts - 1 + 2 * kind) * (2 * np.pi / SWING_TIMESTAMPS))
        return Drawn(chosen, categories[chosen], items, (taste + item_ratings(items)) / 2)

    def _parts(self, rng: np.random.Generator) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """The parts that a user takes part in, the base first, and the history's length behind each."""
        takes = rng.random(1 + TIMESTAMPS) < TAKES_PART
        takes[0] = True
        counts = rng.normal(MEAN * self.scale, DEVIATION * self.scale, 1 + TIMESTAMPS)
        counts = np.maximum(counts, max(1.0, LEAST * self.scale)).round().astype(np.int64)
        return takes, np.cumsum(np.where(takes, counts, 0))


class _Drift:
    """Which of a user's categories each behaviour has, (all behaviours,), and the chances at each part, (parts, 4).

    The chances at a part are those of a Pólya urn that begins with even ones.
    """

    def __init__(self, rng: np.random.Generator, takes: npt.NDArray[np.bool_], ends: npt.NDArray[np.int64]) -> None:
        draws = rng.random(int(ends[-1]))
        even = rng.integers(*EVEN, len(takes), endpoint=True)
        counts = np.zeros(CATEGORIES_OF_A_USER, np.int64)
        self.behaviours = np.empty(len(draws), np.int64)
        self.chances = np.empty((len(takes), CATEGORIES_OF_A_USER))
        start = 0
        for part, end in enumerate(ends.tolist()):
            chances = (even[part] / CATEGORIES_OF_A_USER + counts) / (even[part] + start)
            self.chances[part] = chances
            if takes[part]:
                chosen = np.searchsorted(chances.cumsum()[:-1], draws[start:end], side="right")
                self.behaviours[start:end] = chosen
                counts += np.bincount(chosen, minlength=CATEGORIES_OF_A_USER)
            start = end


def chance_of(least: float, drawn: Drawn, timestamp: int) -> npt.NDArray[np.float64]:
    """The chance (n,) of a rating of at least `least` at a timestamp, for who knows the user's levels and the items."""
    kinds = np.arange(TASTE.shape[1])
    taste = TASTE + SWING * np.cos((timestamp + 2 * kinds) * (2 * np.pi / SWING_TIMESTAMPS))
    reached = (taste[drawn.levels] + item_ratings(drawn.items)[:, None]) / 2 >= least
    return np.asarray((TASTE_CHANCES[drawn.levels] * reached).sum(1))


def item_ratings(items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The items' own ratings, 1 to 5, from a hash of their ids: a table of 10⁹ is not needed."""
    mixed = items.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    even = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return 1 + np.searchsorted(np.cumsum(ITEM_RATINGS)[:-1], even, side="right")
