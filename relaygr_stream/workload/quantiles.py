"""Quantiles by nearest rank: values that were observed, never numbers between two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def nearest_rank(values: Sequence[float] | npt.NDArray[Any], q: float) -> float:
    """The q quantile: the smallest value that at least a share q of the values do not exceed.

    values: at least one; infinite ones count.
    """
    rank = max(0, math.ceil(q * len(values) - 1e-9) - 1)
    return float(np.partition(np.asarray(values, np.float64), rank)[rank])


def quantile(values: Sequence[float], q: float) -> float | None:
    """The same; None if there are fewer than 1/(1 - q) values: none of them would lie beyond the quantile."""
    return nearest_rank(values, q) if len(values) * (1 - q) >= 1 - 1e-9 else None


def quantile_name(q: float) -> str:
    """P50, P99.9, …"""
    return f"P{100 * q:g}"
