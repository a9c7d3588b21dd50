"""Access to the device thread's cache from the event loop, and the hand-over's metrics.

Each command runs between two steps of the device thread, for a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Iterator
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter

from relaygr_stream.cache.transit import (
    Discard,
    Fill,
    GiveBack,
    Lease,
    Lend,
    ListUsers,
    Reservation,
    Reserve,
    Worth,
)
from relaygr_stream.models.api import Tokens
from relaygr_stream.wire.topic_files import lane_of_key
from relaygr_stream.worker.device import DeviceThread

#: Users per command: at about 2 µs each, half a millisecond of the device thread or of the loop.
AT_ONCE: Final = 256
#: The interval of polling for a copy from HBM to DRAM, which takes a few milliseconds and may queue behind others.
LOOK_S: Final = 0.005
#: The time limit of that copy; then the entry is not handed over.
COPY_OUT_S: Final = 2.0


class HandoverMetrics:
    """The hand-over's metrics (docs/reference/metrics.md). way: "given" to other workers or "taken" from them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.entries = Counter("relaygr_handover_entries", "Prefix KV handed over", ["way"], registry=registry)
        self.bytes = Counter("relaygr_handover_bytes", "Bytes of prefix KV handed over", ["way"], registry=registry)
        self.declined = Counter(
            "relaygr_handover_declined",
            "Offered prefix KV not taken: the present entry is as good (held), or all in DRAM is worth more (full)",
            ["reason"],
            registry=registry,
        )
        self.seconds = Counter(
            "relaygr_handover_seconds", "Time of sessions, waits included", ["way"], registry=registry
        )
        self.failed = Counter(
            "relaygr_handover_failed", "Sessions that were refused or broke off", ["way"], registry=registry
        )


class Desk:
    """Runs the cache's transit commands on the device thread. What it returns is given back, filled or discarded."""

    def __init__(self, device: DeviceThread) -> None:
        self._device = device

    async def most_valuable_first(self, lanes: frozenset[int], of: int, max_tokens: int = 0) -> Iterator[str]:
        """The users of these lanes who have an entry, the most valuable entries per byte first.

        of: the number of lanes in all, as the asking worker knows it. max_tokens: those with a longer entry are left
        out; 0: none is.
        """
        everyone = await self._device.ask(ListUsers())
        runs = []  # sorted runs, merged lazily: sorting all users at once would block the loop
        for start in range(0, len(everyone), AT_ONCE):
            users = [user for user in everyone[start : start + AT_ONCE] if lane_of_key(user, of) in lanes]
            if users:
                worth: dict[str, float] = await self._device.ask(Worth(users, max_tokens))
                runs.append(sorted(((value, user) for user, value in worth.items()), reverse=True))
            else:
                await asyncio.sleep(0)
        return (user for _, user in heapq.merge(*runs, reverse=True))

    async def lend(self, user_id: str) -> Lease | None:
        """A lease of the user's copy in DRAM, made first if the entry is only in HBM; None if there is none."""
        for _ in range(int(COPY_OUT_S / LOOK_S)):
            got: Lease | Literal["soon", "never"] = await self._device.ask(Lend(user_id))
            if isinstance(got, Lease):
                return got
            if got == "never":
                return None
            await asyncio.sleep(LOOK_S)
        return None

    def give_back(self, lease: Lease) -> None:
        """End a lease."""
        self._device.submit(GiveBack(lease))

    async def reserve(
        self, user_id: str, tokens: Tokens, capacity: int, uses: float
    ) -> Reservation | Literal["held", "full"]:
        """A reservation for a copy, or why there is none (see Transit.reserve)."""
        got: Reservation | Literal["held", "full"] = await self._device.ask(Reserve(user_id, tokens, capacity, uses))
        return got

    async def fill(self, place: Reservation) -> bool:
        """Make the whole copy the user's entry; False: one as good has come meanwhile. The reservation ends."""
        filled: bool = await self._device.ask(Fill(place))
        return filled

    def discard(self, place: Reservation) -> None:
        """End a reservation whose copy does not arrive."""
        self._device.submit(Discard(place))
