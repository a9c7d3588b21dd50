"""One STU layer, as in meta-recsys/generative-recommenders (no softmax, and only u is activated), and its shape.

    xn = LayerNorm(x);  [u|v|q|k] = xn·W_uvqk + b;  u = SiLU(u)
    A  = SiLU(q·kᵀ / √dqk + bias) / N ⊙ visible;  o = A·v         bias: 0, or as in relative.py
    out = [u, o, u ⊙ Norm(o)]·W_o + x            Norm: LayerNorm over H·dv, or per-head group norm

The layer computes everything but A. The stack computes A, so it decides which pairs are visible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
import torch
from msgspec import Meta
from torch import nn
from torch.nn import functional

from relaygr_stream.models.kv import KVLayout, KVRegion

NORM_EPS: Final = 1e-6


#: No table is larger than what an index of 32 bits reaches.
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
#: The same, with 0 for none.
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
#: Each layer is an object with its weights: a number by mistake must not take minutes to be refused.
Layers = Annotated[int, Meta(ge=1, le=4096)]


class StackConfig(msgspec.Struct, frozen=True):
    """The shape of the layers; HSTUConfig adds what is around them.

    scale_tokens is N of the attention scale 1/N; contextual_seq_len and max_attn_len: 0 for none. relative_positions,
    relative_times: distances and time buckets that have a weight in each layer (relative.py); 0: no such bias.
    """

    layers: Layers
    dim: Positive
    heads: Positive
    dqk: Positive
    dv: Positive
    scale_tokens: Positive
    contextual_seq_len: Count = 0
    max_attn_len: Count = 0
    group_norm: bool = False
    relative_positions: Count = 0
    relative_times: Count = 0

    def layout(self, dtype: torch.dtype) -> KVLayout:
        """The prefix KV of one token."""
        return KVLayout(self.layers, self.heads, self.dqk, self.dv, dtype, times=bool(self.relative_times))


class Workspace:
    """Buffers for n rows that all layers share: the system would clear newly allocated memory page by page.

    uvqk (n, 2·H·dv + 2·H·dqk). gates (n, 3·H·dv): [u, o, u ⊙ Norm(o)]. o (n, H, dv): the view of gates that attention
    writes. The rows of o from `used` on are padding: zeros, never written.
    """

    def __init__(self, config: StackConfig, x: torch.Tensor, used: int | None = None) -> None:
        width, rows = config.heads * config.dv, len(x)
        self.uvqk = torch.empty((rows, 2 * width + 2 * config.heads * config.dqk), dtype=x.dtype, device=x.device)
        self.gates = torch.empty((rows, 3 * width), dtype=x.dtype, device=x.device)
        self.o = self.gates[:, width : 2 * width].view(rows, config.heads, config.dv)
        if used is not None:
            self.o[used:].zero_()


class STULayer(nn.Module):
    """The weights of one layer and all its steps but attention. uvqk has its columns in the order u, v, q, k."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        heads, dv, dqk = config.heads, config.dv, config.dqk
        self.group_norm = config.group_norm
        self.shape = (heads, dv, dqk)
        norm = heads if config.group_norm else heads * dv
        self.input_norm_weight = _parameter(config.dim)
        self.input_norm_bias = _parameter(config.dim)
        self.uvqk_weight = _parameter(config.dim, 2 * heads * (dv + dqk))
        self.uvqk_bias = _parameter(2 * heads * (dv + dqk))
        self.output_norm_weight = _parameter(norm)
        self.output_norm_bias = _parameter(norm)
        self.output_weight = _parameter(3 * heads * dv, config.dim)
        self.relative_position = _parameter(config.relative_positions) if config.relative_positions else None
        self.relative_time = _parameter(config.relative_times) if config.relative_times else None

    def project(self, x: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """x (n, D) → workspace.uvqk: u, v, q, k side by side (n, 2·H·dv + 2·H·dqk), u not yet activated."""
        return torch.addmm(self.uvqk_bias, self._normed(x), self.uvqk_weight, out=workspace.uvqk)

    def project_kv(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Only k (H, n, dqk) and v (H, n, dv): in the last layer, prefix KV needs nothing else."""
        heads, dv, dqk = self.shape
        normed = self._normed(x)
        v_columns = slice(heads * dv, 2 * heads * dv)
        k_columns = slice(2 * heads * dv + heads * dqk, None)
        keys = torch.addmm(self.uvqk_bias[k_columns], normed, self.uvqk_weight[:, k_columns])
        values = torch.addmm(self.uvqk_bias[v_columns], normed, self.uvqk_weight[:, v_columns])
        return keys.view(-1, heads, dqk).transpose(0, 1), values.view(-1, heads, dv).transpose(0, 1)

    def split(self, uvqk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views q (n, H, dqk), k (n, H, dqk), v (n, H, dv) of the result of `project`."""
        heads, dv, dqk = self.shape
        q_start, k_start = 2 * heads * dv, 2 * heads * dv + heads * dqk
        q, k, v = uvqk[:, q_start:k_start], uvqk[:, k_start:], uvqk[:, heads * dv : q_start]
        return q.view(-1, heads, dqk), k.view(-1, heads, dqk), v.view(-1, heads, dv)

    def finish(self, x: torch.Tensor, workspace: Workspace) -> torch.Tensor:
        """The layer's output (n, D), from its input x and the workspace, which holds o and the result of `project`."""
        heads, dv, _ = self.shape
        width = heads * dv
        uvqk, gates = workspace.uvqk, workspace.gates
        u, o, gated = gates[:, :width], gates[:, width : 2 * width], gates[:, 2 * width :]
        torch.ops.aten.silu.out(uvqk[:, :width], out=u)
        if self.group_norm:
            normed = functional.group_norm(
                o.reshape(-1, heads, dv), heads, self.output_norm_weight, self.output_norm_bias, NORM_EPS
            ).view(-1, width)
        else:
            normed = functional.layer_norm(o, (width,), self.output_norm_weight, self.output_norm_bias, NORM_EPS)
        torch.mul(u, normed, out=gated)
        return torch.addmm(x, gates, self.output_weight)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.input_norm_weight, self.input_norm_bias, NORM_EPS)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


@dataclass(frozen=True)
class RankingRows:
    """The rows of one ranking in a batch: `suffix` behaviours behind kv.length, then `candidates`.

    times: of the suffix's behaviours, int64 (suffix,) on the host, as `kv.times`; None: the model compares no times.
    scale_tokens: N of this ranking; 0: the stack's.
    """

    kv: KVRegion
    suffix: int
    candidates: int
    times: torch.Tensor | None = None
    scale_tokens: int = 0
