"""The recipe of a training run, and the model that it starts from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from relaygr_stream.models.hstu_model import HSTUConfig, HSTUModel

#: Standard deviation of the initial item and position rows. Layer norm makes the scale matter only beside the step
#: size: Adam's first steps move a row by about 2 % of it.
TABLE_STD: Final = 0.05
#: Initial bias of attention at a distance d: RECENT · exp(-d / RECENT_SPAN).
RECENT: Final = 3.0
RECENT_SPAN: Final = 8.0


@dataclass(frozen=True)
class Recipe:
    """All that decides a run beside the data. Lengths and windows in behaviours."""

    layers: int = 3
    dim: int = 64
    heads: int = 1
    scale_tokens: int = 32  # N of the attention: near the number of behaviours that matter, so that sums stay near 1
    longest: int = 1000  # longest window; positions behind it share a row
    window: int = 200  # most windows are at most so long
    long_share: float = 0.1  # share of windows that may be `longest` in the first epochs
    long_epochs: int = 8  # the last epochs, all of whose windows may be `longest`
    relative_positions: int = 1000  # distances with a bias of their own
    relative_times: int = 128  # buckets of times with a bias of their own, if the data has times
    catalogue: int = 1000  # items of the catalogue that a batch's softmax draws; all, if there are fewer
    ranking_epochs: int = 0  # the last epochs, with the ranking loss
    positions: int = 4  # positions per window with candidates
    negatives: int = 48  # sampled candidates per position
    batch_tokens: int = 4096  # behaviours in a batch
    epochs: int = 80
    learning_rate: float = 3e-3
    averaging: float = 0.01  # step of the moving average of the weights, which is the model that is kept
    weight_decay: float = 0.0
    dropout: float = 0.2
    validation_users: int = 400
    validate_every: int = 4  # epochs
    seed: int = 1

    def config(self, items: int, has_times: bool, actions: tuple[str, ...] = ()) -> HSTUConfig:
        """The served model's shape. actions: what the file calls them, by row."""
        width = self.dim // self.heads
        return HSTUConfig(
            layers=self.layers, dim=self.dim, heads=self.heads, dqk=width, dv=width, scale_tokens=self.scale_tokens,
            vocab=items, max_positions=self.longest + 1, tasks=("next",), relative_positions=self.relative_positions,
            relative_times=self.relative_times if has_times else 0, actions=actions,
        )  # fmt: skip


#: What --quick changes: training takes a minute of two cores on 100,000 ratings.
QUICK: Final[dict[str, Any]] = {
    "epochs": 15, "long_epochs": 5, "longest": 500, "batch_tokens": 2048, "validation_users": 300,
}  # fmt: skip


def new_model(recipe: Recipe, items: int, has_times: bool = False, actions: tuple[str, ...] = ()) -> HSTUModel:
    """A model to train, its weights drawn from the seed.

    With a bias on distances, position rows stay 0: where a behaviour stands matters by distance alone. Without, they
    start as sinusoids: "the behaviour before" is then one direction for every position, where independent rows would
    each have to learn it.
    """
    torch.manual_seed(recipe.seed)
    model = HSTUModel(recipe.config(items, has_times, actions))
    for name, value in model.named_parameters():
        if name.endswith("norm_weight"):
            value.fill_(1)
        elif name in ("embedding.item", "embedding.candidate"):
            value.normal_(0, TABLE_STD)
        elif name.endswith("relative_position"):
            value.copy_(RECENT * torch.exp(-torch.arange(len(value)) / RECENT_SPAN))
        elif name == "embedding.position" and recipe.relative_positions:
            value.zero_()
            continue
        elif name == "embedding.position":
            value.copy_(sinusoids(*value.shape) * (TABLE_STD * math.sqrt(2)))
        elif name.startswith("embedding.") or value.dim() == 1:
            value.zero_()  # actions, gaps and biases: rows that the data never names stay 0
        else:
            value.normal_(0, 1 / math.sqrt(value.shape[0]))
        value.requires_grad_(True)
    return model


def sinusoids(count: int, dim: int) -> Tensor:
    """Sines and cosines (count, dim) with wavelengths from 2π to 2π·10,000 positions (Vaswani et al. 2017)."""
    angles = torch.arange(count)[:, None] / 10_000 ** (torch.arange(0, dim, 2) / dim)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :dim]
