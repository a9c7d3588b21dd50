"""The two tiers together: what DRAM saves on a trace. A DRAM tier in a file: how fast a restart finds its entries."""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import torch
from cache_baselines import BYTES_PER_TOKEN, Trace, cost_ms, traces

from relaygr_stream.cache.arena import Extent
from relaygr_stream.cache.copy import Before, CopyEngine, CopyTicket
from relaygr_stream.cache.entry import Coverage, Entry, Source
from relaygr_stream.cache.kept import kept_bytes
from relaygr_stream.cache.memory import ALIGNMENT, TierMemory
from relaygr_stream.cache.prefix_cache import PrefixCache
from relaygr_stream.cache.tier_file import FileShape, SlotRecord, TierFile
from relaygr_stream.cache.tier_file_open import open_tier_file
from relaygr_stream.cache.tiers import GRANULE_TOKENS
from relaygr_stream.models.api import ROWS, Tokens
from relaygr_stream.models.kv import KVLayout
from relaygr_stream.wire.erase import Erase
from relaygr_stream.wire.worker_status import StatusReader

CPU = torch.device("cpu")
#: K and V of the trace's entries: bookkeeping is what is measured, so a token has few bytes.
TINY = KVLayout(1, 1, 2, 2, torch.float32)
LONGEST = 8192
#: Copies of real entries, of BYTES_PER_TOKEN, at the bandwidth of this kind of machine.
RELOAD_BYTES_PER_S = 5e9
#: Requests between a prefix's pre-inference and its ranking, which keep it pinned.
PINNED_REQUESTS = 20

#: Entries that a restart is to find within a second, and its rounds.
KEPT: Final = 10_000
ROUNDS: Final = 5
#: Of the rate at which a restart reads and checks records, that at which it has them as entries: these pass through the
#: tables of users, of extents and of eviction. Where each divides the arena's hole anew, it is 0.09.
RESTORED_SHARE: Final = 0.12
#: Users of other workers who were erased meanwhile, and of a restart's time without any, the most that it may take.
ERASED: Final = 1_000
MOST_SLOWER: Final = 1.3

Check = Callable[[bool, str], None]


class AtOnce(CopyEngine):
    """Copies made when they are submitted."""

    def submit(
        self, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False, before: Before | None = None
    ) -> CopyTicket:
        del urgent
        ticket = CopyTicket(dst, src, before=before)
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
        means[1] > means[0],
        f"with DRAM {means[1]:.3f} of the recompute time is saved; bound: above {means[0]:.3f}, of HBM alone",
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


def restart(check: Check) -> None:
    """Find KEPT entries again, beside reading and checking their records alone, by this thread's processor time."""
    token_bytes = 8 * ROWS
    unit = -(-kept_bytes(TINY.nbytes(GRANULE_TOKENS), GRANULE_TOKENS, token_bytes) // ALIGNMENT) * ALIGNMENT
    shape = FileShape((KEPT + LONGEST // GRANULE_TOKENS) * unit, unit, token_bytes, "bench")
    seconds = dict.fromkeys(("records", "entries", "erased"), math.inf)
    erases = [Erase.request(f"{number:016}", f"stranger-{number}", number, StatusReader()) for number in range(ERASED)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tier"
        file = _opened(path, shape)
        for number in range(KEPT):
            place = Extent(number * unit, unit)
            file.commit(SlotRecord(place, f"user-{number}", bytes(20), GRANULE_TOKENS, 50, 1.0, Source.SIGNAL))
        file.close()
        gc.collect()
        gc.freeze()  # as a worker does
        for _ in range(ROUNDS):
            file = _opened(path, shape)
            seconds["records"] = min(seconds["records"], _taken(lambda file=file: list(file.records())))  # type: ignore[misc]
            file.close()
            for name, since in (("entries", []), ("erased", erases)):
                file = _opened(path, shape)
                dram = TierMemory(shape.data_bytes, CPU, file=file)
                hbm = TierMemory(3 * TINY.nbytes(LONGEST), CPU)
                cache = PrefixCache(TINY, hbm, dram, AtOnce(CPU), cost_ms, scratch_tokens=LONGEST)
                seconds[name] = min(seconds[name], _taken(lambda cache=cache, since=since: cache.restore(since)))  # type: ignore[misc]
                found = cache.entries
                cache.close()
                file.close()
        gc.unfreeze()
    slower = seconds["erased"] / seconds["entries"]
    rates = {name: KEPT / each for name, each in seconds.items()}
    share = rates["entries"] / rates["records"]
    found_by = f"A restart finds {found} entries in {seconds['entries']:.2f} s of a processor"
    print(f"{found_by}: {rates['entries']:,.0f} a second")
    print(f"are {share:.2f} of the {rates['records']:,.0f} records a second that it reads and checks")
    print(f"with {ERASED:,} users of others erased meanwhile it takes {slower:.2f} times as long\n")
    check(
        slower <= MOST_SLOWER,
        f"a restart after {ERASED:,} erasures takes {slower:.2f} × that after none; bound: at most {MOST_SLOWER}",
    )
    check(found == KEPT, f"a restart finds {found} entries; bound: all {KEPT}")
    check(
        share >= RESTORED_SHARE,
        f"a restart makes entries at {share:.2f} of the rate at which it reads; bound: at least {RESTORED_SHARE}",
    )


def _opened(path: Path, shape: FileShape) -> TierFile:
    file = open_tier_file(path, shape)
    assert file is not None
    return file


def _taken(work: Callable[[], object]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start
