"""The layers of an HSTU stack over fused attention: the same sums as hstu.py, one launch per layer whatever the batch.

New tokens attend to each other where the projection left them, so an extension is a ranking without candidates, and
both are one kernel. Knows nothing of embeddings, tasks or of whether anybody wants this (choice.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.models.api import KVRegion
from relaygr_stream.models.kernels.silu_attention import Shape, silu_attention
from relaygr_stream.models.kernels.tiles import Field, tile_table
from relaygr_stream.models.stu import RankingRows, Room, StackConfig, STULayer


class FusedStack:
    """`FusedLayers` in Triton, for stacks without contextual tokens."""

    def __init__(self, config: StackConfig, dtype: torch.dtype) -> None:
        assert not config.contextual_seq_len, "choice.py sees to that"
        self._config = config
        self.shape = Shape(
            config.heads,
            config.dqk,
            config.dv,
            scale=1 / math.sqrt(config.dqk),
            weight=1 / config.scale_tokens,
            window=config.max_attn_len,
            dtype=dtype,
        )

    def table(self, batch: Sequence[RankingRows]) -> npt.NDArray[np.int64]:
        """The tiles of a batch, for `run`."""
        return tile_table(batch, self.shape.block, self.shape.window)

    def extend(self, layers: Sequence[STULayer], kv: KVRegion, x: torch.Tensor, outputs: bool) -> torch.Tensor:
        """Write the K/V of x behind kv.length; returns the last layer's outputs if they are wanted."""
        fresh = slice(kv.length, kv.length + len(x))
        table = self.table([RankingRows(kv, len(x), 0)])
        tiles, split = torch.from_numpy(table).to(x.device, non_blocking=True), _split(table)
        room = Room(self._config, x)
        for index, layer in enumerate(layers):
            region_keys, region_values = kv.layer(index)
            if index == len(layers) - 1 and not outputs:
                region_keys[:, fresh], region_values[:, fresh] = layer.project_kv(x)
                break
            _, k, v = layer.split(layer.project(x, room))
            region_keys[:, fresh] = k.transpose(0, 1)
            region_values[:, fresh] = v.transpose(0, 1)
            x = self._finish(layer, index, x, room, tiles, split)
        return x

    def score(self, layers: Sequence[STULayer], batch: Sequence[RankingRows], x: torch.Tensor) -> torch.Tensor:
        """As `HSTUStack.score`."""
        table = self.table(batch)
        return self.run(layers, x, torch.from_numpy(table).to(x.device, non_blocking=True), split=_split(table))

    def run(self, layers: Sequence[STULayer], x: torch.Tensor, tiles: torch.Tensor, *, split: bool) -> torch.Tensor:
        """The last layer's outputs of rows x, by a table on the device: the same launches for any table of a size.

        split: whether any row is cut along its columns; True is right for any table. Rows that no tile names come out
        with anything.
        """
        room = Room(self._config, x)
        for index, layer in enumerate(layers):
            layer.project(x, room)
            x = self._finish(layer, index, x, room, tiles, split)
        return x

    def _finish(
        self, layer: STULayer, index: int, x: torch.Tensor, room: Room, tiles: torch.Tensor, split: bool
    ) -> torch.Tensor:
        silu_attention(self.shape, tiles, index, room.uvqk, room.gates, split=split)
        return layer.finish(x, room)


def _split(table: npt.NDArray[np.int64]) -> bool:
    return bool((table[:, Field.PARTS] > 1).any())
