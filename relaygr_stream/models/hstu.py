"""The HSTU stack on embedded tokens: it appends to prefix KV and scores rows against it.

The layers are in stu.py. N is a constant of the model. If N were the sequence's length, the K/V of the prefix would
change with every new behaviour; a caller whose prefix KV serve one request may give each its own (scale_tokens), if the
stack was placed with kernels "torch".
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
from relaygr_stream.models.attention import UNBLOCKED_ROWS, Block, Visibility, attend, attend_to_self, block_rows
from relaygr_stream.models.embeddings import compiles_per_shape, pad_rows
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.native.layers import NativeLayers, native_layers
from relaygr_stream.models.relative import Places, own_bias
from relaygr_stream.models.stu import RankingRows, StackConfig, STULayer, Workspace

if TYPE_CHECKING:
    from relaygr_stream.models.embeddings import TaskHead, TokenEmbedding
    from relaygr_stream.models.native.ends import NativeEnds
    from relaygr_stream.settings import Kernels


class FusedLayers(Protocol):
    """The layers with fused attention (kernels/fused.py). Callers check the arguments and advance kv.length."""

    def prefill_in_steps(
        self, layers: Sequence[STULayer], kv: KVRegion, x: torch.Tensor, outputs: bool
    ) -> Generator[None, None, torch.Tensor]:
        """Write the K/V of x (n, D) behind kv.length, a layer a step; returns the last layer's outputs if `outputs`."""
        ...

    def append(self, layers: Sequence[STULayer], x: torch.Tensor, tiles: torch.Tensor, *, split: bool) -> None:
        """As `prefill_in_steps`, with a table. With equal `split`, tables of equal size give the same launches."""
        ...

    def score(self, layers: Sequence[STULayer], batch: Sequence[RankingRows], x: torch.Tensor) -> torch.Tensor:
        """As `HSTUStack.score`."""
        ...

    def table(self, batch: Sequence[RankingRows]) -> npt.NDArray[np.int64]:
        """The table of tiles (tiles, fields) for a batch; `run` takes it on the device."""
        ...

    def run(self, layers: Sequence[STULayer], x: torch.Tensor, tiles: torch.Tensor, *, split: bool) -> torch.Tensor:
        """As `score`, with a table. With split, tables of equal size give the same launches."""
        ...


class HSTUStack(nn.Module):
    """The layers of a model. Every call is asynchronous on an accelerator and records no gradients."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config = config
        self.fused: FusedLayers | None = None  # None: attention.py
        self.layers = nn.ModuleList(STULayer(config) for _ in range(config.layers))
        self.native: NativeLayers | None = None  # the layers in C, if there are any for this stack
        self._visibility = Visibility(config.contextual_seq_len, config.max_attn_len)
        self._scale = 1 / math.sqrt(config.dqk)
        self._weight = 1 / config.scale_tokens

    def place(self, device: torch.device, dtype: torch.dtype, kernels: Kernels = "auto") -> HSTUStack:
        """Move the weights and convert them. Packs them for the native layers, so they must not change afterwards.

        kernels: as the setting worker.kernels. Raises ModelError if it names instructions that cannot be used.
        """
        self.to(device=device, dtype=dtype)
        self.native = native_layers(self.config, self.stu_layers(), kernels)
        return self

    def native_ends(self, embedding: TokenEmbedding, head: TaskHead) -> NativeEnds | None:
        """The embedding and the head in C; None where there are no layers in C."""
        return self.native.ends(embedding, head) if self.native else None

    @property
    def kernels(self) -> str:
        """What computes the layers: "triton", an object of native/objects.py, or "torch"."""
        if self.fused is not None:
            return "triton"
        return self.native.name if self.native else "torch"

    @property
    def incremental(self) -> bool:
        """Whether prefix KV stays valid when behaviours follow; False if contextual tokens see the whole history."""
        return self.config.contextual_seq_len == 0

    def append(self, kv: KVRegion, x: torch.Tensor, times: torch.Tensor | None = None) -> None:
        """Append the K/V of embedded behaviours x (n, D) behind kv.length, and advance kv.length by n.

        times: of the behaviours, as `KVRegion.times`, for a stack that compares them.
        Reads the tokens already in `kv` in place. Raises ModelError if the region holds tokens and the model is not
        incremental, ValueError if n tokens do not fit. An error leaves kv.length unchanged.
        """
        _run(self.append_in_steps(kv, x, times))

    def append_in_steps(
        self, kv: KVRegion, x: torch.Tensor, times: torch.Tensor | None = None, scale_tokens: int = 0
    ) -> Generator[None, None, torch.Tensor]:
        """As `append`, one layer per step; the last step advances kv.length. scale_tokens: N; 0: the stack's.

        Between steps the caller may make any call that does not write behind kv.length.
        """
        return self._prefill_in_steps(kv, x, times, outputs=False, scale_tokens=scale_tokens)

    def check_room(self, kv: KVRegion, count: int) -> None:
        """Raise as `append` where `count` tokens cannot be appended to `kv`."""
        if kv.length and not self.incremental:
            raise ModelError(
                f"a model with contextual_seq_len = {self.config.contextual_seq_len} takes its whole history in one "
                f"call, but the region holds {kv.length} tokens already"
            )
        if kv.length + count > kv.capacity:
            raise ValueError(f"{count} tokens behind {kv.length} do not fit into a region of {kv.capacity}")

    def prefill(
        self, kv: KVRegion, x: torch.Tensor, times: torch.Tensor | None = None, scale_tokens: int = 0
    ) -> torch.Tensor:
        """As `append`, but also computes and returns the last layer's outputs (n, D).

        scale_tokens: N; 0: the stack's.
        """
        return _run(self._prefill_in_steps(kv, x, times, outputs=True, scale_tokens=scale_tokens))

    @torch.no_grad()
    def _prefill_in_steps(
        self, kv: KVRegion, x: torch.Tensor, times: torch.Tensor | None, outputs: bool, scale_tokens: int
    ) -> Generator[None, None, torch.Tensor]:
        start, stop, weight = kv.length, kv.length + len(x), self._weight_for(scale_tokens)
        self.check_room(kv, len(x))
        if start == stop:
            return x
        if self.fused is not None:
            x = yield from self.fused.prefill_in_steps(self.stu_layers(), kv, x, outputs)
            kv.length = stop
            return x
        count, native = len(x), self.native
        rows = UNBLOCKED_ROWS if native else block_rows(x.device, x.dtype, self.config.heads, stop)
        blocks = self._visibility.blocks(start, count, 0, stop, stop, rows)
        if native:
            x = yield from native.prefill_in_steps(kv, x, blocks, outputs)
            kv.length = stop
            return x
        x = pad_rows(x)
        workspace = Workspace(self.config, x, count)
        apart = None
        if self.config.relative_times:
            assert times is not None
            kv.set_times(start, times)
            columns = kv.times(0, stop)
            apart = columns[start:], columns
        places = Places((start, 0), count, x.device, apart)
        for index, layer in enumerate(self.stu_layers()):
            region_keys, region_values = kv.layer(index)
            if index == len(self.layers) - 1 and not outputs:
                keys, values = layer.project_kv(x)
                region_keys[:, start:stop] = keys[:, :count]
                region_values[:, start:stop] = values[:, :count]
                break
            q, k, v = (part[:count] for part in layer.split(layer.project(x, workspace)))
            region_keys[:, start:stop] = k.transpose(0, 1)
            region_values[:, start:stop] = v.transpose(0, 1)
            attend(
                q.transpose(0, 1), region_keys, region_values, workspace.o[:count].transpose(0, 1), blocks,
                scale=self._scale, weight=weight, bias=places.bias(layer),
            )  # fmt: skip
            x = layer.finish(x, workspace)
            yield
        kv.length = stop
        return x[:count]

    @torch.no_grad()
    def score(self, batch: Sequence[RankingRows], x: torch.Tensor) -> torch.Tensor:
        """The last layer's outputs of all rows x (Σ suffix + candidates, D), the batch's rankings one after another.

        Suffix rows see the prefix, earlier suffix rows and themselves. Candidates see the prefix, the suffix and
        themselves. No row sees another ranking. kv is read in place and not modified.
        Raises ModelError for a suffix if the model is not incremental.
        """
        offsets = _offsets(batch)
        if not self.incremental and any(rows.suffix for rows in batch):
            raise ModelError(
                f"a model with contextual_seq_len = {self.config.contextual_seq_len} has all history in the prefix "
                f"and takes no suffix"
            )
        if self.fused is not None:
            return self.fused.score(self.stu_layers(), batch, x)
        native = self.native
        if native:
            return native.score(batch, x, [self._whole_plan(rows) for rows in batch], self._self_weights(batch))
        plans = [self._plan(rows, x) for rows in batch]
        places = [self._places(rows, x.device) for rows in batch]
        self_weight = self._self_weight(batch, x.device)
        count = len(x)
        x = pad_rows(x)
        workspace = Workspace(self.config, x, count)
        o = workspace.o[:count]
        for index, layer in enumerate(self.stu_layers()):
            q, k, v = (part[:count] for part in layer.split(layer.project(x, workspace)))
            by_head = [part.transpose(0, 1) for part in (q, k, v, o)]
            for rows, start, plan, place in zip(batch, offsets, plans, places, strict=True):
                stop = start + rows.suffix + rows.candidates
                own_q, own_k, own_v, own_o = (part[:, start:stop] for part in by_head)
                keys, values = rows.kv.layer(index)
                parts = ((keys, values, False), (own_k, own_v, True))
                for (its_keys, its_values, adds), blocks, at in zip(parts, plan, place, strict=True):
                    attend(
                        own_q, its_keys, its_values, own_o, blocks,
                        scale=self._scale, weight=self._weight_for(rows.scale_tokens), bias=at.bias(layer),
                        accumulate=adds,
                    )  # fmt: skip
            attend_to_self(q, k, v, o, scale=self._scale, weight=self_weight, bias=own_bias(layer))
            x = layer.finish(x, workspace)
        return x[:count]

    @torch.no_grad()
    def warm_up(self, most: int) -> None:
        """Compile the products for every row count up to `most` that `pad_rows` makes, where products are compiled."""
        weight = self.stu_layers()[0].uvqk_weight
        if self.native or not compiles_per_shape(weight):
            return
        rows = 1
        while rows <= most:
            x = pad_rows(weight.new_zeros((rows, self.config.dim)))
            for layer in self.stu_layers()[:1]:  # all layers have the same shapes
                workspace = Workspace(self.config, x, 0)
                layer.project(x, workspace)
                layer.finish(x, workspace)
                layer.project_kv(x)
            rows = len(x) + 1

    def _plan(self, rows: RankingRows, x: torch.Tensor) -> tuple[list[Block], list[Block]]:
        """The blocks of one ranking's rows over its prefix, and over its suffix."""
        length, history, count = rows.kv.length, rows.kv.length + rows.suffix, rows.suffix + rows.candidates
        together = block_rows(x.device, x.dtype, self.config.heads, history)
        on_prefix = self._visibility.blocks(length, count, 0, length, history, together)
        if not rows.suffix:
            return on_prefix, []
        return on_prefix, self._visibility.blocks(length, count, length, rows.suffix, history, together)

    def _places(self, rows: RankingRows, device: torch.device) -> tuple[Places, Places]:
        """Where one ranking's rows stand on its prefix, and on its suffix."""
        length, suffix = rows.kv.length, rows.suffix
        on_prefix = on_suffix = None
        if self.config.relative_times:
            assert rows.times is not None
            earlier, later = rows.kv.times(0, length), rows.times.to(device)
            newest = torch.cat([earlier.new_zeros(1), earlier[-1:], later[-1:]])[-1:]  # 0 without a history
            own = torch.cat([later, newest.expand(rows.candidates)])
            on_prefix, on_suffix = (own, earlier), (own, later)
        return (
            Places((length, 0), suffix, device, on_prefix),
            Places((length, length), suffix, device, on_suffix),
        )

    def _whole_plan(self, rows: RankingRows) -> list[Block]:
        """The blocks of one ranking's rows over its prefix and suffix together."""
        history = rows.kv.length + rows.suffix
        return self._visibility.blocks(
            rows.kv.length, rows.suffix + rows.candidates, 0, history, history, UNBLOCKED_ROWS
        )

    def _self_weight(self, batch: Sequence[RankingRows], device: torch.device) -> torch.Tensor | float:
        """The weight of each row's attention to itself: 0 for suffix rows, since the suffix's blocks include it."""
        if not any(rows.suffix or rows.scale_tokens for rows in batch):
            return self._weight
        return torch.from_numpy(self._self_weights(batch)).view(-1, 1, 1).to(device, non_blocking=True)

    def _self_weights(self, batch: Sequence[RankingRows]) -> npt.NDArray[np.float32]:
        weights = np.zeros(sum(one.suffix + one.candidates for one in batch), np.float32)
        start = 0
        for one in batch:
            stop = start + one.suffix + one.candidates
            weights[start + one.suffix : stop] = self._weight_for(one.scale_tokens)
            start = stop
        return weights

    def _weight_for(self, scale_tokens: int) -> float:
        """1/N of a call's own N; of the stack's if it is 0."""
        if not scale_tokens:
            return self._weight
        assert self.fused is None and self.native is None, "the kernels have one N"
        return 1 / scale_tokens

    def stu_layers(self) -> Sequence[STULayer]:
        """The layers, first to last."""
        return self.layers  # type: ignore[return-value]  # ModuleList has no element type


def _run(steps: Generator[None, None, torch.Tensor]) -> torch.Tensor:
    """Run all steps; returns the generator's result."""
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
