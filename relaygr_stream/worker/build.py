"""Puts a worker's inside together from the settings: model, memory, cache, engine, core. Runs on the device thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog
import torch

from relaygr_stream.cache.copy import CopyEngine
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.storage import make_storage
from relaygr_stream.cache.tiers import GRANULE_TOKENS
from relaygr_stream.errors import CapacityError
from relaygr_stream.models.api import RankingModel
from relaygr_stream.models.devices import select_device
from relaygr_stream.models.loading import load_model
from relaygr_stream.settings.schema import Settings
from relaygr_stream.worker.audit import Auditor, Report, check_rounding
from relaygr_stream.worker.executor import Engine
from relaygr_stream.worker.scheduler import Limits, RelayCore
from relaygr_stream.worker.tasks import Answer

# Memory of what was read and is not over: the bound that no sender, backlog or hanging device can pass. read ─► held
# ─► device thread ─► answer or forward acknowledged ─► let go └── too much ─► `overloaded` at once, and nothing of
# the request is kept Used by the event loop; only `taken` is called by the device thread. Knows nothing of what the
# bytes are.


#: Of worker.waiting_bytes, rankings that wait in the core may have this share, in which the client with the most gives
#: way to others. The rest is for what the device thread has not taken yet and for answers on their way.
CORE_SHARE: Final = 0.75


class Held:
    """Bytes of rankings without an acknowledged answer, and of signals that the device thread has not taken."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rankings: dict[tuple[int, int], int] = {}
        self._ranking_bytes = 0
        # Two totals, each written by one thread: no lock is needed.
        self._signals_read = 0
        self._signals_taken = 0

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self._ranking_bytes + self._signals_read - self._signals_taken

    def ranking(self, lane: int, offset: int, nbytes: int) -> bool:
        """A ranking was read; False (nothing changed): it is too much.

        A lane that was lost and regained may bring one again whose first copy is not over: they count together, and
        end together, with the first of them.
        """
        if self.nbytes + nbytes > self.limit:
            return False
        key = (lane, offset)
        self._rankings[key] = self._rankings.get(key, 0) + nbytes
        self._ranking_bytes += nbytes
        return True

    def over(self, lane: int, offset: int) -> None:
        """The ranking needs no more work; one that was never held is no error."""
        self._ranking_bytes -= self._rankings.pop((lane, offset), 0)

    def signal(self, nbytes: int) -> bool:
        """A signal was read; False (nothing changed): it is too much."""
        if self.nbytes + nbytes > self.limit:
            return False
        self._signals_read += nbytes
        return True

    def taken(self, nbytes: int) -> None:
        """The device thread took signals of so many bytes: from now on the cache bounds what they hold."""
        self._signals_taken += nbytes


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
) -> Inside:
    """Model, tiers and core on the configured device. Raises ConfigError, ModelError, DeviceError or CapacityError."""
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
    engine.warm_up(scratch)
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
        max_stale_tokens=worker.max_stale_tokens,
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
