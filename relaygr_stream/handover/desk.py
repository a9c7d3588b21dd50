"""The device thread's cache, asked from the event loop: short questions, between two steps, each a fraction of a
millisecond. What was lent or taken is given back however the asking ends."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter

from relaygr_stream.bus.topics import lane_of
from relaygr_stream.cache.transit import Arrival, Loan, Transit
from relaygr_stream.models.api import Tokens
from relaygr_stream.wire.messages import without_tenant
from relaygr_stream.worker.device import DeviceThread

# The hand-over's metrics. Their names are part of the interface: docs/operations.md has them.


class HandoverMetrics:
    """way: "given" to other workers or "taken" from them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.entries = Counter("relaygr_handover_entries", "Prefix KV handed over", ["way"], registry=registry)
        self.bytes = Counter("relaygr_handover_bytes", "Bytes of them", ["way"], registry=registry)
        self.declined = Counter(
            "relaygr_handover_declined",
            "Offered prefix KV not taken: as good was held, or all there was worth more (full)",
            ["reason"],
            registry=registry,
        )
        self.seconds = Counter(
            "relaygr_handover_seconds", "Time of sessions, waits included", ["way"], registry=registry
        )
        self.failed = Counter(
            "relaygr_handover_failed", "Sessions that were refused or broke off", ["way"], registry=registry
        )


T = TypeVar("T")

#: Users asked about at once: at about 2 µs each, half a millisecond of the device thread or of the loop.
AT_ONCE: Final = 256
#: A copy from HBM to DRAM takes a few milliseconds, and waits for others: looked for this often …
LOOK_S: Final = 0.005
#: … and given up after this long; the entry is then not handed over.
COPY_OUT_S: Final = 2.0


class Desk:
    """lanes: how many there are."""

    def __init__(self, device: DeviceThread, lanes: int) -> None:
        self._device = device
        self._lanes = lanes

    async def most_valuable_first(self, lanes: frozenset[int]) -> Iterator[str]:
        """Users of these lanes with an entry, those first whose entries are worth most per byte."""
        everyone = await self._ask(Transit.users)
        runs = []  # sorted each, and merged as they are needed: sorting all at once would hold up the loop
        for start in range(0, len(everyone), AT_ONCE):
            theirs = [
                user
                for user in everyone[start : start + AT_ONCE]
                if lane_of(without_tenant(user), self._lanes) in lanes
            ]
            if theirs:
                runs.append(sorted(await self._ask(partial(_worth, theirs)), reverse=True))
            else:
                await asyncio.sleep(0)
        return (user for _, user in heapq.merge(*runs, reverse=True))

    @asynccontextmanager
    async def loan(self, user_id: str) -> AsyncIterator[Loan | None]:
        """The user's copy in DRAM, made first if there is only one in HBM; None: there is nothing to lend."""
        loan = await self._lend(user_id)
        try:
            yield loan
        finally:
            if loan is not None:
                self._tell(lambda transit: transit.give_back(loan))

    @asynccontextmanager
    async def arrival(
        self, user_id: str, tokens: Tokens, capacity: int
    ) -> AsyncIterator[Arrival | Literal["held", "full"]]:
        """Room for a copy, which is the user's entry once the context is left; left with an exception, given back."""
        got = await self._ask(
            lambda transit: transit.expect(user_id, tokens, capacity),
            undo=lambda transit, got: transit.discard(got) if isinstance(got, Arrival) else None,
        )
        try:
            yield got
        except BaseException:
            if isinstance(got, Arrival):
                self._tell(lambda transit: transit.discard(got))
            raise
        if isinstance(got, Arrival):
            await self._ask(lambda transit: transit.arrived(got))

    async def _lend(self, user_id: str) -> Loan | None:
        for _ in range(int(COPY_OUT_S / LOOK_S)):
            got = await self._ask(
                lambda transit: transit.lend(user_id),
                undo=lambda transit, got: transit.give_back(got) if isinstance(got, Loan) else None,
            )
            if isinstance(got, Loan):
                return got
            if got == "never":
                return None
            await asyncio.sleep(LOOK_S)
        return None

    async def _ask(
        self, question: Callable[[Transit], T], undo: Callable[[Transit, T], None] = lambda _, __: None
    ) -> T:
        """undo: called on the device thread with the answer, if the asking is cancelled and nobody will see it."""
        answer: list[T] = []
        try:
            await self._device.ask(lambda core, _: answer.append(question(core.cache.transit)))
        except asyncio.CancelledError:
            # Calls run in order: by then the question has been answered.
            self._tell(lambda transit: undo(transit, answer[0]))
            raise
        return answer[0]

    def _tell(self, call: Callable[[Transit], None]) -> None:
        self._device.submit(lambda core, _: call(core.cache.transit))


def _worth(users: list[str], transit: Transit) -> list[tuple[float, str]]:
    return [(worth, user) for user, worth in transit.worth(users).items()]
