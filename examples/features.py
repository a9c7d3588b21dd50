"""A model that reads feature columns, its schema, and a client that announces and ranks with them.

    relaygr model check examples.features:make --set model.path=.

and, in three terminals of the clone, each after `. .venv/bin/activate`:

    relaygr broker
    relaygr topics apply && relaygr up --set model.path=. --set model.factory=examples.features:make --profile cpu
    python -m examples.features

The model is one attention layer with random weights: it shows where each column is read, and ranks as chance does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream import FeatureColumn, FeatureSchema, KVLayout, KVRegion, RelayClient, ScoreInput, Tokens, settings
from relaygr_stream.models.api import digest, version_of

WIDTH: Final = 16
ITEMS: Final = 1000
AGES: Final = 128

#: What the model reads, and what senders must send. In a service of its own it is the list `features` of a JSON file.
SCHEMA: Final = FeatureSchema(
    [
        FeatureColumn(name="age", of="user", dtype="int32"),
        FeatureColumn(name="dwell_s", of="behaviour", dtype="float32"),
        FeatureColumn(name="price", of="candidate", dtype="float32"),
        FeatureColumn(name="affinity", of="cross", dtype="float32", width=2),  # candidate × user
    ]
)
SHAPES: Final = {
    "items": (ITEMS, WIDTH),
    "ages": (AGES, WIDTH),
    "dwell_s": (1, WIDTH),
    "price": (1, WIDTH),
    "affinity": (2, WIDTH),
    "to_value": (WIDTH, WIDTH),
}


class FeatureModel:
    """One attention layer over items and their columns. The user is the first token, as every sequence has it."""

    incremental = True
    note = "random weights, seed 7"
    tasks = ("click",)
    features = SCHEMA

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(7)
        weights = {name: torch.randn(*shape, generator=random) for name, shape in SHAPES.items()}
        self.layout = KVLayout(layers=1, heads=1, dqk=WIDTH, dv=WIDTH, dtype=dtype)
        self.version = version_of("features-example", digest({}, weights), dtype, SCHEMA)
        self._weights = {name: value.to(device, dtype) for name, value in weights.items()}

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        """Append the tokens' K and V."""
        stop = kv.length + len(tokens)
        for part, new in zip(kv.layer(0), self._keys_values(tokens), strict=True):
            part[0, kv.length : stop] = new
        kv.length = stop

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        """Scores of each ranking, float32 (m_i, 1)."""
        return [self._score(one) for one in batch]

    def _score(self, one: ScoreInput) -> torch.Tensor:
        prefix = (part[0, : one.kv.length] for part in one.kv.layer(0))
        keys, values = (torch.cat(parts) for parts in zip(prefix, self._keys_values(one.suffix), strict=True))
        queries = self._items(one.candidates)
        for name in ("price", "affinity"):  # of the candidates, so they touch no prefix KV
            queries = queries + self._numbers(name, one.features[name])
        attention = torch.softmax(queries @ keys.T / WIDTH**0.5, dim=1)
        return (queries * (attention @ values)).sum(1, keepdim=True).float()

    def _keys_values(self, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        context = tokens.context  # 1 if the first token is the user
        behaviours = tokens.slice(context, len(tokens))
        rows = self._items(behaviours.array[0])
        rows = rows + self._numbers("dwell_s", behaviours.features("behaviour", SCHEMA)["dwell_s"])
        if context:
            (age,) = tokens.slice(0, 1).features("user", SCHEMA)["age"]
            rows = torch.cat((self._weights["ages"][torch.as_tensor(age % AGES)], rows))
        return rows, rows @ self._weights["to_value"]

    def _items(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        return self._weights["items"][torch.as_tensor(ids % ITEMS)]

    def _numbers(self, name: str, values: npt.NDArray[np.float32]) -> torch.Tensor:
        weight = self._weights[name]
        return torch.as_tensor(values).to(weight) @ weight


def make(model: settings.Model, device: torch.device, dtype: torch.dtype) -> FeatureModel:  # noqa: ARG001
    """The factory: `model.factory = "examples.features:make"`."""
    return FeatureModel(device, dtype)


async def main() -> None:
    """Announce a user's request with features, rank five candidates with theirs, and once more in full."""
    count, candidates = 400, np.array([3, 141, 592, 653, 589])
    items, actions = np.arange(count) * 37 % ITEMS, np.ones(count, int)
    times = int(time.time() * 1000) - 60_000 * np.arange(count, 0, -1)  # one a minute, oldest first
    dwell = np.arange(count) % 7 / 7
    history, recent = (items[:-5], actions[:-5], times[:-5]), (items[-5:], actions[-5:], times[-5:])
    known: dict[str, npt.ArrayLike] = {"age": 31, "dwell_s": dwell[:-5]}
    late: dict[str, npt.ArrayLike] = {
        "dwell_s": dwell[-5:],
        "price": [0.1, 0.5, 0.3, 0.9, 0.2],
        "affinity": np.eye(5, 2),
    }
    async with (
        RelayClient(features=SCHEMA) as relay,
        relay.request("user-17", history, candidates=5, features=known) as request,  # announced on entry
    ):
        await asyncio.sleep(0.1)  # your retrieval: meanwhile the worker infers the history
        ranking = await request.rank(candidates, suffix=recent, features=late, timeout=10)
        full = await request.rank(candidates, suffix=recent, features=late, timeout=10, mode="full")
    print("prefix KV found:", ranking.outcome)
    print("best three:", *ranking.top(3))
    print("as full inference:", bool(np.allclose(ranking.scores, full.scores, rtol=1e-5, atol=1e-5)))


if __name__ == "__main__":
    asyncio.run(main())
