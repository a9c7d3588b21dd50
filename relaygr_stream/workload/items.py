"""The items of a workload: scheduled requests, and the random parts that generator and replay share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, structs

from relaygr_stream.errors import ConfigError
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.features import FeatureSchema, FeatureTables, Table
from relaygr_stream.wire.messages import RankingRequest, RequestEvent, candidate_fields, with_version

#: Largest sigma of a log-normal law: e^(10·4) is beyond any length or delay, and from e^710 on exp overflows.
MOST_SIGMA: Final = 10.0


@dataclass(frozen=True)
class WorkItem:
    """One request as a recommendation service makes it: the event, and the ranking `stage_delay` later."""

    at: float  # seconds from the workload's start to the request event
    stage_delay: float  # seconds that retrieval and pre-processing take, from the event to the ranking request
    event: RequestEvent
    request: RankingRequest
    target: int | None  # index of the true next item among the candidates; None: unknown
    popularity: npt.NDArray[np.float64] | None = None  # (m,): popularity of each candidate as of this request
    long: bool | None = None  # by one of the traffic's long users; None: the traffic does not say

    @property
    def rank_at(self) -> float:
        """Seconds from the workload's start to the ranking request."""
        return self.at + self.stage_delay


@dataclass(frozen=True)
class StageDelay:
    """Time between request event and ranking request: log-normal, limited to between ¼ and 4 times the median.

    Raises ConfigError for a number out of range.
    """

    median_ms: float = 80.0
    sigma: float = 0.25

    def __post_init__(self) -> None:
        if not (0 <= self.median_ms < math.inf and 0 <= self.sigma <= MOST_SIGMA):
            raise ConfigError(
                f"stage delay = {self.median_ms:g} ms, sigma {self.sigma:g}: must not be negative, and sigma at most "
                f"{MOST_SIGMA:g}"
            )

    def draw(self, rng: np.random.Generator) -> float:
        """One delay in seconds."""
        return self.from_normal(float(rng.standard_normal()))

    def from_normal(self, normal: float) -> float:
        """The delay in seconds that a standard normal value stands for."""
        return self.median_ms / 1e3 * min(4.0, max(0.25, math.exp(self.sigma * normal)))

    def describe(self) -> str:
        """A description of the distribution."""
        return f"stage delay log-normal, median {self.median_ms:g} ms, sigma {self.sigma:g}, cut off at ×¼ and ×4"


def make_item(
    rng: np.random.Generator,
    *,
    name: str,
    at: float,
    delay: StageDelay,
    user: str,
    prefix: Behaviours,
    suffix: Behaviours,
    target: int,
    negatives: npt.NDArray[np.int64],
) -> tuple[WorkItem, npt.NDArray[np.int64]]:
    """The messages of one request, and its candidates (m,): the target, shuffled among the negatives."""
    place = int(rng.integers(len(negatives) + 1))
    candidates = np.insert(negatives, place, target)
    request = RankingRequest(
        request_id=name,
        user_id=user,
        prefix=prefix,
        suffix=suffix,
        **candidate_fields(candidates, UNSET, prefix, suffix),
    )
    # A service does not know how long a retrieval takes, so the event states the median.
    event = RequestEvent(
        request_id=name,
        user_id=user,
        prefix=prefix,
        candidates=len(candidates),
        rank_in_ms=delay.median_ms,
        **with_version(UNSET, prefix),
    )
    return WorkItem(at, delay.draw(rng), event, request, place), candidates


def with_zero_features(item: WorkItem, schema: FeatureSchema) -> WorkItem:
    """The request with all columns of the schema, their values 0."""

    def zeros(table: Table, rows: int) -> dict[str, bytes]:
        return schema.pack(schema.zeros(table, rows), {table: rows})[table]

    event, request = item.event, item.request
    prefix = structs.replace(request.prefix, columns=zeros("behaviour", len(request.prefix)) or UNSET)
    suffix = structs.replace(request.suffix, columns=zeros("behaviour", len(request.suffix)) or UNSET)
    known = FeatureTables(schema.digest, zeros("user", 1))
    columns = structs.replace(known, candidate=zeros("candidate", event.candidates))
    return replace(
        item,
        event=structs.replace(event, prefix=prefix, columns=known),
        request=structs.replace(request, prefix=prefix, suffix=suffix, columns=columns),
    )


def sample_others(
    rng: np.random.Generator, size: int, exclude: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.int64]:
    """`count` distinct numbers, drawn uniformly from 0…size-1 without those in `exclude`; all of them if fewer."""
    exclude = np.unique(exclude)
    left = size - len(exclude)
    if left <= 4 * count:  # rejection would need many rounds: draw from the remaining numbers instead
        allowed = np.setdiff1d(np.arange(size, dtype=np.int64), exclude, assume_unique=True)
        return rng.permutation(allowed)[:count]
    # At most 2 rounds are expected: three quarters of `left` stay free, and each round draws twice the needed numbers.
    chosen = np.empty(0, np.int64)
    while len(chosen) < count:
        drawn = rng.integers(0, size, size=2 * (count - len(chosen)) * size // left + 8)
        merged = np.concatenate([chosen, drawn[~np.isin(drawn, exclude)]])
        _, first = np.unique(merged, return_index=True)
        chosen = merged[np.sort(first)][:count]
    return chosen
