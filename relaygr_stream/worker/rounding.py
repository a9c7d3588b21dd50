"""How far a model's scores move when prefix KV come back from int8: measured on the worker's own model at start.

Knows nothing of the cache: a region goes through the copy engine and back as an entry would.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from relaygr_stream.cache.copy import CopyEngine
from relaygr_stream.cache.storage import Storage
from relaygr_stream.cache.tiers import capacity_for
from relaygr_stream.errors import ConfigError, DeviceError, ModelError
from relaygr_stream.exactness import relative_deviation
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.protocol import ScoreInput
from relaygr_stream.models.tokens import Tokens
from relaygr_stream.worker.engine import Engine, describe
from relaygr_stream.worker.extension import Extension

#: Short prefixes deviate most: with few terms in a sum, roundings cancel less. The longest allowed prefix caps them.
PROBE_TOKENS: Final = (64, 256, 1024)
PROBE_CANDIDATES: Final = 64
#: Ids in the probe are below this, so that a small vocabulary has them too.
PROBE_IDS: Final = 1000
#: A chunk of the probe may take as long as it takes: nobody waits yet.
UNHURRIED_MS: Final = 1e5


def check_rounding(engine: Engine, copier: CopyEngine, storage: Storage, scratch: KVRegion, allowed: float) -> float:
    """The largest relative deviation of scores from prefix KV that went through `storage`, at most `allowed`.

    ConfigError when it is more, ModelError when the model fails on the probe.
    """
    generator = np.random.default_rng(0)
    worst = 0.0
    for n in dict.fromkeys(min(n, scratch.capacity) for n in PROBE_TOKENS):
        behaviours = [generator.integers(0, most, n) for most in (PROBE_IDS, 4, 10**6)]
        candidates = generator.integers(0, PROBE_IDS, PROBE_CANDIDATES)
        region = KVRegion(scratch.layout, scratch.storage, min(capacity_for(n), scratch.capacity))
        try:
            worst = max(worst, _deviation(engine, copier, storage, region, Tokens(np.stack(behaviours)), candidates))
        except DeviceError:
            raise
        except Exception as error:  # a user's model may raise anything
            raise ModelError(
                f"the model failed on a probe of {n} behaviours with ids below {PROBE_IDS}, made for "
                f'worker.dram_storage = "int8" ({describe(error)}); fix the model or set it to "exact"'
            ) from error
    if not worst <= allowed:
        raise ConfigError(
            f'worker.dram_storage = "int8" moves this model\'s scores by {worst:.2g}, relative to the largest, where '
            f'worker.dram_int8_deviation allows {allowed:g}: set worker.dram_storage = "exact", or allow that much'
        )
    return worst


def _deviation(
    engine: Engine,
    copier: CopyEngine,
    storage: Storage,
    region: KVRegion,
    tokens: Tokens,
    candidates: npt.NDArray[np.int64],
) -> float:
    work = Extension(engine, region, tokens)
    while not work.done:
        work.advance(UNHURRIED_MS)
    ranking = ScoreInput(region, tokens.slice(0, 0), candidates)
    exact = engine.score([ranking])[0][0]
    stored = torch.empty(storage.nbytes(region.capacity), dtype=torch.uint8)
    copier.submit(stored, region.storage, convert=storage.spill).wait()
    copier.submit(region.storage, stored, urgent=True, convert=storage.reload).wait()
    return relative_deviation(engine.score([ranking])[0][0], exact)
