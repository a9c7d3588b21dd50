"""Appending a sequence to a KV region, one slice of device time after the other.

The sequence goes in chunks, a chunk in the model's own steps (a layer, say) where it has them. A slice ends between two
steps, so a ranking that comes meanwhile waits for a step or two, not for a chunk; and a chunk may be long, which the
device likes. Knows nothing of entries or of who waits.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from relaygr_stream.models.kv import KVRegion
from relaygr_stream.models.tokens import Tokens
from relaygr_stream.worker.chunk import Chunk
from relaygr_stream.worker.engine import Engine

#: Steps are made to take this share of the bound, by prediction, and slices filled up to it: one that takes twice as
#: long as predicted is still within the bound. `make bench-scheduler` prints what comes of it.
SHARE: Final = 0.5


class Extension:
    """`tokens` on their way into `region`, whose length is where they stand. Used by the device thread alone."""

    def __init__(self, engine: Engine, region: KVRegion, tokens: Tokens) -> None:
        self.region = region
        self.tokens = tokens
        self._engine = engine
        self._chunk: Chunk | None = None  # under way

    @property
    def done(self) -> bool:
        """Everything is there."""
        return self.region.length >= len(self.tokens)

    def advance(self, bound_ms: float) -> float:
        """Work for about half of bound_ms, at least one step; returns the milliseconds. Not to be called when done.

        Out of memory: the chunk begins once more, with half as many tokens where the model takes fewer. Raises what
        the model raises; region.length is then as before the chunk.
        """
        work = partial(self._slice, bound_ms)
        return self._engine.attempt(work, work)

    def _slice(self, bound_ms: float) -> float:
        chunk = self._chunk
        if chunk is None:
            engine, position = self._engine, self.region.length
            stop = min(len(self.tokens), position + engine.chunk_tokens(position, SHARE * bound_ms))
            chunk = self._chunk = engine.chunk(
                self.region, self.tokens.slice(position, stop if engine.model.incremental else len(self.tokens))
            )
        spent = 0.0
        try:
            while True:
                step = chunk.step()
                spent += step
                if chunk.finished or spent + step > SHARE * bound_ms:
                    break
        except BaseException as error:
            self._chunk = None
            if isinstance(error, torch.OutOfMemoryError):
                self._engine.shorten(chunk)
            raise
        if chunk.finished:
            self._chunk = None
            self._engine.learn(chunk)
        return spent
