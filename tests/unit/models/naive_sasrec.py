"""SASRec of RecBole, and gSASRec, from their formulas: float64, one mask over all behaviours, no caches.

It shares no code with relaygr_stream/models, and names weights as their authors do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A model's shape. items: ids 1 … items; own_output: a second item table, of gSASRec only."""

    form: str = "recbole"
    layers: int = 2
    dim: int = 12
    heads: int = 3
    hidden: int = 20
    items: int = 40
    window: int = 60
    activation: str = ""
    own_output: bool = False

    @property
    def eps(self) -> float:
        """Of LayerNorm, as each trains."""
        return 1e-12 if self.form == "recbole" else 1e-5


RECBOLE, GSASREC = Shape(), Shape("gsasrec", own_output=True)


def state_dict(shape: Shape, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under the authors' names, float32; norms and biases are random too."""
    random = torch.Generator().manual_seed(seed)
    dim, hidden = shape.dim, shape.hidden

    def drawn(*sizes: int, around: float = 0.0) -> torch.Tensor:
        return around + torch.randn(*sizes, generator=random) / math.sqrt(sizes[-1])

    def linear(name: str, inputs: int, outputs: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": drawn(outputs, inputs), f"{name}.bias": drawn(outputs)}

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": drawn(dim, around=1.0), f"{name}.bias": drawn(dim)}

    found = {"position_embedding.weight": drawn(shape.window, dim)}
    if shape.form == "recbole":
        found |= {"item_embedding.weight": drawn(shape.items + 1, dim)} | norm("LayerNorm")
        for index in range(shape.layers):
            layer = f"trm_encoder.layer.{index}"
            for name in ("query", "key", "value", "dense"):
                found |= linear(f"{layer}.multi_head_attention.{name}", dim, dim)
            found |= norm(f"{layer}.multi_head_attention.LayerNorm") | norm(f"{layer}.feed_forward.LayerNorm")
            found |= linear(f"{layer}.feed_forward.dense_1", dim, hidden)
            found |= linear(f"{layer}.feed_forward.dense_2", hidden, dim)
        return found
    found |= {"item_embedding.weight": drawn(shape.items + 2, dim)} | norm("seq_norm")
    if shape.own_output:
        found["output_embedding.weight"] = drawn(shape.items + 2, dim)
    for index in range(shape.layers):
        layer = f"transformer_blocks.{index}"
        for name in ("query_proj", "key_proj", "val_proj"):
            found |= linear(f"{layer}.multihead_attention.{name}", dim, dim)
        found |= norm(f"{layer}.first_norm") | norm(f"{layer}.second_norm")
        found |= linear(f"{layer}.dense1", dim, hidden) | linear(f"{layer}.dense2", hidden, dim)
    return found


def scores(shape: Shape, weights: Weights, history: Sequence[int], candidates: Sequence[int]) -> torch.Tensor:
    """(m,) scores of candidates behind the whole history, of which the model knows the newest `window`."""
    w = {name: value.double() for name, value in weights.items()}
    known = list(history)[-shape.window :]
    count = len(known)
    if not count:
        zeros = torch.zeros(shape.dim, dtype=torch.float64)
        last = zeros if shape.form == "recbole" else _norm(w, "seq_norm", zeros[None], shape.eps)[0]
    else:
        last = (_recbole if shape.form == "recbole" else _gsasrec)(shape, w, known)[-1]
    table = w.get("output_embedding.weight", w["item_embedding.weight"])
    return table[list(candidates)] @ last


def _recbole(shape: Shape, w: Weights, known: list[int]) -> torch.Tensor:
    """As in the padded sequence: items from its start on, zeros behind them, which no behaviour sees."""
    x = w["item_embedding.weight"][known] + w["position_embedding.weight"][: len(known)]
    x = _norm(w, "LayerNorm", x, shape.eps)
    for index in range(shape.layers):
        at, of = f"trm_encoder.layer.{index}.multi_head_attention.", f"trm_encoder.layer.{index}.feed_forward."
        q, k, v = (_linear(w, at + name, x) for name in ("query", "key", "value"))
        x = _norm(w, f"{at}LayerNorm", _linear(w, f"{at}dense", _attention(q, k, v, shape.heads)) + x, shape.eps)
        inner = _activated(shape.activation or "gelu", _linear(w, f"{of}dense_1", x))
        x = _norm(w, f"{of}LayerNorm", _linear(w, f"{of}dense_2", inner) + x, shape.eps)
    return x


def _gsasrec(shape: Shape, w: Weights, known: list[int]) -> torch.Tensor:
    """As in the padded sequence: items up to its end."""
    x = w["item_embedding.weight"][known] + w["position_embedding.weight"][shape.window - len(known) :]
    for index in range(shape.layers):
        layer = f"transformer_blocks.{index}."
        normed = _norm(w, f"{layer}first_norm", x, shape.eps)
        q = _linear(w, f"{layer}multihead_attention.query_proj", normed)
        k, v = (_linear(w, f"{layer}multihead_attention.{name}", x) for name in ("key_proj", "val_proj"))
        x = _norm(w, f"{layer}second_norm", _attention(q, k, v, shape.heads) + normed, shape.eps)
        x = x + _linear(w, f"{layer}dense2", _activated(shape.activation or "relu", _linear(w, f"{layer}dense1", x)))
    return _norm(w, "seq_norm", x, shape.eps)


def _linear(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _norm(w: Weights, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    width = q.shape[1] // heads
    out = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        products = q[:, part] @ k[:, part].T / math.sqrt(width)
        products[torch.ones_like(products).triu(1) > 0] = -math.inf
        weights = torch.exp(products - products.amax(1, keepdim=True))
        out.append(weights / weights.sum(1, keepdim=True) @ v[:, part])
    return torch.cat(out, 1)


def _activated(name: str, x: torch.Tensor) -> torch.Tensor:
    formulas: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "gelu": lambda y: y * (1 + torch.erf(y / math.sqrt(2))) / 2,
        "relu": lambda y: y.clamp(min=0),
        "swish": lambda y: y / (1 + torch.exp(-y)),
        "tanh": lambda y: 1 - 2 / (1 + torch.exp(2 * y)),
        "sigmoid": lambda y: 1 / (1 + torch.exp(-y)),
    }
    return formulas[name](x)
