"""Behaviours as a model reads them: items, actions and gaps, on the host.

The gap of a behaviour is the time since the one before it, so it is known once and never changes when the sequence
grows (DESIGN §8). Knows nothing of devices; models move what they need.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from relaygr_stream.messages import Behaviours


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
