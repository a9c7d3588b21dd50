"""HSTU's forward pass with gradients, for batches of histories: the formulas of the served model, in the same order.

`behaviours` is `HSTUModel.prefill` and `rows` is `HSTUModel.score` for many positions at once: a row at position p sees
the behaviours before p and itself, whatever follows. tests/unit/examples compares both with the served model.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.stu import NORM_EPS, STULayer

#: Added to the logits of invisible pairs: SiLU and its gradient are then exactly 0.
INVISIBLE: Final = -1e9

#: K and V of one layer, each (B, H, n, width per head).
KV = tuple[Tensor, Tensor]


class Batch(NamedTuple):
    """B histories, padded at their end to n behaviours: item ids, actions, gap buckets (B, n); lengths (B,)."""

    items: Tensor
    actions: Tensor
    gaps: Tensor
    lengths: Tensor


def behaviours(model: HSTUModel, batch: Batch, dropout: float = 0.0) -> list[KV]:
    """K and V of each layer for all behaviours of the batch. What stands in padded places is never visible."""
    table, count = model.embedding, batch.items.shape[1]
    positions = torch.arange(count).clamp(max=table.max_positions - 1)
    x = table.item[batch.items] + table.position[positions] + table.action[batch.actions] + table.gap[batch.gaps]
    x = functional.dropout(x, dropout)
    mask = torch.full((count, count), INVISIBLE).triu(1)
    found: list[KV] = []
    for layer in model.stack.stu_layers():
        u, v, q, k = project(layer, x)
        found.append((k, v))
        if len(found) < len(model.stack.layers):  # nobody reads the last layer's outputs of behaviours
            x = finish(layer, x, u, attend(model, q, k, v, mask), dropout)
    return found


def rows(
    model: HSTUModel, kv: list[KV], positions: Tensor, items: Tensor | None = None, dropout: float = 0.0
) -> Tensor:
    """The last layer's outputs (B, r, D) of candidates at `positions` (B, r) or (1, r), each behind what came before.

    items: the candidates (B, r). None: candidates without an item; training asks them what comes next, which no served
    model does.
    """
    table = model.embedding
    x = table.position[positions.clamp(max=table.max_positions - 1)]
    x = (x if items is None else table.item[items] + x) + table.candidate
    batch, _, count, _ = kv[0][0].shape
    x = functional.dropout(x.expand(batch, -1, -1), dropout)
    mask = torch.where(torch.arange(count) < positions[..., None], 0.0, INVISIBLE)[:, None]  # (B, 1, r, n)
    for layer, (keys, values) in zip(model.stack.stu_layers(), kv, strict=True):
        u, v, q, k = project(layer, x)
        own = functional.silu((q * k).sum(-1, keepdim=True) / math.sqrt(model.config.dqk)) / model.config.scale_tokens
        x = finish(layer, x, u, attend(model, q, keys, values, mask) + own * v, dropout)
    return x


def logits(model: HSTUModel, out: Tensor) -> Tensor:
    """The head: outputs (…, D) → the first task's logits (…)."""
    head = model.head
    normed = functional.layer_norm(out, out.shape[-1:], head.norm_weight, head.norm_bias, NORM_EPS)
    return normed @ head.weight[:, 0] + head.bias[0]


def project(layer: STULayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (B, n, D) → u (B, n, H·dv), not yet activated, and per head v, q, k (B, H, n, width)."""
    heads, dv, dqk = layer.shape
    normed = functional.layer_norm(x, x.shape[-1:], layer.input_norm_weight, layer.input_norm_bias, NORM_EPS)
    widths = [heads * dv, heads * dv, heads * dqk, heads * dqk]
    parts = torch.split(normed @ layer.uvqk_weight + layer.uvqk_bias, widths, -1)
    v, q, k = (part.view(*x.shape[:2], heads, -1).transpose(1, 2) for part in parts[1:])
    return parts[0], v, q, k


def attend(model: HSTUModel, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """SiLU(q·kᵀ / √dqk) / N · v over the pairs that `mask` leaves visible, (B, H, r, dv)."""
    scores = (q / math.sqrt(model.config.dqk)) @ k.transpose(2, 3) + mask
    return functional.silu(scores) @ (v / model.config.scale_tokens)


def finish(layer: STULayer, x: Tensor, u: Tensor, o: Tensor, dropout: float) -> Tensor:
    """The layer's output [u, o, u ⊙ Norm(o)]·W_o + x; o (B, H, n, dv)."""
    u, o = functional.silu(u), o.transpose(1, 2).flatten(2)
    normed = functional.layer_norm(o, o.shape[-1:], layer.output_norm_weight, layer.output_norm_bias, NORM_EPS)
    return x + functional.dropout(torch.cat([u, o, u * normed], -1) @ layer.output_weight, dropout)
