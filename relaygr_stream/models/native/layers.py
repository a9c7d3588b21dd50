"""The layers of an HSTU stack in one call of layers.c, in float32 and bfloat16 on CPUs with AVX2, AVX-512 or AMX.

oneDNN packs the weights in every product, which at 64 rows takes as long as the product itself. torch computes SiLU at
a third of the speed of the processor's instructions, and each of a layer's ten operators costs a call and a pass over
memory. Here the weights are packed once, in `HSTUStack.place`, and scores are never stored. Sums are float32;
intermediate results have the model's dtype. Every sum has a fixed order, so chunks, batches and threads change no bit.

The stack checks the arguments and advances kv.length.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.native import arguments
from relaygr_stream.models.native.arguments import Attention, KVColumns
from relaygr_stream.models.native.ends import NativeEnds
from relaygr_stream.models.native.objects import Unavailable, library
from relaygr_stream.models.relative import is_relative
from relaygr_stream.models.stu import NORM_EPS

if TYPE_CHECKING:
    from relaygr_stream.models.attention import Block
    from relaygr_stream.models.embeddings import TaskHead, TokenEmbedding
    from relaygr_stream.models.kv import KVRegion
    from relaygr_stream.models.stu import RankingRows, StackConfig, STULayer
    from relaygr_stream.settings import Kernels

#: dtype → its objects (objects.py), the fastest first.
KINDS: Final = {
    torch.bfloat16: ("amx", "avx512_bf16", "avx512_widened", "avx2_widened"),
    torch.float32: ("avx512", "avx2"),
}
#: The width of one step, and the largest width of a head in attention.c.
TILE_WIDTH: Final = 32
MAX_WIDTH: Final = 128


def native_layers(config: StackConfig, layers: Sequence[STULayer], kernels: Kernels = "auto") -> NativeLayers | None:
    """The layers in C; None if the machine or the stack's shape does not suit them, or `kernels` names others.

    kernels: as the setting worker.kernels. Raises ModelError if it names instructions and these layers cannot run.
    """
    if kernels in ("torch", "triton"):
        return None
    most, weight = "" if kernels == "auto" else kernels, layers[0].uvqk_weight
    try:
        _check_fit(config, weight)
        return NativeLayers(library(KINDS[weight.dtype], most), config, layers)
    except Unavailable as error:
        if most:
            raise ModelError(f'worker.kernels = "{most}", but {error}; set it to "auto" or "torch"') from error
        return None


def _check_fit(config: StackConfig, weight: torch.Tensor) -> None:
    """Raises Unavailable, which says what does not fit."""
    if weight.device.type != "cpu":
        raise Unavailable(f"the device is {weight.device}: they are for cpu")
    if weight.dtype not in KINDS:
        raise Unavailable(f"the model computes in {weight.dtype}: they are for {' and '.join(map(str, KINDS))}")
    if is_relative(config):
        raise Unavailable("the model has a bias on relative positions or times, which they do not compute")
    widths = config.dim, config.dqk, config.dv
    if any(width % TILE_WIDTH for width in widths) or max(config.dqk, config.dv) > MAX_WIDTH:
        found = ", ".join(map(str, widths))
        raise Unavailable(
            f"the model's D, dqk, dv are {found}: multiples of {TILE_WIDTH} are needed, dqk and dv up to {MAX_WIDTH}"
        )


class NativeLayers:
    """Packed weights, and the calls of layers.c. One call at a time, as for all calls of a model.

    A call uses as many threads as torch does. Those beside the calling one are the object's own (team.c): all models of
    the process share them, and a call that finds them taken runs alone.
    """

    def __init__(self, compiled: ctypes.CDLL, config: StackConfig, layers: Sequence[STULayer]) -> None:
        self._compiled = compiled
        self._config = config
        self._scale, self._weight = 1 / math.sqrt(config.dqk), 1 / config.scale_tokens
        # Buffers for one chunk's rows between the parts of a layer: normed, gates, q.
        widths = config.dim, 3 * config.heads * config.dv, config.heads * config.dqk
        dtype, rows = layers[0].uvqk_weight.dtype, compiled.relaygr_chunk_rows()
        self._chunk = [torch.empty((rows, width), dtype=dtype) for width in widths]
        self._own = torch.empty(0, dtype=dtype)  # K and V of rows that are only scored
        group = config.dv if config.group_norm else config.heads * config.dv
        self._shape = arguments.LayerShape(config.dim, config.heads, config.dqk, config.dv, group, NORM_EPS)
        self._weights = [self._of_layer(layer) for layer in layers]  # keeps the memory behind the addresses below
        addresses = [arguments.Layer(*(part.data_ptr() for part in weights)) for weights in self._weights]
        self._layers = (arguments.Layer * len(layers))(*addresses)

    def ends(self, embedding: TokenEmbedding, head: TaskHead) -> NativeEnds:
        """The embedding and the head in C, in the same width and dtype."""
        return NativeEnds(self._compiled, embedding, head)

    @property
    def name(self) -> str:
        """The object (objects.py) that computes them."""
        return Path(self._compiled._name).stem

    def prefill_in_steps(
        self, kv: KVRegion, x: torch.Tensor, blocks: Sequence[Block], outputs: bool
    ) -> Generator[None, None, torch.Tensor]:
        """Write the K/V of x (n, D) behind kv.length, one layer per step; returns the last outputs if `outputs`."""
        x = x.clone(memory_format=torch.contiguous_format)
        columns = KVColumns.from_region(kv)
        own = columns.behind(kv.length)
        attentions = [self._attention(columns, kv.length + len(x), own, block, 0) for block in blocks]
        rows = self._rows(x, own, attentions)
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
        plans: Sequence[list[Block]],
        self_weights: npt.NDArray[np.float32],
    ) -> torch.Tensor:
        """As `HSTUStack.score`. plans: each ranking's blocks over its prefix and suffix together.

        self_weights (n,): the weight of each row's attention to itself.
        """
        x = x.clone(memory_format=torch.contiguous_format)
        own, attentions, start = self._own_columns(len(x)), [], 0
        for ranking, blocks in zip(batch, plans, strict=True):
            columns, length = KVColumns.from_region(ranking.kv), ranking.kv.length
            attentions += [self._attention(columns, length, own.behind(start), block, start) for block in blocks]
            start += ranking.suffix + ranking.candidates
        rows = self._rows(x, own, attentions)
        rows.self_weights = self_weights.ctypes.data
        self._run(rows, 0, len(self._layers), only_kv=False)
        return x

    def _own_columns(self, count: int) -> KVColumns:
        """A buffer for the K and V of `count` scored rows. Every layer and every call overwrites it."""
        config = self._config
        k_row, v_row = config.heads * config.dqk, config.heads * config.dv
        if len(self._own) < count * (k_row + v_row):
            self._own = self._own.new_empty(count * (k_row + v_row))
        address, size = self._own.data_ptr(), self._own.itemsize
        return KVColumns(address, address + count * k_row * size, config.dqk, k_row, config.dv, v_row, 0, size)

    def _attention(self, columns: KVColumns, length: int, own: KVColumns, block: Block, first: int) -> Attention:
        return arguments.attention(
            columns, length, own, block, self._config, first=first, scale=self._scale, weight=self._weight
        )

    def _rows(self, x: torch.Tensor, own: KVColumns, attentions: Sequence[Attention]) -> arguments.LayerRows:
        """The structure for `relaygr_layers`. own: where it writes the rows' own K and V."""
        return arguments.LayerRows(
            *(part.data_ptr() for part in (x, *self._chunk)), own.k, own.v,
            own.k_head, own.k_row, own.v_head, own.v_row, own.layer, own.layer, len(x),
            (Attention * len(attentions))(*attentions), len(attentions), None, self._scale,
        )  # fmt: skip

    def _run(self, rows: arguments.LayerRows, first: int, stop: int, *, only_kv: bool) -> None:
        self._compiled.relaygr_layers(
            ctypes.byref(self._shape), self._layers, ctypes.byref(rows),
            ctypes.c_int64(first), ctypes.c_int64(stop), ctypes.c_int32(only_kv),
            ctypes.c_int64(torch.get_num_threads()),
        )  # fmt: skip

    def _of_layer(self, layer: STULayer) -> tuple[torch.Tensor, ...]:
        """The packed weights of a layer, in the order of `arguments.Layer`."""
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
