"""The hash of ids outside a table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def oov_hash(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64, elementwise: a 64-bit number for each 64-bit id, different for different ids."""
    z = ids.astype(np.uint64)  # two's complement
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
