"""A simulated device: a model whose operations advance a clock and compute nothing, and copies that take time.

The real executor runs this model, measures it by that clock and learns its costs, so chunk sizes and stated costs arise
as on a real device. Memory is `TierMemory` on torch's `meta` device: the real arena without bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import numpy as np
import torch

from relaygr_lab.simulate.costs import DeviceCosts
from relaygr_lab.simulate.noise import Lasting, Noise
from relaygr_stream.cache.copy import Before, CopyEngine, CopyTicket
from relaygr_stream.models.api import ScoreInput, Tokens
from relaygr_stream.models.kv import KVRegion

META = torch.device("meta")
#: After this long without an operation, the next one takes cold_ms longer.
IDLE_S: Final = 1e-3


class DeviceClock(Protocol):
    """The time by which a device works: simulated (timeline.py), or real (lab/emulate)."""

    @property
    def now(self) -> float:
        """Seconds."""
        ...

    def spend(self, seconds: float) -> None:
        """Let an operation take this time; returns when it is over."""
        ...


class SimulatedModel:
    """A RankingModel whose operations take the times in `costs`; all scores are zero."""

    version = "simulated"
    note = "simulated: computes nothing"
    tasks: tuple[str, ...] = ("score",)
    incremental = True

    def __init__(self, costs: DeviceCosts, clock: DeviceClock, rng: np.random.Generator) -> None:
        self.layout = costs.kv.layout()
        self.busy_s = 0.0
        self._costs = costs
        self._clock = clock
        machine = Lasting(costs.lasting_ms / 1e3, rng)
        self._extend_noise = Noise(costs.extend_factors, machine)
        self._score_noise = Noise(costs.score_factors, machine)
        self._worked_until = clock.now
        self._zeros: dict[int, torch.Tensor] = {}

    def busy_until(self, now: float) -> float:
        """Seconds that the device had worked by then: the operation under way may end later."""
        return self.busy_s - max(0.0, self._worked_until - now)

    def prefill(self, kv: KVRegion, tokens: Tokens) -> None:
        """Take the time of `DeviceCosts.extend`."""
        count = len(tokens)
        self._pass(self._costs.extend(kv.length, count) * self._extend_noise.draw(self._clock.now))
        kv.length += count

    def prefill_in_steps(self, kv: KVRegion, tokens: Tokens) -> Iterator[None]:
        """As `prefill`, in `DeviceCosts.steps` equal steps."""
        count, steps = len(tokens), self._costs.steps
        ms = self._costs.extend(kv.length, count) * self._extend_noise.draw(self._clock.now)
        for _ in range(steps):
            self._pass(ms / steps)
            if steps > 1:
                yield
        kv.length += count

    def score(self, batch: Sequence[ScoreInput]) -> list[torch.Tensor]:
        """Take the time of `DeviceCosts.score`."""
        shapes = [(one.kv.length, len(one.suffix) + len(one.candidates)) for one in batch]
        self._pass(self._costs.score(shapes) * self._score_noise.draw(self._clock.now))
        return [self._scores(len(one.candidates)) for one in batch]

    def _scores(self, candidates: int) -> torch.Tensor:
        known = self._zeros.get(candidates)
        if known is None:
            known = self._zeros[candidates] = torch.zeros(candidates, len(self.tasks))
        return known

    def _pass(self, ms: float) -> None:
        if self._clock.now > self._worked_until + IDLE_S:
            ms += self._costs.cold_ms
        self.busy_s += ms / 1e3
        self._clock.spend(ms / 1e3)
        self._worked_until = self._clock.now


class _Ticket(CopyTicket):
    """A copy that completes at a given time."""

    __slots__ = ("_clock", "_over_at")

    def __init__(self, dst: torch.Tensor, src: torch.Tensor, clock: DeviceClock, over_at: float) -> None:
        super().__init__(dst, src, None)
        self._clock = clock
        self._over_at = over_at

    def done(self) -> bool:
        """Whether the copy is complete."""
        return self._clock.now >= self._over_at


class SimulatedCopies(CopyEngine):
    """Copies that take bytes / bandwidth, one after the other per direction.

    wake_at(time): called for each copy with the time of its completion.
    """

    def __init__(self, costs: DeviceCosts, clock: DeviceClock, wake_at: Callable[[float], None]) -> None:
        self._speed = {True: costs.reload_bytes_per_s, False: costs.spill_bytes_per_s}
        self._free_at = {True: 0.0, False: 0.0}
        self._clock = clock
        self._wake_at = wake_at

    def submit(
        self, dst: torch.Tensor, src: torch.Tensor, *, urgent: bool = False, before: Before | None = None
    ) -> CopyTicket:
        """Start a copy; of no file."""
        del before
        seconds = src.nbytes / self._speed[urgent]
        over_at = max(self._free_at[urgent], self._clock.now) + seconds
        self._free_at[urgent] = over_at
        self._wake_at(over_at)
        return _Ticket(dst, src, self._clock, over_at)

    def close(self) -> None:
        """Does nothing: there is no thread."""
