"""The HSTU stack (DESIGN §8) on tokens that are embedded already: append to prefix KV, score rows against it.

Its layers: stu.py. N is a constant of the model, never a length: prefix KV would mean something else in a longer
sequence. Knows nothing of items, embeddings or tasks.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import KVRegion
from relaygr_stream.models.attention import ANY_ROWS, Block, Visibility, attend, attend_to_self, block_rows
from relaygr_stream.models.embeddings import compiles_per_shape, with_usual_rows
from relaygr_stream.models.native.layers import NativeLayers, native_layers
from relaygr_stream.models.stu import NORM_EPS, RankingRows, Room, StackConfig, STULayer

if TYPE_CHECKING:
    from relaygr_stream.models.embeddings import TaskHead, TokenEmbedding
    from relaygr_stream.models.native.ends import NativeEnds


class FusedLayers(Protocol):
    """The layers with attention of another kind (kernels/fused.py). Checks, and kv.length, are the stack's business."""

    def extend(self, layers: Sequence[STULayer], kv: KVRegion, x: torch.Tensor, outputs: bool) -> torch.Tensor:
        """Write the K/V of x behind kv.length; returns the last layer's outputs if they are wanted."""
        ...

    def score(self, layers: Sequence[STULayer], batch: Sequence[RankingRows], x: torch.Tensor) -> torch.Tensor:
        """As `HSTUStack.score`."""
        ...

    def table(self, batch: Sequence[RankingRows]) -> npt.NDArray[np.int64]:
        """What the launches for a batch are told, to be given to `run` on the device."""
        ...

    def run(self, layers: Sequence[STULayer], x: torch.Tensor, tiles: torch.Tensor, *, split: bool) -> torch.Tensor:
        """As `score`, by a table: with split, the same launches for any two tables of a size."""
        ...


class HSTUStack(nn.Module):
    """The layers. Every call is asynchronous on an accelerator and records no gradients."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        self.fused: FusedLayers | None = None  # None: attention.py
        self.layers = nn.ModuleList(STULayer(config) for _ in range(config.layers))
        self._native: NativeLayers | None = None
        self._visibility = Visibility(config.contextual_seq_len, config.max_attn_len)
        self._scale = 1 / math.sqrt(config.dqk)
        self._weight = 1 / config.scale_tokens

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Move the weights and convert them; from here on they are what `native` has of them, if it has them."""
        self.to(device=device, dtype=dtype)
        self._native = native_layers(self.config, self.stu_layers(), NORM_EPS)

    @property
    def native(self) -> NativeLayers | None:
        """The layers in C, where they are the faster ones now."""
        return self._native if self._native and self._native.serve() else None

    def native_ends(self, embedding: TokenEmbedding, head: TaskHead) -> NativeEnds | None:
        """What lies before and behind the layers, where they have been compiled."""
        return self._native.ends(embedding, head, NORM_EPS) if self._native else None

    @property
    def incremental(self) -> bool:
        """Whether prefix KV stays valid when behaviours follow: not if early tokens see the whole history."""
        return self.config.contextual_seq_len == 0

    def append(self, kv: KVRegion, x: torch.Tensor) -> None:
        """Append the K/V of embedded behaviours x (n, D) behind kv.length, and advance kv.length by n.

        The rows already in `kv` are read in place. Raises ModelError if a model that is not incremental is to extend
        a region that holds tokens, ValueError if n tokens do not fit. kv.length is unchanged if anything fails.
        """
        _run(self.append_in_steps(kv, x))

    def append_in_steps(self, kv: KVRegion, x: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        """As `append`, a layer at a time: kv.length moves with the last one. Between two of them anything may be done
        with this model but to write behind kv.length.
        """
        return self._extension(kv, x, outputs=False)

    def extend(self, kv: KVRegion, x: torch.Tensor) -> torch.Tensor:
        """As `append`, and returns the last layer's outputs (n, D), which the prefix KV does not need."""
        return _run(self._extension(kv, x, outputs=True))

    @torch.no_grad()
    def _extension(self, kv: KVRegion, x: torch.Tensor, outputs: bool) -> Generator[None, None, torch.Tensor]:
        start, stop = kv.length, kv.length + len(x)
        if start and not self.incremental:
            raise ModelError(
                f"a model with contextual_seq_len = {self.config.contextual_seq_len} takes its whole history in one "
                f"call, but the region holds {start} tokens already"
            )
        if stop > kv.capacity:
            raise ValueError(f"{len(x)} tokens behind {start} do not fit into a region of {kv.capacity}")
        if start == stop:
            return x
        if self.fused is not None:
            x = self.fused.extend(self.stu_layers(), kv, x, outputs)
            kv.length = stop
            return x
        count, native = len(x), self.native
        rows = ANY_ROWS if native else block_rows(x.device, x.dtype, self.config.heads, stop)
        blocks = self._visibility.blocks(start, count, 0, stop, stop, rows)
        if native:
            x = yield from native.extension(kv, x, blocks, outputs)
            kv.length = stop
            return x
        x = with_usual_rows(x)
        room = Room(self.config, x, count)
        for index, layer in enumerate(self.stu_layers()):
            region_keys, region_values = kv.layer(index)
            if index == len(self.layers) - 1 and not outputs:
                keys, values = layer.project_kv(x)
                region_keys[:, start:stop] = keys[:, :count]
                region_values[:, start:stop] = values[:, :count]
                break
            q, k, v = (part[:count] for part in layer.split(layer.project(x, room)))
            region_keys[:, start:stop] = k.transpose(0, 1)
            region_values[:, start:stop] = v.transpose(0, 1)
            attend(
                q.transpose(0, 1), region_keys, region_values, room.o[:count].transpose(0, 1), blocks,
                scale=self._scale, weight=self._weight,
            )  # fmt: skip
            x = layer.finish(x, room)
            yield
        kv.length = stop
        return x[:count]

    @torch.no_grad()
    def score(self, batch: Sequence[RankingRows], x: torch.Tensor) -> torch.Tensor:
        """Last layer's outputs of all rows x (Σ suffix + candidates, D), the batch's rankings one after another.

        Suffix rows see the prefix and earlier suffix rows; candidates see all of these and themselves; nobody sees
        another ranking. kv is read in place and stays as it is.
        """
        offsets = _offsets(batch)
        if not self.incremental and any(rows.suffix for rows in batch):
            raise ModelError(
                f"a model with contextual_seq_len = {self.config.contextual_seq_len} has all history in the prefix "
                f"and takes no suffix"
            )
        if self.fused is not None:
            return self.fused.score(self.stu_layers(), batch, x)
        plans = [self._plan(rows, x) for rows in batch]
        native = self.native
        if native:
            return native.score(batch, x, plans, self._self_weights(batch))
        self_weight = self._self_weight(batch, x.device)
        count = len(x)
        x = with_usual_rows(x)
        room = Room(self.config, x, count)
        o = room.o[:count]
        for index, layer in enumerate(self.stu_layers()):
            q, k, v = (part[:count] for part in layer.split(layer.project(x, room)))
            by_head = [part.transpose(0, 1) for part in (q, k, v, o)]
            for rows, start, (on_prefix, on_suffix) in zip(batch, offsets, plans, strict=True):
                stop = start + rows.suffix + rows.candidates
                own_q, own_k, own_v, own_o = (part[:, start:stop] for part in by_head)
                keys, values = rows.kv.layer(index)
                attend(own_q, keys, values, own_o, on_prefix, scale=self._scale, weight=self._weight)
                attend(own_q, own_k, own_v, own_o, on_suffix, scale=self._scale, weight=self._weight, accumulate=True)
            attend_to_self(q, k, v, o, scale=self._scale, weight=self_weight)
            x = layer.finish(x, room)
        return x[:count]

    @torch.no_grad()
    def warm_up(self, most: int) -> None:
        """Meet every number of rows up to `most` that `with_usual_rows` makes, where meeting one first costs time."""
        weight = self.stu_layers()[0].uvqk_weight
        if self.native or not compiles_per_shape(weight):
            return
        rows = 1
        while rows <= most:
            x = with_usual_rows(weight.new_zeros((rows, self.config.dim)))
            for layer in self.stu_layers()[:1]:  # all have the same shapes
                room = Room(self.config, x, 0)
                layer.project(x, room)
                layer.finish(x, room)
                layer.project_kv(x)
            rows = len(x) + 1

    def _plan(self, rows: RankingRows, x: torch.Tensor) -> tuple[list[Block], list[Block]]:
        """Blocks of one ranking's rows over the prefix, and over its suffix."""
        length, history, count = rows.kv.length, rows.kv.length + rows.suffix, rows.suffix + rows.candidates
        together = ANY_ROWS if self.native else block_rows(x.device, x.dtype, self.config.heads, history)
        on_prefix = self._visibility.blocks(length, count, 0, length, history, together)
        if not rows.suffix:
            return on_prefix, []
        return on_prefix, self._visibility.blocks(length, count, length, rows.suffix, history, together)

    def _self_weight(self, batch: Sequence[RankingRows], device: torch.device) -> torch.Tensor | float:
        """Candidates see themselves here; a suffix row's own column is among those of the suffix."""
        if not any(rows.suffix for rows in batch):
            return self._weight
        return torch.from_numpy(self._self_weights(batch)).view(-1, 1, 1).to(device, non_blocking=True)

    def _self_weights(self, batch: Sequence[RankingRows]) -> npt.NDArray[np.float32]:
        weights = np.full(sum(one.suffix + one.candidates for one in batch), self._weight, np.float32)
        start = 0
        for one in batch:
            weights[start : start + one.suffix] = 0
            start += one.suffix + one.candidates
        return weights

    def stu_layers(self) -> Sequence[STULayer]:
        """The layers, first to last."""
        return self.layers  # type: ignore[return-value]  # ModuleList does not name what it holds


def _run(steps: Generator[None, None, torch.Tensor]) -> torch.Tensor:
    """All steps at once; what they return."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: torch.Tensor = end.value
            return result


def _offsets(batch: Sequence[RankingRows]) -> list[int]:
    offsets, total = [], 0
    for rows in batch:
        offsets.append(total)
        total += rows.suffix + rows.candidates
    return offsets
