"""SASRec as RecBole and gSASRec-pytorch define it, behind the model protocol.

The model knows the newest `window` behaviours. x (n, D) are their item rows plus position rows:

    recbole   x = LN(x); a layer: y = LN₁(softmax(q·kᵀ / √d)·v·W_o + b_o + x), x = LN₂(f(y) + y); q, k, v of x
              the oldest behaviour known has position 0
    gsasrec   a layer: r = LN₁(x), y = LN₂(softmax(q·kᵀ / √d)·v + r), x = f(y) + y; q of r, k and v of x; in the end
              x = LN(x); the newest behaviour has position window − 1

with f(y) = activation(y·W_up + b)·W_down + b, and each row seeing itself and earlier rows. A candidate's score is the
product of the newest behaviour's x and the candidate's row of the item table, or of a second one (`own_output`).

So a ranking without a suffix is one product, with the newest x in the region's state. The state has the rows of the
window, too: once positions move, which they do behind `window` behaviours of recbole and with every behaviour of
gsasrec, all K and V change, and the window is computed anew from its rows. Until then K and V of recbole's behaviours
are kept in the region, and new ones are computed against them. Scores are those of full inference in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.built_in import BuiltInModel
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.mapped import ItemEmbedding, MappedTable
from relaygr_stream.models.sasrec.config import ROW_BYTES, Activation, SasRecConfig
from relaygr_stream.models.softmax import attend_to_history
from relaygr_stream.settings import Kernels

ACTIVATIONS: Final[dict[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": functional.gelu, "relu": torch.relu, "swish": functional.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
}  # fmt: skip

Ids = npt.NDArray[np.int64]
#: (layer, K (H, n, d), V (H, n, d) of new rows) → K and V of all that they see, themselves last.
Seen = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class SasRecEmbedding(ItemEmbedding):
    """The tables of items and positions."""

    def __init__(self, config: SasRecConfig, table: MappedTable | None) -> None:
        super().__init__(table)
        self.config = config
        if table is None:
            self.item = nn.Parameter(torch.empty(config.items, config.dim))
        if config.own_output:
            self.output = nn.Parameter(torch.empty(config.items, config.dim))
        self.position = nn.Parameter(torch.empty(config.window, config.dim))

    def rows(self, ids: Ids) -> torch.Tensor:
        """Rows (n,) of the item table, int64 on the device. An id without one has row 1 + (id − 1) mod (items − 1)."""
        known = self.config.items - 1
        self.unknown_items += int(np.count_nonzero((ids < 1) | (ids > known)))
        return torch.from_numpy((ids - 1) % known + 1).to(self.position.device, non_blocking=True)

    def behaviours(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """x (n, D) of behaviours at positions first, first + 1, …"""
        return self._items(rows) + self.position[first : first + len(rows)]

    def outputs(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows (m, D) that a candidate's score is a product with."""
        return self.output.index_select(0, rows) if self.config.own_output else self._items(rows)

    def _items(self, rows: torch.Tensor) -> torch.Tensor:
        return self.item.index_select(0, rows) if self.table is None else self.table.rows(rows.cpu().numpy())


class SasRecLayer(nn.Module):
    """The weights of one layer and all its steps but attention."""

    def __init__(self, config: SasRecConfig) -> None:
        super().__init__()
        dim, eps = config.dim, config.norm_eps
        self.heads = config.heads
        self.norm_first = not config.grows  # gsasrec
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        if not self.norm_first:
            self.output = nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=eps), nn.LayerNorm(dim, eps=eps)
        self.up, self.down = nn.Linear(dim, config.hidden), nn.Linear(config.hidden, dim)
        self.activation = ACTIVATIONS[config.activation]

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x (n, D) → what is added to the attention's result (n, D), then q, k, v (H, n, d)."""
        beside = self.norm1(x) if self.norm_first else x
        return beside, self._heads(self.query(beside)), self._heads(self.key(x)), self._heads(self.value(x))

    def finish(self, beside: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output (n, D), from the attention's result (H, n, d)."""
        y = attended.transpose(0, 1).flatten(1)
        y = self.norm2(y + beside) if self.norm_first else self.norm1(self.output(y) + beside)
        y = y + self.down(self.activation(self.up(y)))
        return y if self.norm_first else self.norm2(y)  # type: ignore[no-any-return]  # a module's call is untyped

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), self.heads, -1).transpose(0, 1)


class SasRec(BuiltInModel):
    """SASRec as a `RankingModel`."""

    incremental = True  # a state grows, and K and V that it has no use for any more stay as they were
    kernels = "torch"
    config: SasRecConfig
    embedding: SasRecEmbedding

    def __init__(self, config: SasRecConfig, table: MappedTable | None = None) -> None:
        super().__init__(config, SasRecEmbedding(config, table))
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps)
        self.layers = nn.ModuleList(SasRecLayer(config) for _ in range(config.layers))
        self.requires_grad_(False)

    def place(self, device: torch.device, dtype: torch.dtype, kernels: Kernels = "auto") -> Self:
        """As of all families. Raises ModelError for kernels other than torch operators."""
        if kernels not in ("auto", "torch"):
            raise ModelError(
                f'worker.kernels = "{kernels}", but only torch operators compute a SASRec; set it to "auto"'
            )
        self._place_embedding(device, dtype)
        return self.to(device=device, dtype=dtype)

    @torch.no_grad()
    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        """Append `tokens`. Raises ValueError if they do not fit."""
        window, start, stop = self.config.window, kv.length, kv.length + len(tokens)
        if stop > kv.capacity:
            raise ValueError(f"{len(tokens)} tokens behind {start} do not fit into a region of {kv.capacity}")
        if start == stop:
            return
        rows = self.embedding.rows(tokens.array[0])
        known = torch.cat((self._known_rows(kv), rows))[-window:]
        if self.config.grows and start < window:
            inside = rows[: window - start]
            newest = self._behind(inside, start, lambda index, k, v: _written(kv, index, start, k, v))
        if not self.config.grows or stop > window:
            for index in range(kv.layout.layers):  # K and V behind the window are read by nothing
                for part in kv.layer(index):
                    part[:, max(start, window) : stop] = 0
            newest = self._of_window(known)
        held = known.to(torch.int32).view(kv.layout.dtype)
        kv.state[: len(held)].copy_(held)
        kv.state[-self.config.dim :].copy_(newest)
        kv.length = stop

    @torch.no_grad()
    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        """The products of each ranking, float32 (m_i, 1). Without any behaviour, x is 0 and recbole's scores are 0."""
        return [self._score(one) for one in batch]

    def _score(self, one: ScoreInput) -> torch.Tensor:
        length, suffix = one.kv.length, self.embedding.rows(one.suffix.array[0])
        if not len(suffix):
            newest = one.kv.state[-self.config.dim :] if length else self._of_window(suffix)
        elif self.config.grows and length + len(suffix) <= self.config.window:
            newest = self._behind(suffix, length, lambda index, k, v: _joined(one.kv, index, length, k, v))
        else:
            newest = self._of_window(torch.cat((self._known_rows(one.kv), suffix))[-self.config.window :])
        outputs = self.embedding.outputs(self.embedding.rows(one.candidates))
        return (outputs.float() @ newest.float())[:, None]

    def _of_window(self, rows: torch.Tensor) -> torch.Tensor:
        """The newest x (D,) of a window's rows (n,), all computed anew."""
        if not len(rows):
            nothing = self.embedding.position.new_zeros(1, self.config.dim)
            return nothing[0] if self.config.grows else self.norm(nothing)[0]
        first = 0 if self.config.grows else self.config.window - len(rows)
        return self._behind(rows, first, lambda _, k, v: (k, v))

    def _behind(self, rows: torch.Tensor, first: int, seen: Seen) -> torch.Tensor:
        """x (D,) of the last of the behaviours in `rows`, whose positions are first, first + 1, …"""
        x = self.embedding.behaviours(rows, first)
        x = self.norm(x) if self.config.grows else x
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, SasRecLayer)
            beside, q, k, v = layer.project(x)
            keys, values = seen(index, k, v)
            if index + 1 == len(self.layers):  # nothing reads the last layer's other rows
                beside, q = beside[-1:], q[:, -1:]
            x = layer.finish(beside, attend_to_history(q, keys, values))
        return x[0] if self.config.grows else self.norm(x)[0]

    def _known_rows(self, kv: KVRegion) -> torch.Tensor:
        """The rows (n,) of the newest behaviours of the region, int64, at most `window` of them."""
        count = min(kv.length, self.config.window)
        held = kv.state[: count * ROW_BYTES // kv.layout.dtype.itemsize].clone().view(torch.int32)
        return held.to(torch.int64).clamp_(0, self.config.items - 1)  # whatever stood there: an index must exist


def _written(
    kv: KVRegion, index: int, start: int, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a region's first `start` tokens and of new ones, which are written behind them."""
    stop = start + k.shape[1]
    keys, values = kv.layer(index)
    keys[:, start:stop], values[:, start:stop] = k, v
    return keys[:, :stop], values[:, :stop]


def _joined(
    kv: KVRegion, index: int, length: int, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_written`, without writing to the region."""
    keys, values = kv.layer(index)
    return torch.cat((keys[:, :length], k), 1), torch.cat((values[:, :length], v), 1)
