"""Prefix KV: its layout, and a region of memory that holds it.

Prefix KV is layer-major and contiguous per head: for each layer K (heads, capacity, dqk), then V (heads, capacity, dv).
Matrix products and kernels read a head's tokens in place. Behind them lie the tokens' times and the state, if the model
has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Final

import torch

#: Bytes of a token's time in a region.
TIME_BYTES: Final = 8


@dataclass(frozen=True)
class KVLayout:
    """The shape and type of prefix KV: K and V of each token, perhaps its time, and a state of the whole prefix.

    state: elements that a region has once, whatever its length, such as a recurrent state or K and V of context tokens.
    times: whether each token's time is kept beside its K and V, 8 bytes, for a model that compares times at ranking.
    """

    layers: int
    heads: int
    dqk: int  # key width per head
    dv: int  # value width per head
    dtype: torch.dtype
    state: int = 0
    times: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "dqk", "dv", "state"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 0:
                raise ValueError(f"a layout's `{name}` must be an integer of at least 0, found {value!r}")
        if self.elements(1) < 1:
            raise ValueError(f"a layout needs K and V per token, or a state: {self}")

    @classmethod
    def of_state(cls, elements: int, dtype: torch.dtype) -> KVLayout:
        """A layout without K and V per token: its size does not depend on the length."""
        return cls(0, 0, 0, 0, dtype, elements)

    @property
    def sliceable(self) -> bool:
        """Whether the first n tokens of a region are the prefix KV of these n tokens. A state has one length only."""
        return not self.state

    @cached_property
    def kv_per_token(self) -> int:
        """Elements of K and V of one token in all layers."""
        return self.layers * self.heads * (self.dqk + self.dv)

    @cached_property
    def time_elements(self) -> int:
        """Elements that one token's time takes."""
        return TIME_BYTES // self.dtype.itemsize if self.times else 0

    @cached_property
    def elements_per_token(self) -> int:
        """Elements of one token: K and V in all layers, and its time."""
        return self.kv_per_token + self.time_elements

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.elements_per_token * self.dtype.itemsize

    def elements(self, capacity: int) -> int:
        """Elements of a region for `capacity` tokens."""
        return capacity * self.elements_per_token + self.state

    def nbytes(self, capacity: int) -> int:
        """Bytes of a region for `capacity` tokens."""
        return (capacity * self.elements_per_token + self.state) * self.dtype.itemsize


class KVRegion:
    """One contiguous piece of memory that holds `length` ≤ `capacity` tokens. The region does not own the memory.

    storage: 1-D tensor of layout.dtype with at least layout.elements(capacity) elements.
    Raises ValueError for a storage of another type, shape or a smaller size.
    """

    __slots__ = ("capacity", "layout", "length", "storage")

    layout: KVLayout
    storage: torch.Tensor
    capacity: int
    length: int

    def __init__(self, layout: KVLayout, storage: torch.Tensor, capacity: int, length: int = 0) -> None:
        needed = layout.elements(capacity)
        if storage.dtype != layout.dtype or storage.dim() != 1 or storage.numel() < needed:
            raise ValueError(
                f"a region of {capacity} tokens needs {needed} elements of {layout.dtype}, "
                f"got {tuple(storage.shape)} of {storage.dtype}"
            )
        self.layout = layout
        self.storage = storage if storage.numel() == needed else storage[:needed]
        self.capacity = capacity
        self.length = length

    @classmethod
    def new(cls, layout: KVLayout, capacity: int, fill: float = 0.0, device: torch.device | None = None) -> KVRegion:
        """An empty region in memory of its own, by default on the CPU, whose elements are `fill`."""
        return cls(layout, torch.full((layout.elements(capacity),), fill, dtype=layout.dtype, device=device), capacity)

    def first(self, tokens: int) -> KVRegion:
        """The region as a reader of its first tokens sees it, at most so many, even if more are appended later."""
        seen = KVRegion.__new__(KVRegion)  # unchecked: over the same storage
        seen.layout, seen.storage, seen.capacity = self.layout, self.storage, self.capacity
        seen.length = min(tokens, self.length)
        return seen

    def copy_from(self, other: KVRegion, tokens: int) -> None:
        """Copy the first `tokens` tokens of another region of this layout, two copies for any number of layers, and its
        state."""
        if self.layout.times:
            self._times()[:tokens].copy_(other._times()[:tokens])
        if self.layout.kv_per_token:
            for target, source in zip(self._all_layers(), other._all_layers(), strict=True):
                target[:, :, :tokens].copy_(source[:, :, :tokens])
        if self.layout.state:
            self.state.copy_(other.state)

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K (heads, capacity, dqk) and V (heads, capacity, dv) of one layer, as views to read and write in place."""
        layout, capacity = self.layout, self.capacity
        k_elements = layout.heads * capacity * layout.dqk
        v_elements = layout.heads * capacity * layout.dv
        start = index * (k_elements + v_elements)
        keys = self.storage[start : start + k_elements].view(layout.heads, capacity, layout.dqk)
        values = self.storage[start + k_elements : start + k_elements + v_elements]
        return keys, values.view(layout.heads, capacity, layout.dv)

    def times(self, start: int, stop: int) -> torch.Tensor:
        """A copy of the times of tokens start:stop, int64 (stop - start,), in ms since the first token's behaviour
        before."""
        # Cloned first: a view as int64 would need an even number of elements before it.
        return self._times()[start:stop].clone().view(torch.int64).flatten()

    def set_times(self, start: int, times: torch.Tensor) -> None:
        """Write the times (n,), int64, of tokens from `start` on."""
        self._times()[start : start + len(times)].copy_(times.view(-1, 1).view(self.layout.dtype))

    def _times(self) -> torch.Tensor:
        """(capacity, elements of a time), as a view."""
        layout, start = self.layout, self.capacity * self.layout.kv_per_token
        found = self.storage[start : start + self.capacity * layout.time_elements]
        return found.view(self.capacity, layout.time_elements)

    @property
    def state(self) -> torch.Tensor:
        """The state of the first `length` tokens, layout.state elements, as a view. At length 0 it means nothing."""
        return self.storage[self.capacity * self.layout.elements_per_token :]

    def _all_layers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K (layers, heads, capacity, dqk) and V (layers, heads, capacity, dv), as views."""
        layout, capacity = self.layout, self.capacity
        layers = self.storage[: capacity * layout.kv_per_token].view(layout.layers, -1)
        k_elements = layout.heads * capacity * layout.dqk
        shape = (layout.layers, layout.heads, capacity)
        return layers[:, :k_elements].view(*shape, layout.dqk), layers[:, k_elements:].view(*shape, layout.dv)
