"""The layers of an HSTU stack with fused attention: the same sums as hstu.py, one launch per layer for any batch.

New tokens attend to each other in the projection's output. A prefill is therefore a ranking without candidates, and
the same kernel computes both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.models.kernels.silu_attention import Shape, silu_attention
from relaygr_stream.models.kernels.tiles import Field, tile_table
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.stu import RankingRows, StackConfig, STULayer, Workspace


class FusedStack:
    """`FusedLayers` in Triton, for stacks without contextual tokens."""

    def __init__(self, config: StackConfig, dtype: torch.dtype) -> None:
        assert not config.contextual_seq_len, "choice.py refuses contextual tokens"
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
        """The table of tiles of a batch, for `run`."""
        return tile_table(batch, self.shape.block, self.shape.window)

    def prefill(self, layers: Sequence[STULayer], kv: KVRegion, x: torch.Tensor, outputs: bool) -> torch.Tensor:
        """Write the K/V of x (n, D) behind kv.length; returns the last layer's outputs if `outputs`."""
        fresh = slice(kv.length, kv.length + len(x))
        table = self.table([RankingRows(kv, len(x), 0)])
        tiles, split = torch.from_numpy(table).to(x.device, non_blocking=True), _split(table)
        workspace = Workspace(self._config, x)
        for index, layer in enumerate(layers):
            region_keys, region_values = kv.layer(index)
            if index == len(layers) - 1 and not outputs:
                region_keys[:, fresh], region_values[:, fresh] = layer.project_kv(x)
                break
            _, k, v = layer.split(layer.project(x, workspace))
            region_keys[:, fresh] = k.transpose(0, 1)
            region_values[:, fresh] = v.transpose(0, 1)
            x = self._finish(layer, index, x, workspace, tiles, split)
        return x

    def score(self, layers: Sequence[STULayer], batch: Sequence[RankingRows], x: torch.Tensor) -> torch.Tensor:
        """As `HSTUStack.score`."""
        table = self.table(batch)
        return self.run(layers, x, torch.from_numpy(table).to(x.device, non_blocking=True), split=_split(table))

    def run(self, layers: Sequence[STULayer], x: torch.Tensor, tiles: torch.Tensor, *, split: bool) -> torch.Tensor:
        """The last layer's outputs of rows x (n, D), with a table on the device. Equal sizes give the same launches.

        split: whether any row is cut along its columns; True is valid for any table. The outputs of rows in no tile are
        undefined.
        """
        workspace = Workspace(self._config, x)
        for index, layer in enumerate(layers):
            layer.project(x, workspace)
            x = self._finish(layer, index, x, workspace, tiles, split)
        return x

    def _finish(
        self, layer: STULayer, index: int, x: torch.Tensor, workspace: Workspace, tiles: torch.Tensor, split: bool
    ) -> torch.Tensor:
        silu_attention(self.shape, tiles, index, workspace.uvqk, workspace.gates, split=split)
        return layer.finish(x, workspace)


def _split(table: npt.NDArray[np.int64]) -> bool:
    return bool((table[:, Field.PARTS] > 1).any())
