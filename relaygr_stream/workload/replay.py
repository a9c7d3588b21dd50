"""Replays a log of interactions as requests: the target of each ranking is the user's next interaction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from msgspec import structs

from relaygr_stream.errors import ConfigError, InputError
from relaygr_stream.workload.items import StageDelay, WorkItem, make_item, sample_others
from relaygr_stream.workload.log_features import Rows, request_columns
from relaygr_stream.workload.logs import InteractionLog


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Which interactions become requests, and when. Raises ConfigError for numbers that clash."""

    seed: int = 7
    requests: int = 1000  # at most; the latest ones of the log
    which: Literal["all", "last"] = "all"  # every interaction is a request, or only each user's last
    min_history: int = 16  # behaviours before the target
    suffix: int = 8
    candidates: int = 100
    max_prefix: int = 4096
    speed: float | None = None  # divides the log's times between requests
    rate: float = 20.0  # without a speed: Poisson arrivals, requests per second
    delay: StageDelay = field(default_factory=StageDelay)
    run: str = "r"  # prefix of every request id

    def __post_init__(self) -> None:
        if self.min_history <= self.suffix:
            raise ConfigError(
                f"min_history = {self.min_history} must exceed suffix = {self.suffix}, or there is no prefix to relay"
            )
        for name in ("requests", "max_prefix", "rate", "speed"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name} = {value}: must be above 0")
        if self.suffix < 0 or self.candidates < 2:
            raise ConfigError(f"suffix = {self.suffix} must be at least 0, candidates = {self.candidates} at least 2")


class Replay:
    """The requests of a log in the order of time; every iteration gives the same ones.

    Memory besides the log: 12 bytes an interaction. Raises InputError if no user has enough behaviours.
    """

    def __init__(self, log: InteractionLog, options: ReplayOptions) -> None:
        self.log = log
        self.options = options
        self._catalogue, codes = np.unique(log.items, return_inverse=True)
        self._codes = codes.astype(np.uint32)
        lengths = np.diff(log.offsets)
        if len(self._catalogue) < 2:
            raise InputError(f"{log.path}: all interactions are with one item; there is nothing to rank")
        #: Row numbers in the order of time; ties as the log is sorted.
        self._by_time = np.argsort(log.times, kind="stable")
        place = np.arange(len(log)) - np.repeat(log.offsets[:-1], lengths)
        eligible = place >= options.min_history
        if options.which == "last":
            last = np.zeros(len(log), np.bool_)
            last[log.offsets[1:] - 1] = True
            eligible &= last
        self._places = np.flatnonzero(eligible[self._by_time])[-options.requests :]
        self._targets = self._by_time[self._places]
        if not len(self._targets):
            raise InputError(
                f"{log.path}: no user has more than {options.min_history} behaviours (the longest history has "
                f"{int(lengths.max())}); lower --min-history"
            )

    def __len__(self) -> int:
        return len(self._targets)

    def describe(self) -> str:
        """A description of the replay, one fact a line."""
        o, log = self.options, self.log
        pace = (
            f"Poisson arrivals at {o.rate:g} requests/s" if o.speed is None else f"the log's times, {o.speed:g}× faster"
        )
        kind = "each user's last interaction" if o.which == "last" else "interactions"
        return "\n".join(
            [
                f"{log.path.name} ({log.format}): {len(log)} interactions of {len(log.users)} users with "
                f"{len(self._catalogue)} items; {log.broken_count} broken lines skipped",
                log.facts(),
                f"requests: the latest {len(self)} {kind} with at least {o.min_history} behaviours before; {pace}",
                f"the last {o.suffix} behaviours as suffix; {o.candidates} candidates: the true next item and others "
                f"drawn uniformly (seed {o.seed}), never one from the user's history",
                o.delay.describe(),
            ]
        )

    def __iter__(self) -> Iterator[WorkItem]:
        o, log = self.options, self.log
        rng = np.random.default_rng(o.seed)
        owners = np.searchsorted(log.offsets, self._targets, side="right") - 1
        counts = np.zeros(len(self._catalogue), np.float64)
        counted, at = 0, 0.0
        newest = np.empty(len(self._catalogue), np.int64)  # each item's row until the request; before it, the first
        newest[self._codes[self._by_time[::-1]]] = self._by_time[::-1]
        first_ms = int(log.times[self._targets[0]])
        for index, (row, owner, place) in enumerate(
            zip(self._targets.tolist(), owners.tolist(), self._places.tolist(), strict=True)
        ):
            passed = self._by_time[counted:place]
            np.add.at(counts, self._codes[passed], 1.0)
            newest[self._codes[passed]] = passed  # of an item's several rows, the last one is assigned last
            counted = place
            if o.speed is None:
                at += float(rng.exponential(1 / o.rate))
            else:
                at = (int(log.times[row]) - first_ms) / 1000 / o.speed
            begin = int(log.offsets[owner])
            split = row - o.suffix
            start = begin + window_start(split - begin, o.max_prefix)
            others = sample_others(
                rng, len(self._catalogue), self._codes[begin : row + 1].astype(np.int64), o.candidates - 1
            )
            item, candidates = make_item(
                rng,
                name=f"{o.run}{index:08d}",
                at=at,
                delay=o.delay,
                user=log.users[owner],
                prefix=log.behaviours(start, split),
                suffix=log.behaviours(split, row),
                target=int(log.items[row]),
                negatives=self._catalogue[others].astype(np.int64),
            )
            codes = np.searchsorted(self._catalogue, candidates)
            if log.schema:
                item = self._with_features(item, begin, row, codes, newest)
            yield replace(item, popularity=counts[codes])

    def _with_features(self, item: WorkItem, begin: int, row: int, codes: Rows, newest: Rows) -> WorkItem:
        """The request of the user's rows begin:row with its features. codes: of the candidates."""
        seen, behind = np.unique(
            self._codes[begin:row][::-1], return_index=True
        )  # each item's last row: row - 1 - behind
        places = np.minimum(np.searchsorted(seen, codes), len(seen) - 1)
        pairs = np.where(seen[places] == codes, row - 1 - behind[places], -1)
        columns = request_columns(self.log.schema, self.log.features, row, newest[codes], pairs)
        event = structs.replace(item.event, columns=structs.replace(columns, candidate={}))
        return replace(item, event=event, request=structs.replace(item.request, columns=columns))


def window_start(length: int, most: int) -> int:
    """The start of a prefix in a history of `length` behaviours, so that at most `most` remain.

    It moves in steps of half of `most`: if it moved with every behaviour, no prefix would extend the one before it, and
    none could be reused.
    """
    if length <= most:
        return 0
    step = max(1, most // 2)
    return -(-(length - most) // step) * step
