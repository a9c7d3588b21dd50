"""The softmax transformer as its formulas say it: float64, one dense mask over all rows, no caching."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from relaygr_stream.models.api import Tokens
from relaygr_stream.models.transformer import Transformer, TransformerConfig


def naive_scores(
    model: Transformer, config: TransformerConfig, history: Tokens, candidates: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Scores (m, tasks): behaviours see earlier ones and themselves, candidates all behaviours and themselves."""
    visible = visible_in_order(len(history), len(candidates))
    x = model.embedding.rankings([(history, 0, candidates)])

    def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return softmax_attention(q, k, v, visible)

    return naive_logits(model, config, x, len(history), attended)


def visible_in_order(n: int, m: int) -> torch.Tensor:
    """Which of n behaviours and then m candidates a row (n + m, n + m) sees."""
    visible = torch.eye(n + m, dtype=torch.bool)
    visible[:n, :n] |= torch.ones(n, n, dtype=torch.bool).tril()
    visible[n:, :n] = True
    return visible


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """One head: rows (n, dqk), (n, dqk), (n, dv) → (n, dv)."""
    scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~visible, -math.inf)
    return scores.exp() / scores.exp().sum(1, keepdim=True) @ v


def naive_logits(
    model: Transformer,
    config: TransformerConfig,
    x: torch.Tensor,
    first: int,
    attend: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Scores of the rows of x from `first` on. attend(q, k, v): the outputs of the next head, for all rows."""
    x = x.double()
    weights = {name: value.double() for name, value in model.state_dict().items()}
    for index in range(config.layers):
        w = {name.split(".")[2]: value for name, value in weights.items() if name.startswith(f"layers.{index}.")}
        qkv = _normed(x, w["attention_norm_weight"], w["attention_norm_bias"]) @ w["qkv_weight"] + w["qkv_bias"]
        q, k, v = qkv.split([config.heads * width for width in (config.dqk, config.dqk, config.dv)], dim=1)
        attended = []
        for head in range(config.heads):
            qk, of_v = (slice(head * width, (head + 1) * width) for width in (config.dqk, config.dv))
            attended.append(attend(q[:, qk], k[:, qk], v[:, of_v]))
        x = x + torch.cat(attended, 1) @ w["output_weight"]
        up = _normed(x, w["mlp_norm_weight"], w["mlp_norm_bias"]) @ w["up_weight"] + w["up_bias"]
        gelu = up * (1 + torch.erf(up / math.sqrt(2))) / 2
        x = x + gelu @ w["down_weight"] + w["down_bias"]
    out = _normed(x[first:], weights["head.norm_weight"], weights["head.norm_bias"])
    return torch.addmm(weights["head.bias"], out, weights["head.weight"])


def _normed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)
