"""DLRMv3's traffic, written anew from its published facts and generated as it is needed: no file.

A user takes part in a base timestamp and in each of 100 later ones with the same chance, and each time adds behaviours
to the history. At the timestamps behind the training's 90, a user who takes part asks first: the history of all earlier
parts, and candidates. All times are equal. Items open with time, evenly. Everything follows from the seed, the user and
the timestamp, so a request is made without those before it.
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
RATINGS: Final = 5
#: Seconds since 1970 of everything.
TIME_S: Final = 1


class Visit(NamedTuple):
    """One request. new: behaviours since the user's last request, all of them at the first."""

    user: int
    timestamp: int
    length: int
    new: int


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
    """scale: multiplies the behaviours of a part. Raises ConfigError for numbers out of range."""

    users: int = USERS
    candidates: int = CANDIDATES
    scale: float = 1.0
    seed: int = 7

    def __post_init__(self) -> None:
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
        rng = np.random.default_rng([self.seed, visit.user])
        takes, ends = self._parts(rng)
        categories = rng.choice(CATEGORIES, CATEGORIES_OF_A_USER, replace=False)
        part = np.repeat(np.arange(len(takes)), np.diff(ends, prepend=0))[: visit.length]
        of_part = rng.integers(0, CATEGORIES_OF_A_USER, ends[-1])[: visit.length]
        items = _items(categories[of_part], rng.random(ends[-1])[: visit.length], part)
        actions = 1 << rng.integers(0, RATINGS, ends[-1])[: visit.length]
        prefix = Behaviours.of(items, actions, np.full(visit.length, 1000 * TIME_S))
        asked = np.random.default_rng([self.seed, visit.user, visit.timestamp])
        chosen = asked.integers(0, CATEGORIES, self.candidates)
        candidates = _items(chosen, asked.random(self.candidates), np.full(self.candidates, visit.timestamp))
        user, columns = f"{name}-{visit.user}", UNSET
        both: FeatureTables | None = None
        if schema:
            values = {
                "user_id": visit.user,
                "uih_category_id": categories[of_part],
                "cand_category_id": chosen,
                "cand_query_time": np.full(self.candidates, TIME_S),
            }
            tables = schema.pack(values, {"user": 1, "behaviour": visit.length, "candidate": self.candidates})
            prefix = structs.replace(prefix, columns=tables["behaviour"])
            both = FeatureTables(schema.digest, tables["user"], tables["candidate"])
        request = RankingRequest(
            request_id=f"{user}-{visit.timestamp}",
            user_id=user,
            prefix=prefix,
            candidates=pack_items(candidates),
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

    def _parts(self, rng: np.random.Generator) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
        """The parts that a user takes part in, the base first, and the history's length behind each."""
        takes = rng.random(1 + TIMESTAMPS) < TAKES_PART
        takes[0] = True
        counts = rng.normal(MEAN * self.scale, DEVIATION * self.scale, 1 + TIMESTAMPS)
        counts = np.maximum(counts, max(1.0, LEAST * self.scale)).round().astype(np.int64)
        return takes, np.cumsum(np.where(takes, counts, 0))


def _items(
    categories: npt.NDArray[np.int64], draws: npt.NDArray[np.float64], parts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Item ids of these categories. draws: evenly between 0 and 1, among those that are open at each part."""
    each = ITEMS // CATEGORIES
    return categories * each + (draws * each * (parts + 1) / (TIMESTAMPS + 1)).astype(np.int64)
