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

from relaygr_stream.models import relative
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.stu import NORM_EPS, STULayer

#: Added to the logits of invisible pairs: SiLU and its gradient are then exactly 0.
INVISIBLE: Final = -1e9

#: K and V of one layer, each (B, H, n, width per head).
KV = tuple[Tensor, Tensor]


class Batch(NamedTuple):
    """B histories, padded at their end to n behaviours: ids, actions, gap buckets, times in ms (B, n); lengths (B,)."""

    items: Tensor
    actions: Tensor
    gaps: Tensor
    times: Tensor
    lengths: Tensor


def behaviours(model: HSTUModel, batch: Batch, dropout: float = 0.0) -> list[KV]:
    """K and V of each layer for all behaviours of the batch. What stands in padded places is never visible."""
    table, count = model.embedding, batch.items.shape[1]
    positions = torch.arange(count).clamp(max=table.max_positions - 1)
    x = table.item[batch.items] + table.position[positions] + table.action[batch.actions] + table.gap[batch.gaps]
    x = functional.dropout(x, dropout)
    found: list[KV] = []
    for layer in model.stack.stu_layers():
        u, v, q, k = project(layer, x)
        found.append((k, v))
        if len(found) < len(model.stack.layers):  # nobody reads the last layer's outputs of behaviours
            own = bias(layer, torch.arange(count)[None], batch.times, own=True)[:, None]
            x = finish(layer, x, u, attend(q, k, v, own, model.config.scale_tokens), dropout)
    return found


def rows(
    model: HSTUModel, kv: list[KV], positions: Tensor, items: Tensor, times: Tensor, dropout: float = 0.0
) -> Tensor:
    """The last layer's outputs (B, r, D) of candidates at `positions` (B, r) or (1, r), each behind what came before.

    items: the candidates (B, r). times: of the behaviours (B, n); a candidate's is that of the newest before it.
    """
    table = model.embedding
    x = table.item[items] + table.position[positions.clamp(max=table.max_positions - 1)] + table.candidate
    x = functional.dropout(x, dropout)
    for layer, (keys, values) in zip(model.stack.stu_layers(), kv, strict=True):
        u, v, q, k = project(layer, x)
        own = (q * k).sum(-1, keepdim=True) / math.sqrt(model.config.dqk)
        own_bias = relative.own_bias(layer)
        own = functional.silu(own if own_bias is None else own + own_bias) / model.config.scale_tokens
        o = attend(q, keys, values, bias(layer, positions, times)[:, None], model.config.scale_tokens) + own * v
        x = finish(layer, x, u, o, dropout)
    return x


def bias(layer: STULayer, positions: Tensor, times: Tensor, *, own: bool = False) -> Tensor:
    """What is added to the scores of rows at `positions` (B or 1, r) over the behaviours, (B or 1, r, n); times (B, n).

    A row sees the behaviours before its position. With `own` it is the behaviour at its position and sees itself; else
    it is a candidate, with the time of the newest that it sees.
    """
    distances = positions[..., None] - torch.arange(times.shape[1])
    added = torch.where(distances >= (0 if own else 1), 0.0, INVISIBLE)
    if layer.relative_position is not None:
        added = added + layer.relative_position[distances.clamp(0, len(layer.relative_position) - 1)]
    if layer.relative_time is not None:
        at = (positions if own else positions - 1).clamp(min=0).expand(len(times), -1)
        apart = times.gather(1, at)[..., None] - times[:, None]
        added = added + layer.relative_time[relative.time_buckets(apart, len(layer.relative_time))]
    return added


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


def attend(q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale_tokens: int | Tensor) -> Tensor:
    """SiLU(q·kᵀ / √dqk + added) / N · v, (B, H, r, dv); added: `bias`. scale_tokens: N, or one of each history."""
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(2, 3) + added
    return functional.silu(scores) @ (v / scale_tokens)


def finish(layer: STULayer, x: Tensor, u: Tensor, o: Tensor, dropout: float) -> Tensor:
    """The layer's output [u, o, u ⊙ Norm(o)]·W_o + x; o (B, H, n, dv)."""
    u, o = functional.silu(u), o.transpose(1, 2).flatten(2)
    normed = functional.layer_norm(o, o.shape[-1:], layer.output_norm_weight, layer.output_norm_bias, NORM_EPS)
    return x + functional.dropout(torch.cat([u, o, u * normed], -1) @ layer.output_weight, dropout)
