"""The forms of K and V in the DRAM tier (exact, or int8 with a scale per token and head), and the scratch region.

A storage converts the elements of a region to bytes and back. The copy engine's lanes call it; the bytes are on the
host, the elements on the device.

int8: the dqk elements of a token's key in one head (the dv of its value) are q · scale, with scale = max |x| / 127 in
float32 and q rounded to nearest, so the error of an element is at most half a scale. One scale for each token and head
has three reasons. Scores deviate less than with one per head and granule, for 6 % more bytes at 64 elements. A token's
bytes do not depend on the rest of the region. Quantising reloaded elements gives the same bytes, so a prefix that is
spilled and reloaded many times while it grows is rounded once. Times and a state (KVLayout) are stored unchanged: a
time has no rounding, and all later tokens would carry a state's on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, Protocol

import torch

from relaygr_stream.models.kv import KVLayout, KVRegion


class Scratch:
    """The region for full inference, reserved at start so that it does not depend on the cache's contents.

    One borrower at a time has it.
    """

    def __init__(self, region: KVRegion) -> None:
        self._region: KVRegion | None = region

    @property
    def free(self) -> bool:
        """Whether no borrower has the region."""
        return self._region is not None

    def borrow(self) -> KVRegion:
        """The region, with length 0. Call it only while the region is free."""
        region, self._region = self._region, None
        assert region is not None, "the scratch region is lent"
        region.length = 0
        return region

    def give_back(self, region: KVRegion) -> None:
        """Return the region that `borrow` returned."""
        assert self._region is None
        self._region = region


StorageKind = Literal["exact", "int8"]

#: q is in −127…127: a symmetric range stores a value and its negative alike.
STEPS: Final = 127
#: Scales keep 17 of float32's 24 significant bits. Then 127 · scale is exact, and reloaded elements have the same scale
#: again. The precision is sufficient: a scale that is 2⁻¹⁶ too small changes no value by a hundredth of the scale.
SCALE_MASK: Final = -(1 << 7)
#: The smallest normal float32 replaces a scale of 0; a row of zeros is then stored as zeros.
LEAST_SCALE: Final = torch.finfo(torch.float32).tiny
#: Elements converted at once on the CPU: 512 KiB of float32 intermediates stay in a core's cache. On two cores it
#: quantises 3.8 GB/s of float32; 2.4 GB/s with 16 times as many elements, 3.4 GB/s with a quarter.
CPU_PIECE: Final = 1 << 17
#: Elements converted at once on an accelerator: about 10 launches (50 µs), and about 80 µs for the int8 bytes on a bus
#: of 50 GB/s. Its intermediates, up to 48 MiB, are the only device memory outside the tier. Not measured.
DEVICE_PIECE: Final = 1 << 22


class Storage(Protocol):
    """A form of regions in the DRAM tier. Both conversions run on the current stream, and may run in any thread."""

    approximate: bool  # whether reloaded elements may differ from spilled elements

    def nbytes(self, capacity: int) -> int:
        """Bytes of a region for `capacity` tokens in this form."""
        ...

    def spill(self, stored: torch.Tensor, region: torch.Tensor) -> None:
        """Convert the region (1-D, all its elements) into `stored` (uint8, nbytes(capacity) bytes)."""
        ...

    def reload(self, region: torch.Tensor, stored: torch.Tensor) -> None:
        """Convert the bytes that `spill` wrote back into the region."""
        ...


def make_storage(kind: StorageKind, layout: KVLayout) -> Storage:
    """The storage that `worker.dram_storage` names."""
    return Int8(layout) if kind == "int8" else Exact(layout)


class Exact:
    """Stores the elements unchanged."""

    approximate = False

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout

    def nbytes(self, capacity: int) -> int:
        """As in HBM."""
        return self._layout.nbytes(capacity)

    def spill(self, stored: torch.Tensor, region: torch.Tensor) -> None:
        """Copy the region's bytes."""
        stored.copy_(region.view(torch.uint8), non_blocking=True)

    def reload(self, region: torch.Tensor, stored: torch.Tensor) -> None:
        """Copy the stored bytes."""
        region.view(torch.uint8).copy_(stored, non_blocking=True)


class Int8:
    """Stores the scales (float32; by layer, K before V, then head and token), then q in the order of the elements."""

    approximate = True

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        # A model may have no keys, or no values: there is no scale of a row without elements.
        self._widths = tuple(width for width in (layout.dqk, layout.dv) if width)
        self._rows_per_token = len(self._widths) * layout.layers * layout.heads

    def nbytes(self, capacity: int) -> int:
        """One byte per element of K and V and four per scale; times and a state as in HBM."""
        per_token = self._layout.kv_per_token + self._rows_per_token * torch.float32.itemsize
        return capacity * per_token + self._layout.exact_bytes(capacity)

    def spill(self, stored: torch.Tensor, region: torch.Tensor) -> None:
        """Quantise on the region's device, so that only the int8 form crosses the bus."""
        for rows, kept, scales in self._pieces(region, stored):
            values = rows.float()
            scale = (values.abs().amax(1, keepdim=True) / STEPS).clamp_min_(LEAST_SCALE)
            scale.view(torch.int32).bitwise_and_(SCALE_MASK)
            kept.copy_((values / scale).round_().to(torch.int8), non_blocking=True)
            scales.copy_(scale, non_blocking=True)
        exact, kept_exact = self._exact(region, stored)
        kept_exact.copy_(exact, non_blocking=True)

    def reload(self, region: torch.Tensor, stored: torch.Tensor) -> None:
        """Multiply on the region's device, so that only the int8 form crosses the bus."""
        for rows, kept, scales in self._pieces(region, stored):
            near = kept.to(rows.device, non_blocking=True)
            torch.mul(near, scales.to(rows.device, non_blocking=True), out=rows)
        exact, kept_exact = self._exact(region, stored)
        exact.copy_(kept_exact, non_blocking=True)

    def _capacity(self, region: torch.Tensor) -> int:
        return (region.numel() - self._layout.state) // max(1, self._layout.elements_per_token)

    def _exact(self, region: torch.Tensor, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes of times and the state in the region and in its copy."""
        size = self._layout.exact_bytes(self._capacity(region))
        return region.view(torch.uint8)[region.nbytes - size :], stored[stored.nbytes - size :]

    def _pieces(
        self, region: torch.Tensor, stored: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Pieces of the region, each of rows of one width: elements (n, d), their q (n, d), their scales (n, 1)."""
        layout, capacity = self._layout, self._capacity(region)
        scale_bytes = capacity * self._rows_per_token * torch.float32.itemsize
        all_scales, all_kept = stored[:scale_bytes].view(torch.float32), stored[scale_bytes:].view(torch.int8)
        most = CPU_PIECE if region.device.type == "cpu" else DEVICE_PIECE
        element = row = 0
        for width in self._widths * layout.layers:
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
