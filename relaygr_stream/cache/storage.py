"""How a region's K and V are kept in the DRAM tier: byte for byte, or as int8 with a scale per token and head.

A storage turns the elements of a region into bytes and back; the copy engine has it do so in its lanes, where the bytes
are on the host and the elements on the device. Knows nothing of entries, arenas or threads.

int8: the dqk elements of a token's key in one head (the dv of its value) are q · scale, with scale = max |x| / 127 in
float32 and q rounded to nearest, so each is off by at most half a scale. A scale of its own for every token and head
instead of one per head and granule: measured, scores tend to deviate less for 6 % more bytes at 64
elements (docs/performance.md); a token's bytes do not depend on what else is in the region, such as the unused end of
it; and quantising what was quantised gives the same bytes, so that a prefix that is spilled and reloaded any number of
times while it grows was rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, Protocol

import torch

from relaygr_stream.models.api import KVLayout, KVRegion

# Memory for one full inference, set aside at start so that it never depends on what is cached.


class Scratch:
    """One region, lent to one borrower at a time."""

    def __init__(self, region: KVRegion) -> None:
        self._region: KVRegion | None = region

    @property
    def free(self) -> bool:
        """It is not lent."""
        return self._region is not None

    def borrow(self) -> KVRegion:
        """The region, empty; only while it is free."""
        region, self._region = self._region, None
        assert region is not None, "the scratch region is lent"
        region.length = 0
        return region

    def give_back(self, region: KVRegion) -> None:
        """Return what `borrow` lent."""
        assert self._region is None
        self._region = region


StorageKind = Literal["exact", "int8"]

#: q is in −127…127: symmetric, so that a value and its negative are stored alike.
STEPS: Final = 127
#: Scales keep 17 of float32's 24 significant bits, so that 127 · scale is exact, and the scale of what is reloaded is
#: the scale again. That costs nothing: a scale 2⁻¹⁶ too small moves no value by a hundredth of it.
SCALE_MASK: Final = -(1 << 7)
#: The smallest normal float32, in place of a scale of 0: a row of zeros is stored as zeros.
LEAST_SCALE: Final = torch.finfo(torch.float32).tiny
#: Elements converted at once on the CPU: 512 KiB of float32 intermediates stay in a core's cache. Measured on two cores
#: at 3.8 GB/s of float32 quantised with these, 2.4 GB/s with 16 times as many, 3.4 with a quarter.
CPU_PIECE: Final = 1 << 17
#: The same on an accelerator, where a piece costs some 10 launches (about 50 µs) and its int8 bytes about 80 µs on a
#: bus of 50 GB/s; its intermediates, up to 48 MiB, are the only device memory taken beside the tier. Not measured yet.
DEVICE_PIECE: Final = 1 << 22


class Storage(Protocol):
    """A form of regions in the DRAM tier. Both conversions run on the current stream, and may run in any thread."""

    approximate: bool  # what is reloaded is not bit for bit what was spilled

    def nbytes(self, capacity: int) -> int:
        """Bytes of a region with room for `capacity` tokens in this form."""
        ...

    def spill(self, stored: torch.Tensor, region: torch.Tensor) -> None:
        """Write the region (1-D, all of its elements) as bytes (uint8, nbytes(capacity) of them)."""
        ...

    def reload(self, region: torch.Tensor, stored: torch.Tensor) -> None:
        """Write into the region what `spill` stored."""
        ...


def make_storage(kind: StorageKind, layout: KVLayout) -> Storage:
    """The storage that `worker.dram_storage` names."""
    return Int8(layout) if kind == "int8" else Exact(layout)


class Exact:
    """The elements as they are."""

    approximate = False

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    def nbytes(self, capacity: int) -> int:
        """As many as in HBM."""
        return self._layout.nbytes(capacity)

    def spill(self, stored: torch.Tensor, region: torch.Tensor) -> None:
        """One copy."""
        stored.copy_(region.view(torch.uint8), non_blocking=True)

    def reload(self, region: torch.Tensor, stored: torch.Tensor) -> None:
        """One copy."""
        region.view(torch.uint8).copy_(stored, non_blocking=True)


class Int8:
    """Scales (float32; by layer, K before V, then head and token), then q in the order of the region's elements."""

    approximate = True

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._rows_per_token = 2 * layout.layers * layout.heads

    def nbytes(self, capacity: int) -> int:
        """A byte per element and four per scale."""
        return capacity * (self._layout.elements_per_token + self._rows_per_token * torch.float32.itemsize)

    def spill(self, stored: torch.Tensor, region: torch.Tensor) -> None:
        """Quantise on the region's device; only the small form crosses the bus."""
        for rows, kept, scales in self._pieces(region, stored):
            values = rows.float()
            scale = (values.abs().amax(1, keepdim=True) / STEPS).clamp_min_(LEAST_SCALE)
            scale.view(torch.int32).bitwise_and_(SCALE_MASK)
            kept.copy_((values / scale).round_().to(torch.int8), non_blocking=True)
            scales.copy_(scale, non_blocking=True)

    def reload(self, region: torch.Tensor, stored: torch.Tensor) -> None:
        """Only the small form crosses the bus; multiplied out on the region's device."""
        for rows, kept, scales in self._pieces(region, stored):
            near = kept.to(rows.device, non_blocking=True)
            torch.mul(near, scales.to(rows.device, non_blocking=True), out=rows)

    def _pieces(
        self, region: torch.Tensor, stored: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The region cut into rows (n, d) of one width: those elements, their q (n, d), their scales (n, 1)."""
        layout = self._layout
        capacity = region.numel() // layout.elements_per_token
        scale_bytes = capacity * self._rows_per_token * torch.float32.itemsize
        all_scales, all_kept = stored[:scale_bytes].view(torch.float32), stored[scale_bytes:].view(torch.int8)
        most = CPU_PIECE if region.device.type == "cpu" else DEVICE_PIECE
        element = row = 0
        for width in (layout.dqk, layout.dv) * layout.layers:
            last = row + layout.heads * capacity
            while row < last:
                n = min(last - row, max(1, most // width))
                part = slice(element, element + n * width)
                yield (
                    region[part].view(n, width),
                    all_kept[part].view(n, width),
                    all_scales[row : row + n].view(n, 1),
                )
                element, row = element + n * width, row + n
