"""A small softmax transformer behind the model protocol: the worked example of docs/how-to/model.md.

    model.factory = "relaygr_stream.models.transformer:make"

Pre-norm layers: x += softmax(q·kᵀ / √dqk)·v·W_o, then x += GELU(LayerNorm(x)·W_up + b)·W_down + b. A behaviour sees
itself and earlier behaviours; a candidate sees all history and itself. The weights are seeded random numbers: the model
shows how a model is served, and ranks as chance does. It is written to be read, as is its attention
(softmax.py); attention.py is written for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec
import torch
from msgspec import Meta
from torch import nn
from torch.nn import functional

from relaygr_stream import settings
from relaygr_stream.errors import ConfigError
from relaygr_stream.models.api import ScoreInput, Tokens, digest, version_of
from relaygr_stream.models.embeddings import TaskHead, TokenEmbedding
from relaygr_stream.models.hstu_model import HSTUConfig
from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.models.loading import config_of, draw_weights
from relaygr_stream.models.softmax import attend_to_history, attend_to_history_and_self

Positive = Annotated[int, Meta(ge=1)]

NORM_EPS: Final = 1e-6
#: Hidden width of the MLP over the width of the model, as in most transformers.
MLP_RATIO: Final = 4


class TransformerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole definition of a transformer apart from its weights."""

    layers: Positive
    dim: Positive
    heads: Positive
    dqk: Positive
    dv: Positive
    vocab: Positive
    max_positions: Positive
    tasks: tuple[str, ...]

    def layout(self, dtype: torch.dtype) -> KVLayout:
        """The prefix KV of one token."""
        return KVLayout(self.layers, self.heads, self.dqk, self.dv, dtype)


def make(model: settings.Model, device: torch.device, dtype: torch.dtype) -> Transformer:
    """The factory: a model with random weights, of the shape that the settings name. Raises as `shape_of`."""
    return Transformer(TransformerConfig(**shape_of(model)), model.seed, device, dtype)


def shape_of(model: settings.Model) -> dict[str, Any]:
    """The fields of TransformerConfig in the config.json of `model.checkpoint`, or of the default shape.

    Raises ConfigError for another model than an HSTU, and for fields of it that a transformer does not have.
    """
    config = config_of(model)
    if not isinstance(config, HSTUConfig):
        raise ConfigError(
            f"`model.checkpoint` = {model.checkpoint!r} is no HSTU, whose shape `model.factory` = {model.factory!r} "
            f"takes: leave one of them out"
        )
    for name in (
        "contextual_seq_len", "max_attn_len", "group_norm", "oov_rows", "relative_positions", "relative_times"
    ):  # fmt: skip
        if value := getattr(config, name):
            raise ConfigError(
                f"`{name}` = {value!r} is of the built-in HSTU, and `model.factory` = {model.factory!r} does not have "
                f"it: leave it out of {model.checkpoint or 'the shape'}"
            )
    return {name: getattr(config, name) for name in TransformerConfig.__struct_fields__}


class TransformerLayer(nn.Module):
    """The weights of one layer and all its steps but attention. qkv has its columns in the order q, k, v."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim, heads, hidden = config.dim, config.heads, MLP_RATIO * config.dim
        self.heads = heads
        self.widths = (config.dqk, config.dqk, config.dv)
        self.attention_norm_weight = _parameter(dim)
        self.attention_norm_bias = _parameter(dim)
        self.qkv_weight = _parameter(dim, heads * sum(self.widths))
        self.qkv_bias = _parameter(heads * sum(self.widths))
        self.output_weight = _parameter(heads * config.dv, dim)
        self.mlp_norm_weight = _parameter(dim)
        self.mlp_norm_bias = _parameter(dim)
        self.up_weight = _parameter(dim, hidden)
        self.up_bias = _parameter(hidden)
        self.down_weight = _parameter(hidden, dim)
        self.down_bias = _parameter(dim)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x (n, D) → q (H, n, dqk), k (H, n, dqk), v (H, n, dv)."""
        normed = functional.layer_norm(x, x.shape[-1:], self.attention_norm_weight, self.attention_norm_bias, NORM_EPS)
        qkv = torch.addmm(self.qkv_bias, normed, self.qkv_weight)
        parts = torch.split(qkv, [self.heads * width for width in self.widths], dim=1)
        return tuple(part.view(len(x), self.heads, -1).transpose(0, 1) for part in parts)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output (n, D) from its input x (n, D) and the attention's result (H, n, dv)."""
        x = torch.addmm(x, attended.transpose(0, 1).flatten(1), self.output_weight)
        normed = functional.layer_norm(x, x.shape[-1:], self.mlp_norm_weight, self.mlp_norm_bias, NORM_EPS)
        hidden = functional.gelu(torch.addmm(self.up_bias, normed, self.up_weight))
        return x + torch.addmm(self.down_bias, hidden, self.down_weight)


class Transformer(nn.Module):
    """A softmax transformer as a `RankingModel`, with weights drawn from a seed. embedding: another than the usual."""

    architecture = "transformer"
    incremental = True  # a behaviour sees only earlier behaviours, so cached K/V stay valid

    def __init__(
        self,
        config: TransformerConfig,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        embedding: TokenEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = embedding or TokenEmbedding(config.dim, config.vocab, config.max_positions)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.layers))
        self.head = TaskHead(config.dim, len(config.tasks))
        self.load_state_dict(draw_weights(self.state_dict(), seed))
        self.layout = config.layout(dtype)
        self.tasks = config.tasks
        self.note = f"random weights, seed {seed}"
        self.version = version_of(self.architecture, digest(config, self.state_dict()), dtype)
        self.embedding.to(device=device, dtype=dtype)
        self.layers.to(device=device, dtype=dtype)
        self.head.to(device=device)  # the head stays float32

    @torch.no_grad()
    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        """Append the K/V of `tokens`, at positions from kv.length on. Raises ValueError if they do not fit."""
        start, stop = kv.length, kv.length + len(tokens)
        if stop > kv.capacity:
            raise ValueError(f"{len(tokens)} tokens behind {start} do not fit into a region of {kv.capacity}")
        if start == stop:
            return
        x = self.embedding.behaviours(tokens, start)
        for index, layer in enumerate(self._layers()):
            keys, values = kv.layer(index)
            q, k, v = layer.project(x)
            keys[:, start:stop] = k
            values[:, start:stop] = v
            if index + 1 < len(self.layers):  # the last layer's output is not needed
                x = layer.finish(x, attend_to_history(q, keys[:, :stop], values[:, :stop]))
        kv.length = stop

    @torch.no_grad()
    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        """Logits of each ranking, float32 (m_i, tasks)."""
        return [self._score(one) for one in batch]

    def _score(self, one: ScoreInput) -> torch.Tensor:
        """The logits of one ranking; rows are its suffix, then its candidates."""
        length, suffix = one.kv.length, len(one.suffix)
        x = self.embedding.rankings([(one.suffix, length, one.candidates)])
        for index, layer in enumerate(self._layers()):
            keys, values = (part[:, :length] for part in one.kv.layer(index))  # memory behind kv.length is undefined
            q, k, v = layer.project(x)
            if suffix:  # this copies the prefix; a kernel would read both parts in place
                keys, values = torch.cat((keys, k[:, :suffix]), 1), torch.cat((values, v[:, :suffix]), 1)
            attended = attend_to_history_and_self(q[:, suffix:], keys, values, k[:, suffix:], v[:, suffix:])
            if suffix:
                attended = torch.cat((attend_to_history(q[:, :suffix], keys, values), attended), 1)
            x = layer.finish(x, attended)
        return self.head.logits(x[suffix:])

    def _layers(self) -> Sequence[TransformerLayer]:
        return self.layers  # type: ignore[return-value]  # ModuleList has no element type


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
