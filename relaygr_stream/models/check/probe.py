"""A model under check: random requests, regions, its results, and how far they are from full inference.

The probe uses only the two operations of the protocol, and calls them as the worker does (inference mode, one thread).

Deviations are judged against one limit. In float32 it is the largest deviation relative to the largest expected value,
over all results together: one candidate's scores may nearly cancel, and float32's own rounding is then a larger part of
them. In half precision, results must be no further from the float32 truth than full inference in half precision is:
both are roundings of the same truth, so single values say nothing, but root mean squares over many scores do.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import (
    ROWS,
    USER_ACTION,
    RankingModel,
    ScoreInput,
    Tokens,
    relative_deviation,
    schema_of,
    takes_suffix,
)
from relaygr_stream.models.features import oov_hash
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.wire.features import FeatureColumn, Table, Values

Scores = npt.NDArray[np.float32]

#: Candidates of a ranking: enough scores for a root mean square in half precision.
CANDIDATES: Final = 12
#: The exactness bound. Products of other shapes round differently, up to 3e-6; a leak shows as 1e-2.
FLOAT32_LIMIT: Final = 1e-5
#: RMS deviation from the float32 truth over that of full inference. Its reason is in docs/explanation/exactness.md.
HALF_LIMIT: Final = 1.25
#: K and V have as many roundings as scores, but no head averages them: ten times the bound of the scores.
KV_LIMIT: Final = 1e-4


@dataclass(frozen=True)
class Measure:
    """The largest deviation found, and the limit. ratio: both are multiples of full inference's own deviation."""

    value: float
    limit: float
    ratio: bool = False

    @property
    def holds(self) -> bool:
        """Whether the deviation is within the limit; False if it is NaN."""
        return self.value <= self.limit

    def __str__(self) -> str:
        return f"{self.value:.2f}× (≤ {self.limit:g}×)" if self.ratio else f"{self.value:.1e} (≤ {self.limit:g})"


class Deviations:
    """Collects pairs of results; `measure` judges them together. half: judge by the rule of half precision."""

    def __init__(self, *, half: bool, limit: float = FLOAT32_LIMIT, half_limit: float = HALF_LIMIT) -> None:
        self._half = half
        self._limit = limit
        self._half_limit = half_limit
        self._worst = 0.0  # absolute
        self._largest = float(np.finfo(np.float32).tiny)
        self._found = 0.0  # sums of squares
        self._full = 0.0
        self._count = 0

    def add(self, found: Scores, full: Scores, truth: Scores) -> None:
        """Add one result. full: full inference in the same type; truth: full inference in float32."""
        if math.isinf(relative_deviation(found, full)):
            self._worst = math.inf
        else:
            self._worst = max(self._worst, float(np.abs(found - full).max(initial=0.0)))
            # One scale for all results: a single score whose terms cancel would outweigh all others by its own.
            self._largest = max(self._largest, float(np.abs(full).max(initial=0.0)))
        if not self._half:
            return
        # An infinite full score would make the ratio 0 whatever the others are.
        if found.shape != truth.shape or not all(np.isfinite(scores).all() for scores in (found, full, truth)):
            self._found = math.inf
            return
        self._found += float(((found.astype(np.float64) - truth) ** 2).sum())
        self._full += float(((full.astype(np.float64) - truth) ** 2).sum())
        self._count += found.size

    @property
    def measure(self) -> Measure:
        """The measure over all results so far."""
        if not self._half:
            return Measure(self._worst / self._largest, self._limit)
        count = max(self._count, 1)
        found, full = math.sqrt(self._found / count), math.sqrt(self._full / count)
        # A model that computes in float32 internally has almost no deviation: float32's bound replaces the ratio's.
        return Measure(found / max(full, self._limit * self._largest), self._half_limit, ratio=True)


#: Lengths of histories: around powers of two and block sizes, where off-by-one errors occur.
LENGTHS: Final = (1, 2, 7, 33, 64, 90, 150)

Items = npt.NDArray[np.int64]


class Failed(Exception):  # a verdict, so not named an error
    """The property does not hold; the message says what the check saw."""


@dataclass(frozen=True)
class RequestBounds:
    """The largest request that the settings allow, and the number of items.

    max_stale: tokens of the prefix that may be missing from cached KV and come with the suffix
    (worker.max_stale_tokens).
    """

    prefix: int
    suffix: int
    candidates: int
    items: int
    max_stale: int = 0


class Probe:
    """One model, and requests drawn from `seed`. make: creates the model in a type; bounds: limits of the settings."""

    def __init__(
        self, make: Callable[[torch.dtype], RankingModel], device: torch.device, dtype: torch.dtype,
        bounds: RequestBounds, seed: int,
    ) -> None:  # fmt: skip
        self.make = make
        self.device = device
        self.dtype = dtype
        self.bounds = bounds
        self.model = make(dtype)
        self.half = dtype != torch.float32
        self.takes_suffix = takes_suffix(self.model)
        self.reference = make(torch.float32) if self.half else self.model
        self.random = np.random.default_rng(seed)
        self.schema = schema_of(self.model)
        self.none = Tokens.zeros(0, self.schema)
        self.user = self.history(self.schema.context_tokens)  # a user without behaviours: no token, or the user's

    def make_again(self) -> RankingModel:
        """Another model in the type under check. Raises Failed if it cannot be made."""
        with as_failure("making the model a second time"):
            return self.make(self.dtype)

    # ---- requests ----

    def lengths(self, added: int = 0) -> tuple[int, ...]:
        """Lengths to try, ascending; the settings allow a prefix of the longest length plus `added` tokens."""
        most = max(1, self.bounds.prefix - added)
        return tuple(sorted({min(length, most) for length in LENGTHS}))

    def history(self, length: int) -> Tokens:
        """`length` random tokens: behaviours, the first one the user's features if the model reads such."""
        return self.with_user(self.behaviours(length))

    def behaviours(self, length: int) -> Tokens:
        """`length` random behaviours, as they follow a history."""
        rows = (self.random.integers(0, high, length) for high in (self.bounds.items, 256, 1 << 30))
        array = np.concatenate([np.stack(list(rows)).astype(np.int64), np.zeros((self.schema.words, length), np.int64)])
        self.schema.to_words("behaviour", self._random_columns("behaviour", length), array[ROWS:])
        return Tokens(array)

    def with_user(self, tokens: Tokens) -> Tokens:
        """A copy with other, random features of the user in place of the first token; `tokens` if there are none."""
        if not (self.schema.context_tokens and len(tokens)):
            return tokens
        array = tokens.array.copy()
        array[:, 0] = 0
        array[1, 0] = USER_ACTION
        self.schema.to_words("user", self._random_columns("user", 1), array[ROWS:, :1])
        return Tokens(array)

    def _random_columns(self, table: Table, rows: int) -> dict[str, bytes]:
        values = {
            one.name: self._values(one, self.random.integers(0, 1 << 32, rows)) for one in self.schema.table(table)
        }
        return self.schema.pack(values, {table: rows})[table]

    def features(self, candidates: Items, salt: int = 0) -> Values:
        """The candidates' features: the same for the same item and salt, whichever others there are."""
        return {one.name: self._values(one, candidates + (salt << 33)) for one in self.schema.table("candidate")}

    @staticmethod
    def _values(column: FeatureColumn, keys: Items) -> npt.NDArray[Any]:
        """Values (rows, width) of a column, by a hash of each row's key: some categories are outside any table."""
        seeds = keys[:, None] * 131 + np.arange(column.width) * 31 + zlib.crc32(column.name.encode())
        hashed = (oov_hash(seeds) >> np.uint64(40)).astype(np.int64)  # 24 bits
        if column.dtype == "float32":
            return (hashed / (1 << 23) - 1).astype(np.float32)
        return (hashed % 1000 - 100).astype(column.dtype)

    def candidates(self, count: int) -> Items:
        """`count` random item ids."""
        return self.random.integers(0, self.bounds.items, count)

    # ---- regions ----

    def region(self, capacity: int, fill: float = 0.0, model: RankingModel | None = None) -> KVRegion:
        """An empty region whose memory holds `fill`."""
        return KVRegion.new((model or self.model).layout, max(capacity, 1), fill, self.device)

    def prefix(
        self, history: Tokens, *, stops: tuple[int, ...] = (), slack: int = 0, model: RankingModel | None = None
    ) -> KVRegion:
        """A region that holds `history`, prefilled in chunks that end at `stops` and at the end of the history."""
        region = self.region(len(history) + slack, model=model)
        for stop in (*stops, len(history)):
            self.prefill(region, history.slice(region.length, stop), model)
        return region

    # ---- the two operations ----

    def prefill(self, region: KVRegion, tokens: Tokens, model: RankingModel | None = None) -> None:
        """`model.prefill`. Raises Failed if it raises, or does not advance kv.length by len(tokens)."""
        expected = region.length + len(tokens)
        with model_call(f"prefill() of {len(tokens)} tokens behind {region.length}", tokens.array):
            (model or self.model).prefill(region, tokens)
        if region.length != expected:
            raise Failed(
                f"prefill() was given {len(tokens)} tokens behind {expected - len(tokens)} and left kv.length at "
                f"{region.length}, not {expected}"
            )

    def score_batch(self, batch: list[ScoreInput], model: RankingModel | None = None) -> list[Scores]:
        """`model.score`, on the host. Raises Failed if it raises, or its result breaks the protocol."""
        model = model or self.model
        shown = ", ".join(f"{one.kv.length} + {len(one.suffix)} tokens, {len(one.candidates)} cand." for one in batch)
        inputs = [array for one in batch for array in (one.suffix.array, one.candidates, *one.features.values())]
        with model_call(f"score() of [{shown}]", *inputs):
            scores: object = model.score(batch)
        expected = [(len(one.candidates), len(model.tasks)) for one in batch]
        if not isinstance(scores, list) or not all(isinstance(one, torch.Tensor) for one in scores):
            raise Failed(f"score() returned a {type(scores).__name__}, expected a list of tensors")
        shapes = [tuple(one.shape) for one in scores]
        if shapes != expected:
            raise Failed(f"score() returned shapes {shapes}, expected (candidates, tasks) of each ranking: {expected}")
        for one in scores:
            if one.dtype != torch.float32 or one.device.type != self.device.type:
                raise Failed(f"score() returned {one.dtype} on {one.device}, expected torch.float32 on {self.device}")
        return [one.to("cpu", copy=True).numpy() for one in scores]  # copied, as in the worker

    def score(self, kv: KVRegion, suffix: Tokens, candidates: Items, model: RankingModel | None = None) -> Scores:
        """The scores of one ranking in a batch of one."""
        return self.score_batch([self.ranking(kv, suffix, candidates)], model)[0]

    def ranking(self, kv: KVRegion, suffix: Tokens, candidates: Items, salt: int = 0) -> ScoreInput:
        """A ranking of these candidates with their features."""
        return ScoreInput(kv, suffix, candidates, self.features(candidates, salt))

    def full(
        self, history: Tokens, candidates: Items, model: RankingModel | None = None, suffix: Tokens | None = None
    ) -> Scores:
        """Full inference: prefill all history into its own region in one call, then score the candidates.

        The suffix belongs to the history, unless the model tells the two apart (api.takes_suffix).
        """
        suffix = self.none if suffix is None else suffix
        if self.model.incremental:
            history, suffix = history.followed_by(suffix), self.none
        return self.score(self.prefix(history, model=model), suffix, candidates, model)

    # ---- comparing ----

    def deviations(self, limit: float = FLOAT32_LIMIT, half_limit: float = HALF_LIMIT) -> Deviations:
        """An empty collection with the rule for the probe's type."""
        return Deviations(half=self.half, limit=limit, half_limit=half_limit)

    def compare(
        self, into: Deviations, found: Scores, history: Tokens, candidates: Items, suffix: Tokens | None = None
    ) -> None:
        """Compare `found`, scores of `candidates` behind `history` and `suffix`, with full inference."""
        into.add(found, *self.expected(history, candidates, suffix))

    def expected(self, history: Tokens, candidates: Items, suffix: Tokens | None = None) -> tuple[Scores, Scores]:
        """Full inference in the type under check, and in float32."""
        full = self.full(history, candidates, suffix=suffix)
        return full, self.full(history, candidates, self.reference, suffix) if self.half else full


@contextmanager
def as_failure(call: str) -> Iterator[None]:
    """Turn any exception of the model into a failure of the property; `call` describes the call."""
    try:
        yield
    except ModelError as error:
        raise Failed(f"{call} was refused: {error}") from error
    except Exception as error:  # a user's model may raise any exception
        raise Failed(f"{call} raised {type(error).__name__}: {error}") from error


@contextmanager
def model_call(call: str, *inputs: npt.NDArray[Any]) -> Iterator[None]:
    """A call of one of the operations, as the worker makes it. Raises Failed if it raises, or writes to its inputs."""
    before = [array.copy() for array in inputs]
    with as_failure(call), torch.inference_mode():
        yield
    # Compared afterwards: a read-only array does not stop torch.from_numpy.
    if not all(map(np.array_equal, inputs, before)):
        raise Failed(f"{call} wrote to its tokens, candidates or features, which belong to the caller")


#: Whether a property means anything for a probe's model.
Applies = Callable[[Probe], bool]
