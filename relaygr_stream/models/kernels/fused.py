"""The layers of an HSTU stack with fused attention: the same sums as hstu.py, one launch per layer for any batch.

New tokens attend to each other in the projection's output. A prefill is therefore a ranking without candidates, and
the same kernel computes both.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.models.kernels.silu_attention import Shape, silu_attention, store_kv
from relaygr_stream.models.kernels.tiles import is_split, tile_table
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

    def prefill_in_steps(
        self, layers: Sequence[STULayer], kv: KVRegion, x: torch.Tensor, outputs: bool
    ) -> Generator[None, None, torch.Tensor]:
        """Write the K/V of x (n, D) behind kv.length, a layer a step; returns the last layer's outputs if `outputs`."""
        fresh = slice(kv.length, kv.length + len(x))
        table = self.table([RankingRows(kv, len(x), 0)])
        tiles, split = torch.from_numpy(table).to(x.device, non_blocking=True), is_split(table)
        workspace = Workspace(self._config, x)
        for index, layer in enumerate(layers):
            if index == len(layers) - 1 and not outputs:
                region_keys, region_values = kv.layer(index)
                region_keys[:, fresh], region_values[:, fresh] = layer.project_kv(x)
                break
            self._project(layer, index, x, workspace, tiles)
            x = self._finish(layer, index, x, workspace, tiles, split)
            yield
        return x

    def append(self, layers: Sequence[STULayer], x: torch.Tensor, tiles: torch.Tensor, *, split: bool) -> None:
        """As `prefill_in_steps` without outputs, with a table on the device: equal sizes give the same launches."""
        workspace = Workspace(self._config, x)
        for index, layer in enumerate(layers):
            self._project(layer, index, x, workspace, tiles)
            if index < len(layers) - 1:
                x = self._finish(layer, index, x, workspace, tiles, split)

    def score(self, layers: Sequence[STULayer], batch: Sequence[RankingRows], x: torch.Tensor) -> torch.Tensor:
        """As `HSTUStack.score`."""
        table = self.table(batch)
        return self.run(layers, x, torch.from_numpy(table).to(x.device, non_blocking=True), split=is_split(table))

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

    def _project(self, layer: STULayer, index: int, x: torch.Tensor, workspace: Workspace, tiles: torch.Tensor) -> None:
        layer.project(x, workspace)
        store_kv(self.shape, tiles, index, workspace.uvqk)

    def _finish(
        self, layer: STULayer, index: int, x: torch.Tensor, workspace: Workspace, tiles: torch.Tensor, split: bool
    ) -> torch.Tensor:
        silu_attention(self.shape, tiles, index, workspace.uvqk, workspace.gates, split=split)
        return layer.finish(x, workspace)
