"""Prefix KV as a model sees it: a layout, and one contiguous region of that layout.

Layer-major, per-head contiguous: for each layer first K as (heads, capacity, dqk), then V as (heads, capacity, dv), so
that matrix products and kernels read a head's tokens in place. Knows nothing of who allocated the memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.wire.messages import Behaviours

# Behaviours as a model reads them: items, actions and gaps, on the host. The gap of a behaviour is the time since the
# one before it, so it is known once and never changes when the sequence grows (DESIGN §8). Knows nothing of devices;
# models move what they need.


class Tokens(msgspec.Struct, frozen=True):  # made for every chunk; a frozen dataclass takes twice as long
    """n behaviours as one int64 array of shape (3, n): item ids, action types, gaps in milliseconds."""

    array: npt.NDArray[np.int64]

    @classmethod
    def of(cls, behaviours: Behaviours, previous_ms: int | None = None) -> Tokens:
        """previous_ms: time of the behaviour just before the first one; None: there is none (its gap is 0)."""
        items, actions, times = behaviours.arrays()
        array = np.empty((3, len(items)), np.int64)
        array[0], array[1] = items, actions
        if len(times):
            array[2, 0] = 0 if previous_ms is None else max(0, int(times[0]) - previous_ms)
            np.subtract(times[1:], times[:-1], out=array[2, 1:])
        return cls(array)

    def __len__(self) -> int:
        count: int = self.array.shape[1]
        return count

    def slice(self, start: int, stop: int) -> Tokens:
        """Tokens start:stop, gaps unchanged; a view."""
        return Tokens(self.array[:, start:stop])


@dataclass(frozen=True)
class KVLayout:
    """What one token of prefix KV consists of."""

    layers: int
    heads: int
    dqk: int  # key width per head
    dv: int  # value width per head
    dtype: torch.dtype

    @property
    def elements_per_token(self) -> int:
        """Elements of one token over all layers."""
        return self.layers * self.heads * (self.dqk + self.dv)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers."""
        return self.elements_per_token * self.dtype.itemsize

    def nbytes(self, capacity: int) -> int:
        """Bytes of a region with room for `capacity` tokens."""
        return capacity * self.bytes_per_token


class KVRegion:
    """One contiguous piece of memory holding `length` ≤ `capacity` tokens. Does not own the memory.

    storage: 1-D tensor of layout.dtype with capacity × layout.elements_per_token elements.
    """

    __slots__ = ("capacity", "layout", "length", "storage")

    def __init__(self, layout: KVLayout, storage: torch.Tensor, capacity: int, length: int = 0) -> None:
        needed = capacity * layout.elements_per_token
        if storage.dtype != layout.dtype or storage.dim() != 1 or storage.numel() < needed:
            raise ValueError(
                f"a region of {capacity} tokens needs {needed} elements of {layout.dtype}, "
                f"got {tuple(storage.shape)} of {storage.dtype}"
            )
        self.layout = layout
        self.storage = storage if storage.numel() == needed else storage[:needed]
        self.capacity = capacity
        self.length = length

    def copy_from(self, other: KVRegion, tokens: int) -> None:
        """The first `tokens` tokens of another region of this layout, in two copies whatever the number of layers."""
        for target, source in zip(self._all_layers(), other._all_layers(), strict=True):
            target[:, :, :tokens].copy_(source[:, :, :tokens])

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K (heads, capacity, dqk) and V (heads, capacity, dv) of one layer, as views to read and write in place."""
        layout, capacity = self.layout, self.capacity
        k_elements = layout.heads * capacity * layout.dqk
        v_elements = layout.heads * capacity * layout.dv
        start = index * (k_elements + v_elements)
        keys = self.storage[start : start + k_elements].view(layout.heads, capacity, layout.dqk)
        values = self.storage[start + k_elements : start + k_elements + v_elements]
        return keys, values.view(layout.heads, capacity, layout.dv)

    def _all_layers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K (layers, heads, capacity, dqk) and V (layers, heads, capacity, dv), as views."""
        layout, capacity = self.layout, self.capacity
        layers = self.storage.view(layout.layers, -1)
        k_elements = layout.heads * capacity * layout.dqk
        shape = (layout.layers, layout.heads, capacity)
        return layers[:, :k_elements].view(*shape, layout.dqk), layers[:, k_elements:].view(*shape, layout.dv)


# What the worker asks of a model: append tokens to prefix KV, score candidates against it. Nothing else. Pre-
# inference, chunked pre-inference, extension and full inference are all made of these two operations, so a relayed
# and a full score agree by construction (DESIGN §7).


@dataclass(frozen=True)
class ScoreInput:
    """One ranking: prefix KV (read only), the suffix behaviours (maybe none), m ≥ 1 candidate item ids (int64)."""

    kv: KVRegion
    suffix: Tokens
    candidates: npt.NDArray[np.int64]


@runtime_checkable
class RankingModel(Protocol):
    """A generative recommender that can be served as a relay. All calls come from one thread, under no_grad.

    layout: the prefix KV of a token.
    version: changes whenever the scores may change; prefix KV of another version are never used.
    note: what a person should know about the weights ("random weights, seed 7"), or "".
    tasks: names of the score columns.
    incremental: extending kv by tokens never changes what the earlier tokens stand for. False (contextual tokens that
        see the whole history): the prefix is inferred in one call of `extend`, never in chunks, never extended, and
        requests with a suffix are inferred in full with the suffix appended to the prefix.
    """

    layout: KVLayout
    version: str
    note: str
    tasks: tuple[str, ...]
    incremental: bool

    def extend(self, kv: KVRegion, tokens: Tokens) -> None:
        """Append the K/V of `tokens` behind kv.length and advance kv.length; the caller saw to kv.capacity."""
        ...

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        """Scores of each ranking, float32 (m_i, tasks) on the model's device; kv stays as it is.

        A ranking's scores must not depend on the others in the batch (DESIGN §8).
        """
        ...


class WarmedModel(RankingModel, Protocol):
    """A model whose first call of a size is slower than the worker's own warm-up finds out. Optional; HSTU is one."""

    def warm_up(self, most: int) -> None:
        """Meet every size up to `most` rows; called once, before anything else."""
        ...


class SteppedModel(RankingModel, Protocol):
    """A model that can be interrupted within `extend`, which lets the scheduler make chunks several times as long
    (and so cheaper) at the same delay for a ranking that comes meanwhile. Optional; HSTU is one."""

    def extend_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        """As `extend`, in steps of about the same time, for example one layer each.

        kv.length moves with the last step. Between steps other calls are made, on this region too (it is read up to
        kv.length), and the rest may never be asked for: what was written behind kv.length is then as good as nothing.
        """
        ...


# A model's version from what it is: the same for the same model in any process, another one as soon as scores differ.
# Prefix KV and scores are kept apart by it (DESIGN §7). Knows nothing of any architecture.


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


# How far two sets of scores are apart. Used by the workers' audits, the demo's client and the benches.


def relative_deviation(relayed: npt.NDArray[np.float32], full: npt.NDArray[np.float32]) -> float:
    """Largest absolute difference over the largest absolute full score; infinite where one is not finite."""
    if relayed.shape != full.shape or not (np.isfinite(relayed).all() and np.isfinite(full).all()):
        return float("inf")
    scale = max(float(np.abs(full).max(initial=0.0)), float(np.finfo(np.float32).tiny))
    return float(np.abs(relayed - full).max(initial=0.0)) / scale
