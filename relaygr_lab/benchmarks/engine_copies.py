"""Spill and reload of whole entries by the cache's own copy engine, and what they do to a ranking meanwhile."""

from __future__ import annotations

import time
from functools import partial
from typing import Final

import numpy as np
import torch
from engine_load import EngineLoad
from engine_report import Report
from floors import Machine, Work, dtype_name

from relaygr_stream.cache.copy import CopyEngine, CopyTicket
from relaygr_stream.cache.memory import TierMemory

PREFIX: Final = 2048
CANDIDATES: Final = 64
ENTRIES: Final = 8  # copied one after the other: a spill frees more than one
COPY_SHARE: Final = 0.80


class Tiers:
    """The same entries in the device's memory and in the host's, and both ways to copy them."""

    def __init__(self, load: EngineLoad, nbytes: int) -> None:
        self.pinned = load.device.type != "cpu"
        fast = TierMemory(ENTRIES * nbytes, load.device).buffer
        slow = TierMemory(ENTRIES * nbytes, torch.device("cpu"), pinned=self.pinned).buffer
        slow.fill_(1)  # memory that was never written is not there yet
        self.entries = [(fast[at : at + nbytes], slow[at : at + nbytes]) for at in range(0, len(fast), nbytes)]
        self.engine = CopyEngine(load.device)

    def plain(self, up: bool) -> None:
        """In this thread, on its stream."""
        for device, host in self.entries:
            target, source = (device, host) if up else (host, device)
            target.copy_(source, non_blocking=self.pinned)

    def submit(self, up: bool) -> list[CopyTicket]:
        """In the background."""
        return [
            self.engine.submit(*((device, host) if up else (host, device)), urgent=up) for device, host in self.entries
        ]

    def background(self, up: bool) -> None:
        """In the background, waited for."""
        for ticket in self.submit(up):
            ticket.wait()


def copies(load: EngineLoad, machine: Machine, report: Report, seconds: float) -> None:
    """Print and judge the bandwidth of both directions, and how much longer a ranking takes beside them."""
    print(f"\nspill and reload of {PREFIX} tokens, {dtype_name(load.dtype)}", flush=True)
    kv = load.region(PREFIX)
    load.model.prefill(kv, load.tokens(PREFIX))
    nbytes = kv.storage.numel() * load.dtype.itemsize
    tiers = Tiers(load, nbytes)
    try:
        for name, up in (("spill", False), ("reload", True)):
            direct, aside = machine.race((partial(tiers.plain, up), partial(tiers.background, up)), seconds)
            speeds = [ENTRIES * nbytes / taken / 1e9 for taken in (direct, aside)]
            text = f"{speeds[1]:.1f} GB/s, a plain copy {speeds[0]:.1f} GB/s: {direct / aside:.0%}"
            report.note(load.dtype, name, text, gb_per_s=speeds[1], share=direct / aside)
            report.check(
                direct >= COPY_SHARE * aside,
                f"{name}: {direct / aside:.0%} of a plain copy's bandwidth; bound: at least {COPY_SHARE:.0%}",
            )
        alike = load.alike(load.ranking(kv, CANDIDATES))
        slowed = beside_spills(lambda: load.model.score([next(alike)]), tiers, machine, 2 * seconds)
        report.note(load.dtype, "a ranking while spills run", f"{slowed:.2f} × its time without", ratio=slowed)
    finally:
        tiers.engine.close()


def beside_spills(score: Work, tiers: Tiers, machine: Machine, seconds: float) -> float:
    """Median time of `score` while the spill lane is never empty, over that while nothing is copied."""
    times: dict[bool, list[float]] = {False: [], True: []}
    tickets: list[CopyTicket] = []
    started = time.perf_counter()
    score()
    while time.perf_counter() - started < seconds:
        for busy in (False, True):
            for ticket in tickets:
                ticket.wait()
            tickets = []
            for _ in range(10):
                if busy and all(ticket.done() for ticket in tickets):
                    tickets = tiers.submit(up=False)
                begin = time.perf_counter()
                score()
                machine.synchronize()
                times[busy].append(time.perf_counter() - begin)
    for ticket in tickets:
        ticket.wait()
    return float(np.median(times[True]) / np.median(times[False]))
