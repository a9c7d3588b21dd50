"""A synthetic workload with stated distributions, for use without a log of interactions.

Zipf users and items, log-normal history lengths, revisits, histories that grow between a user's requests. What a user
takes next follows from the past as tastes.py says, so a model can learn to rank it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from relaygr_stream.errors import ConfigError
from relaygr_stream.lab.workload.items import StageDelay, WorkItem, make_item, with_zero_features
from relaygr_stream.lab.workload.tastes import INTERESTS, NEAR_SHARE, SERIES_ITEMS, Tastes, zipf
from relaygr_stream.wire.features import NO_FEATURES, FeatureSchema
from relaygr_stream.wire.messages import Behaviours

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
class GeneratorOptions:
    """The options of a generated workload. Raises ConfigError for numbers out of range."""

    seed: int = 7
    rate: float = 20.0  # requests per second, Poisson arrivals
    users: int = 2_000
    user_exponent: float = 1.0  # of the Zipf law over users
    items: int = 50_000  # item ids are 0…items-1
    item_exponent: float = 1.0
    length_median: float = 512.0  # behaviours at a user's first request, log-normal
    length_sigma: float = 0.8
    revisit: float = 0.3  # share of requests made by a recent user
    recent: int = 64  # a revisit is by a user of one of the last `recent` requests
    strangers: int = 0  # number of first requests that are all by new users
    growth: float = 3.0  # mean number of new behaviours at a return, 1 + Poisson
    suffix: int = 8  # the last behaviours, sent as suffix
    candidates: int = 100  # one of them the true next item
    max_prefix: int = 4096
    delay: StageDelay = field(default_factory=StageDelay)
    run: str = "g"  # prefix of every request id
    features: FeatureSchema = NO_FEATURES  # sent with all values 0

    def __post_init__(self) -> None:
        for name in ("rate", "users", "items", "length_median", "recent", "candidates", "max_prefix"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be above 0")
        for name in ("user_exponent", "item_exponent", "length_sigma", "strangers", "suffix"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 0")
        if not 0 <= self.revisit <= 1:
            raise ConfigError(f"revisit = {self.revisit}: must be a probability within 0…1")
        if not 1 <= self.growth <= self.max_prefix:
            raise ConfigError(f"growth = {self.growth}: must be within 1…max_prefix ({self.max_prefix})")
        if self.items < 2 * self.candidates:
            raise ConfigError(f"items = {self.items}: must be at least twice the candidates ({self.candidates})")


class _User:
    """A user's interests, behaviours so far, and next item."""

    def __init__(self, name: str, capacity: int, interests: npt.NDArray[np.int64]) -> None:
        self.name = name
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
        return Behaviours.of(self.items[start:stop], self.actions[start:stop], self.times[start:stop])


class Generator:
    """An endless workload, equal for equal options; every iteration starts from the beginning.

    Memory: MEMORY_BYTES of histories plus 12 bytes for each of `users` and 16 for each of `items`.
    """

    def __init__(self, options: GeneratorOptions) -> None:
        self.options = options
        self._tastes = Tastes(options.items, options.item_exponent)
        self._user_law = zipf(options.users, options.user_exponent)

    def describe(self) -> str:
        """A description of every distribution, one a line."""
        o = self.options
        return "\n".join(
            [
                f"generated, seed {o.seed}: Poisson arrivals at {o.rate:g} requests/s; {o.delay.describe()}",
                f"users: {o.users}, Zipf with exponent {o.user_exponent:g}; {o.revisit:.0%} of requests by one of the "
                f"users of the last {o.recent} requests",
                f"items: {o.items}, Zipf with exponent {o.item_exponent:g}, in series of {SERIES_ITEMS}; a user stays "
                f"in a series, returns to one of {INTERESTS} slowly changing interests, or takes any by popularity",
                f"histories: log-normal, median {o.length_median:g}, sigma {o.length_sigma:g}, at most {o.max_prefix} "
                f"in the prefix; a returning user has 1 + Poisson({o.growth - 1:g}) new behaviours; once full, the "
                "user comes back as a new one",
                f"requests: the last {o.suffix} behaviours as suffix, {o.candidates} candidates: the user's next item "
                f"and others, {NEAR_SHARE:.0%} of them interests, the rest by popularity",
                f"gaps between behaviours log-normal, median {GAP_MEDIAN_MS / 60_000:g} min, sigma {GAP_SIGMA:g}; "
                f"actions 1, 2, 3 with shares {', '.join(f'{share:g}' for share in ACTION_SHARES)}",
                *([f"features: {len(o.features.columns)} columns, all values 0"] if o.features else []),
            ]
        )

    def __iter__(self) -> Iterator[WorkItem]:
        o = self.options
        rng = np.random.default_rng(o.seed)
        known: OrderedDict[int, _User] = OrderedDict()  # longest unseen first
        births = np.zeros(o.users, np.uint32)
        recent: deque[int] = deque(maxlen=o.recent)
        held, at, index = 0, 0.0, 0
        while True:
            at += float(rng.exponential(1 / o.rate))
            now_ms = EPOCH_MS + int(at * 1000)
            if recent and rng.random() < o.revisit and index >= o.strangers:
                code = recent[int(rng.integers(len(recent)))]
            else:
                code = int(np.searchsorted(self._user_law, rng.random(), side="right"))
            recent.append(code)
            user = known.pop(code, None)
            if user is not None:
                held -= user.nbytes
                user = self._grown(rng, user, now_ms)
            if user is None:
                births[code] += 1
                name = f"user-{code}" if births[code] == 1 else f"user-{code}.{births[code]}"
                user = self._born(rng, name, now_ms)
            known[code] = user
            held += user.nbytes
            while held > MEMORY_BYTES and len(known) > 1:
                held -= known.popitem(last=False)[1].nbytes
            yield self._item(rng, user, at, f"{o.run}{index:08d}")
            index += 1

    def _born(self, rng: np.random.Generator, name: str, now_ms: int) -> _User:
        o = self.options
        drawn = o.length_median * np.exp(o.length_sigma * rng.standard_normal())
        length = int(min(o.max_prefix + o.suffix, max(o.suffix + 1, round(drawn))))
        interests = self._tastes.interests(rng, o.max_prefix + o.suffix)
        user = _User(name, length, interests)
        gaps = np.exp(np.log(GAP_MEDIAN_MS) + GAP_SIGMA * rng.standard_normal(length))
        times = now_ms - np.cumsum(gaps)[::-1].astype(np.int64)
        items = self._tastes.following(rng, interests, None, 0, length + 1)
        user.append(items[:-1], _actions(rng, length), np.maximum(times, 0))
        user.next_item = int(items[-1])
        return user

    def _grown(self, rng: np.random.Generator, user: _User, now_ms: int) -> _User | None:
        """The user with behaviours since the last request; None if the prefix would be too long."""
        o = self.options
        count = 1 + int(rng.poisson(o.growth - 1))
        if user.length + count > o.max_prefix + o.suffix:
            return None
        last = int(user.times[user.length - 1])
        target = user.next_item  # of the last request: it comes true
        items = self._tastes.following(rng, user.interests, target, user.length + 1, count)
        times = np.sort(rng.integers(last, max(last, now_ms) + 1, size=count))
        user.append(np.append(target, items[:-1]), _actions(rng, count), times)
        user.next_item = int(items[-1])
        return user

    def _item(self, rng: np.random.Generator, user: _User, at: float, name: str) -> WorkItem:
        o = self.options
        others = self._tastes.candidates(rng, user.interests, user.length, user.next_item, o.candidates - 1)
        split = user.length - o.suffix
        item, candidates = make_item(
            rng,
            name=name,
            at=at,
            delay=o.delay,
            user=user.name,
            prefix=user.behaviours(0, split),
            suffix=user.behaviours(split, user.length),
            target=user.next_item,
            negatives=others,
        )
        if o.features:
            item = with_zero_features(item, o.features)
        return replace(item, popularity=self._tastes.popularity[candidates])


def _actions(rng: np.random.Generator, count: int) -> npt.NDArray[np.uint32]:
    return (1 + np.searchsorted(np.cumsum(ACTION_SHARES[:-1]), rng.random(count), side="right")).astype(np.uint32)
