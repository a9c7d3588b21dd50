"""Has a worker's lanes follow what is measured: states its speed, and asks for another assignment while it has far more
to do than the others. What moves then, the group decides (bus/balance.py), often nothing.

Knows neither Kafka nor the device.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Final, Protocol

from relaygr_stream.bus.balance import START, STEPS_AN_OCTAVE, counted_speeds
from relaygr_stream.fleet import OwnerDirectory
from relaygr_stream.telemetry.clocks import Clock
from relaygr_stream.wire.messages import WorkerStatus

#: The interval of looks at what workers state.
LOOK_S: Final = 5.0
#: Busy shares are averaged over so long, and a worker asks after its lanes have been the same for so long.
ASK_S: Final = 300.0
#: Where nothing moved, it waits twice as long, up to ASK_S times this: 5 hours. So a worker with one hot lane, from
#: which nothing can be taken, hardly asks.
MOST_PAUSES: Final = 64
#: A worker less busy than this does not ask: hardly a ranking waits there.
LEAST_BUSY: Final = 0.3
#: What a speed is of: full inference of so many tokens and candidates, long enough on every device to tell them apart.
TOKENS: Final = 1024
CANDIDATES: Final = 128
#: What is stated to take less counts as this, so that speeds stay within their bound on the wire (MemberClaim).
LEAST_MS: Final = 1e-6
#: A speed that was stated stays until it is off by half a step of those that count.
NEWS: Final = 2.0 ** (0.5 / STEPS_AN_OCTAVE)


def stated_speed(stated: float, measured: float) -> float:
    """The speed to state from now on; stated: 0 if none was."""
    return stated if stated / NEWS <= measured <= stated * NEWS else measured


def speed_of(status: WorkerStatus) -> float:
    """Of its stated costs; 0: they are not known yet."""
    cost_ms = status.costs.full_ms(TOKENS, CANDIDATES)
    return 1e3 / max(cost_ms, LEAST_MS) if cost_ms > 0 else 0.0


def fair_busy_share(workers: Collection[WorkerStatus]) -> float:
    """The busy share of each of these if their work were shared out by their speeds; there must be one."""
    speeds = counted_speeds([speed_of(each) for each in workers])
    return sum(speed * each.busy_share for speed, each in zip(speeds, workers, strict=True)) / sum(speeds)


class LaneMember(Protocol):
    """The member of the group that is asked (bus/lanes.py: LaneConsumer)."""

    speed: float

    def rebalance(self) -> None:
        """Ask the group for another assignment."""


class FairShare:
    """name: the worker's. peers: what all workers state. fixed: its weight is set by hand, so it states no speed."""

    def __init__(
        self,
        name: str,
        peers: OwnerDirectory,
        member: LaneMember,
        *,
        fixed: bool,
        clock: Clock = time.monotonic,
    ) -> None:
        self._name, self._peers, self._member = name, peers, member
        self._fixed = fixed
        self._clock = clock
        self._looked = clock()
        self._cost_ms: float | None = None  # averaged over ASK_S
        self.lanes_changed()

    def lanes_changed(self) -> None:
        """From now on its lanes are others."""
        self._began = self._clock()
        self._own = self._all = 0.0
        self._pauses = 1

    async def look(self) -> None:
        """Look at what is stated; ask where it has been uneven for long. Call it every LOOK_S."""
        serving = {name: each for name, each in self._peers.workers().items() if each.state == "serving"}
        if (own := serving.get(self._name)) is None:
            return
        now = self._clock()
        part = min(1.0, (now - self._looked) / ASK_S)
        self._looked = now
        if (speed := speed_of(own)) and not self._fixed:
            cost_ms = 1e3 / speed
            self._cost_ms = cost_ms if self._cost_ms is None else self._cost_ms + part * (cost_ms - self._cost_ms)
            self._member.speed = stated_speed(self._member.speed, 1e3 / self._cost_ms)
        self._own += part * (own.busy_share - self._own)
        self._all += part * (fair_busy_share(serving.values()) - self._all)
        if now - self._began >= ASK_S * self._pauses and self._own > max(LEAST_BUSY, (1.0 + START) * self._all):
            self._began = now
            self._pauses = min(MOST_PAUSES, 2 * self._pauses)
            self._member.rebalance()
