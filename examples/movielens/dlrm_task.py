"""DLRMv3's task on a log of ratings: will a user like each of the next items? And its training, for any DlrmHSTU.

A request has a user's behaviours and the next ASKED ones as candidates, all asked at the time of the first. `logits`
is `DlrmHSTU.prefill` and `score` with gradients, for many requests at once: the model's own embedding and head around
the layers of forward.py. tests/unit/examples compares both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.dlrmv3.measures import LIKED, auc, entropies
from examples.movielens import forward
from examples.movielens.data import Histories, History, Ints
from examples.movielens.evaluate import behaviours_of
from examples.movielens.recipe import TABLE_STD, Recipe
from examples.movielens.training import Training, grouped
from relaygr_stream.models.api import KVRegion, ScoreInput, Tokens
from relaygr_stream.models.dlrm.config import DlrmConfig
from relaygr_stream.models.dlrm.embedding import SwishNorm
from relaygr_stream.models.dlrm.model import DlrmHSTU

Floats = npt.NDArray[np.float64]

#: Candidates of a request. A user's last ones are the test's, those before them validation's.
ASKED: Final = 10
#: Fewest behaviours of a user: a history, training's candidates, validation's and the test's, ASKED each.
FEWEST: Final = 4 * ASKED
#: An action's bits: a rating rounded down is 1 … 5 (0: none), as DLRMv3 has it.
BITS: Final = (1, 2, 4, 8, 16)


class Request(NamedTuple):
    """What a user did, and what is asked: items, actions (ratings as bits) and times of both; liked (ASKED,)."""

    user: int
    history: History
    asked: History
    liked: npt.NDArray[np.bool_]

    def tokens(self, model: DlrmHSTU) -> Tokens:
        """The prefix with the features that the model reads; there are no categories, so all have number 0."""
        count = len(self.history)
        values: dict[str, npt.ArrayLike] = {
            "user_id": [self.user], "query_time": [self.query_time], "candidates": [len(self.asked)],
            "uih_category_id": np.zeros(count, np.int32), "uih_timestamp": self.history.times // 1000,
        }  # fmt: skip
        read = {one.name for one in (*model.features.table("user"), *model.features.table("behaviour"))}
        packed = model.features.pack(
            {name: value for name, value in values.items() if name in read}, {"user": 1, "behaviour": count}
        )
        behaviours = msgspec.structs.replace(behaviours_of(self.history), columns=packed["behaviour"])
        return Tokens.from_behaviours(behaviours, schema=model.features, user=packed["user"])

    @property
    def query_time(self) -> int:
        """Seconds."""
        return int(self.asked.times[0]) // 1000

    def candidates(self) -> tuple[Ints, Ints]:
        """Categories and query times of the candidates, in seconds."""
        return np.zeros(len(self.asked), np.int64), np.full(len(self.asked), self.query_time)


class Batch(NamedTuple):
    """Requests side by side: the host's table of all tokens (6, n), tokens before each one's candidates, their times.

    liked (requests, ASKED).
    """

    rows: Ints
    known: Tensor
    times: Ints
    liked: Tensor


def batch_of(model: DlrmHSTU, requests: Sequence[Request]) -> Batch:
    """The rows that serving would look up for each request by itself."""
    table, rows, known = model.embedding, [], []
    for request in requests:
        tokens = request.tokens(model)
        stated = table.stated_in(tokens)
        rows.append(table.token_rows(tokens, 0, len(request.history), stated))
        rows.append(table.candidate_rows(request.asked.items, *request.candidates(), stated.query_time))
        known.append(len(tokens))
    times = np.concatenate([request.candidates()[1] for request in requests])
    liked = torch.from_numpy(np.stack([request.liked for request in requests])).float()
    return Batch(np.concatenate(rows, 1), torch.tensor(known)[:, None], times, liked)


def logits(model: DlrmHSTU, batch: Batch, dropout: float = 0.0) -> Tensor:
    """(requests, ASKED). The user and behaviours see what stands before them, a candidate all of these and itself."""
    known, count = batch.known, batch.liked.shape[1]
    places = torch.arange(int(known.max()) + count)
    real = places < known + count
    x = torch.zeros((*real.shape, model.config.dim))
    x[real] = functional.dropout(model.embedding(batch.rows), dropout)
    before = (places[None] <= places[:, None]) & (places < known)[:, None]
    added = torch.where(before | torch.eye(len(places), dtype=torch.bool), 0.0, forward.INVISIBLE)[:, None]
    scale = model.config.scale_tokens or (known + count)[..., None, None]
    for layer in model.stack.stu_layers():
        u, v, q, k = forward.project(layer, x)
        x = forward.finish(layer, x, u, forward.attend(q, k, v, added, scale), dropout)
    is_candidate = real & (places >= known)
    user = model.head.user_side(x[is_candidate], batch.times)
    item = model.head.item(model.embedding.items_of(batch.rows[:, is_candidate[real].numpy()]))
    return model.head.logits(user, item)[:, 0].view(batch.liked.shape)


def chances(model: DlrmHSTU, requests: Sequence[Request]) -> Floats:
    """(requests, ASKED): the chance that each candidate is liked, as it is served."""
    found, region = [], KVRegion.new(model.layout, 1 + max(len(one.history) for one in requests))
    for request in requests:
        region.length = 0
        model.prefill(region, request.tokens(model))
        categories, times = request.candidates()
        features = {"cand_category_id": categories[:, None], "cand_query_time": times[:, None]}
        none = Tokens.zeros(0, model.features)
        scores = model.score([ScoreInput(region, none, request.asked.items, features)])[0]
        found.append(torch.sigmoid(scores[:, 0]).double().numpy())
    return np.stack(found)


class Rated(NamedTuple):
    """Of all candidates of validation."""

    ne: float
    auc: float


class DlrmRun(Training[DlrmHSTU, Batch]):
    """Training of one form. Both forms see the same requests in the same order."""

    def __init__(self, data: Histories, recipe: Recipe, folder: Path, config: DlrmConfig) -> None:
        self.config = config
        self.ratings = np.array([float(name or 0) for name in data.actions])
        super().__init__(data, recipe, folder)
        self.users = [user for user in range(len(data.users)) if len(data.users[user]) >= FEWEST]

    def untrained(self) -> DlrmHSTU:
        """Tables nearly 0, matrices that keep a vector's length; torch's own for the rest."""
        torch.manual_seed(self.recipe.seed)
        model = DlrmHSTU(self.config)
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, SwishNorm):
                module.weight.fill_(1)
                module.bias.zero_()
        for name, value in [*model.stack.named_parameters(), *model.embedding.named_parameters(recurse=False)]:
            if value.dim() == 1 and "target_action" not in name:
                value.fill_(name.endswith("norm_weight"))
            else:
                value.normal_(0, 1 / value.shape[0] ** 0.5 if name.endswith("_weight") else TABLE_STD)
        return model.requires_grad_(True)

    def request(self, user: int, stop: int) -> Request:
        """The request before behaviour `stop` of the user."""
        known = self.data.users[user]
        history, asked = (
            known.slice(*bounds) for bounds in ((max(0, stop - self.recipe.longest), stop), (stop, stop + ASKED))
        )
        bits = (1 << self.ratings[history.actions].astype(np.int64)) >> 1
        history = History(history.user, history.items, bits, history.times)
        return Request(user, history, asked, self.liked(asked))

    def liked(self, behaviours: History) -> npt.NDArray[np.bool_]:
        """Which of them were rated LIKED or better."""
        return self.ratings[behaviours.actions] >= LIKED

    def last_requests(self, before_end: int) -> list[Request]:
        """One of each user: its candidates end `before_end` behaviours before the newest."""
        return [self.request(user, len(self.data.users[user]) - before_end - ASKED) for user in self.users]

    def batches(self, draw: np.random.Generator) -> Iterator[Batch]:
        """Some of each user's requests, `recipe.positions` at most."""
        requests = [self.request(user, stop) for user in self.users for stop in self.stops(user, draw)]
        lengths = [1 + len(one.history) + ASKED for one in requests]
        for group in grouped(lengths, self.recipe.batch_tokens, draw):
            yield batch_of(self.model, [requests[index] for index in group])

    def stops(self, user: int, draw: np.random.Generator) -> list[int]:
        """Before which behaviours the user is asked in an epoch: no candidate twice, none of validation or test."""
        first = int(draw.integers(ASKED, 2 * ASKED))
        stops = np.arange(first, len(self.data.users[user]) - 3 * ASKED + 1, ASKED)
        return [int(stop) for stop in draw.permutation(stops)[: self.recipe.positions]]

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Cross entropy of the candidates' ratings."""
        found = logits(self.model, batch, self.recipe.dropout)
        return {"rating": functional.binary_cross_entropy_with_logits(found, batch.liked)}

    def quality(self, model: DlrmHSTU) -> Rated:
        """The requests before the test's, as served."""
        requests = self.last_requests(ASKED)
        found, liked = chances(model, requests), np.stack([one.liked for one in requests])
        return Rated(float(entropies(found, liked).mean()), auc(found.ravel(), liked.ravel()))
