"""Seeded random weights for the built-in models: the same numbers for the same seed in every process.

They stand in for a checkpoint in demos, tests and measurements. Rankings made with them are as good as chance.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np
import torch

from relaygr_stream.models.hstu_model import HSTUConfig, HSTUModel


def random_model(config: HSTUConfig, seed: int) -> HSTUModel:
    """A float32 model on the CPU, noted as "random weights, seed N"."""
    model = HSTUModel(config)
    return model.load_weights(draw_weights(model.state_dict(), seed), note=f"random weights, seed {seed}")


def draw_weights(wanted: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """float32 weights of the names and shapes of `wanted` (whose values do not matter), matrices as (inputs, outputs).

    Names say what a tensor is: "…norm_weight" becomes ones, "…bias" zeros, "embedding.…" a table.
    """
    return {name: _draw(name, tuple(value.shape), seed) for name, value in wanted.items()}


def _draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if name.endswith("norm_weight"):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    # NumPy's generator, one stream per tensor: torch's depends on the processor's vector width, and a shared stream
    # on the order of the tensors.
    stream = np.random.default_rng([seed % 2**64, zlib.crc32(name.encode())])
    # Rows of tables: four of them make up a token, which so has unit variance. Matrices keep their inputs' variance.
    deviation = 0.5 if name.startswith("embedding.") else 1 / math.sqrt(shape[0])
    values = stream.standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(np.multiply(values, np.float32(deviation), out=values))
