"""The layers of an HSTU stack in one call of layers.c, scores never stored: bfloat16 on CPUs with AMX, float32 on those
with AVX-512.

oneDNN packs weights anew in every product, which at 64 rows takes as long as the product; torch computes SiLU at a
third of the speed of its own instructions, and each of a layer's ten operators costs a call and a pass over memory.
Here weights are packed once, when the model is placed. Sums are float32; what is stored between the parts is of the
model's own dtype. Chunks and batches change no bit: each sum is made in the same order whatever is computed beside it.

Knows nothing of embeddings or tasks, nor who may see whom: blocks say so. Checks, and kv.length, are the stack's.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.models.native import arguments
from relaygr_stream.models.native.arguments import Attention, Columns
from relaygr_stream.models.native.build import library
from relaygr_stream.models.native.ends import NativeEnds

if TYPE_CHECKING:
    from relaygr_stream.models.api import KVRegion
    from relaygr_stream.models.attention import Block
    from relaygr_stream.models.embeddings import TaskHead, TokenEmbedding
    from relaygr_stream.models.stu import RankingRows, StackConfig, STULayer

#: Folders of build.py.
KINDS: Final = {torch.bfloat16: "amx", torch.float32: "avx512"}
#: What is computed at once, and the room that attention.c has for a head.
TILE_WIDTH: Final = 32
MAX_WIDTH: Final = 128
#: The functions run in the calling thread alone, at least 2.6 × (AMX) and 1.6 × as fast as torch in one thread, and not
#: slower than in two; with more threads than this, torch is not slower.
MAX_THREADS: Final = 2


def native_layers(config: StackConfig, layers: Sequence[STULayer], eps: float) -> NativeLayers | None:
    """The layers on this machine, or None where they are not for them; the first time it compiles, a second."""
    weight = layers[0].uvqk_weight
    fit = (
        weight.device.type == "cpu"
        and weight.dtype in KINDS
        and max(config.dqk, config.dv) <= MAX_WIDTH
        and not any(width % TILE_WIDTH for width in (config.dim, config.dqk, config.dv))
    )
    compiled = library(KINDS[weight.dtype]) if fit else None
    return None if compiled is None else NativeLayers(compiled, config, layers, eps)


class NativeLayers:
    """Packed weights, and the calls. One call at a time, as all of a model's."""

    def __init__(self, compiled: ctypes.CDLL, config: StackConfig, layers: Sequence[STULayer], eps: float) -> None:
        self._compiled = compiled
        self._config = config
        self._scale, self._weight = 1 / math.sqrt(config.dqk), 1 / config.scale_tokens
        # What a chunk's rows leave from one part of a layer to the next: normed, gates, q.
        widths = config.dim, 3 * config.heads * config.dv, config.heads * config.dqk
        dtype, rows = layers[0].uvqk_weight.dtype, compiled.relaygr_chunk_rows()
        self._chunk = [torch.empty((rows, width), dtype=dtype) for width in widths]
        self._own = torch.empty(0, dtype=dtype)  # K and V of rows that are only scored
        group = config.dv if config.group_norm else config.heads * config.dv
        self._shape = arguments.Shape(config.dim, config.heads, config.dqk, config.dv, group, eps)
        self._weights = [self._of_layer(layer) for layer in layers]  # what the addresses below point to
        addresses = [arguments.Layer(*(part.data_ptr() for part in weights)) for weights in self._weights]
        self._layers = (arguments.Layer * len(layers))(*addresses)

    def ends(self, embedding: TokenEmbedding, head: TaskHead, eps: float) -> NativeEnds:
        """What lies before and behind the layers, of the same width and dtype."""
        return NativeEnds(self._compiled, embedding, head, eps)

    @staticmethod
    def serve() -> bool:
        """Whether they are the faster ones, with as many threads as torch has now."""
        return torch.get_num_threads() <= MAX_THREADS

    def extension(
        self, kv: KVRegion, x: torch.Tensor, blocks: Sequence[Block], outputs: bool
    ) -> Generator[None, None, torch.Tensor]:
        """Write the K/V of x behind kv.length, a layer at a time; returns the last layer's outputs if wanted."""
        x = x.clone(memory_format=torch.contiguous_format)
        columns = Columns.of(kv)
        attentions = [self._attention(columns, block, 0) for block in blocks]
        rows = self._rows(x, columns.behind(kv.length), attentions)
        for layer in range(len(self._layers)):
            last = layer == len(self._layers) - 1
            self._run(rows, layer, layer + 1, only_kv=last and not outputs)
            if not last:
                yield
        return x

    def score(
        self,
        batch: Sequence[RankingRows],
        x: torch.Tensor,
        plans: Sequence[tuple[list[Block], list[Block]]],
        self_weights: npt.NDArray[np.float32],
    ) -> torch.Tensor:
        """As `HSTUStack.score`; plans: each ranking's blocks over its prefix, and over its suffix; self_weights (n,):
        of each row's column of its own.
        """
        x = x.clone(memory_format=torch.contiguous_format)
        own, attentions, start = self._own_columns(len(x)), [], 0
        for ranking, (on_prefix, on_suffix) in zip(batch, plans, strict=True):
            columns = Columns.of(ranking.kv)
            attentions += [self._attention(columns, block, start) for block in on_prefix]
            attentions += [self._attention(own.behind(start), block, start, accumulate=True) for block in on_suffix]
            start += ranking.suffix + ranking.candidates
        rows = self._rows(x, own, attentions)
        rows.self_weights = self_weights.ctypes.data
        self._run(rows, 0, len(self._layers), only_kv=False)
        return x

    def _own_columns(self, count: int) -> Columns:
        """Room for the K and V of so many rows that are only scored: overwritten by each layer and each call."""
        config = self._config
        k_row, v_row = config.heads * config.dqk, config.heads * config.dv
        if len(self._own) < count * (k_row + v_row):
            self._own = self._own.new_empty(count * (k_row + v_row))
        address, size = self._own.data_ptr(), self._own.itemsize
        return Columns(address, address + count * k_row * size, config.dqk, k_row, config.dv, v_row, 0, size)

    def _attention(self, columns: Columns, block: Block, first: int, *, accumulate: bool = False) -> Attention:
        return arguments.attention(
            columns, block, self._config, first=first, scale=self._scale, weight=self._weight, accumulate=accumulate
        )

    def _rows(self, x: torch.Tensor, own: Columns, attentions: Sequence[Attention]) -> arguments.Rows:
        """own: where the rows' own K and V are written."""
        return arguments.Rows(
            *(part.data_ptr() for part in (x, *self._chunk)), own.k, own.v,
            own.k_head, own.k_row, own.v_head, own.v_row, own.layer, own.layer, len(x),
            (Attention * len(attentions))(*attentions), len(attentions), None, self._scale,
        )  # fmt: skip

    def _run(self, rows: arguments.Rows, first: int, stop: int, *, only_kv: bool) -> None:
        self._compiled.relaygr_layers(
            ctypes.byref(self._shape), self._layers, ctypes.byref(rows),
            ctypes.c_int64(first), ctypes.c_int64(stop), ctypes.c_int32(only_kv),
        )  # fmt: skip

    def _of_layer(self, layer: STULayer) -> tuple[torch.Tensor, ...]:
        """In the order of `arguments.Layer`."""
        width = self._config.heads * self._config.dv
        each = width // len(layer.output_norm_weight)  # a group norm has one number per head
        return (
            layer.input_norm_weight.contiguous(),
            layer.input_norm_bias.contiguous(),
            self._packed(layer.uvqk_weight),
            layer.uvqk_bias.contiguous(),
            layer.output_norm_weight.repeat_interleave(each),
            layer.output_norm_bias.repeat_interleave(each),
            self._packed(layer.output_weight),
        )

    def _packed(self, weight: torch.Tensor) -> torch.Tensor:
        source, packed = weight.contiguous(), torch.empty(weight.shape, dtype=weight.dtype)
        self._compiled.relaygr_pack(
            ctypes.c_void_p(source.data_ptr()), ctypes.c_int64(source.stride(0)),
            ctypes.c_int64(source.shape[0]), ctypes.c_int64(source.shape[1]), ctypes.c_void_p(packed.data_ptr()),
        )  # fmt: skip
        return packed
