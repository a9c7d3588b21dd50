"""Histories for tests: of one seed, longer ones continue shorter ones."""

from __future__ import annotations

import msgspec
import numpy as np

from relaygr_stream.wire.behaviours import Behaviours


def history(length: int, seed: int = 0, *, features: bool = False) -> Behaviours:
    rng = np.random.default_rng(seed)
    items, actions = rng.integers(0, 1000, 1024)[:length], rng.integers(0, 9, 1024)[:length]
    plain = Behaviours.from_arrays(items, actions, np.arange(length) * 1000)
    if not features or not length:
        return plain
    dwell, pair = rng.random(1024, np.float32)[:length], rng.integers(0, 99, (1024, 2))[:length]
    columns = {"dwell:float32": dwell.tobytes(), "pair:int64": pair.astype("<i8").tobytes()}
    return msgspec.structs.replace(plain, columns=columns)
