"""How far two sets of scores are apart. Used by the workers' audits, the demo's client and the benches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def relative_deviation(relayed: npt.NDArray[np.float32], full: npt.NDArray[np.float32]) -> float:
    """Largest absolute difference over the largest absolute full score; infinite where one is not finite."""
    if relayed.shape != full.shape or not (np.isfinite(relayed).all() and np.isfinite(full).all()):
        return float("inf")
    scale = max(float(np.abs(full).max(initial=0.0)), float(np.finfo(np.float32).tiny))
    return float(np.abs(relayed - full).max(initial=0.0)) / scale
