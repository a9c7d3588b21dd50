"""The STU layers as a good engineer writes them in torch: what peers run eagerly, compile and export.

It needs torch alone, and knows nothing of the package: weights and K/V come as tensors. The formulas are those of the
package's stu.py; attention runs in blocks of rows, and computes no block above the diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional

EPS: Final = 1e-6
#: Rows of a block, and scores of a block: a block's scores stay in the last-level cache.
BLOCK_ROWS: Final = 256
BLOCK_SCORES: Final = 2 << 20

#: K (heads, tokens, dqk) and V (heads, tokens, dv) of each layer, one after the other.
KV = list[torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """The layers' shape; scale_tokens is N of the attention scale 1/N."""

    heads: int
    dqk: int
    dv: int
    scale_tokens: int


class STU(nn.Module):
    """One layer. `weights`: as the package's STULayer names them; matrices are (inputs, outputs)."""

    input_norm_weight: torch.Tensor
    input_norm_bias: torch.Tensor
    uvqk_weight: torch.Tensor
    uvqk_bias: torch.Tensor
    output_norm_weight: torch.Tensor
    output_norm_bias: torch.Tensor
    output_weight: torch.Tensor

    def __init__(self, shape: Shape, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.shape = shape
        for name, value in weights.items():
            self.register_buffer(name, value)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x (n, D) → u (n, H·dv), and v, scaled q and k, each (H, n, width)."""
        heads, dqk, dv = self.shape.heads, self.shape.dqk, self.shape.dv
        normed = functional.layer_norm(x, x.shape[-1:], self.input_norm_weight, self.input_norm_bias, EPS)
        uvqk = torch.addmm(self.uvqk_bias, normed, self.uvqk_weight)
        u, v, q, k = torch.split(uvqk, [heads * dv, heads * dv, heads * dqk, heads * dqk], dim=1)
        v, q, k = (part.reshape(-1, heads, part.shape[1] // heads).transpose(0, 1) for part in (v, q, k))
        return functional.silu(u), v, q * (1 / math.sqrt(dqk)), k

    def finish(self, x: torch.Tensor, u: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        """The layer's output (n, D) from its input, u, and the attention's sums o (H, n, dv), before 1/N."""
        o = (o * (1 / self.shape.scale_tokens)).transpose(0, 1).reshape(x.shape[0], -1)
        normed = functional.layer_norm(o, o.shape[-1:], self.output_norm_weight, self.output_norm_bias, EPS)
        return torch.addmm(x, torch.cat((u, o, u * normed), 1), self.output_weight)

    def score(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Candidates x (m, D): each sees the prefix and itself."""
        u, v, q, k = self.project(x)
        step = max(32, min(BLOCK_ROWS, BLOCK_SCORES // (q.shape[0] * keys.shape[1])))
        parts = [seen(q[:, start : start + step], keys, values) for start in range(0, x.shape[0], step)]
        own = functional.silu((q * k).sum(-1, keepdim=True)) * v
        return self.finish(x, u, (parts[0] if len(parts) == 1 else torch.cat(parts, 1)) + own)

    def prefill(self, x: torch.Tensor, parts: Parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Behaviours x (n, D): each sees itself and the earlier ones. Output, K, V."""
        u, v, q, k = parts.project(self, x)
        k, v = k.contiguous(), v.contiguous()
        sums = []
        for start in range(0, x.shape[0], BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            o = parts.diagonal(q[:, block], k[:, block], v[:, block])
            sums.append(o + parts.seen(q[:, block], k[:, :start], v[:, :start]) if start else o)
        return parts.finish(self, x, u, torch.cat(sums, 1)), k, v

    def keys_and_values(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V alone: all that a prefill needs of the last layer."""
        heads, dqk, dv = self.shape.heads, self.shape.dqk, self.shape.dv
        normed = functional.layer_norm(x, x.shape[-1:], self.input_norm_weight, self.input_norm_bias, EPS)
        weight, bias = self.uvqk_weight, self.uvqk_bias
        key, value = slice(2 * heads * dv + heads * dqk, None), slice(heads * dv, 2 * heads * dv)
        k, v = (torch.addmm(bias[part], normed, weight[:, part]) for part in (key, value))
        return (
            k.reshape(-1, heads, dqk).transpose(0, 1).contiguous(),
            v.reshape(-1, heads, dv).transpose(0, 1).contiguous(),
        )


def seen(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """SiLU(q·kᵀ)·v of rows that see every column."""
    return functional.silu(queries @ keys.transpose(1, 2), inplace=True) @ values


def diagonal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The same where row i sees columns 0 … i."""
    return functional.silu(queries @ keys.transpose(1, 2), inplace=True).tril() @ values


@dataclass(frozen=True)
class Parts:
    """What a layer's prefill calls: the functions themselves, or compiled ones."""

    project: Callable[..., tuple[torch.Tensor, ...]] = STU.project
    seen: Callable[..., torch.Tensor] = seen
    diagonal: Callable[..., torch.Tensor] = diagonal
    finish: Callable[..., torch.Tensor] = STU.finish


class Score(nn.Module):
    """All layers and the head: embedded candidates (m, D) and K/V → logits (m, tasks), float32."""

    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, layers: list[STU], head: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.step: Callable[..., torch.Tensor] = STU.score
        for name, value in head.items():
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor, *kv: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = self.step(layer, x, kv[2 * index], kv[2 * index + 1])
        x = x.float()
        normed = functional.layer_norm(x, x.shape[-1:], self.norm_weight, self.norm_bias, EPS)
        return torch.addmm(self.bias, normed, self.weight)


class Prefill(nn.Module):
    """All layers: embedded behaviours (n, D) → K and V of each layer."""

    def __init__(self, layers: list[STU]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.parts = Parts()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kv: KV = []
        *earlier, last = self.layers
        for layer in earlier:
            assert isinstance(layer, STU)
            x, k, v = layer.prefill(x, self.parts)
            kv += [k, v]
        assert isinstance(last, STU)
        return (*kv, *last.keys_and_values(x))
