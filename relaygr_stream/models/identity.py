"""A model's version from what it is: the same for the same model in any process, another one as soon as scores differ.

Prefix KV and scores are kept apart by it (DESIGN §7). Knows nothing of any architecture.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import torch


def digest(config: msgspec.Struct, weights: Mapping[str, torch.Tensor]) -> str:
    """64 bits over a configuration and float32 weights on the CPU, as 16 hexadecimal digits."""
    state = hashlib.blake2b(msgspec.json.encode(config, order="sorted"), digest_size=8)
    for name in sorted(weights):
        state.update(f"\n{name} {tuple(weights[name].shape)}\n".encode())
        state.update(weights[name].contiguous().numpy().data)
    return state.hexdigest()


def version_of(architecture: str, weights_digest: str, dtype: torch.dtype) -> str:
    """The version of a model that computes in `dtype`: rounding is part of the scores."""
    return f"{architecture}-{weights_digest}-{str(dtype).removeprefix('torch.')}"
