"""The two tiers together: what DRAM saves on a trace, and what its two forms of copies hold, take and round."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from cache_baselines import BYTES_PER_TOKEN, Trace, cost_ms, traces

from relaygr_stream.cache.copy import Convert, CopyEngine, CopyTicket, unchanged
from relaygr_stream.cache.entry import Coverage, Entry
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.storage import StorageKind, make_storage
from relaygr_stream.models.api import ScoreInput, Tokens, relative_deviation
from relaygr_stream.models.kv import KVLayout, KVRegion
from relaygr_stream.models.loading import load_model
from relaygr_stream.settings.schema import Relay
from relaygr_stream.settings.worker import Model

CPU = torch.device("cpu")
#: K and V of the trace's entries: bookkeeping is what is measured, so a token has few bytes.
TINY = KVLayout(1, 1, 2, 2, torch.float32)
LONGEST = 8192
#: Copies of real entries, of BYTES_PER_TOKEN, at the bandwidth of this kind of machine.
RELOAD_BYTES_PER_S = 5e9
#: Requests between a prefix's pre-inference and its ranking, which keep it pinned.
PINNED_REQUESTS = 20
#: int8 copies of one prefix and of these models: as far as their scores may move (worker.dram_int8_deviation).
MOST_DEVIATION = 0.03
#: int8 needs a quarter (float32) or half (bfloat16) of the bytes, and four for each scale.
LEAST_GAIN = {torch.float32: 3.5, torch.bfloat16: 1.75}

Check = Callable[[bool, str], None]


class AtOnce(CopyEngine):
    """Copies made when they are submitted."""

    def submit(
        self, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False, convert: Convert = unchanged
    ) -> CopyTicket:
        del urgent
        ticket = CopyTicket(dst, src, None, convert)
        ticket.run(None)
        return ticket


def two_tiers(check: Check) -> None:
    print("HBM and DRAM together: recompute time saved, reloads paid; 8,000 requests of 3,000 users\n")
    names = ("HBM alone", "with DRAM", "reloads", "spills")
    print(f"{'trace':>18} {'HBM':>5} {'DRAM':>5} " + " ".join(f"{name:>14}" for name in names))
    population, count = 3000, 8000
    saved: list[tuple[float, float]] = []
    for trace in traces(count, population):
        everyone = sum(trace.tokens[:population]) * TINY.bytes_per_token
        for hbm, dram in ((0.03, 0.06), (0.05, 0.3)):
            alone, _, _ = replay_tiers(trace, int(hbm * everyone), 0)
            both, reloads, spills = replay_tiers(trace, int(hbm * everyone), int(dram * everyone))
            saved.append((alone, both))
            print(f"{trace.name:>18} {hbm:>5.0%} {dram:>5.0%} {alone:>14.3f} {both:>14.3f} {reloads:>14} {spills:>14}")
    means = np.mean(saved, axis=0)
    print(f"{'mean':>30} {means[0]:>14.3f} {means[1]:>14.3f}\n")
    check(
        means[1] > means[0], f"with DRAM {means[1]:.3f} of the recompute time is saved, with HBM alone {means[0]:.3f}"
    )


def replay_tiers(trace: Trace, hbm: int, dram: int) -> tuple[float, int, int]:
    """Share of recompute time saved, after a quarter of the trace to warm up; reloads; spills."""
    most = TINY.nbytes(LONGEST)
    granule = TINY.nbytes(64)
    in_hbm = TierMemory(hbm + 2 * most, CPU, alignment=granule)
    in_dram = TierMemory(dram + most, CPU, alignment=granule) if dram else None
    cache = PrefixCache(TINY, in_hbm, in_dram, AtOnce(CPU), cost_ms, scratch_tokens=LONGEST)
    behaviours = np.zeros((3, LONGEST), np.int64)
    pinned: deque[Entry] = deque()
    spent = total = 0.0
    for number, user in enumerate(trace.users):
        length = trace.tokens[user]
        tokens, paid = Tokens(behaviours[:, :length]), 0.0
        entry, coverage = cache.find(str(user), tokens)
        if entry is None or coverage is not Coverage.COVERS:
            paid = cost_ms(length)
            entry = cache.open(str(user), tokens)
            if entry is not None and entry.region is not None:
                entry.region.length = length
                cache.finish(entry)
        elif not entry.ready:
            paid = length * BYTES_PER_TOKEN / RELOAD_BYTES_PER_S * 1e3 if cache.load(entry) else cost_ms(length)
            cache.poll()
        if entry is not None and entry.ready:
            cache.pin(entry)
            pinned.append(entry)
        while len(pinned) > PINNED_REQUESTS:
            cache.unpin(pinned.popleft())
        cache.poll()
        if number >= len(trace.users) // 4:
            total += cost_ms(length)
            spent += paid
    cache.check_integrity()
    cache.close()
    return 1 - spent / total, cache.counters.loaded, cache.counters.spilled


def storages(check: Check) -> None:
    print("Copies in DRAM of a prefix of 2,048 tokens; 8 layers, D = 256, 4 heads × 64; one thread\n")
    print(
        f"{'K and V':>9} {'storage':>8} {'bytes':>11} {'times':>6} {'spill GB/s':>11} {'reload GB/s':>12} "
        f"{'deviation':>10}"
    )
    torch.set_num_threads(1)
    shape = Model(layers=8, dim=256, heads=4, dqk=64, dv=64)
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(shape, Relay(), device=CPU, dtype=dtype)
        generator = np.random.default_rng(1)
        region = KVRegion.new(model.layout, 2048)
        tokens = Tokens(np.stack([generator.integers(0, most, 2048) for most in (100_000, 4, 10**6)]))
        ranking = ScoreInput(region, tokens.slice(0, 0), generator.integers(0, 100_000, 64))
        with torch.inference_mode():
            model.prefill(region, tokens)
            exact = model.score([ranking])[0].numpy()
        computed = region.storage.clone()
        kinds: tuple[StorageKind, ...] = ("exact", "int8")
        for kind in kinds:
            storage = make_storage(kind, model.layout)
            stored = torch.zeros(storage.nbytes(2048), dtype=torch.uint8)
            region.storage.copy_(computed)
            engine = CopyEngine(CPU)
            speeds = []
            for target, source, convert in (
                (stored, region.storage, storage.spill),
                (region.storage, stored, storage.reload),
            ):
                best = math.inf
                for _ in range(10):
                    start = time.perf_counter()
                    engine.submit(target, source, convert=convert).wait()
                    best = min(best, time.perf_counter() - start)
                speeds.append(region.storage.nbytes / best / 1e9)
            engine.close()
            with torch.inference_mode():
                deviation = relative_deviation(model.score([ranking])[0].numpy(), exact)
            gain = region.storage.nbytes / stored.nbytes
            print(
                f"{str(dtype).removeprefix('torch.'):>9} {kind:>8} {stored.nbytes:>11,} {gain:>6.2f} "
                f"{speeds[0]:>11.1f} {speeds[1]:>12.1f} {deviation:>10.1e}"
            )
            if kind == "exact":
                check(deviation == 0, f"exact copies of {dtype} change scores by {deviation:.1e}")
            else:
                check(gain >= LEAST_GAIN[dtype], f"int8 holds {gain:.2f} times as much as {dtype}")
                check(deviation <= MOST_DEVIATION, f"int8 copies of {dtype} change scores by {deviation:.1e}")
    print("\nGB/s of HBM read or filled; deviation: of scores from the reloaded prefix, relative to the largest\n")
