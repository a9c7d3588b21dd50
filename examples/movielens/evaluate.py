"""Leave-one-out over the whole catalogue: where does the model rank a user's next item?

As gSASRec-pytorch evaluates: every item that occurs in the file is a candidate, items of the user's history are not
ranked, HR@10 and NDCG@10 are means over users. Scores come from the served model's own two operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from examples.movielens.data import History, Ints
from relaygr_stream.models.api import KVRegion, RankingModel, ScoreInput, Tokens
from relaygr_stream.wire.messages import Behaviours

Floats = npt.NDArray[np.float64]

#: `held_out` of `split`: which of a user's last behaviours is the target.
TEST: Final = 1
VALIDATION: Final = 2


class Quality(NamedTuple):
    """Means over users."""

    hr: float
    ndcg: float

    def __str__(self) -> str:
        return f"HR@10 {self.hr:.4f}, NDCG@10 {self.ndcg:.4f}"


def quality(ranks: Ints, at: int = 10) -> Quality:
    """HR and NDCG at `at` of ranks (users,), 0 for the best."""
    return Quality(float((ranks < at).mean()), float(ndcg(ranks, at).mean()))


def ndcg(ranks: Ints, at: int = 10) -> Floats:
    """NDCG of one relevant item per user, (users,): 1 / log2(rank + 2), and 0 from rank `at` on."""
    return np.where(ranks < at, 1 / np.log2(ranks + 2.0), 0.0)


def rank_of(scores: npt.NDArray[np.float32], target: int, seen: Ints) -> int:
    """How many items that are not in `seen` score at least as high as `target`; scores (items,).

    A tie counts against the model, so one that scores everything alike ranks last.
    """
    better = scores >= scores[target]
    better[seen] = False
    better[target] = False
    return int(better.sum())


def split(user: History, held_out: int, longest: int) -> tuple[History, int, Ints]:
    """(the last `longest` behaviours before the target, the target, all items before it).

    held_out: TEST: the last behaviour is the target; VALIDATION: the one before it.
    """
    stop = len(user) - held_out
    return user.slice(max(0, stop - longest), stop), int(user.items[stop]), user.items[:stop]


def behaviours_of(history: History) -> Behaviours:
    """The history as it travels."""
    return Behaviours.of(history.items, history.actions, history.times)


def scores_of(model: RankingModel, history: History, candidates: Ints, region: KVRegion) -> npt.NDArray[np.float32]:
    """Full inference: the first task's scores (m,). `region` is overwritten."""
    region.length = 0
    model.prefill(region, Tokens.of(behaviours_of(history)))
    scores = model.score([ScoreInput(region, Tokens(np.zeros((3, 0), np.int64)), candidates)])[0]
    return np.asarray(scores[:, 0].cpu().numpy())


def evaluate(model: RankingModel, users: Sequence[History], items: int, longest: int, held_out: int) -> Ints:
    """The rank (users,) of each user's target among all `items`, behind the last `longest` behaviours before it."""
    candidates = np.arange(items)
    region = empty_region(model, longest)
    ranks = np.zeros(len(users), np.int64)
    with torch.no_grad():
        for index, user in enumerate(users):
            history, target, seen = split(user, held_out, longest)
            ranks[index] = rank_of(scores_of(model, history, candidates, region), target, seen)
    return ranks


def empty_region(model: RankingModel, tokens: int) -> KVRegion:
    """Memory for the prefix KV of one user."""
    layout = model.layout
    return KVRegion(layout, torch.zeros(tokens * layout.elements_per_token, dtype=layout.dtype), tokens)


# What length buys.


class Gain(NamedTuple):
    """A mean difference, and a 95 % interval of it."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def paired_gain(longer: Floats, shorter: Floats, resamples: int = 2000, seed: int = 0) -> Gain:
    """The mean of longer − shorter, (users,) each, with a percentile interval from resampled users (bootstrap).

    Paired: both are of the same users, so that differences between users do not widen the interval.
    """
    difference = longer - shorter
    draw = np.random.default_rng(seed)
    means = [difference[draw.integers(0, len(difference), len(difference))].mean() for _ in range(resamples)]
    low, high = np.percentile(means, [2.5, 97.5])
    return Gain(float(difference.mean()), float(low), float(high))
