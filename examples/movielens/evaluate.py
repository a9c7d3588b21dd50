"""Leave-one-out over the whole catalogue: where does the model rank a user's next item?

As gSASRec and HSTU are evaluated: every item that occurs in the file is a candidate, items of the user's history are
not ranked, HR@10 and NDCG@10 are means over users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from examples.movielens.data import History, Ints
from relaygr_stream.models.api import KVRegion, RankingModel, ScoreInput, Tokens
from relaygr_stream.wire.messages import Behaviours

Floats = npt.NDArray[np.float64]


class Quality(NamedTuple):
    """Means over users."""

    hr: float
    ndcg: float


@dataclass(frozen=True)
class Ranks:
    """Each user's rank of the next item, 0 for the best, (users,)."""

    ranks: Ints

    def quality(self, at: int = 10) -> Quality:
        """HR and NDCG at `at`."""
        return Quality(float((self.ranks < at).mean()), float(ndcg(self.ranks, at).mean()))


def ndcg(ranks: Ints, at: int = 10) -> Floats:
    """NDCG@at of one relevant item per user: 1 / log2(rank + 2), 0 from `at` on."""
    return np.where(ranks < at, 1 / np.log2(ranks + 2.0), 0.0)


def rank_of(scores: npt.NDArray[np.float32], target: int, seen: Ints) -> int:
    """How many unseen items score at least as high as `target`; scores (items,). A tie counts against the model."""
    better = scores >= scores[target]
    better[seen] = False
    better[target] = False
    return int(better.sum())


def split(user: History, held_out: int, longest: int) -> tuple[History, int, Ints]:
    """(the last `longest` behaviours before the target, the target, all items before it).

    held_out: 1: the last behaviour is the target (test); 2: the one before (validation).
    """
    stop = len(user) - held_out
    return user.slice(max(0, stop - longest), stop), int(user.items[stop]), user.items[:stop]


def behaviours_of(history: History) -> Behaviours:
    """The history as the wire has it."""
    return Behaviours.of(history.items, history.actions, history.times)


def scores_of(model: RankingModel, history: History, candidates: Ints, region: KVRegion) -> npt.NDArray[np.float32]:
    """Full inference with the served model's two operations: (m,) scores of the first task."""
    region.length = 0
    model.prefill(region, Tokens.of(behaviours_of(history)))
    nothing = Tokens(np.zeros((3, 0), np.int64))
    scores = model.score([ScoreInput(region, nothing, candidates)])[0]
    return scores[:, 0].cpu().numpy()


def evaluate(model: RankingModel, users: Sequence[History], longest: int, *, held_out: int, items: int = 0) -> Ranks:
    """The rank of each user's target behind the last `longest` behaviours before it, among all `items`.

    items: 0: the model's vocabulary.
    """
    count = items or model.config.vocab  # type: ignore[attr-defined]
    candidates = np.arange(count)
    region = empty_region(model, longest)
    ranks = np.zeros(len(users), np.int64)
    with torch.no_grad():
        for index, user in enumerate(users):
            history, target, seen = split(user, held_out, longest)
            ranks[index] = rank_of(scores_of(model, history, candidates, region), target, seen)
    return Ranks(ranks)


def empty_region(model: RankingModel, tokens: int) -> KVRegion:
    """Memory for one user's prefix KV."""
    layout = model.layout
    return KVRegion(layout, torch.zeros(tokens * layout.elements_per_token, dtype=layout.dtype), tokens)
