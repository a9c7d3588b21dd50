"""Prefix KV as a model sees it: a layout, and one contiguous region of that layout.

Layer-major, per-head contiguous: for each layer first K as (heads, capacity, dqk), then V as (heads, capacity, dv), so
that matrix products and kernels read a head's tokens in place. Knows nothing of who allocated the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
