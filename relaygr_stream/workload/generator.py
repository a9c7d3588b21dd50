"""Generated requests: traffic (visits.py) by users whose histories grow and follow tastes, for use without a log.

What a user takes next follows from the past as tastes.py says, so a model can learn to rank it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import ConfigError
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema
from relaygr_stream.workload.items import WorkItem, make_item, with_zero_features
from relaygr_stream.workload.tastes import INTERESTS, NEAR_SHARE, SERIES_ITEMS, Tastes
from relaygr_stream.workload.traffic import Traffic
from relaygr_stream.workload.visits import Pace, Visit, visits

#: Memory of histories. Beyond it, users are dropped, least recently used first, and return as new users. 2,000 users of
#: 512 behaviours (the defaults) take 20 MB.
MEMORY_BYTES: Final = 256 << 20
BYTES_PER_BEHAVIOUR: Final = 20  # int64 item, uint32 action, int64 time: the arrays of _User
#: Start of the generated behaviours' clock, fixed so that a seed gives the same requests on every day.
EPOCH_MS: Final = 1_750_000_000_000

GAP_MEDIAN_MS: Final = 30 * 60 * 1000.0
GAP_SIGMA: Final = 1.5
ACTION_SHARES: Final = (0.80, 0.15, 0.05)  # of actions 1, 2, 3: view, like, share


@dataclass(frozen=True, kw_only=True)
class GeneratorOptions(Traffic):
    """Traffic, and what its users are offered. Raises ConfigError for numbers out of range."""

    rate: float = 20.0
    users: int = 2_000
    zipf: float = 1.0
    revisit: float = 0.3
    return_s: float = 2.0
    length: float = 512.0
    sigma: float = 0.8
    seed: int = 7
    items: int = 50_000  # item ids are 0…items-1
    item_exponent: float = 1.0  # of the Zipf law over items
    known: int | None = None  # users introduced by first visits before any returns; None: as many as return
    run: str = "g"  # prefix of every request id
    features: FeatureSchema = NO_FEATURES  # sent with all values 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.items < 2 * self.candidates:
            raise ConfigError(f"items = {self.items}: must be at least twice the candidates ({self.candidates})")
        if not 0 <= self.item_exponent < float("inf"):
            raise ConfigError(f"item_exponent = {self.item_exponent}: must be at least 0")


class _User:
    """A user's interests, behaviours so far, and next item."""

    def __init__(self, name: str, life: int, capacity: int, interests: npt.NDArray[np.int64]) -> None:
        self.name = name
        self.life = life
        self.interests = interests
        self.length = 0
        self.next_item = -1
        self.items = np.empty(capacity, np.int64)
        self.actions = np.empty(capacity, np.uint32)
        self.times = np.empty(capacity, np.int64)

    @property
    def nbytes(self) -> int:
        return len(self.items) * BYTES_PER_BEHAVIOUR + self.interests.nbytes

    def append(
        self, items: npt.NDArray[np.int64], actions: npt.NDArray[np.uint32], times: npt.NDArray[np.int64]
    ) -> None:
        end = self.length + len(items)
        if end > len(self.items):
            for name in ("items", "actions", "times"):
                old = getattr(self, name)
                grown = np.empty(2 * end, old.dtype)
                grown[: self.length] = old[: self.length]
                setattr(self, name, grown)
        self.items[self.length : end] = items
        self.actions[self.length : end] = actions
        self.times[self.length : end] = times
        self.length = end

    def behaviours(self, start: int, stop: int) -> Behaviours:
        return Behaviours.from_arrays(self.items[start:stop], self.actions[start:stop], self.times[start:stop])


class Generator:
    """An endless workload, equal for equal options; every iteration starts from the beginning.

    Memory: MEMORY_BYTES of histories plus 12 bytes for each of `items`.
    """

    def __init__(self, options: GeneratorOptions) -> None:
        self.options = options
        self._tastes = Tastes(options.items, options.item_exponent)

    def describe(self) -> str:
        """A description of every distribution, one a line."""
        o = self.options
        return "\n".join(
            [
                f"generated, seed {o.seed}",
                *o.describe().splitlines(),
                f"items: {o.items}, Zipf with exponent {o.item_exponent:g}, in series of {SERIES_ITEMS}; a user stays "
                f"in a series, returns to one of {INTERESTS} slowly changing interests, or takes any by popularity",
                f"candidates: the user's next item and others, {NEAR_SHARE:.0%} of them interests, the rest by "
                "popularity",
                f"gaps between behaviours log-normal, median {GAP_MEDIAN_MS / 60_000:g} min, sigma {GAP_SIGMA:g}; "
                f"actions 1, 2, 3 with shares {', '.join(f'{share:g}' for share in ACTION_SHARES)}",
                *([f"features: {len(o.features.columns)} columns, all values 0"] if o.features else []),
            ]
        )

    def __iter__(self) -> Iterator[WorkItem]:
        pace = Pace(self.options.rate, self.options.tide)
        return (replace(item, at=pace.after(item.at)) for item in self.paced())

    def paced(self) -> Iterator[WorkItem]:
        """The requests without a rate: `at` is the gap to the request before, in mean times between two requests."""
        o = self.options
        rng = np.random.default_rng([o.seed, 1])  # not the seed of the visits
        known: OrderedDict[int, _User] = OrderedDict()  # longest unseen first
        held, now = 0, 0.0
        for index, visit in enumerate(visits(o, o.seed, known=o.pool if o.known is None else o.known)):
            now += visit.gap / o.rate
            now_ms = EPOCH_MS + int(now * 1000)
            user = known.pop(visit.user, None)
            if user is not None:
                held -= user.nbytes
            if user is not None and user.life == visit.life:
                self._grow(rng, user, visit.prefix + o.suffix, now_ms)
            else:
                # A life that goes on without its history was forgotten here, and begins anew.
                again = f"~{index}" if visit.returning else ""
                user = self._born(rng, visit, f"user-{visit.user}.{visit.life}{again}", now_ms)
            known[visit.user] = user
            held += user.nbytes
            while held > MEMORY_BYTES and len(known) > 1:
                held -= known.popitem(last=False)[1].nbytes
            yield self._item(rng, user, visit, f"{o.run}{index:08d}")

    def _born(self, rng: np.random.Generator, visit: Visit, name: str, now_ms: int) -> _User:
        o = self.options
        length = visit.prefix + o.suffix
        interests = self._tastes.interests(rng, o.max_prefix + o.suffix)
        user = _User(name, visit.life, length, interests)
        gaps = np.exp(np.log(GAP_MEDIAN_MS) + GAP_SIGMA * rng.standard_normal(length))
        times = now_ms - np.cumsum(gaps)[::-1].astype(np.int64)
        items = self._tastes.following(rng, interests, None, 0, length + 1)
        user.append(items[:-1], _actions(rng, length), np.maximum(times, 0))
        user.next_item = int(items[-1])
        return user

    def _grow(self, rng: np.random.Generator, user: _User, length: int, now_ms: int) -> None:
        """Add behaviours since the last request, up to this length."""
        count = length - user.length
        last = int(user.times[user.length - 1])
        target = user.next_item  # of the last request: it comes true
        items = self._tastes.following(rng, user.interests, target, user.length + 1, count)
        times = np.sort(rng.integers(last, max(last, now_ms) + 1, size=count))
        user.append(np.append(target, items[:-1]), _actions(rng, count), times)
        user.next_item = int(items[-1])

    def _item(self, rng: np.random.Generator, user: _User, visit: Visit, name: str) -> WorkItem:
        o = self.options
        others = self._tastes.candidates(rng, user.interests, user.length, user.next_item, o.candidates - 1)
        split = user.length - o.suffix
        item, candidates = make_item(
            rng,
            name=name,
            at=visit.gap,
            delay=o.delay,
            user=user.name,
            prefix=user.behaviours(0, split),
            suffix=user.behaviours(split, user.length),
            target=user.next_item,
            negatives=others,
        )
        if o.features:
            item = with_zero_features(item, o.features)
        popularity = self._tastes.popularity[candidates]
        return replace(item, popularity=popularity, stage_delay=visit.head_start, long=visit.long)


def _actions(rng: np.random.Generator, count: int) -> npt.NDArray[np.uint32]:
    return (1 + np.searchsorted(np.cumsum(ACTION_SHARES[:-1]), rng.random(count), side="right")).astype(np.uint32)
