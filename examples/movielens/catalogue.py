"""Ranks the whole catalogue at every position, for the price of dot products: how training starts.

A candidate's token may ask each layer what it wants from the history. Training starts with a model whose candidates do
less, so that all of them share the work: in every layer but the last they attend to nothing and stay as they are, and
in the last one all ask for the same. A history's answer o and an item's gate u then meet in one sum,

    g(t, i) = a·u_i + c · (u_i ⊙ Norm(o_t))         a, c: one column of the last layer's W_o

and the head's LayerNorm and weights are an increasing function of g, the same for all items. So g ranks the items as
the served model's `score` does. This is no approximation: what is left out here is 0 in the weights. `restrict` makes
the model so, `hold` keeps it so after each step. The ranking loss (losses.py) then trains the last layer's queries and
all of its W_o as well: candidates ask for what they need, and g goes on as what proposes them.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from examples.movielens import forward
from relaygr_stream.models.hstu_model import HSTUModel
from relaygr_stream.models.stu import NORM_EPS

#: The element of a vector that says "a candidate", and the one that the last layer writes its answer to.
MARK: Final = -1
ANSWER: Final = 0
#: Added to what must not be: SiLU(-60) is 0 beside anything, whatever training adds to it.
UNSEEN: Final = -60.0
#: Initial column of W_o.
COLUMN_STD: Final = 0.02
#: Logits are SCALE · g. With two unit parts, the head's logit of a small g is HEAD_WEIGHT · √(D / 2) · g: the same.
SCALE: Final = 17.0


@torch.no_grad()
def restrict(model: HSTUModel) -> None:
    """Make an untrained model's candidates differ in the last layer's gate alone."""
    last = model.stack.stu_layers()[-1]
    heads, dv, dqk = last.shape
    last.uvqk_weight[:, 2 * heads * dv : 2 * heads * dv + heads * dqk] = 0
    last.uvqk_bias[2 * heads * dv : 2 * heads * dv + heads * dqk].normal_(0, 1)
    last.output_weight.zero_()
    gated = last.output_weight[2 * heads * dv :, ANSWER]
    gated.normal_(0, COLUMN_STD)
    model.head.weight.zero_()
    model.head.weight[ANSWER] = SCALE / math.sqrt(model.config.dim / 2)
    model.embedding.candidate.zero_().requires_grad_(False)
    model.embedding.candidate[MARK] = 1
    for name, value in model.named_parameters():
        if "norm_" in name:
            value.requires_grad_(False)  # 1 and 0: the matrices behind a norm can do what its weights do
    hold(model)


@torch.no_grad()
def hold(model: HSTUModel) -> None:
    """Set the weights again that keep candidates as `restrict` made them, after an optimiser's step."""
    table = model.embedding
    table.item[:, ANSWER] = 0
    _unmark(table.item)
    table.item.copy_(functional.normalize(table.item, dim=-1))
    for rows in (table.action, table.gap):
        _unmark(rows)
    *layers, last = model.stack.stu_layers()
    mark = math.sqrt(model.config.dim / 2)  # of a candidate, behind LayerNorm: its vector has two parts of norm 1
    for layer in layers:
        _unmark(layer.output_weight)
        heads, dv, dqk = layer.shape
        layer.uvqk_weight[MARK, : heads * dv] = UNSEEN / mark
        # One element of q and k: a candidate's query times every key is UNSEEN · √dqk there, a behaviour's is 0.
        q, k = layer.uvqk_weight[:, 2 * heads * dv :].view(-1, 2, heads, dqk).unbind(1)
        q[:, :, 0] = 0
        q[MARK] = 0
        k[:, :, 0] = 0
        share = math.sqrt(-UNSEEN * math.sqrt(dqk) / mark)
        q[MARK, :, 0] = -share
        bias = layer.uvqk_bias[2 * heads * dv :].view(2, heads, dqk)
        bias[0, :, 0], bias[1, :, 0] = 0, share
    assert last.relative_position is not None
    last.relative_position[0] = UNSEEN  # a candidate does not see itself: what it sees is the same for all


def _unmark(rows: Tensor) -> None:
    """Rows without a mark and with mean 0: LayerNorm then leaves the mark's element at 0."""
    rows[:, MARK] = 0
    rows[:, 1:MARK] -= rows[:, :MARK].sum(1, keepdim=True) / (rows.shape[1] - 2)


def histories(model: HSTUModel, keys: Tensor, values: Tensor, times: Tensor) -> Tensor:
    """SCALE · c ⊙ Norm(o) at every position that has a history, 1 … n - 1, (B, n - 1, H·dv).

    keys, values: those of the last layer (B, H, n, width per head). times: of the behaviours (B, n).
    """
    layer = model.stack.stu_layers()[-1]
    heads, dv, dqk = layer.shape
    positions = torch.arange(1, keys.shape[2])[None]
    query = layer.uvqk_bias[2 * heads * dv : 2 * heads * dv + heads * dqk].view(heads, dqk, 1)
    common = (keys @ query / math.sqrt(dqk)).transpose(2, 3)  # (B, H, 1, n): what all candidates ask
    weights = functional.silu(common + forward.bias(layer, positions, times)[:, None])
    o = (weights @ (values / model.config.scale_tokens)).transpose(1, 2).flatten(2)
    column = layer.output_weight[2 * heads * dv :, ANSWER]
    return functional.layer_norm(o, o.shape[-1:], eps=NORM_EPS) * (SCALE * column)


def gates(model: HSTUModel) -> tuple[Tensor, Tensor]:
    """Of every item u (items, H·dv) and SCALE · a·u (items,)."""
    layer, x = model.stack.stu_layers()[-1], model.embedding.item + model.embedding.candidate
    heads, dv, _ = layer.shape
    normed = functional.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
    u = functional.silu(normed @ layer.uvqk_weight[:, : heads * dv] + layer.uvqk_bias[: heads * dv])
    return u, SCALE * (u @ layer.output_weight[: heads * dv, ANSWER])
