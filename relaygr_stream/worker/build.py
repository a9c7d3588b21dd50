"""Puts a worker's inside together from the settings: model, memory, cache, engine, core. Runs on the device thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from relaygr_stream.cache.copy import CopyEngine
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.tiers import GRANULE_TOKENS
from relaygr_stream.models.devices import select_device
from relaygr_stream.models.load import load_model
from relaygr_stream.models.protocol import RankingModel
from relaygr_stream.settings import Settings
from relaygr_stream.worker.audit import Auditor
from relaygr_stream.worker.core import Limits, RelayCore
from relaygr_stream.worker.engine import Engine
from relaygr_stream.worker.tasks import Answer, RankTask


@dataclass(frozen=True)
class Inside:
    """What the service may read of a built worker; only the device thread calls into it."""

    core: RelayCore
    cache: PrefixCache
    engine: Engine
    model: RankingModel
    device: torch.device
    bytes_per_token: int
    alloc_bytes: int


def build(
    settings: Settings,
    deliver: Callable[[Answer], None],
    report_audit: Callable[[RankTask, float, float], None],
    wake: Callable[[], None],
) -> Inside:
    """Model, tiers and core on the configured device. Raises ModelError, DeviceError or CapacityError."""
    worker = settings.worker
    device = select_device(worker.device)
    if device.type == "cpu":
        torch.set_num_threads(worker.threads)
    model = load_model(settings.model, settings.relay, device=device, dtype=getattr(torch, worker.dtype))
    engine = Engine(model, device)
    host = torch.device("cpu")
    hbm = TierMemory(worker.hbm_bytes, device, setting="worker.hbm_bytes")
    dram = None
    if worker.dram_bytes:
        pinned = device.type != "cpu"
        dram = TierMemory(worker.dram_bytes, host, pinned=pinned, setting="worker.dram_bytes")
    inside = assemble(settings, engine, hbm, dram, CopyEngine(device, wake), deliver, report_audit)
    scratch = inside.cache.scratch.borrow()
    engine.warm_up(scratch)
    inside.cache.scratch.give_back(scratch)
    return inside


def assemble(
    settings: Settings,
    engine: Engine,
    hbm: TierMemory,
    dram: TierMemory | None,
    copier: CopyEngine,
    deliver: Callable[[Answer], None],
    report_audit: Callable[[RankTask, float, float], None],
    audit_seed: int | None = None,
) -> Inside:
    """Cache and core over this engine and memory, as configured; also what `relaygr simulate` runs."""
    worker, model = settings.worker, engine.model
    cache = PrefixCache(
        model.layout,
        hbm,
        dram,
        copier,
        engine.costs_of_prefix,
        scratch_tokens=settings.relay.max_prefix_tokens + settings.relay.max_suffix_tokens,
        incremental=model.incremental,
    )
    core = RelayCore(
        engine,
        cache,
        Limits(
            pinned_bytes=int(worker.pinned_share * worker.hbm_bytes),
            max_ranking_delay_ms=worker.max_ranking_delay_ms,
            batch=worker.batch,
            queue_limit=worker.queue_limit,
        ),
        Auditor(worker.audit_share, report_audit, audit_seed),
        deliver,
    )
    # Triggers count ⌈tokens × bytes_per_token ÷ alloc_bytes⌉ units. Where a granule is no multiple of the arena's
    # alignment, its padding counts as part of the tokens, so that they never count less than the cache takes.
    alloc_bytes = cache.nbytes(1)
    return Inside(core, cache, engine, model, engine.device, -(-alloc_bytes // GRANULE_TOKENS), alloc_bytes)
