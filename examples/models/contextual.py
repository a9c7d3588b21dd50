"""Context tokens that see a whole history: a transformer whose prefix KV cannot grow, and which takes a suffix anyway.

    model.factory = "examples.models.contextual:make"

It is the transformer of relaygr_stream/models/transformer.py with learned context tokens before the behaviours. In each
layer a context token sees all context tokens and the whole prefix, and a behaviour sees all context tokens and earlier
behaviours. So K and V of every behaviour depend on the whole prefix, through the context tokens of the layer below:
`incremental` is False, and a prefix is computed in one call.

A suffix row sees the context tokens as they are behind the prefix, the prefix, and earlier suffix rows; a candidate
sees all of these and itself. So the model's scores are defined on the prefix and the suffix of a request apart, and it
is trained so: the context tokens summarise the history that was announced. `takes_suffix` says that. Full inference is
then `prefill` of the prefix and `score` with the suffix, as in the relay.

K and V of the context tokens are the region's state: a prefix has them once. A user without a prefix has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import nn

from relaygr_stream import settings
from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import KVLayout, KVRegion, ScoreInput, Tokens
from relaygr_stream.models.embeddings import TokenEmbedding
from relaygr_stream.models.softmax import BLOCK_ROWS
from relaygr_stream.models.transformer import Positive, Transformer, TransformerConfig, shape_of

#: Context tokens of a model that the settings make.
CONTEXT: Final = 8

#: K (H, columns, dqk) and V (H, columns, dv) of some tokens.
Part = tuple[torch.Tensor, torch.Tensor]


class ContextualConfig(TransformerConfig, frozen=True, kw_only=True):
    """The whole definition of the model apart from its weights. context: number of context tokens."""

    context: Positive = CONTEXT

    def layout(self, dtype: torch.dtype) -> KVLayout:
        """K and V per behaviour, and those of the context tokens as the state."""
        tokens = super().layout(dtype)
        return replace(tokens, state=tokens.elements(self.context))


def make(model: settings.Model, device: torch.device, dtype: torch.dtype) -> Contextual:
    """The factory: a model with the shape, tasks and seed of the settings. Raises as `shape_of`."""
    return Contextual(ContextualConfig(**shape_of(model)), model.seed, device, dtype)


class ContextEmbedding(TokenEmbedding):
    """The embedding of the transformer, and the context tokens' vectors."""

    def __init__(self, config: ContextualConfig) -> None:
        super().__init__(config.dim, config.vocab, config.max_positions)
        self.context = nn.Parameter(torch.empty(config.context, config.dim), requires_grad=False)


class Contextual(Transformer):
    """A transformer with context tokens as a `RankingModel`, with weights drawn from a seed."""

    architecture = "contextual"
    incremental = False  # another behaviour changes the context tokens, and they change all earlier behaviours
    takes_suffix = True  # a suffix row changes neither

    embedding: ContextEmbedding

    def __init__(self, config: ContextualConfig, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, seed, device, dtype, ContextEmbedding(config))
        self._count = config.context
        self._context_layout = replace(self.layout, state=0)

    @torch.no_grad()
    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        """Compute the whole prefix. Raises ModelError if the region holds one already."""
        if kv.length:
            raise ModelError(f"context tokens saw the {kv.length} behaviours in this region: compute a prefix whole")
        if not len(tokens):
            return
        count, stop = self._count, len(tokens)
        x = torch.cat((self.embedding.context, self.embedding.behaviours(tokens, 0)))
        for index, layer in enumerate(self._layers()):
            q, k, v = layer.project(x)
            context, behaviours = self._parts(kv, index, stop)
            for part, rows in ((context, slice(0, count)), (behaviours, slice(count, None))):
                part[0].copy_(k[:, rows])
                part[1].copy_(v[:, rows])
            if index + 1 < len(self.layers):  # the last layer's output is not needed
                seen = attend(q[:, :count], [context, behaviours])
                seen = torch.cat((seen, attend(q[:, count:], [context, behaviours], in_order=True)), 1)
                x = layer.finish(x, seen)
        kv.length = stop

    def _score(self, one: ScoreInput) -> torch.Tensor:
        """The logits of one ranking; rows are its suffix, then its candidates."""
        length, suffix = one.kv.length, len(one.suffix)
        x = self.embedding.rankings([(one.suffix, length, one.candidates)])
        for index, layer in enumerate(self._layers()):
            q, k, v = layer.project(x)
            parts = [*(self._parts(one.kv, index, length) if length else ()), (k[:, :suffix], v[:, :suffix])]
            seen = attend(q[:, :suffix], parts, in_order=True)
            seen = torch.cat((seen, attend(q[:, suffix:], parts, own=(k[:, suffix:], v[:, suffix:]))), 1)
            x = layer.finish(x, seen)
        return self.head.logits(x[suffix:])

    def _parts(self, kv: KVRegion, index: int, length: int) -> tuple[Part, Part]:
        """A layer's K and V in the region: of the context tokens, and of the first `length` behaviours."""
        keys, values = kv.layer(index)
        return KVRegion(self._context_layout, kv.state, self._count).layer(index), (
            keys[:, :length],
            values[:, :length],
        )


def attend(
    queries: torch.Tensor, parts: Sequence[Part], *, in_order: bool = False, own: Part | None = None
) -> torch.Tensor:
    """Softmax attention of queries (H, n, dqk) to all columns of the parts, which are read in place: (H, n, dv).

    in_order: the last part holds K and V of these rows; each sees itself and earlier ones there. own: K and V of these
    rows, which see themselves and not each other.
    """
    outputs = [parts[-1][1][:, :0]]
    for start in range(0, queries.shape[1], BLOCK_ROWS):
        stop = min(start + BLOCK_ROWS, queries.shape[1])
        q = queries[:, start:stop] / math.sqrt(queries.shape[2])
        seen = [*parts[:-1], (parts[-1][0][:, :stop], parts[-1][1][:, :stop])] if in_order else parts
        scores = [q @ keys.transpose(1, 2) for keys, _ in seen]
        if in_order:
            scores[-1].masked_fill_(torch.ones_like(scores[-1][0], dtype=torch.bool).triu_(start + 1), -math.inf)
        if own is not None:
            scores.append((q.float() * own[0][:, start:stop].float()).sum(-1, keepdim=True).to(q.dtype))
        weights = torch.softmax(torch.cat(scores, 2), 2, dtype=torch.float32).to(q.dtype)
        *shares, last = torch.split(weights, [part.shape[2] for part in scores], 2)
        shares = shares if own is not None else [*shares, last]
        out = sum((share @ values for share, (_, values) in zip(shares, seen, strict=True)), torch.zeros(()))
        outputs.append(out if own is None else out + last * own[1][:, start:stop])
    return torch.cat(outputs, 1)
