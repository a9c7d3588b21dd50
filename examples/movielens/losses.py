"""What training minimises, for windows of the users' histories: two estimates of one softmax.

The softmax is that of the next item over the whole catalogue. `catalogue_loss` is for candidates that share their
attention (catalogue.py) and takes every position, `ranking_loss` is for candidates as they are served and takes some.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor
from torch.nn import functional

from examples.movielens import catalogue, forward
from relaygr_stream.models.hstu_model import HSTUModel

if TYPE_CHECKING:
    from examples.movielens.recipe import Recipe

#: Share of proposals drawn uniformly, so that no item has an expected number near 0.
UNIFORM_SHARE: Final = 0.5


def losses(model: HSTUModel, batch: forward.Batch, recipe: Recipe, *, ranking: bool) -> dict[str, Tensor]:
    """Means of the catalogue's loss over all positions and, if asked for, of the ranking loss over some; in nats."""
    kv = forward.behaviours(model, batch, recipe.dropout)
    histories = functional.dropout(catalogue.histories(model, *kv[-1], batch.times), recipe.dropout)
    gates, bias = catalogue.gates(model)
    real = torch.arange(1, batch.items.shape[1]) < batch.lengths[:, None]
    found = {"catalogue": catalogue_loss(histories[real], batch.items[:, 1:][real], gates, bias, recipe.catalogue)}
    if ranking:
        # Positions of a window are drawn alike; a short window draws some twice. The first behaviour has no history.
        drawn = torch.rand(len(batch.items), recipe.positions) * (batch.lengths[:, None] - 1)
        before = drawn.long().clamp(max=batch.items.shape[1] - 2)
        with torch.no_grad():
            chosen = histories.gather(1, before[..., None].expand(-1, -1, histories.shape[-1]))
            likely = (chosen @ gates.T + bias).softmax(-1)
        found["ranking"] = ranking_loss(model, kv, batch, before + 1, likely, recipe)
    return found


def catalogue_loss(histories: Tensor, targets: Tensor, gates: Tensor, bias: Tensor, sample: int) -> Tensor:
    """The softmax of the targets (n,) over the catalogue, or over `sample` items of it; histories (n, width)."""
    if len(gates) <= sample:
        return functional.cross_entropy(torch.addmm(bias, histories, gates.T), targets)
    # One sample for all positions; an item that is drawn stands for all that are not.
    drawn = torch.randperm(len(gates))[:sample]
    others = torch.addmm(bias[drawn] + math.log(len(gates) / sample), histories, gates[drawn].T)
    place = torch.full((len(gates),), -1).scatter_(0, drawn, torch.arange(sample))[targets]
    rows = place.ge(0).nonzero()[:, 0]
    others[rows, place[rows]] = -math.inf  # the next item itself counts once
    own = (histories * gates[targets]).sum(-1) + bias[targets]
    return (torch.logaddexp(own, others.logsumexp(-1)) - own).mean()


def ranking_loss(
    model: HSTUModel, kv: list[forward.KV], batch: forward.Batch, positions: Tensor, likely: Tensor, recipe: Recipe
) -> Tensor:
    """The softmax over the logits of the next item and of sampled candidates at positions (B, p), as they are served.

    It estimates the softmax over the catalogue: a sampled candidate counts 1 / its expected number (Jean et al. 2015).
    likely (B, p, items): how the candidates are drawn, but for a uniform share.
    """
    proposal = (1 - UNIFORM_SHARE) * likely + UNIFORM_SHARE / likely.shape[-1]
    negatives = proposal.flatten(0, 1).multinomial(recipe.negatives, replacement=True).view(*positions.shape, -1)
    targets = batch.items.gather(1, positions)[..., None]
    candidates = torch.cat([targets, negatives], -1)  # (B, p, 1 + negatives)
    at = positions[..., None].expand_as(candidates).flatten(1)
    scores = forward.logits(model, forward.rows(model, kv, at, candidates.flatten(1), batch.times, recipe.dropout))
    scores = scores.view(candidates.shape)
    correction = -(recipe.negatives * proposal.gather(2, negatives)).log()
    correction = correction.masked_fill(negatives == targets, -math.inf)  # the next item itself counts once
    scores = torch.cat([scores[..., :1], scores[..., 1:] + correction], -1)
    return -scores.log_softmax(-1)[..., 0][batch.lengths > 1].mean()
