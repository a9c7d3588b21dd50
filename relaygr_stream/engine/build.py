"""Builds a worker's runtime from the settings: model, memory, cache, executor, scheduler. Runs on the device thread."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Final

import structlog
import torch

from relaygr_stream.cache.copy import CopyEngine, Wake
from relaygr_stream.cache.fading import CostAwarePolicy
from relaygr_stream.cache.memory import ALIGNMENT, TierMemory
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.tier_file import TierFile
from relaygr_stream.cache.tiers import GRANULE_TOKENS, MakePolicy, capacity_for
from relaygr_stream.engine.audit import Auditor, Report
from relaygr_stream.engine.executor import Executor
from relaygr_stream.engine.scheduler import Limits, Scheduler
from relaygr_stream.engine.tier_file import tier_file_of
from relaygr_stream.errors import CapacityError, ModelError
from relaygr_stream.models.api import RankingModel, schema_of
from relaygr_stream.models.devices import select_device
from relaygr_stream.models.kv import KVLayout
from relaygr_stream.models.loading import load_model
from relaygr_stream.models.mapped import HOT_PART
from relaygr_stream.settings.scenarios import SECTION
from relaygr_stream.settings.schema import Settings
from relaygr_stream.settings.worker import Worker as WorkerSettings
from relaygr_stream.wire.worker_status import counted_bytes

log = structlog.get_logger(__name__)

#: Share of worker.max_waiting_bytes for rankings inside the scheduler, where the client with the most gives way to
#: others. The rest is for commands that the device thread has not taken and for answers on their way.
SCHEDULER_SHARE: Final = 0.75
#: Bytes pinned on other workers' behalf, as a part of those for the lanes' own users. A worker is a delegate for
#: moments in which it has time; its own users' returns need the rest of HBM as a cache. But a room without place for
#: one longest prefix is no room for its users, so it has that much wherever HBM does.
DELEGATED_PART: Final = 0.25
#: A ranking waits at most this share of the SLO for a slice of other work.
DELAY_SLO_SHARE: Final = 0.2


@dataclass(frozen=True)
class WorkerRuntime:
    """What the process may read of a built worker; only the device thread calls into it.

    delegated_bytes: may be pinned on other workers' behalf, beside worker.pinned_share; not reserved.
    longest_bytes: of a prefix of relay.max_prefix_tokens. dram: memory of the DRAM tier; None: there is none.
    """

    scheduler: Scheduler
    cache: PrefixCache
    executor: Executor
    model: RankingModel
    device: torch.device
    bytes_per_token: int
    alloc_bytes: int
    delegated_bytes: int
    longest_bytes: int
    dram: TierMemory | None = None

    @property
    def tier_file(self) -> TierFile | None:
        """The DRAM tier's file; None: it is in memory."""
        return None if self.dram is None else self.dram.file

    def close(self, *, for_good: bool) -> None:
        """Once the device thread has ended: give the DRAM tier's file back. for_good: and remove it."""
        if self.dram is not None:
            if for_good and self.tier_file is not None:
                self.tier_file.path.unlink(missing_ok=True)
            self.dram.close()


def free_memory() -> None:
    """Give back what is left of a runtime that is gone, for the next one: cycles, and what torch keeps on a device."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def load_executor(settings: Settings) -> Executor:
    """The configured model on the configured device. Raises ConfigError, ModelError or DeviceError."""
    worker = settings.worker
    device = select_device(worker.device)
    if device.type == "cpu":
        torch.set_num_threads(worker.threads)
    dtype = getattr(torch, worker.dtype)
    hot_bytes = worker.hbm_bytes // HOT_PART
    try:
        model = load_model(
            settings.model, settings.relay, device=device, dtype=dtype, kernels=worker.kernels, hot_bytes=hot_bytes
        )
    except ModelError as error:
        if any(each.name == settings.scenario and each.model for each in settings.scenarios):
            raise type(error)(f"`{SECTION}{settings.scenario}.model`: {error}") from error
        raise
    return Executor(model, device)


def build(
    settings: Settings,
    report_audit: Report,
    wake: Wake,
) -> WorkerRuntime:
    """On the configured device. Raises ConfigError, ModelError, DeviceError or CapacityError."""
    worker = settings.worker
    executor = load_executor(settings)
    device = executor.device
    host = torch.device("cpu")
    hbm = TierMemory(worker.hbm_bytes, device, setting="worker.hbm_bytes")
    dram = None
    if worker.dram_bytes:
        pinned, file = device.type != "cpu", tier_file_of(settings, executor.model, device)
        dram = TierMemory(worker.dram_bytes, host, pinned=pinned, setting="worker.dram_bytes", file=file)
        if pinned and not dram.pinned:
            log.info("the DRAM tier's file cannot be pinned: copies take a way round")
    copier = CopyEngine(device, wake)
    runtime = assemble(settings, executor, hbm, dram, copier, report_audit)
    scratch = runtime.cache.scratch.borrow()
    executor.warm_up(scratch, settings.relay.max_candidates)
    runtime.cache.scratch.give_back(scratch)
    return runtime


def assemble(
    settings: Settings,
    executor: Executor,
    hbm: TierMemory,
    dram: TierMemory | None,
    copier: CopyEngine,
    report_audit: Report,
    audit_seed: int | None = None,
    policy: MakePolicy = CostAwarePolicy,
) -> WorkerRuntime:
    """Cache and scheduler over this executor and memory, as configured; also what `relaygr simulate` runs.

    policy: makes each tier's eviction order.
    """
    worker, model = settings.worker, executor.model
    cache = PrefixCache(
        model.layout,
        hbm,
        dram,
        copier,
        executor.costs_of_prefix,
        scratch_tokens=longest_sequence(settings, model),
        incremental=model.incremental,
        max_stale_tokens=worker.max_stale_tokens,
        policy=policy,
    )
    context_tokens = schema_of(model).context_tokens
    longest_tokens = context_tokens + settings.relay.max_prefix_tokens
    bytes_per_token, alloc_bytes = stated_bytes(model.layout, longest_tokens, hbm.arena.alignment)
    # Triggers may count more than the cache takes, and delegate by what they count.
    longest_bytes = max(cache.nbytes(longest_tokens), counted_bytes(longest_tokens, bytes_per_token, alloc_bytes))
    pinned_bytes = _pinned_bytes(settings, cache, context_tokens)
    spare_bytes = worker.hbm_bytes - cache.hbm_used - pinned_bytes  # beside the pinned share and the scratch region
    delegated_bytes = _delegated_bytes(worker, spare_bytes, longest_bytes)
    scheduler = Scheduler(
        executor,
        cache,
        Limits(
            pinned_bytes=pinned_bytes,
            delegated_bytes=delegated_bytes,
            tenant_bytes=_tenant_bytes(settings, cache, context_tokens),
            max_ranking_delay_ms=worker.max_ranking_delay_ms or DELAY_SLO_SHARE * settings.relay.slo_ms,
            delay_by_costs=not worker.max_ranking_delay_ms,
            batch=worker.max_batch,
            queue_limit=worker.max_queue,
            waiting_bytes=int(SCHEDULER_SHARE * worker.max_waiting_bytes),
            truncate_to=worker.truncate_to,
        ),
        Auditor(worker.audit_share, report_audit, audit_seed, half=worker.dtype != "float32"),
    )
    return WorkerRuntime(
        scheduler,
        cache,
        executor,
        model,
        executor.device,
        bytes_per_token,
        alloc_bytes,
        delegated_bytes,
        longest_bytes,
        dram,
    )


def stated_bytes(layout: KVLayout, longest: int, alignment: int = ALIGNMENT) -> tuple[int, int]:
    """The bytes_per_token and alloc_bytes of a status. longest: tokens of a sequence.

    Triggers count ⌈tokens × bytes_per_token ÷ alloc_bytes⌉ units of alloc_bytes for a prefix. They must never count
    less than the cache takes, which has padding per granule of tokens, and may have a state that does not grow. So a
    prefix of one token more than any number of granules has to count as many units as it takes.
    """

    def taken(tokens: int) -> int:
        return -(-layout.nbytes(capacity_for(tokens)) // alignment) * alignment

    granules = range(GRANULE_TOKENS, max(longest, GRANULE_TOKENS + 1), GRANULE_TOKENS)  # one, two, … below the longest
    alloc_bytes = taken(1)
    units_before = ((tokens, -(-taken(tokens + 1) // alloc_bytes) - 1) for tokens in granules)
    return max([1, *(-(-units * alloc_bytes // tokens) for tokens, units in units_before)]), alloc_bytes


def longest_sequence(settings: Settings, model: RankingModel) -> int:
    """Tokens of the longest sequence that the settings allow."""
    return schema_of(model).context_tokens + settings.relay.max_prefix_tokens + settings.relay.max_suffix_tokens


def _delegated_bytes(worker: WorkerSettings, spare_bytes: int, longest_bytes: int) -> int:
    """Bytes that may be pinned on other workers' behalf: DELEGATED_PART, or one longest prefix if that is spare."""
    pinned = int(worker.pinned_share * worker.hbm_bytes)
    part = min(int(DELEGATED_PART * pinned), worker.hbm_bytes - pinned)
    return max(part, longest_bytes) if longest_bytes <= spare_bytes else part


def _tenant_bytes(settings: Settings, cache: PrefixCache, context_tokens: int) -> dict[str, int]:
    """Bytes that one tenant's announced requests may pin, by the scenario that they are charged to; 0: no bound.
    CapacityError where they hold no prefix."""
    alone = [each for each in settings.scenarios if each.name == settings.scenario]
    tokens = settings.relay.max_prefix_tokens
    needed = cache.nbytes(context_tokens + tokens)
    for each in (served := settings.sharing or dict(zip([""], alone, strict=False))).values():
        if 0 < each.max_pinned_bytes < needed:
            raise CapacityError(
                f"scenario.{each.name}.max_pinned_bytes = {each.max_pinned_bytes} cannot hold one prefix of "
                f"relay.max_prefix_tokens = {tokens}: it takes {needed} bytes; raise it, or lower "
                f"relay.max_prefix_tokens"
            )
    return {charged: each.max_pinned_bytes for charged, each in served.items()}


def _pinned_bytes(settings: Settings, cache: PrefixCache, context_tokens: int) -> int:
    """Bytes that admitted requests may pin. CapacityError where that is less than one prefix."""
    worker, tokens = settings.worker, settings.relay.max_prefix_tokens
    share, needed = int(worker.pinned_share * worker.hbm_bytes), cache.nbytes(context_tokens + tokens)
    if share < needed:
        raise CapacityError(
            f"worker.pinned_share = {worker.pinned_share:g} of worker.hbm_bytes = {worker.hbm_bytes} is {share} bytes, "
            f"which cannot hold one prefix of relay.max_prefix_tokens = {tokens}: it takes {needed} bytes; raise "
            f"either, or lower relay.max_prefix_tokens"
        )
    return share
