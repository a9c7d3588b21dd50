"""How far the served float32 scores are from the same formulas in float64 (forward.py)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from examples.movielens import forward
from examples.movielens.data import History
from examples.movielens.evaluate import TEST, scores_of, split
from examples.movielens.train import padded
from relaygr_stream.models.api import KVRegion
from relaygr_stream.models.hstu_model import HSTUModel


@torch.no_grad()
def deviation_from_float64(model: HSTUModel, users: Sequence[History], longest: int) -> float:
    """The largest absolute deviation over all items' scores behind these users' histories, as logits."""
    exact = HSTUModel(model.config).double()
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    candidates, region, worst = np.arange(model.config.vocab), KVRegion.new(model.layout, longest), 0.0
    for user in users:
        history, _, _ = split(user, TEST, longest)
        batch = padded([history])
        kv = forward.behaviours(exact, batch)
        positions = torch.full((1, len(candidates)), len(history))
        out = forward.rows(exact, kv, positions, torch.from_numpy(candidates)[None], batch.times)
        truth = forward.logits(exact, out)[0]
        found = scores_of(model, history, candidates, region)
        worst = max(worst, float(np.abs(found - truth.numpy()).max()))
    return worst
