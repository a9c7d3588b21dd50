"""Models that break one property each, for tests of the checker; `Plain` breaks none.

Those with features, with a state or with steps of prefill are in broken_families.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from examples.models.contextual import Contextual, ContextualConfig
from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.transformer import Transformer, TransformerConfig

CPU = torch.device("cpu")
CONFIG = TransformerConfig(
    layers=2, dim=16, heads=2, dqk=8, dv=8, vocab=50, max_positions=200, tasks=("click", "like")
)  # fmt: skip

Batch = Sequence[ScoreInput]


class Plain(Transformer):
    def __init__(self, dtype: torch.dtype, seed: int = 3) -> None:
        super().__init__(CONFIG, seed, CPU, dtype)


class NoAdvance(Plain):
    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        super().prefill(kv, tokens)
        kv.length -= len(tokens)


class HalfScores(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [scores.half() for scores in super().score(batch)]


class Transposed(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [scores.T for scores in super().score(batch)]


class Dropout(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [scores + 0.01 * torch.rand(()) for scores in super().score(batch)]


class OneVersion(Plain):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.version = "v1"


class Unseeded(Plain):
    made = 0

    def __init__(self, dtype: torch.dtype) -> None:
        type(self).made += 1
        super().__init__(dtype, seed=self.made)
        self.version = f"v1-{dtype}"


class MadeOnce(Plain):
    """It holds something of which there is one in a process."""

    made = False

    def __init__(self, dtype: torch.dtype) -> None:
        if self.made:
            raise RuntimeError("the port is in use")
        type(self).made = True
        super().__init__(dtype)


class OwnBuffer(Plain):
    """Returns views of one buffer, which the next call overwrites; it breaks nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.buffer = torch.empty(0)

    def score(self, batch: Batch) -> list[torch.Tensor]:
        scores = torch.cat(super().score(batch))
        if len(self.buffer) < len(scores):
            self.buffer = torch.empty_like(scores)
        self.buffer[: len(scores)] = scores
        return list(torch.split(self.buffer[: len(scores)], [len(one.candidates) for one in batch]))


class ReadsSlack(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        hidden = [one.kv.storage.sum() * 0 for one in batch]
        return [scores + zero for scores, zero in zip(super().score(batch), hidden, strict=True)]


class WritesSuffix(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        for one in batch:
            one.kv.layer(1)[0][:, one.kv.length : one.kv.length + len(one.suffix)] = 1.0
        return super().score(batch)


class Touches(Plain):
    """Moves earlier keys by one rounding: too little for any score, and still a write where others read."""

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        start = kv.length
        super().prefill(kv, tokens)
        keys = kv.layer(0)[0][:, :start]
        keys.copy_(torch.nextafter(keys, torch.full_like(keys, math.inf)))


class FromTheEnd(Plain):
    """Positions counted back from the newest behaviour."""

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        start, ends = kv.length, kv.length + len(tokens)
        behaviours = self.embedding.behaviours
        self.embedding.behaviours = lambda wanted, first: behaviours(wanted, 200 - ends + first - start)  # type: ignore[method-assign,assignment]
        super().prefill(kv, tokens)
        self.embedding.behaviours = behaviours  # type: ignore[method-assign]


class Acausal(Plain):
    """Contextual tokens that see what follows: the first token's K takes in the mean of the call's items."""

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        start = kv.length
        super().prefill(kv, tokens)
        if start == 0 and len(tokens):
            kv.layer(1)[0][:, 0] += 0.1 * float(tokens.array[0].mean())


class ForgetsChunks(Plain):
    """A chunk sees only itself."""

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        own = KVRegion(kv.layout, torch.zeros_like(kv.storage), kv.capacity)
        super().prefill(own, tokens)
        start, kv.length = kv.length, kv.length + len(tokens)
        for layer in range(kv.layout.layers):
            for target, source in zip(kv.layer(layer), own.layer(layer), strict=True):
                target[:, start : kv.length] = source[:, : len(tokens)]


class RefusesChunks(Plain):
    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        if kv.length and len(tokens):
            raise RuntimeError("only from the start")
        super().prefill(kv, tokens)


class RemembersLength(Plain):
    """What it scored once, it takes to have that length for ever."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.seen: dict[int, tuple[KVRegion, int]] = {}

    def score(self, batch: Batch) -> list[torch.Tensor]:
        stale = []
        for one in batch:
            _, length = self.seen.setdefault(id(one.kv), (one.kv, one.kv.length))
            kv = KVRegion(one.kv.layout, one.kv.storage, one.kv.capacity, length)
            stale.append(ScoreInput(kv, one.suffix, one.candidates))
        return super().score(stale)


class StateOutside(Plain):
    """A feature of the history that is kept beside the region."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.sums: dict[int, tuple[KVRegion, int]] = {}

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        before = self.sums.get(id(kv), (kv, 0))[1] if kv.length else 0
        super().prefill(kv, tokens)
        self.sums[id(kv)] = (kv, before + int(tokens.array[0].sum()))

    def score(self, batch: Batch) -> list[torch.Tensor]:
        sums = [self.sums.get(id(one.kv), (one.kv, 0))[1] + int(one.suffix.array[0].sum()) for one in batch]
        return [scores + 0.1 * total for scores, total in zip(super().score(batch), sums, strict=True)]


class SuffixAnew(Plain):
    """Positions of a suffix start at 0."""

    def score(self, batch: Batch) -> list[torch.Tensor]:
        rankings = self.embedding.rankings
        self.embedding.rankings = lambda wanted: rankings(  # type: ignore[method-assign,assignment,misc]
            [(suffix, 0 if len(suffix) else first, candidates) for suffix, first, candidates in wanted]
        )
        scores = super().score(batch)
        self.embedding.rankings = rankings  # type: ignore[method-assign]
        return scores


class CoarseSuffix(Plain):
    """Exact in float32; in half precision, further off where there is a suffix."""

    def score(self, batch: Batch) -> list[torch.Tensor]:
        half = self.layout.dtype != torch.float32
        rough = [
            0.05 * torch.sin(torch.from_numpy(one.candidates))[:, None].float() * bool(half and len(one.suffix))
            for one in batch
        ]
        return [scores + off for scores, off in zip(super().score(batch), rough, strict=True)]


class FixedCut(Contextual):
    """A context model, whose scores depend on the cut; it breaks nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        config = ContextualConfig(**{name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__}, context=2)
        super().__init__(config, 3, CPU, dtype)


class FixedCutSeesCandidates(FixedCut):
    """The mean over the candidates comes in where there is a suffix alone."""

    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [
            scores + 1e-3 * scores.mean(0) * bool(len(one.suffix))
            for scores, one in zip(super().score(batch), batch, strict=True)
        ]


class SeeEachOther(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [scores + 1e-3 * scores.mean(0) for scores in super().score(batch)]


class ByOrder(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [scores + 1e-3 * torch.arange(len(scores))[:, None] for scores in super().score(batch)]


class ByBatchSize(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [scores * (1 + 1e-3 * (len(batch) - 1)) for scores in super().score(batch)]


class EmptySegment(Plain):
    """A ranking without any history shifts the scores of its neighbours, and of itself."""

    def score(self, batch: Batch) -> list[torch.Tensor]:
        off = 1e-2 * (len(batch) > 1 and any(not one.kv.length for one in batch))
        return [scores + off for scores in super().score(batch)]


class MaskedNeighbours(Plain):
    """Multiplies what it must not see by 0, which hides numbers and neither NaN nor infinity."""

    def score(self, batch: Batch) -> list[torch.Tensor]:
        others = sum(one.kv.layer(0)[0][:, : one.kv.length].sum() for one in batch)
        return [scores + 0 * others for scores in super().score(batch)]


class NeedsHistory(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        return [
            scores if one.kv.length + len(one.suffix) else scores * math.nan
            for scores, one in zip(super().score(batch), batch, strict=True)
        ]


class KnownItemsOnly(Plain):
    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        if (tokens.array[0] >= CONFIG.vocab).any():
            raise IndexError("index out of range in self")
        super().prefill(kv, tokens)


class MapsInPlace(Plain):
    """Maps item ids to rows in the caller's array, through torch's view of it."""

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        if len(tokens):
            torch.from_numpy(tokens.array[0]).remainder_(CONFIG.vocab)
        super().prefill(kv, tokens)


class MapsCandidatesInPlace(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        for one in batch:
            one.candidates[:] %= CONFIG.vocab
        return super().score(batch)


class UnknownElsewhere(Plain):
    """Unknown items have another row in a suffix than in a prefix."""

    def score(self, batch: Batch) -> list[torch.Tensor]:
        return super().score([ScoreInput(one.kv, _clipped(one.suffix), one.candidates) for one in batch])


def _clipped(tokens: Tokens) -> Tokens:
    items, *others = tokens.array
    return Tokens(np.stack([items.clip(max=CONFIG.vocab - 1), *others]))


class ShortTable(Plain):
    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        if kv.length + len(tokens) > 24:
            raise IndexError("position 24 is out of range")
        super().prefill(kv, tokens)


class ShortPrefix(Plain):
    """Positions for a prefix of 20 tokens and a suffix of 16; it breaks nothing where no more are allowed."""

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        if kv.length + len(tokens) > 20 + 16:
            raise IndexError("position 36 is out of range")
        super().prefill(kv, tokens)


class ShortSuffix(Plain):
    def score(self, batch: Batch) -> list[torch.Tensor]:
        if max(len(one.suffix) for one in batch) > 16:
            raise IndexError("suffix row 16 is out of range")
        return super().score(batch)


class Noise(Plain):
    """In half precision, the same wrong scores whichever way."""

    def score(self, batch: Batch) -> list[torch.Tensor]:
        scores = super().score(batch)
        return scores if self.layout.dtype == torch.float32 else [-one for one in scores]
