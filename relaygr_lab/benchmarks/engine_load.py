"""What the engine's bench runs: the model, regions full of history, rankings, and how many operations they are.

Operations count visible pairs only (the triangle, not the square), and not what the last layer of an `extend` need not
compute. Norms and sums are not counted: the floor is what a machine would need that has them for nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from floors import Cost

from relaygr_stream import settings
from relaygr_stream.models.api import RankingModel, ScoreInput, Tokens
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.loading import load_model

#: Together the copies of a prefix are so large that a ranking finds none of it in the processor's own caches.
COLD_BYTES: Final = 256 << 20


def triangle(rows: int) -> int:
    """Pairs of rows that see themselves and the earlier ones."""
    return rows * (rows + 1) // 2


class EngineLoad:
    """One model of the bench's shape on one device, in one dtype."""

    def __init__(
        self, shape: settings.Model, device: torch.device, dtype: torch.dtype, kernels: settings.Kernels = "auto"
    ) -> None:
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.model: RankingModel = load_model(shape, settings.Relay(), device=device, dtype=dtype, kernels=kernels)
        self.random = np.random.default_rng(0)
        value, key = shape.heads * shape.dv, shape.heads * shape.dqk
        self._row_flops = 2 * shape.dim * (5 * value + 2 * key)
        self._kv_row_flops = 2 * shape.dim * (value + key)
        self._pair_flops = 2 * (value + key)
        self._row_activations = value  # u
        # v, q and k, o, the gate and the output; a float32 number is rounded nowhere.
        self._kv_row_conversions = (value + key) if dtype != torch.float32 else 0
        self._row_conversions = (3 * value + 2 * key + shape.dim) if dtype != torch.float32 else 0
        self._weight_bytes = shape.layers * shape.dim * (5 * value + 2 * key) * dtype.itemsize

    def tokens(self, count: int) -> Tokens:
        array = np.empty((3, count), np.int64)
        array[0] = self.random.integers(0, 1 << 31, count)
        array[1] = self.random.integers(0, 4, count)
        array[2] = self.random.integers(0, 1 << 20, count)
        return Tokens(array)

    def region(self, capacity: int) -> KVRegion:
        return KVRegion.new(self.model.layout, capacity, device=self.device)

    def ranking(self, kv: KVRegion, candidates: int, suffix: int = 0) -> ScoreInput:
        return ScoreInput(kv, self.tokens(suffix), self.random.integers(0, 1 << 31, candidates))

    def alike(self, one: ScoreInput) -> Iterator[ScoreInput]:
        """The same ranking on copies of its prefix KV, for ever in turn: none is in a cache when it comes again."""
        copies = math.ceil(COLD_BYTES / one.kv.layout.nbytes(one.kv.capacity))
        regions = [one.kv] + [self._copy(one.kv) for _ in range(copies - 1)]
        return itertools.cycle([ScoreInput(kv, one.suffix, one.candidates) for kv in regions])

    def extend_cost(self, prefix: int, tokens: int) -> Cost:
        """Appending `tokens` behind `prefix`."""
        pairs = tokens * prefix + triangle(tokens)
        whole, last = self._cost(self.shape.layers - 1, tokens, pairs), tokens * self._kv_row_flops
        nbytes = self._weight_bytes + (prefix + tokens) * self.model.layout.bytes_per_token
        return whole + Cost(last, nbytes, conversions=tokens * self._kv_row_conversions)

    def score_cost(self, one: ScoreInput) -> Cost:
        """One ranking."""
        prefix, suffix, count = one.kv.length, len(one.suffix), len(one.candidates)
        pairs = suffix * prefix + triangle(suffix) + count * (prefix + suffix + 1)
        whole = self._cost(self.shape.layers, suffix + count, pairs)
        return whole + Cost(0, self._weight_bytes + prefix * self.model.layout.bytes_per_token)

    def batch_cost(self, batch: list[ScoreInput]) -> Cost:
        """Rankings computed together: the weights are read once."""
        whole = sum((self.score_cost(one) for one in batch), Cost(0, 0))
        return whole + Cost(0, -(len(batch) - 1) * self._weight_bytes)

    def _cost(self, layers: int, rows: int, pairs: int) -> Cost:
        """Of whole layers, without bytes."""
        flops = rows * self._row_flops + pairs * self._pair_flops
        each = Cost(flops, 0, pairs * self.shape.heads, rows * self._row_activations, rows * self._row_conversions)
        return sum([each] * layers, Cost(0, 0))

    def _copy(self, kv: KVRegion) -> KVRegion:
        return KVRegion(kv.layout, kv.storage.clone(), kv.capacity, kv.length)
