"""Some tokens being appended to a KV region, in the model's own steps where it has them.

Knows nothing of time limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.protocol import RankingModel, SteppedModel
from relaygr_stream.models.tokens import Tokens


class Chunk:
    """Used by the device thread alone. Dropped half-way, it leaves region.length where it was."""

    def __init__(
        self,
        model: RankingModel,
        region: KVRegion,
        tokens: Tokens,
        clock: Callable[[], float],
        synchronize: Callable[[], None],
    ) -> None:
        self.position = region.length
        self.tokens = len(tokens)
        self.ms = 0.0  # spent so far
        self.steps = 0  # taken so far
        self._last_ms = 0.0  # of the last of them
        self.finished = False
        self._region = region
        self._clock = clock
        self._synchronize = synchronize
        self._rest = _steps(model, region, tokens)

    @property
    def whole_steps(self) -> float:
        """How many steps, such as those before the last one, the chunk so far is worth: the last one is what is left
        to do, next to nothing or nearly as much as the others."""
        before, ms = self.steps - 1, self.ms - self._last_ms
        return before * self.ms / ms if before and ms > 0 else 1.0

    def step(self) -> float:
        """Take the next step and wait for the device; returns the milliseconds.

        Raises what the model raises, ModelError if it did not append what it was given; region.length is then as
        before the chunk, which is over.
        """
        start = self._clock()
        try:
            with torch.inference_mode():
                self.finished = next(self._rest, self) is self
                self._synchronize()
            if self.finished and self._region.length != self.position + self.tokens:
                raise ModelError(
                    f"extend() was given {self.tokens} tokens behind {self.position} and left kv.length at "
                    f"{self._region.length}"
                )
        except BaseException:
            self._region.length = self.position
            raise
        ms = (self._clock() - start) * 1e3
        self._last_ms = ms
        self.ms += ms
        self.steps += 1
        return ms


def _steps(model: RankingModel, region: KVRegion, tokens: Tokens) -> Iterator[None]:
    """The model's own steps. Asked of its class: a wrapper that forwards what it does not define means its `extend`."""
    if hasattr(type(model), "extend_in_steps"):
        return cast(SteppedModel, model).extend_in_steps(region, tokens)
    return _whole(model, region, tokens)


def _whole(model: RankingModel, region: KVRegion, tokens: Tokens) -> Iterator[None]:
    """`extend` as a single step."""
    model.extend(region, tokens)
    yield from ()
