"""How good predicted ratings are: AUC, normalised entropy, NDCG@10."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from examples.movielens.evaluate import Floats

Flags = npt.NDArray[np.bool_]

#: A rating that counts as liked.
LIKED: Final = 3.5
TOP: Final = 10


def auc(predicted: Floats, liked: Flags) -> float:
    """The chance that a liked candidate is predicted above one that is not; ties count half."""
    values, inverse, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    del values
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = int(liked.sum())
    return float((ranks[liked].sum() - positive * (positive + 1) / 2) / (positive * (len(liked) - positive)))


def entropies(predicted: Floats, liked: Flags) -> Floats:
    """Normalised entropy of each user (users,): mean cross entropy over the entropy of the mean rate of all."""
    p, rate = np.clip(predicted, 1e-6, 1 - 1e-6), liked.mean()
    cross = -np.where(liked, np.log(p), np.log(1 - p)).mean(1)
    return np.asarray(cross / -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)))


def ndcg(predicted: Floats, liked: Flags) -> Floats:
    """NDCG@10 (users,) of (users, candidates); 0 where a user likes none."""
    weights = 1 / np.log2(np.arange(TOP) + 2.0)
    order = np.argsort(-predicted, axis=1, kind="stable")[:, :TOP]
    ideal = (weights * (np.arange(TOP) < liked.sum(1)[:, None])).sum(1)
    return np.asarray((np.take_along_axis(liked, order, 1) * weights).sum(1) / np.maximum(ideal, weights[0]))
