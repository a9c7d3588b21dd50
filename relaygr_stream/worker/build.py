"""Puts a worker's inside together from the settings: model, memory, cache, engine, core. Runs on the device thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from relaygr_stream.cache.copy import CopyEngine
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.storage import make_storage
from relaygr_stream.cache.tiers import GRANULE_TOKENS
from relaygr_stream.errors import CapacityError
from relaygr_stream.models.devices import select_device
from relaygr_stream.models.load import load_model
from relaygr_stream.models.protocol import RankingModel
from relaygr_stream.settings import Settings
from relaygr_stream.worker.audit import Auditor, Report
from relaygr_stream.worker.core import Limits, RelayCore
from relaygr_stream.worker.engine import Engine
from relaygr_stream.worker.held import CORE_SHARE
from relaygr_stream.worker.rounding import check_rounding
from relaygr_stream.worker.tasks import Answer

log = structlog.get_logger(__name__)


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


def load_engine(settings: Settings) -> Engine:
    """The configured model on the configured device. Raises ConfigError, ModelError or DeviceError."""
    worker = settings.worker
    device = select_device(worker.device)
    if device.type == "cpu":
        torch.set_num_threads(worker.threads)
    dtype = getattr(torch, worker.dtype)
    model = load_model(settings.model, settings.relay, device=device, dtype=dtype, kernels=worker.kernels)
    return Engine(model, device)


def build(
    settings: Settings,
    deliver: Callable[[Answer], None],
    report_audit: Report,
    wake: Callable[[], None],
    settled: Callable[[], None] = lambda: None,
) -> Inside:
    """Model, tiers and core on the configured device. Raises ConfigError, ModelError, DeviceError or CapacityError.

    settled: called when what is left to do is timed, and short.
    """
    worker = settings.worker
    engine = load_engine(settings)
    model, device = engine.model, engine.device
    host = torch.device("cpu")
    hbm = TierMemory(worker.hbm_bytes, device, setting="worker.hbm_bytes")
    dram = None
    if worker.dram_bytes:
        pinned = device.type != "cpu"
        dram = TierMemory(worker.dram_bytes, host, pinned=pinned, setting="worker.dram_bytes")
    copier = CopyEngine(device, wake)
    inside = assemble(settings, engine, hbm, dram, copier, deliver, report_audit)
    scratch = inside.cache.scratch.borrow()
    engine.warm_up(scratch, settled)
    if dram is not None and worker.dram_storage == "int8":
        storage = make_storage(worker.dram_storage, model.layout)
        deviation = check_rounding(engine, copier, storage, scratch, worker.dram_int8_deviation)
        log.info("DRAM copies are int8", deviation=round(deviation, 6), allowed=worker.dram_int8_deviation)
    inside.cache.scratch.give_back(scratch)
    return inside


def assemble(
    settings: Settings,
    engine: Engine,
    hbm: TierMemory,
    dram: TierMemory | None,
    copier: CopyEngine,
    deliver: Callable[[Answer], None],
    report_audit: Report,
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
        lag_tokens=worker.lag_tokens,
        storage=worker.dram_storage,
    )
    pinned_bytes = _pinned_bytes(settings, cache)
    core = RelayCore(
        engine,
        cache,
        Limits(
            pinned_bytes=pinned_bytes,
            max_ranking_delay_ms=worker.max_ranking_delay_ms,
            batch=worker.batch,
            queue_limit=worker.queue_limit,
            waiting_bytes=int(CORE_SHARE * worker.waiting_bytes),
            warm_up=worker.warm_up,
        ),
        Auditor(worker.audit_share, report_audit, audit_seed),
        deliver,
    )
    # Triggers count ⌈tokens × bytes_per_token ÷ alloc_bytes⌉ units. Where a granule is no multiple of the arena's
    # alignment, its padding counts as part of the tokens, so that they never count less than the cache takes.
    alloc_bytes = cache.nbytes(1)
    return Inside(core, cache, engine, model, engine.device, -(-alloc_bytes // GRANULE_TOKENS), alloc_bytes)


def _pinned_bytes(settings: Settings, cache: PrefixCache) -> int:
    """What admitted requests may hold. CapacityError where that is not even one prefix."""
    worker, tokens = settings.worker, settings.relay.max_prefix_tokens
    share, needed = int(worker.pinned_share * worker.hbm_bytes), cache.nbytes(tokens)
    if share < needed:
        raise CapacityError(
            f"worker.pinned_share = {worker.pinned_share:g} of worker.hbm_bytes = {worker.hbm_bytes} is {share} bytes, "
            f"which cannot hold one prefix of relay.max_prefix_tokens = {tokens}: it takes {needed} bytes; raise "
            f"either, or lower relay.max_prefix_tokens"
        )
    return share
