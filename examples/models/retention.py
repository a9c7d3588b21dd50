"""A recurrent user state: a retention network, whose prefix KV have the same size for a history of any length.

    model.factory = "examples.models.retention:make"

It is the transformer of relaygr_stream/models/transformer.py with retention (RetNet, arXiv 2307.08621) in place of
attention. Each head keeps a matrix S (dqk, dv), which a behaviour updates and reads, with a decay γ < 1 of the head:

    S_t = γ · S_{t-1} + k_t v_tᵀ        o_t = S_tᵀ q_t / √dqk

A candidate stands behind the suffix: it reads γ · S + k vᵀ with its own k and v. The state is float32 whatever the type
of the layers, and so is all arithmetic with it: it is a sum over the whole history, which rounding would fill.

A state cannot go back to an earlier length (KVLayout.sliceable). An entry serves requests whose prefix begins with all
of it, and the cache copies it before it grows while someone holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch.nn import functional

from relaygr_stream import settings
from relaygr_stream.models.api import KVLayout, KVRegion, ScoreInput, Tokens
from relaygr_stream.models.transformer import NORM_EPS, Transformer, TransformerConfig, shape_of

#: Rows computed together, as attention within the block and by the state before it: the work per row grows with this,
#: and the number of steps falls.
BLOCK_ROWS: Final = 128
#: A head's γ is 1 - 2⁻ᵉ with e spread over this range: half of a behaviour is forgotten after 11 … 700 later ones.
DECAY_EXPONENTS: Final = (4.0, 10.0)


class RetentionConfig(TransformerConfig, frozen=True, kw_only=True):
    """The whole definition of a retention network apart from its weights."""

    def layout(self, dtype: torch.dtype) -> KVLayout:  # noqa: ARG002  every type has the same
        """One state per layer and head, and nothing per token; float32 for any dtype."""
        return KVLayout.of_state(self.layers * self.heads * self.dqk * self.dv, torch.float32)


def make(model: settings.Model, device: torch.device, dtype: torch.dtype) -> Retention:
    """The factory: a model with the shape, tasks and seed of the settings. Raises as `shape_of`."""
    return Retention(RetentionConfig(**shape_of(model)), model.seed, device, dtype)


class Retention(Transformer):
    """A retention network as a `RankingModel`, with weights drawn from a seed."""

    architecture = "retention"

    def __init__(self, config: RetentionConfig, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(config, seed, device, dtype)
        self._log_decay = torch.log1p(-torch.exp2(-torch.linspace(*DECAY_EXPONENTS, config.heads))).to(device)

    @torch.no_grad()
    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        """Take the state over `tokens`, at positions from kv.length on. Rewrites it at the end, with kv.length."""
        if not len(tokens):
            return
        x = self.embedding.behaviours(tokens, kv.length)
        states = []
        for layer, before in zip(self._layers(), self._states(kv), strict=True):
            q, k, v = (part.float() for part in layer.project(x))
            out, state = retain(q, k, v, before, self._log_decay)
            states.append(state)
            if len(states) < len(self.layers):  # the last layer's output is not needed
                x = layer.finish(x, _normalised(out, x.dtype))
        kv.state.copy_(torch.stack(states).flatten())
        kv.length += len(tokens)

    def _score(self, one: ScoreInput) -> torch.Tensor:
        """The logits of one ranking; rows are its suffix, then its candidates. The region's state stays as it is."""
        suffix = len(one.suffix)
        x = self.embedding.rankings([(one.suffix, one.kv.length, one.candidates)])
        for layer, before in zip(self._layers(), self._states(one.kv), strict=True):
            q, k, v = (part.float() for part in layer.project(x))
            out, state = retain(q[:, :suffix], k[:, :suffix], v[:, :suffix], before, self._log_decay)
            own = look(q[:, suffix:], k[:, suffix:], v[:, suffix:], state, self._log_decay)
            x = layer.finish(x, _normalised(torch.cat((out, own), 1), x.dtype))
        return self.head.logits(x[suffix:])

    def _states(self, kv: KVRegion) -> Iterator[torch.Tensor]:
        """Each layer's state (H, dqk, dv) behind kv.length behaviours, to read."""
        config = self.config
        shape = (config.layers, config.heads, config.dqk, config.dv)
        yield from kv.state.view(shape) if kv.length else torch.zeros(shape, device=kv.state.device)


def retain(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, state: torch.Tensor, log_decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Retention of n rows behind `state`: their outputs (H, n, dv), and the state behind them (H, dqk, dv), a new one.

    queries and keys (H, n, dqk), values (H, n, dv), log_decay (H), all float32. A row reads itself and earlier rows.
    """
    outputs = [values[:, :0]]
    for start in range(0, keys.shape[1], BLOCK_ROWS):
        block = slice(start, start + BLOCK_ROWS)
        q, k, v = queries[:, block] / math.sqrt(queries.shape[2]), keys[:, block], values[:, block]
        steps = torch.arange(k.shape[1], device=k.device)
        lags = steps[:, None] - steps
        within = (q @ k.transpose(1, 2)) * _power(log_decay, lags.clamp(min=0)).tril()
        outputs.append(within @ v + (q * _power(log_decay, steps + 1)[:, :, None]) @ state)
        fresh = (k * _power(log_decay, len(steps) - 1 - steps)[:, :, None]).transpose(1, 2) @ v
        state = state * torch.exp(log_decay * len(steps))[:, None, None] + fresh
    return torch.cat(outputs, 1), state


def look(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, state: torch.Tensor, log_decay: torch.Tensor
) -> torch.Tensor:
    """The outputs (H, m, dv) of rows that stand behind `state` at one position and do not see each other."""
    queries = queries / math.sqrt(queries.shape[2])
    own = (queries * keys).sum(-1, keepdim=True) * values
    return own + (queries @ state) * torch.exp(log_decay)[:, None, None]


def _power(log_decay: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """γ to these powers, for each head: (H, *exponents.shape)."""
    return torch.exp(log_decay.view(-1, *[1] * exponents.dim()) * exponents)


def _normalised(out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each row and head with mean 0 and variance 1: what a sum over any number of behaviours becomes."""
    return functional.layer_norm(out, out.shape[-1:], eps=NORM_EPS).to(dtype)
