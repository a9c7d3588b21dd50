"""The two tiers together: what DRAM saves on a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from cache_baselines import BYTES_PER_TOKEN, Trace, cost_ms, traces

from relaygr_stream.cache.copy import CopyEngine, CopyTicket
from relaygr_stream.cache.entry import Coverage, Entry
from relaygr_stream.cache.memory import TierMemory
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.models.api import Tokens
from relaygr_stream.models.kv import KVLayout

CPU = torch.device("cpu")
#: K and V of the trace's entries: bookkeeping is what is measured, so a token has few bytes.
TINY = KVLayout(1, 1, 2, 2, torch.float32)
LONGEST = 8192
#: Copies of real entries, of BYTES_PER_TOKEN, at the bandwidth of this kind of machine.
RELOAD_BYTES_PER_S = 5e9
#: Requests between a prefix's pre-inference and its ranking, which keep it pinned.
PINNED_REQUESTS = 20

Check = Callable[[bool, str], None]


class AtOnce(CopyEngine):
    """Copies made when they are submitted."""

    def submit(self, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False) -> CopyTicket:
        del urgent
        ticket = CopyTicket(dst, src)
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
