"""What lies before and behind the layers of a DlrmHSTU: tokens from tables, and scores of candidates.

The formulas, for a history of n behaviours (0 is the oldest) and a query at time q, D the width:

    MLP(x) = LayerNorm(s(x·A1ᵀ + a1)·A2ᵀ + a2),  s(h) = h·σ(LayerNorm(h))
    behaviour = content(item) + additional(category) + action(rows of the action's bits, side by side)
    candidate = the same with one learned row in place of the bits
    user      = user row·W + b; 0·W + b under config.min_tokens tokens of history and candidates
    x         = √D·token + position row + time row
    score     = s((user_side ⊙ item_side)·B1ᵀ + b1)·B2ᵀ + b2
    user_side = LayerNorm([x behind the layers, cos and sin of hour and weekday]·Wᵀ + b)
    item_side = MLP([item, category])

Which rows of the tables a token has is computed on the host, so that it is the same on every device.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from relaygr_stream.models.api import ROWS, Tokens
from relaygr_stream.models.dlrm.config import CATEGORY, QUERY, TIME, USER, DlrmConfig
from relaygr_stream.models.embeddings import pad_rows
from relaygr_stream.models.mapped import ItemEmbedding, MappedTable
from relaygr_stream.wire.features import FeatureSchema

Ids = npt.NDArray[np.int64]

#: Rows of the host's table of tokens (6, n). The action of a user's token is 1 if its row of the table is used.
KIND, ITEM, CATEGORIES, ACTION, POSITION, AGE = range(6)
#: Kinds of tokens.
USER_TOKEN, BEHAVIOUR, CANDIDATE = range(3)
#: Rows of the position table: of the user's token, of candidates, and the first of behaviours.
USER_POSITION, CANDIDATE_POSITION, FIRST_POSITION = range(3)
EPS: Final = 1e-5
TRANSDUCER_EPS: Final = 1e-6
#: The reference's two π.
TWO_PI: Final = 2 * 3.14


class StatedQuery(NamedTuple):
    """What a prefix's request stated: its query time (Unix seconds), and its number of candidates."""

    query_time: int = 0
    candidates: int = 0


class SwishNorm(nn.Module):
    """s(h) = h·σ(LayerNorm(h))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        """(n, width) → (n, width)."""
        return h * torch.sigmoid(functional.layer_norm(h, h.shape[-1:], self.weight, self.bias, EPS))


def mlp(inputs: int, hidden: int, outputs: int, *, norm: bool = True) -> nn.Sequential:
    """The MLP of the formulas; without `norm` it ends before the last LayerNorm."""
    last = [nn.LayerNorm(outputs, eps=EPS)] if norm else []
    return nn.Sequential(nn.Linear(inputs, hidden), SwishNorm(hidden), nn.Linear(hidden, outputs), *last)


class DlrmEmbedding(ItemEmbedding):
    """Tables, and the vectors of tokens. An id outside its table has row id mod rows."""

    def __init__(self, config: DlrmConfig, mapped: MappedTable | None = None) -> None:
        super().__init__(mapped)
        self.config = config
        self.schema = FeatureSchema(config.features)
        dim, table, bits = config.dim, config.table_dim, len(config.action_weights)
        if mapped is None:
            self.item = nn.Parameter(torch.empty(config.items, table))
        self.category, self.user = (
            nn.Parameter(torch.empty(rows, table)) for rows in (config.categories, config.users)
        )
        self.user_weight = nn.Parameter(torch.empty(table, dim))
        self.user_bias = nn.Parameter(torch.empty(dim))
        self.action_rows = nn.Parameter(torch.empty(bits, config.action_dim))
        self.target_action = nn.Parameter(torch.empty(bits * config.action_dim))
        self.content = mlp(table, config.hidden, dim)
        self.additional = mlp(table, config.hidden, dim)
        self.action = mlp(bits * config.action_dim, config.hidden, dim)
        self.position = nn.Parameter(torch.empty(config.position_rows, dim))
        self.time = nn.Parameter(torch.empty(config.time_rows, dim))
        self.requires_grad_(False)

    # ---- on the host: which rows of the tables ----

    def token_rows(self, tokens: Tokens, first: int, history: int, stated: StatedQuery) -> Ids:
        """The host's table (6, n) of tokens at places first, first + 1, …; place 0 is the user's token.

        history: behaviours of the whole prefix.
        """
        config, context, count = self.config, tokens.context, len(tokens)
        behaviours = tokens.slice(context, count)
        items, actions, gaps = behaviours.array[:ROWS]
        columns = behaviours.features("behaviour", self.schema)
        rows = np.zeros((6, count), np.int64)
        if context:
            found = tokens.slice(0, 1).features("user", self.schema)
            used = not config.min_tokens or history + stated.candidates >= config.min_tokens
            user = int(found[USER.name][0, 0]) % config.users
            age = self._age_rows(np.array([stated.query_time])) if config.times == "query" else [0]
            rows[:, 0] = USER_TOKEN, user, 0, int(used), USER_POSITION, age[0]
        own = rows[:, context:]
        own[KIND] = BEHAVIOUR
        own[ITEM] = self._known_items(items)
        own[CATEGORIES] = columns[CATEGORY.name][:, 0] % config.categories
        own[ACTION] = actions
        own[POSITION] = self._position_rows(np.arange(first + context, first + count) - 1, history)
        if config.times == "query":
            own[AGE] = self._age_rows(stated.query_time - columns[TIME.name][:, 0])
        elif config.times == "gap":
            own[AGE] = self._age_rows(gaps / 1000)
        return rows

    def candidate_rows(self, items: Ids, categories: Ids, times: Ids, query_time: int) -> Ids:
        """The host's table (6, m) of candidates. times: of their own queries; query_time: the request's."""
        rows = np.zeros((6, len(items)), np.int64)
        rows[KIND] = CANDIDATE
        rows[ITEM] = self._known_items(items)
        rows[CATEGORIES] = categories % self.config.categories
        rows[POSITION] = CANDIDATE_POSITION
        if self.config.times == "query":
            rows[AGE] = self._age_rows(query_time - times)
        return rows

    def stated_in(self, tokens: Tokens) -> StatedQuery:
        """What the first token of a sequence states; what the model does not read is 0."""
        if not tokens.context:
            return StatedQuery()
        found = tokens.slice(0, 1).features("user", self.schema)
        query, count = (int(found[name][0, 0]) if name in found else 0 for name in (QUERY.name, "candidates"))
        return StatedQuery(query, max(0, count))

    def _known_items(self, ids: Ids) -> Ids:
        self.unknown_items += int(np.count_nonzero((ids < 0) | (ids >= self.config.items)))
        return ids % self.config.items

    def _position_rows(self, behaviours: Ids, history: int) -> Ids:
        match self.config.positions:
            case "end":
                places = history - 1 - behaviours
            case "start":
                places = behaviours
            case "none":
                places = np.zeros_like(behaviours)
        return np.clip(places + FIRST_POSITION, 0, self.config.position_rows - 1)

    def _age_rows(self, seconds: npt.NDArray[np.int64] | npt.NDArray[np.float64]) -> Ids:
        """Rows of the time table for ages in seconds, in float32 as in the reference."""
        ages = np.maximum(seconds.astype(np.float32), np.float32(1e-6)) / np.float32(self.config.time_bucket_s)
        return np.minimum(np.sqrt(ages).astype(np.int64), self.config.time_last_row)

    # ---- on the device ----

    def vectors(self, rows: Ids) -> torch.Tensor:
        """Tokens before position and time (n, D), from the host's table."""
        users = np.flatnonzero(rows[KIND] == USER_TOKEN)
        items = rows[ITEM].copy()
        items[users] = 0
        kinds, actions = self._to_device(rows[KIND]), self._to_device(rows[ACTION])
        weights = torch.tensor(self.config.action_weights, device=actions.device)
        bits = (actions[:, None] & weights) > 0
        blocks = (bits[:, :, None] * self.action_rows).flatten(1)
        blocks = torch.where((kinds == CANDIDATE)[:, None], self.target_action, blocks)
        x = self._through(self.content, self._items(items))
        x += self._through(self.additional, self.category[self._to_device(rows[CATEGORIES])])
        x += self._through(self.action, blocks)
        if len(users):
            places = self._to_device(users)
            found = self.user[self._to_device(rows[ITEM, users])] * actions[places, None].to(x.dtype)
            x[places] = torch.addmm(self.user_bias, found, self.user_weight)
        return x

    def encoded(self, vectors: torch.Tensor, rows: Ids) -> torch.Tensor:
        """Tokens with position and time (n, D)."""
        x = vectors * math.sqrt(self.config.dim)
        return x + self.position[self._to_device(rows[POSITION])] + self.time[self._to_device(rows[AGE])]

    def forward(self, rows: Ids) -> torch.Tensor:
        """The inputs of the first layer (n, D)."""
        return self.encoded(self.vectors(rows), rows)

    def items_of(self, rows: Ids) -> torch.Tensor:
        """[item, category] of candidates (m, 2·table_dim), in float32."""
        categories = self.category[self._to_device(rows[CATEGORIES])]
        return torch.cat([self._items(rows[ITEM]).float(), categories.float()], 1)

    def _items(self, ids: Ids) -> torch.Tensor:
        return self.item[self._to_device(ids)] if self.table is None else self.table.rows(ids)

    def _through(self, module: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = module(pad_rows(x))
        return found[: len(x)]

    def _to_device(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.position.device, non_blocking=True)


class DlrmHead(nn.Module):
    """The postprocessor of candidates and the multi-task head, in float32 for a stack of any type."""

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        self.periods = config.periods
        self.time = nn.Linear(config.dim + 2 * len(config.periods), config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=TRANSDUCER_EPS)
        self.item = mlp(2 * config.table_dim, config.item_hidden, config.dim)
        self.task = mlp(config.dim, config.head_hidden, len(config.tasks), norm=False)
        self.requires_grad_(False)

    def time_features(self, times: npt.NDArray[np.int64]) -> torch.Tensor:
        """cos and sin of each period (m, 2·periods), computed on the host: of hour, then of weekday."""
        seconds = torch.from_numpy(times).float()
        found = []
        for unit, per in self.periods:
            turns = torch.remainder(torch.div(seconds, float(unit), rounding_mode="floor"), float(per))
            angle = turns / float(per) * TWO_PI
            found += [angle.cos(), angle.sin()]
        return torch.stack(found, 1)

    def user_side(self, x: torch.Tensor, times: npt.NDArray[np.int64]) -> torch.Tensor:
        """(m, D), from the last layer's outputs and the candidates' query times."""
        features = self.time_features(times).to(x.device, non_blocking=True)
        found: torch.Tensor = self.norm(self.time(torch.cat([x.float(), features], 1)))
        return found

    def logits(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        """(m, tasks), from both sides."""
        found: torch.Tensor = self.task(user * item)
        return found
